"""Slabs that are lent, by story: events in, actions out."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from covey.core.events import Heard, LogEvent, Message, SetTimer, Undelivered
from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from covey.ports.probes import MemoryNow
from plugins.memory.machine.lending import events as le
from plugins.memory.machine.lending.lender import Lender, react_s
from plugins.memory.machine.loan import LoanedSlab
from plugins.memory.messages import (
    Activity,
    CheckActivity,
    Done,
    Evict,
    FreeMem,
    Map,
    MrInfo,
    QueryMem,
    Renew,
    SlabActivity,
    SlabRef,
)
from plugins.memory.policy.lending import Headroom
from tests.plugins.memory.tale import ME, OTHERS, PAGE, SECRET, SLAB, noted, only, sent


class Loan:
    """One lender with `spare` slabs above its headroom."""

    def __init__(self, spare: int = 4, kept: Headroom | None = Headroom(fixed_bytes=8 * GIB)) -> None:
        self.machine = Lender(random.Random(1), lambda n: b"s" * n, kept, 64 * GIB, 10.0, 60.0)
        self.pressure = 0.0
        self.now_s = 100.0
        self.available_bytes = 8 * GIB + spare * SLAB
        self.touched_bytes = 0
        self.drained = False
        self.tell(le.StoreFound("10.0.0.2:7", ()))
        self.second()

    def tell(self, event: le.LenderEvent, after_s: float = 0.0) -> Sequence[Any]:
        self.now_s += after_s
        actions = self.machine.handle(event, self.now_s)
        self.machine.check()
        return actions

    def second(self) -> Sequence[Any]:
        memory = MemoryNow(
            total_bytes=64 * GIB, available_bytes=self.available_bytes, pressure_some_avg10=self.pressure
        )
        return self.tell(le.LenderTick(memory, self.touched_bytes, self.drained), 1.0)

    def hear(self, sender: HostId, message: Message) -> Sequence[Any]:
        return self.tell(Heard(sender, message))

    def lend(self, index: int = 0, epoch: int = 1, to: HostId = ME, size: int = SLAB) -> SlabRef:
        register = only(self.hear(to, Map("v", index, epoch, size, PAGE)), le.RegisterSlab)
        self.tell(le.SlabRegistered(to, register.slab, "10.0.0.2:7"))
        return SlabRef("v", index, epoch)

    def short(self, slabs: int) -> Sequence[Any]:
        """Make memory short by so many slabs below headroom, for long enough to be believed."""
        self.available_bytes = 8 * GIB - slabs * SLAB + MIB
        self.machine._used_bytes = float(64 * GIB - self.available_bytes)
        return self.second()


def asking_two() -> tuple[Loan, CheckActivity, SetTimer[Any]]:
    """A lender that is short by one slab and asks ME and OTHERS[0], who borrow one each: the question and its time."""
    loan = Loan(spare=6)
    for host in (ME, OTHERS[0]):
        loan.lend(0, 1, host)
    actions = loan.short(1)
    assert sorted(host for host, _ in sent(actions, CheckActivity)) == [ME, OTHERS[0]]
    return loan, sent(actions, CheckActivity)[0][1], only(actions, SetTimer)


def test_without_a_slab_process_nothing_is_offered_or_lent() -> None:
    loan = Loan()
    loan.tell(le.StoreLost("killed"))
    assert sent(loan.hear(ME, QueryMem("v", 0, 1, SLAB)), FreeMem)[0][1].slabs == 0
    assert "does not lend" in sent(loan.hear(ME, Map("v", 0, 1, SLAB, PAGE)), MrInfo)[0][1].refused


def test_nothing_is_offered_before_a_measurement_or_before_the_slab_process_answers() -> None:
    asks, memory = Heard(ME, QueryMem("v", 0, 1, SLAB)), MemoryNow(64 * GIB, 40 * GIB, 0.0)
    for first, then in (
        (le.StoreFound("10.0.0.2:7", ()), le.LenderTick(memory, 0)),
        (le.LenderTick(memory, 0), le.StoreFound("10.0.0.2:7", ())),
    ):
        machine = Lender(random.Random(1), lambda n: b"s" * n, Headroom(fraction=0.125), 64 * GIB, 10.0, 60.0)
        for event, offered in ((None, 0), (first, 0), (then, 32 * GIB // SLAB)):
            if event is not None:
                machine.handle(event, 1.0)
            assert sent(machine.handle(asks, 1.0), FreeMem)[0][1].slabs == offered


def test_a_map_heard_again_while_memory_is_registered_is_answered_once() -> None:
    loan = Loan()
    register = only(loan.hear(ME, Map("v", 0, 1, SLAB, PAGE)), le.RegisterSlab)
    assert loan.hear(ME, Map("v", 0, 1, SLAB, PAGE)) == [], "the answer is on its way"
    assert len(sent(loan.tell(le.SlabRegistered(ME, register.slab, "10.0.0.2:7")), MrInfo)) == 1


def test_a_map_of_a_slab_that_is_taken_back_is_refused() -> None:
    loan = Loan(spare=4)
    loan.lend()
    assert len(sent(loan.short(1), Evict)) == 1, "there is only this one: nobody is asked"
    ((_, said),) = sent(loan.hear(ME, Map("v", 0, 1, SLAB, PAGE)), MrInfo)
    assert said.refused == "this mapping is being taken back"


def test_a_map_is_refused_when_there_is_no_room_or_its_epoch_is_old() -> None:
    loan = Loan(spare=1)
    loan.lend(0, epoch=5)
    assert "to spare" in sent(loan.hear(ME, Map("v", 1, 6, SLAB, PAGE)), MrInfo)[0][1].refused
    assert "older than" in sent(loan.hear(ME, Map("v", 0, 4, SLAB, PAGE)), MrInfo)[0][1].refused
    assert "whole number" in sent(loan.hear(OTHERS[0], Map("v", 0, 1, PAGE + 1, PAGE)), MrInfo)[0][1].refused


def test_a_failed_registration_is_a_refusal() -> None:
    loan = Loan()
    slab = only(loan.hear(ME, Map("v", 0, 1, SLAB, PAGE)), le.RegisterSlab).slab
    actions = loan.tell(le.SlabNotRegistered(ME, slab, "out of memory"))
    assert sent(actions, MrInfo)[0][1].refused == "out of memory"
    assert loan.machine.lent == {}


def test_a_slab_process_found_again_keeps_what_both_know_and_what_is_being_added() -> None:
    loan = Loan()
    ref = loan.lend(0)
    for _ in range(30):
        loan.second()
    coming = only(loan.hear(ME, Map("v", 1, 2, SLAB, PAGE)), le.RegisterSlab).slab
    assert loan.tell(le.StoreFound("10.0.0.2:7", (LoanedSlab(ME, ref, SLAB, SECRET),))) == []
    assert [lent.slab for lent in loan.machine.lent.values()] == [ref, coming]
    for _ in range(28):
        assert loan.second() == []
    assert noted([*loan.second(), *loan.second()]) == ["orphan"], "no new lease for the first"


def test_a_slab_is_freed_after_done_and_gone_when_its_memory_is() -> None:
    loan = Loan()
    ref = loan.lend()
    actions = loan.hear(ME, Done("v", 0, 1))
    assert only(actions, le.FreeSlab).slab == ref
    assert len(loan.machine.lent) == 1
    assert loan.hear(ME, Done("v", 0, 1)) == [], "told twice"
    assert loan.tell(le.SlabRegistered(ME, ref, "10.0.0.2:7")) == [], "too late"
    assert loan.tell(le.SlabNotRegistered(ME, ref, "out of memory")) == [], "too late"
    loan.tell(le.SlabFreed(ME, ref))
    assert loan.machine.lent == {}
    assert loan.tell(le.SlabFreed(ME, ref)) == loan.tell(le.SlabNotRegistered(ME, ref, "no")) == []
    assert only(loan.tell(le.SlabRegistered(ME, ref, "10.0.0.2:7")), le.FreeSlab).slab == ref, "nobody wants it"


def test_done_of_another_host_or_epoch_frees_nothing() -> None:
    loan = Loan()
    loan.lend(0, epoch=5)
    assert loan.hear(OTHERS[0], Done("v", 0, 5)) == []
    assert loan.hear(ME, Done("v", 0, 4)) == []


def test_an_orphan_is_freed_when_its_lease_is_over_and_renewal_keeps_it() -> None:
    loan = Loan()
    ref = loan.lend()
    for _ in range(50):
        assert loan.second() == []
    loan.hear(ME, Renew((ref,)))
    for _ in range(59):
        assert loan.second() == []
    assert noted([*loan.second(), *loan.second()]) == ["orphan"]
    assert loan.machine.evictions == dict.fromkeys(loan.machine.evictions, 0) | {"orphan": 1}


def test_leases_last_while_a_borrower_is_away_and_one_more_once_it_is_back() -> None:
    loan = Loan()
    loan.lend(0)
    loan.lend(1, to=OTHERS[0])
    loan.tell(le.BorrowerAway(ME, 60.0))
    said = [noted(loan.second()) for _ in range(59)]
    assert not any(said)
    assert noted([*loan.second(), *loan.second()]) == ["orphan"], "of the other borrower, who is not away"
    loan.tell(le.BorrowerAway(ME, 0.0))
    assert not any(noted(loan.second()) for _ in range(58))
    assert noted([*loan.second(), *loan.second()]) == ["orphan"]


def test_who_is_still_short_asks_for_more_only_when_what_was_evicted_is_back() -> None:
    """Batches follow one after another; the next measurement shows what the last one brought. Reference: §2.5.2."""
    loan = Loan(spare=6)
    for index in range(6):
        loan.lend(index)
    ((_, check),) = sent(loan.short(2), CheckActivity)
    gone = [message.ref for _, message in sent(loan.hear(ME, Activity(check.round, ())), Evict)]
    assert len(gone) == 2 == loan.machine.evictions["pressure"]
    assert loan.second() == [], "they are on their way"
    for ref in gone:
        loan.hear(ME, Done(ref.volume, ref.index, ref.epoch))
    assert loan.second() == [], "their memory is not back yet"
    loan.tell(le.SlabFreed(ME, gone[0]))
    assert loan.second() == []
    loan.tell(le.SlabFreed(ME, gone[1]))
    ((_, again),) = sent(loan.second(), CheckActivity)
    assert again.round > check.round, "as short as before: the next two"
    assert loan.tell(le.AnswersOver(check.round)) == []


def test_of_slabs_of_several_sizes_no_more_go_than_must() -> None:
    """A large and a small slab are the least active; the large one alone is enough. Reference: §2.5.2."""
    loan = Loan(spare=40)
    large = loan.lend(0, size=8 * SLAB)
    refs = [large, *(loan.lend(index) for index in range(1, 9))]
    ((_, check),) = sent(loan.short(8), CheckActivity)
    assert set(check.slabs) <= set(refs)
    rates = {ref: 1.0 if ref == large else 0.5 if index == 1 else 9.0 for index, ref in enumerate(refs)}
    answer = Activity(check.round, tuple(SlabActivity(slab, rates[slab]) for slab in check.slabs))
    gone = [message.ref for _, message in sent(loan.hear(ME, answer), Evict)]
    assert large in check.slabs, "drawn with this seed"
    assert gone == [large]


def test_while_tasks_wait_for_memory_an_eighth_of_loans_goes_with_headroom_intact() -> None:
    """The rule is ours, beside what restores headroom. Reference: §2.5.2."""
    loan = Loan(spare=40)
    for index in range(16):
        loan.lend(index)
    loan.pressure = 30.0
    actions = loan.second()
    ((_, check),) = sent(actions, CheckActivity)
    assert len(check.slabs) == 4
    busy = tuple(SlabActivity(slab, 50.0) for slab in check.slabs)
    actions = loan.hear(ME, Activity(check.round, busy))
    assert len(sent(actions, Evict)) == 2
    assert "tasks waited for memory 30 % of 10 s" in actions[0].reason
    assert sent(loan.hear(OTHERS[0], QueryMem("w", 0, 1, SLAB)), FreeMem)[0][1].slabs == 0


def test_measured_headroom_is_small_on_a_quiet_host_and_grows_with_its_programs() -> None:
    """Headroom that follows the host is future work of the paper. Reference: §2.5.1."""
    loan = Loan(spare=0, kept=None)
    for _ in range(5):
        loan.second()
    floor = round(0.03 * 64 * GIB)
    assert loan.machine.budget is not None
    assert loan.machine.budget.headroom_bytes == floor
    offered = sent(loan.hear(ME, QueryMem("v", 0, 1, SLAB)), FreeMem)[0][1].slabs
    assert offered == (8 * GIB - floor) // SLAB, "of 8 GiB free; a fixed eighth would have left none"
    for _ in range(5):
        loan.available_bytes -= 200 * MIB
        loan.second()
    assert loan.machine.budget.headroom_bytes == round(1.5 * 200 * MIB * react_s(10.0))
    assert react_s(10.0) == 14.0


def test_measured_headroom_does_not_mind_what_borrowers_write() -> None:
    loan = Loan(spare=30, kept=None)
    for index in range(20):
        loan.lend(index)
    loan.second()
    for _ in range(20):
        loan.touched_bytes += SLAB
        loan.available_bytes -= SLAB
        assert loan.second() == []
    assert loan.machine.budget is not None
    assert loan.machine.budget.headroom_bytes == round(0.03 * 64 * GIB)


@pytest.mark.parametrize("at_once", [False, True], ids=["silent", "out of reach"])
def test_a_borrower_that_does_not_answer_counts_as_idle(at_once: bool) -> None:
    loan, check, timer = asking_two()
    loan.hear(ME, Activity(check.round, (SlabActivity(SlabRef("v", 0, 1), 3.0),)))
    over = loan.tell(Undelivered(OTHERS[0], check)) if at_once else loan.tell(timer.event, timer.after_s)
    assert [host for host, _ in sent(over, Evict)] == [OTHERS[0]]


def test_only_answers_of_those_asked_in_this_round_count() -> None:
    """The least active of those asked go, by what their borrowers say now. Reference: §2.5.2."""
    loan, check, _ = asking_two()
    busy = (SlabActivity(SlabRef("v", 0, 1), 9.0),)
    assert loan.hear(ME, Activity(check.round - 1, (SlabActivity(SlabRef("v", 0, 1), 0.5),))) == []
    assert loan.hear(OTHERS[1], Activity(check.round, ())) == [], "nobody asked it"
    assert loan.tell(le.AnswersOver(check.round - 1)) == [], "a timer of the round before"
    assert loan.hear(ME, Activity(check.round, (*busy, SlabActivity(SlabRef("w", 3, 1), 1.0)))) == []
    assert loan.hear(ME, Activity(check.round, ())) == [], "told twice"
    found = loan.hear(OTHERS[0], Activity(check.round, (SlabActivity(SlabRef("v", 0, 1), 1.0),)))
    assert [host for host, _ in sent(found, Evict)] == [OTHERS[0]]
    assert loan.hear(OTHERS[0], Activity(check.round, ())) == [], "there is no round any more"
    assert loan.tell(le.AnswersOver(check.round)) == []


@pytest.mark.parametrize("freed", [False, True])
def test_what_was_given_back_while_borrowers_were_asked_is_not_evicted(freed: bool) -> None:
    loan, _, timer = asking_two()
    loan.hear(ME, Done("v", 0, 1))
    if freed:
        loan.tell(le.SlabFreed(ME, SlabRef("v", 0, 1)))
    assert [host for host, _ in sent(loan.tell(timer.event, timer.after_s), Evict)] == [OTHERS[0]]


def test_a_slab_that_is_only_being_registered_is_not_evicted() -> None:
    loan = Loan(spare=2)
    only(loan.hear(ME, Map("v", 0, 1, SLAB, PAGE)), le.RegisterSlab)
    assert loan.short(1) == []


def test_a_borrower_that_started_anew_has_its_old_mapping_freed_and_asks_again() -> None:
    loan = Loan(spare=4)
    old = loan.lend(0, epoch=1)
    found = loan.hear(ME, Map("v", 0, 2, SLAB, PAGE))
    assert only(found, le.FreeSlab).slab == old and noted(found) == ["replaced"]
    assert "try again" in sent(found, MrInfo)[0][1].refused
    loan.tell(le.SlabFreed(ME, old))
    assert loan.lend(0, epoch=2) == SlabRef("v", 0, 2)


def test_an_evicted_slab_keeps_its_grace_also_when_its_lease_ends_before() -> None:
    """Reference: §2.5.2."""
    loan = Loan(spare=1)
    loan.lend()
    for _ in range(55):
        loan.second()
    assert sent(loan.short(1), Evict)
    loan.hear(ME, Renew((SlabRef("v", 0, 1), SlabRef("w", 9, 9))))  # does not put it off
    for _ in range(9):
        assert loan.second() == []
    assert noted(loan.second()) == ["forced"]


def test_an_evicted_slab_is_freed_without_done_only_after_grace_and_lease() -> None:
    loan = Loan(spare=1)
    ref = loan.lend()
    assert sent(loan.short(1), Evict), "one slab, one to go: nobody needs to be asked"
    began_s = loan.now_s
    loan.hear(ME, Renew((ref,)))  # does not put it off
    while not (actions := loan.second()):
        pass
    assert noted(actions) == ["forced"]
    assert loan.machine.evictions == dict.fromkeys(loan.machine.evictions, 0) | {"pressure": 1, "forced": 1}
    assert only(actions, le.FreeSlab).slab == ref
    assert 50 < loan.now_s - began_s <= 60


def test_a_host_that_is_drained_lends_nothing_more_and_takes_all_back() -> None:
    loan = Loan(spare=4)
    refs = [loan.lend(index) for index in range(2)]
    loan.drained = True
    actions = loan.second()
    assert {message.index for _, message in sent(actions, Evict)} == {0, 1}
    assert {action.reason for action in actions if isinstance(action, LogEvent) and "drained" in action.reason}
    assert loan.machine.evictions["drained"] == 2 and loan.machine.spare_bytes() == 0
    for ref in refs:
        loan.hear(ME, Done(ref.volume, ref.index, ref.epoch))
        loan.tell(le.SlabFreed(ME, ref))
    assert not loan.machine.lent
    ((_, info),) = sent(loan.hear(ME, Map("v", 7, 1, SLAB, PAGE)), MrInfo)
    assert "to spare now" in info.refused
    loan.drained = False
    loan.second()
    assert loan.machine.spare_bytes() >= 4 * SLAB


def test_a_slab_process_found_again_is_believed_and_its_slabs_get_a_new_lease() -> None:
    loan = Loan()
    loan.lend(0)
    held = LoanedSlab(OTHERS[0], SlabRef("w", 3, 8), SLAB, SECRET)
    loan.tell(le.StoreFound("10.0.0.2:8", (held,)))
    assert list(loan.machine.lent) == [(OTHERS[0], "w", 3)]
    for _ in range(58):
        assert loan.second() == []
    assert noted([*loan.second(), *loan.second(), *loan.second()]) == ["orphan"]
