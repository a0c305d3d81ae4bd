"""Steps of a plan that moves blocks between workers and servers, one host being one or the other (Cruise §3.3).

Only `covey-sim tuner` performs them: on live hosts ranks and tables change hands by the log, in one entry
(`plugins.facts.ArrangementsWanted`).
"""

from typing import Literal

import msgspec

from covey.core.ids import HostId

Role = Literal["worker", "server"]
Kind = Literal["data", "model"]
"""Kind of blocks: training data is held by workers and never changes; the model is held by servers and does."""


class Add(msgspec.Struct, frozen=True, tag=True):
    """Start an executor on a host that joins."""

    host: HostId
    role: Role


class Delete(msgspec.Struct, frozen=True, tag=True):
    """End the executor of a host that leaves; it owns nothing any more."""

    host: HostId
    role: Role


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Change the role of a host: its executor stays, nothing is set up or cleared away."""

    host: HostId
    before: Role
    after: Role


class Move(msgspec.Struct, frozen=True, tag=True):
    """Hand blocks to another host: ownership first, then the content, block by block (Cruise §3.3.2)."""

    kind: Kind
    source: HostId
    target: HostId
    blocks: tuple[int, ...]
    """Ids of the blocks, ascending."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish the present mini-batch, flush the pushes, and compute no more: its data is about to leave."""

    host: HostId


class Start(msgspec.Struct, frozen=True, tag=True):
    """Begin to compute: the data is here."""

    host: HostId


class Recover(msgspec.Struct, frozen=True, tag=True):
    """Hold these blocks, which a lost host owned or was to get: read training data again from where it came from, take
    the newest version of the model that any host or checkpoint has."""

    kind: Kind
    host: HostId
    blocks: tuple[int, ...]
    """Ids of the blocks, ascending."""


Operation = Add | Delete | Switch | Move
"""The four operations of the paper's Table 3.2."""
Step = Operation | Stop | Start | Recover
"""Step of a plan, as hosts perform it."""
