"""Events about the volumes and slabs of a borrowing host, and the actions of its machine."""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.events import Heard, LogEvent, Send, SetTimer, Undelivered
from covey.core.ids import HostId
from plugins.memory.machine.borrowing.place import Link, SlabPlace
from plugins.memory.policy.placement import LenderPeer

# ---- events ----------------------------------------------------------------------------------------------------------


class BorrowerTick(msgspec.Struct, frozen=True):
    requests: Mapping[str, Sequence[int]]
    """Volume -> page requests to each slab since the last second. A volume whose process did not answer is absent."""
    peers: tuple[LenderPeer, ...]
    links: Mapping[str, Mapping[int, Link]] | None = None
    """Volume -> epoch -> state of the link to that place; None when the links were not looked at."""
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
    """Members of each slab (`policy.mirroring`); `places` are by member number."""
    tenant: str = ""
    """Tenant against whose budget it counts; empty: none."""
    job: str = ""


class VolumeForgotten(msgspec.Struct, frozen=True):
    volume: str


class BorrowedSlabEvent(msgspec.Struct, frozen=True):
    """The volume's process reports something about one slab under one epoch."""

    volume: str
    index: int
    epoch: int


class SlabOpened(BorrowedSlabEvent, frozen=True):
    """The place is open: from now on pages go there."""


class SlabNotOpened(BorrowedSlabEvent, frozen=True):
    why: str


class SlabCopied(BorrowedSlabEvent, frozen=True):
    """The place also has all pages that were written before it was opened."""


class SlabFailed(BorrowedSlabEvent, frozen=True):
    """Its link ended and could not be opened again; reads go to the queue or the disk already."""

    why: str


class SlabClosed(BorrowedSlabEvent, frozen=True):
    """The place is closed: nothing is in flight and nothing acknowledged depends on it."""


class LenderLost(msgspec.Struct, frozen=True):
    host: HostId


class SearchOver(BorrowedSlabEvent, frozen=True):
    """Timer: answers that are not here by now do not count."""

    step: str


class GraceOver(BorrowedSlabEvent, frozen=True):
    """Timer: the lender's grace is nearly over."""


OfSlab = SlabOpened | SlabNotOpened | SlabCopied | SlabFailed | SlabClosed | SearchOver | GraceOver
"""Events about one slab."""
BorrowerEvent = BorrowerTick | VolumeFound | VolumeForgotten | LenderLost | Heard | Undelivered | OfSlab

# ---- actions ---------------------------------------------------------------------------------------------------------


class OpenSlab(msgspec.Struct, frozen=True):
    """Tell the volume's process to open a place; it answers with `SlabOpened` or `SlabNotOpened`."""

    volume: str
    index: int
    place: SlabPlace


class CloseSlab(msgspec.Struct, frozen=True):
    """Tell the volume's process to close a place; it answers with `SlabClosed`."""

    volume: str
    index: int
    epoch: int


BorrowerAction = Send | SetTimer[SearchOver | GraceOver] | LogEvent | OpenSlab | CloseSlab
Actions = list[BorrowerAction]
