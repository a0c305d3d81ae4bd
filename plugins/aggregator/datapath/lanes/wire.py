"""The protocol between `aggd` and its lanes on a unix socket of their own, in frames of `covey.wire.frames`.

    aggd     LaneMaps(what an order may speak of from now on, and what none will) ->     lane
             LaneOrder(number, which arrays, what becomes of their sum) ->
                                                    <- LaneDone(number, why it failed)

Numbers of tensors never travel there: both have mapped the memory in which they are.
"""

from collections.abc import Sequence

import msgspec

from covey.tensors.numbers.tensor_wire import Type
from covey.tensors.owner.part_additions import LastAddition

SOCKET = "aggd-lanes.sock"
Place = tuple[int, int, int]
"""Place in shared memory: number of the memory, the first byte there, and the byte after the last."""


class LaneMemoryAt(msgspec.Struct, frozen=True, array_like=True):
    """Memory that an order may speak of from now on."""

    number: int
    name: str
    """Name of the memory, as in `covey.ports.pages.SharedRing`."""
    size: int


class LaneOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Order for one addition, with fields as in `part_additions.PartAddition`."""

    number: int
    of: Type
    single: tuple[bool, ...]
    sides: tuple[Place, ...]
    into: Place | None
    last: LastAddition | None
    old: tuple[Place, ...]
    new: tuple[Place, ...]


class LaneMaps(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Memory to map and to unmap. There is no answer to it."""

    opens: Sequence[LaneMemoryAt] = ()
    closes: Sequence[int] = ()
    """Numbers of memory of which no order speaks any more."""


class LaneDone(msgspec.Struct, frozen=True, array_like=True):
    number: int
    not_finite: int = 0
    cpu_s: float = 0.0
    """Seconds of a core that it took, with what the lane does between two orders."""
    why: str = ""
    """Why it failed; empty: it did not."""


orders: msgspec.msgpack.Decoder[LaneOrder | LaneMaps] = msgspec.msgpack.Decoder(LaneOrder | LaneMaps)
answers: msgspec.msgpack.Decoder[LaneDone] = msgspec.msgpack.Decoder(LaneDone)
