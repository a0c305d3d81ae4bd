"""What happens to the volumes and slabs of a borrowing host, and what its machine asks for."""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.events import Heard, LogEvent, Send, SetTimer, Undelivered
from covey.core.ids import HostId
from plugins.memory.machine.borrowing.place import Link, SlabPlace
from plugins.memory.policy.placement import LenderPeer

# ---- events ----------------------------------------------------------------------------------------------------------


class BorrowerTick(msgspec.Struct, frozen=True):
    requests: Mapping[str, Sequence[int]]
    """Volume -> pages requested of each slab since the last second. A volume whose process did not answer is absent."""
    peers: tuple[LenderPeer, ...]
    links: Mapping[str, Mapping[int, Link]] | None = None
    """Volume -> epoch -> how the link to that place is; None when nobody looked."""
    empty: Mapping[str, Sequence[int]] = {}
    """Volume -> slabs that were written and of which every page is zeros by now."""


class VolumeFound(msgspec.Struct, frozen=True):
    """A volume's process answers (first start, restart of it or of this agent) and says which places it has open."""

    volume: str
    slabs: int
    slab_bytes: int
    page_bytes: int
    places: tuple[tuple[int, SlabPlace], ...]
    members: int = 1
    """Of each slab (`policy.mirroring`); places are by their number."""
    tenant: str = ""
    """Against whose budget it counts; empty: nobody's."""
    job: str = ""


class VolumeForgotten(msgspec.Struct, frozen=True):
    volume: str


class BorrowedSlabEvent(msgspec.Struct, frozen=True):
    """The volume's process, about one slab under one epoch."""

    volume: str
    index: int
    epoch: int


class SlabOpened(BorrowedSlabEvent, frozen=True):
    """From now on pages go there."""


class SlabNotOpened(BorrowedSlabEvent, frozen=True):
    why: str


class SlabCopied(BorrowedSlabEvent, frozen=True):
    """All pages that were written before it was opened are there as well."""


class SlabFailed(BorrowedSlabEvent, frozen=True):
    """Its link ended and could not be opened again; reads go to the queue or the disk already."""

    why: str


class SlabClosed(BorrowedSlabEvent, frozen=True):
    """Nothing is in flight and nothing acknowledged depends on it."""


class LenderLost(msgspec.Struct, frozen=True):
    host: HostId


class SearchOver(BorrowedSlabEvent, frozen=True):
    """Timer: answers that are not here by now do not count."""

    step: str


class GraceOver(BorrowedSlabEvent, frozen=True):
    """Timer: the lender's grace is nearly over."""


OfSlab = SlabOpened | SlabNotOpened | SlabCopied | SlabFailed | SlabClosed | SearchOver | GraceOver
"""About one slab."""
BorrowerEvent = BorrowerTick | VolumeFound | VolumeForgotten | LenderLost | Heard | Undelivered | OfSlab

# ---- actions ---------------------------------------------------------------------------------------------------------


class OpenSlab(msgspec.Struct, frozen=True):
    """Tell the volume's process; comes back as `SlabOpened` or `SlabNotOpened`."""

    volume: str
    index: int
    place: SlabPlace


class CloseSlab(msgspec.Struct, frozen=True):
    """Tell the volume's process; comes back as `SlabClosed`."""

    volume: str
    index: int
    epoch: int


BorrowerAction = Send | SetTimer[SearchOver | GraceOver] | LogEvent | OpenSlab | CloseSlab
Actions = list[BorrowerAction]
