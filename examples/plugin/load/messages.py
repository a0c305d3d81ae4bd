"""Messages about load: one question, its answer, and one value by gossip. The tag is what crosses the network."""

from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.events import Message

Load = Annotated[float, Meta(ge=0, le=1)]
"""The busier of GPUs and memory, 0..1. A value from another host outside of that is malformed and never decoded."""


class HowBusy(Message, frozen=True):
    """A question: how busy are you now?"""


class BusyNow(Message, frozen=True):
    """Answer to `HowBusy`."""

    load: Load


class LoadHint(msgspec.Struct, frozen=True):
    """Published by gossip under the key `load`: a hint that may be seconds old."""

    load: Load


Messages = HowBusy | BusyNow
