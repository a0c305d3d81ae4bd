"""How a slab leaves a place: closed by the volume's process first, and only then given back to its lender.

Until it is closed its pages may be the only copy, should the process die: `Done` follows `SlabClosed`, whatever the
reason for leaving. What the process does not have any more is given back at once.
"""

from covey.core import LogEvent, Send
from plugins.memory.machine.borrower_events import Actions, CloseSlab
from plugins.memory.machine.slab import BorrowedSlab, SlabPlace
from plugins.memory.messages import Done


def lost_note(slab: BorrowedSlab, place: SlabPlace, why: str, instead: str) -> LogEvent:
    return LogEvent(slab.subject, "lost", f"{place.lender}, epoch {place.epoch}: {why}; {instead}")


def forgotten(slab: BorrowedSlab, place: SlabPlace) -> Actions:
    """The volume's process has no such place, so nothing depends on it."""
    note = LogEvent(slab.subject, "lost", f"{place.lender}, epoch {place.epoch}: the volume's process does not have it")
    return [note, Send(place.lender, Done(slab.volume, slab.index, place.epoch))]


def promote(slab: BorrowedSlab) -> str:
    """The place it was moving to, if any, is its place now. Who serves it, for people."""
    slab.place, slab.next = slab.next, None
    slab.evicted = slab.closing = slab.lost = False
    slab.link = "open" if slab.place is not None else ""
    return "the disk" if slab.place is None else slab.place.lender


def close(slab: BorrowedSlab) -> CloseSlab:
    assert slab.place is not None
    slab.closing = True
    return CloseSlab(slab.volume, slab.index, slab.place.epoch)


def closed(slab: BorrowedSlab, epoch: int) -> Actions:
    done = Done(slab.volume, slab.index, epoch)
    if epoch in slab.left:
        return [Send(slab.left.pop(epoch), done)]
    if slab.next is not None and slab.next.epoch == epoch:
        lender, slab.next = slab.next.lender, None
        return [Send(lender, done), *leave_if_evicted(slab)]
    if slab.place is None or slab.place.epoch != epoch:
        return []
    lender = slab.place.lender
    where = promote(slab)
    return [LogEvent(slab.subject, "done", f"{lender} may free it, {where} holds it now"), Send(lender, done)]


def leave_if_evicted(slab: BorrowedSlab) -> Actions:
    """An evicted slab that found no new place leaves the old one now: there is nothing to wait for."""
    leaves = slab.evicted and slab.place is not None and not slab.closing
    return [close(slab)] if leaves else []


def reconcile(slab: BorrowedSlab, found: list[SlabPlace]) -> Actions:
    """The volume's process began anew, or we did: its word counts. `found` oldest first. With two, a move was under
    way: the older one is closed, the newer one stays."""
    epochs = {place.epoch for place in found}
    actions: Actions = []
    for place in (slab.place, slab.next):
        if place is not None and place.epoch not in epochs:
            actions += forgotten(slab, place)
    if slab.search is not None and slab.search.place is not None:
        search, slab.search = slab.search, None
        if search.epoch not in epochs:
            assert search.chosen is not None
            actions.append(Send(search.chosen, Done(slab.volume, slab.index, search.epoch)))
    if epochs - {place.epoch for place in (slab.place, slab.next) if place is not None} - slab.left.keys():
        actions.append(LogEvent(slab.subject, "found again", f"on {found[-1].lender}, epoch {found[-1].epoch}"))
    was_closing = slab.closing
    still = slab.place is not None and slab.place.epoch in epochs
    kept = [place for place in found if place.epoch not in slab.left]
    slab.left |= {place.epoch: place.lender for place in kept[1:-1]}
    slab.place = kept[0] if kept else None
    slab.next = kept[-1] if len(kept) > 1 else None
    slab.closing = slab.lost = False
    slab.evicted = slab.evicted and still
    slab.link = ""
    for epoch, lender in sorted(slab.left.items()):
        again = CloseSlab(slab.volume, slab.index, epoch)
        done = Send(lender, Done(slab.volume, slab.index, epoch))
        actions.append(again if epoch in epochs else done)
    slab.left = {epoch: lender for epoch, lender in slab.left.items() if epoch in epochs}
    if kept and (was_closing or slab.next is not None):
        actions.append(close(slab))  # the process died before it had closed it
    return actions
