"""How a slab leaves a place: closed by the volume's process first, and only then given back to its lender.

Until it is closed its pages may be the only copy, should the process die: `Done` follows `SlabClosed`, whatever the
reason for leaving. What the process does not have any more is given back at once.
"""

from covey.core.events import LogEvent, Send
from covey.core.ids import HostId
from plugins.memory.machine.borrowing.events import Actions, CloseSlab
from plugins.memory.machine.borrowing.lender_search import Opening
from plugins.memory.machine.borrowing.place import SlabPlace
from plugins.memory.machine.borrowing.slab import BorrowedSlab
from plugins.memory.messages import Done, SlabMessage


def give_back(to: HostId, message: SlabMessage) -> Send:
    """Tell a lender that this host does not use the slab."""
    return Send(to, Done(message.volume, message.index, message.epoch))


def given_back(slab: BorrowedSlab) -> list[Send]:
    """Give back every place of a slab whose volume is gone."""
    return [Send(lender, Done(slab.volume, slab.index, epoch)) for epoch, lender in slab.lenders().items()]


def lost_note(slab: BorrowedSlab, place: SlabPlace, why: str, instead: str) -> LogEvent:
    return LogEvent(slab.subject, "lost", f"{place.lender}, epoch {place.epoch}: {why}; {instead}")


def forgotten(slab: BorrowedSlab, place: SlabPlace) -> Actions:
    """Give back a place that the volume's process does not have: nothing depends on it."""
    note = LogEvent(slab.subject, "lost", f"{place.lender}, epoch {place.epoch}: the volume's process does not have it")
    return [note, Send(place.lender, Done(slab.volume, slab.index, place.epoch))]


def close(slab: BorrowedSlab, lost: bool = False) -> CloseSlab:
    return CloseSlab(slab.volume, slab.index, slab.close(lost).epoch)


def closed(slab: BorrowedSlab, epoch: int) -> Actions:
    done = Done(slab.volume, slab.index, epoch)
    if epoch in slab.left:
        return [Send(slab.left.pop(epoch), done)]
    if slab.next is not None and slab.next.epoch == epoch:
        return [Send(slab.next_gone().lender, done), *leave_if_evicted(slab)]
    if slab.place is None or slab.place.epoch != epoch:
        return []
    lender = slab.place.lender
    serving = slab.closed()
    where = ("the disk" if slab.members == 1 else "its other member") if serving is None else serving.lender
    return [LogEvent(slab.subject, "done", f"{lender} may free it; {where} has it now"), Send(lender, done)]


def leave_if_evicted(slab: BorrowedSlab) -> Actions:
    """Close the old place of an evicted slab that found no new one: there is nothing to wait for."""
    return [close(slab)] if slab.is_evicted and not slab.is_closing else []


def reconcile(slab: BorrowedSlab, found: list[SlabPlace]) -> Actions:
    """Take over the places `found`, oldest first, after the volume's process or this agent began anew. With two a move
    was under way: the older one is closed, the newer one stays."""
    epochs = {place.epoch for place in found}
    actions: Actions = []
    for place in slab.places:
        if place.epoch not in epochs:
            actions += forgotten(slab, place)
    search = slab.search
    if isinstance(search, Opening) and search.epoch not in epochs:
        actions.append(Send(search.chosen, Done(slab.volume, slab.index, search.epoch)))
    if epochs - {place.epoch for place in slab.places} - slab.left.keys():
        actions.append(LogEvent(slab.subject, "found again", f"on {found[-1].lender}, epoch {found[-1].epoch}"))
    kept = [place for place in found if place.epoch not in slab.left]
    slab.left |= {place.epoch: place.lender for place in kept[1:-1]}
    slab.found(kept)
    for epoch, lender in sorted(slab.left.items()):
        again = CloseSlab(slab.volume, slab.index, epoch)
        done = Send(lender, Done(slab.volume, slab.index, epoch))
        actions.append(again if epoch in epochs else done)
    slab.left = {epoch: lender for epoch, lender in slab.left.items() if epoch in epochs}
    if slab.is_closing and slab.place is not None:
        actions.append(CloseSlab(slab.volume, slab.index, slab.place.epoch))  # the process died before it had closed it
    return actions
