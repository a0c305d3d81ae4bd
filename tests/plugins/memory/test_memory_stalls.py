"""The actions of a lender while tasks of its host wait for memory at this very moment."""

from covey.core.units import GIB
from covey.ports.probes import MemoryNow
from plugins.memory.machine.lending import events as le
from plugins.memory.messages import Activity, CheckActivity, Evict
from tests.plugins.memory.tale import ME, SLAB, sent
from tests.plugins.memory.test_lender import Loan


def stalls(loan: Loan, available_bytes: int) -> list[int]:
    """The slabs that are freed at once."""
    actions = loan.tell(le.MemoryStalls(MemoryNow(64 * GIB, available_bytes, 0.0)))
    return [action.slab.index for action in actions if isinstance(action, le.FreeSlab)]


def test_while_tasks_wait_for_memory_slabs_go_at_once_and_their_borrowers_hear_of_it() -> None:
    loan = Loan(spare=8)
    for index in range(6):
        loan.lend(index)
    actions = loan.tell(le.MemoryStalls(MemoryNow(64 * GIB, 8 * GIB - 2 * SLAB, 0.0)))
    freed = [action.slab.index for action in actions if isinstance(action, le.FreeSlab)]
    assert len(freed) == 2, "what headroom lacks"
    assert [message.index for _, message in sent(actions, Evict)] == freed
    assert all(message.grace_s == 0.0 for _, message in sent(actions, Evict))
    assert loan.machine.evictions["stalled"] == 2
    assert stalls(loan, 8 * GIB - 3 * SLAB) == [], "memory is on its way"


def test_those_that_were_asked_to_go_anyway_go_first() -> None:
    loan = Loan(spare=8)
    for index in range(6):
        loan.lend(index)
    ((_, check),) = sent(loan.short(2), CheckActivity)
    asked = [message.index for _, message in sent(loan.hear(ME, Activity(check.round, ())), Evict)]
    assert len(asked) == 2
    assert stalls(loan, 8 * GIB - 2 * SLAB) == asked


def test_nothing_goes_while_headroom_is_there_although_somebody_waits() -> None:
    """A job at the limit of its own group waits for memory too, on a host that has plenty."""
    loan = Loan(spare=8)
    loan.lend()
    assert stalls(loan, 8 * GIB) == []
    assert stalls(Loan(), 0) == [], "and nothing is lent"
