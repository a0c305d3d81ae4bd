"""What `aggd` and its lanes say to one another on a unix socket of their own, in frames of `covey.wire.frames`.

    aggd     LaneMaps(what an order may speak of from now on, and what none will) ->     lane
             LaneOrder(number, which arrays, what becomes of their sum) ->
                                                    <- LaneDone(number, why it failed)

Numbers of tensors never travel there: both have mapped the memory in which they lie.
"""

from collections.abc import Sequence

import msgspec

from covey.tensors.numbers.tensor_wire import Type
from plugins.aggregator.datapath.lanes.part_additions import LastAddition

SOCKET = "aggd-lanes.sock"
Place = tuple[int, int, int]
"""Which memory, the first byte there, and the byte after the last."""


class LaneMemoryAt(msgspec.Struct, frozen=True, array_like=True):
    """Memory that an order may speak of from now on."""

    number: int
    name: str
    """Name of the memory, as in `covey.ports.SharedRing`."""
    size: int


class LaneOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One addition, as of `part_additions.PartAddition`."""

    number: int
    of: Type
    single: tuple[bool, ...]
    sides: tuple[Place, ...]
    into: Place | None
    last: LastAddition | None
    old: tuple[Place, ...]
    new: tuple[Place, ...]


class LaneMaps(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There is no answer to it."""

    opens: Sequence[LaneMemoryAt] = ()
    closes: Sequence[int] = ()
    """Memory of which no order speaks any more."""


class LaneDone(msgspec.Struct, frozen=True, array_like=True):
    number: int
    not_finite: int = 0
    cpu_s: float = 0.0
    """Seconds of a core that it took, with what the lane does between two orders."""
    why: str = ""
    """It failed."""


orders: msgspec.msgpack.Decoder[LaneOrder | LaneMaps] = msgspec.msgpack.Decoder(LaneOrder | LaneMaps)
answers: msgspec.msgpack.Decoder[LaneDone] = msgspec.msgpack.Decoder(LaneDone)
