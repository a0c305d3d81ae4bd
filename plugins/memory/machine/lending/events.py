"""Events of a host that lends memory (`plugins/memory/machine/lending/lender.py`), and the actions of its machine."""

import msgspec

from covey.core.events import Heard, LogEvent, Send, SetTimer, Undelivered
from covey.core.ids import HostId
from covey.ports.probes import MemoryNow
from plugins.memory.machine.loan import LoanedSlab
from plugins.memory.messages import SlabRef

# ---- events ----------------------------------------------------------------------------------------------------------


class LenderTick(msgspec.Struct, frozen=True):
    memory: MemoryNow
    touched_bytes: int
    """Bytes of lent slabs that have been written."""
    drained: bool = False
    """Everything that is lent is to go elsewhere, a batch at a time."""
    promised_bytes: int = 0
    """Memory that jobs of this host may take, in use already or not."""


class MemoryStalls(msgspec.Struct, frozen=True):
    """Tasks of this host wait for memory at this moment (PSI), whatever the last second said."""

    memory: MemoryNow


class LentSlabEvent(msgspec.Struct, frozen=True):
    """The slab process reports something about one slab."""

    borrower: HostId
    slab: SlabRef


class SlabRegistered(LentSlabEvent, frozen=True):
    address: str


class SlabNotRegistered(LentSlabEvent, frozen=True):
    why: str
    late: bool = False
    """The slab process did not answer in time."""


class SlabFreed(LentSlabEvent, frozen=True):
    """The slab's memory is back with the system."""


class StoreFound(msgspec.Struct, frozen=True):
    """The slab process answers, and holds these slabs."""

    address: str
    slabs: tuple[LoanedSlab, ...]


class StoreAsleep(msgspec.Struct, frozen=True):
    """There is no slab process; the first loan starts it."""


class StoreLost(msgspec.Struct, frozen=True):
    """The slab process is gone, and all its slabs with it."""

    why: str


class BorrowerAway(msgspec.Struct, frozen=True):
    """A borrower's agent restarts and renews nothing meanwhile, while its volumes keep using their slabs here."""

    borrower: HostId
    for_s: float
    """Seconds for which it is away; 0: it is back. Slabs that it gave up while this host could not be told are not
    renewed, and end with a lease."""


class AnswersOver(msgspec.Struct, frozen=True):
    """Timer: activities that are not here by now do not count."""

    round: int


OfStore = SlabRegistered | SlabNotRegistered | SlabFreed | StoreFound | StoreAsleep | StoreLost
"""Events from the slab process."""
LenderEvent = LenderTick | MemoryStalls | OfStore | BorrowerAway | AnswersOver | Heard | Undelivered

# ---- actions ---------------------------------------------------------------------------------------------------------


class RegisterSlab(msgspec.Struct, frozen=True):
    """Tell the slab process to register a slab; it answers with `SlabRegistered` or `SlabNotRegistered`."""

    borrower: HostId
    slab: SlabRef
    size_bytes: int
    page_bytes: int
    secret: bytes


class FreeSlab(msgspec.Struct, frozen=True):
    """Tell the slab process to free a slab; it answers with `SlabFreed`."""

    borrower: HostId
    slab: SlabRef


LenderAction = Send | SetTimer[AnswersOver] | LogEvent | RegisterSlab | FreeSlab
