"""One host's GPUs: kept for one grant at a time, remembered across restarts, given back for certain."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from covey.core.events import Heard, Send
from covey.core.ids import HostId, JobId
from plugins.facts import GpuUse
from plugins.scheduler.machine.host.reservations import (
    RELEASED_MAX,
    Action,
    Event,
    GpusSeen,
    GrantNews,
    HeldReservations,
    KeepPort,
    RanksGone,
    ReleasePort,
    Reservations,
    Save,
    SecondWent,
    Starting,
    UseSeen,
)
from plugins.scheduler.machine.leader.shared_capacity import Sharing
from plugins.scheduler.messages.wire import NotReserved, Release, Reserve, Reserved
from tests.families import examples

J1, J2 = JobId("j1"), JobId("j2")
HOME, OTHER = HostId("coordinator"), HostId("other")
LEASE_S = 15.0


class Local:
    def __init__(self, kept: HeldReservations | None = None, now_s: float = 0.0) -> None:
        self.machine = Reservations(kept or HeldReservations(), LEASE_S, now_s)
        self.now_s = now_s
        self.machine.handle(GpusSeen(("g0", "g1", "g2", "g3")), now_s)

    def dispatch(self, event: Event) -> Sequence[Action]:
        actions = self.machine.handle(event, self.now_s)
        self.machine.check()
        return actions

    def ask(self, job: JobId, workers: int, epoch: int = 1, attempt: int = 1, **more: Any) -> Any:
        """Ask a host, and return its answer."""
        coordinator = more.pop("coordinator", HOME)
        ask = Reserve(job, epoch, attempt, workers, more.pop("each", 1), more.pop("master", False), LEASE_S, **more)
        last = self.dispatch(Heard(coordinator, ask))[-1]
        if isinstance(last, KeepPort):
            return last.reserved
        assert isinstance(last, Send) and last.to == coordinator
        return last.message

    def restarted(self) -> "Local":
        data = msgspec.msgpack.encode(self.machine.held())
        return Local(msgspec.msgpack.decode(data, type=HeldReservations), self.now_s)


def test_a_yes_names_the_gpus_and_is_written_down_before_it_is_said() -> None:
    local = Local()
    actions = local.dispatch(Heard(HOME, Reserve(J1, 1, 1, 2, 1, False, LEASE_S)))
    assert actions == [Save(), Send(HOME, Reserved(J1, 1, 1, ("g0", "g1"), "", 0))]
    actions = local.dispatch(Heard(HOME, Reserve(J2, 1, 1, 1, 2, True, LEASE_S)))
    assert actions == [Save(), KeepPort(HOME, Reserved(J2, 1, 1, ("g2", "g3"), "", 0))]


def test_double_booking_is_refused_with_what_is_free() -> None:
    local = Local()
    local.ask(J1, 3)
    answer = local.ask(J2, 2)
    assert isinstance(answer, NotReserved)
    assert (answer.free, answer.reason) == (1, "2 GPUs were requested and 1 are free")


def test_the_same_ask_twice_is_the_same_yes() -> None:
    local = Local()
    assert local.ask(J1, 2) == local.ask(J1, 2)
    assert local.machine.free() == ["g2", "g3"]


def test_a_release_gives_back_and_an_ask_that_comes_after_it_is_too_late() -> None:
    local = Local()
    local.ask(J1, 2)
    assert ReleasePort(J1, 1) in local.dispatch(Heard(HOME, Release(J1, 1, 1)))
    assert len(local.machine.free()) == 4
    assert isinstance(local.ask(J1, 2), NotReserved)
    assert isinstance(local.ask(J1, 2, attempt=2), Reserved)


def test_a_release_that_overtakes_its_ask_still_wins() -> None:
    local = Local()
    local.dispatch(Heard(HOME, Release(J1, 1, 2)))
    assert isinstance(local.ask(J1, 2, attempt=1), NotReserved)
    assert isinstance(local.ask(J1, 2, attempt=2), NotReserved)
    assert isinstance(local.ask(J1, 2, attempt=3), Reserved)


def test_a_fence_never_goes_back_whatever_comes_late_or_twice() -> None:
    """A release of an earlier attempt or grant that arrives last opens nothing for the asks of between."""
    local = Local()
    local.dispatch(Heard(HOME, Release(J1, 2, 3)))
    for epoch, attempt in ((1, 9), (2, 1), (2, 3), (1, 1)):
        local.dispatch(Heard(OTHER, Release(J1, epoch, attempt)))
        assert isinstance(local.ask(J1, 1, epoch=2, attempt=3), NotReserved), (epoch, attempt)
        assert isinstance(local.ask(J1, 1, epoch=2, attempt=2), NotReserved)
        assert isinstance(local.ask(J1, 1, epoch=1, attempt=99), NotReserved)
    assert isinstance(local.restarted().ask(J1, 1, epoch=2, attempt=3), NotReserved), "nor over a restart"
    assert isinstance(local.ask(J1, 1, epoch=2, attempt=4), Reserved)


def test_a_lease_of_a_grant_that_is_over_lets_no_late_ask_of_it_in() -> None:
    local = Local()
    assert isinstance(local.ask(J1, 1, epoch=3, attempt=2), Reserved)
    local.now_s = LEASE_S
    local.dispatch(SecondWent())
    assert local.machine.find(J1, 3) is None, "it ends at its end and not later"
    assert isinstance(local.ask(J1, 1, epoch=2, attempt=9), NotReserved)
    assert isinstance(local.ask(J1, 1, epoch=3, attempt=2), NotReserved)
    assert isinstance(local.ask(J1, 1, epoch=3, attempt=3), Reserved)


def test_a_late_release_of_an_earlier_attempt_leaves_the_later_one_its_gpus() -> None:
    local = Local()
    local.ask(J1, 2, attempt=1)
    assert isinstance(local.ask(J1, 2, attempt=2), Reserved)
    local.dispatch(Heard(HOME, Release(J1, 1, 1)))
    assert local.machine.find(J1, 1) is not None and len(local.machine.free()) == 2
    local.dispatch(Heard(HOME, Release(J1, 1, 2)))
    assert len(local.machine.free()) == 4


def test_the_same_ask_again_keeps_its_gpus_for_a_lease_from_now_on() -> None:
    local = Local()
    local.ask(J1, 1)
    local.now_s = 10.0
    assert isinstance(local.ask(J1, 1), Reserved)
    local.now_s = LEASE_S + 5.0
    local.dispatch(SecondWent())
    assert local.machine.find(J1, 1) is not None
    local.now_s = LEASE_S + 10.0
    local.dispatch(SecondWent())
    assert local.machine.find(J1, 1) is None


def test_of_many_fences_the_oldest_is_forgotten_and_one_that_is_renewed_is_not_old() -> None:
    local = Local()
    local.dispatch(Heard(HOME, Release(J1, 5, 1)))
    for number in range(RELEASED_MAX - 1):
        local.dispatch(Heard(HOME, Release(JobId(f"k{number}"), 1, 1)))
    local.dispatch(Heard(HOME, Release(J1, 5, 1)))
    local.dispatch(Heard(HOME, Release(J2, 1, 1)))
    assert isinstance(local.ask(J1, 1, epoch=5), NotReserved) and isinstance(local.ask(J2, 1), NotReserved)
    assert JobId("k0") not in local.machine.released and len(local.machine.released) == RELEASED_MAX


def test_of_two_coordinators_the_newer_grant_wins_in_either_order() -> None:
    local = Local()
    local.ask(J1, 2, epoch=1)
    assert isinstance(local.ask(J1, 3, epoch=2, coordinator=OTHER), Reserved)
    assert len(local.machine.free()) == 1
    assert isinstance(local.ask(J1, 1, epoch=1, attempt=9), NotReserved)
    local.dispatch(Heard(HOME, Release(J1, 1, 9)))
    assert local.machine.find(J1, 2) is not None, "a release by the old coordinator is about the old grant"


def test_a_lease_without_news_ends_and_one_with_news_does_not() -> None:
    local = Local()
    local.ask(J1, 1)
    local.ask(J2, 1)
    local.now_s = 14.0
    local.dispatch(GrantNews(J2, 1, live=True, over=False))
    local.dispatch(GrantNews(J1, 1, live=False, over=False))
    local.now_s = 16.0
    local.dispatch(SecondWent())
    assert local.machine.find(J1, 1) is None and local.machine.find(J2, 1) is not None
    assert isinstance(local.ask(J1, 1), NotReserved), "the attempt whose lease ended is over"


def test_a_grant_that_is_over_gives_back_at_once_unless_its_ranks_run() -> None:
    local = Local()
    local.ask(J1, 1)
    local.ask(J2, 1)
    local.dispatch(Starting(J2, 1, ("g1",)))
    for job in (J1, J2):
        local.dispatch(GrantNews(job, 1, live=False, over=True))
    assert local.machine.owners() == {"g1": J2}
    local.dispatch(Heard(HOME, Release(J2, 1, 1)))
    local.now_s = 1000.0
    local.dispatch(SecondWent())
    assert local.machine.owners() == {"g1": J2}, "what runs holds its GPUs, whatever anybody says"
    local.dispatch(RanksGone(J2, 1))
    assert len(local.machine.free()) == 4


def test_a_newer_grant_on_a_host_where_the_old_ranks_still_end_gets_other_gpus() -> None:
    local = Local()
    local.ask(J1, 2)
    local.dispatch(Starting(J1, 1, ("g0", "g1")))
    answer = local.ask(J1, 2, epoch=2)
    assert isinstance(answer, Reserved) and answer.gpus == ("g2", "g3")
    assert isinstance(local.ask(J1, 2, epoch=1, attempt=5), NotReserved)


def test_the_log_may_start_a_gang_whose_lease_ended_here() -> None:
    local = Local()
    local.ask(J1, 2)
    local.now_s = 20.0
    local.dispatch(SecondWent())
    local.ask(J2, 1)
    local.dispatch(Starting(J1, 1, ("g0", "g1")))
    assert local.machine.owners() == {"g0": J1, "g1": J1}, "the log refuses to place j2 on what it gave to j1"
    assert local.dispatch(Starting(J1, 1, ("g0", "g1"))) == ()


def test_a_restarted_agent_knows_what_it_promised_and_what_it_released() -> None:
    local = Local()
    local.ask(J1, 2)
    local.dispatch(Starting(J1, 1, ("g0", "g1")))
    local.ask(J2, 1)
    local.dispatch(Heard(HOME, Release(J2, 1, 1)))
    local.now_s = 5.0
    local = local.restarted()
    assert local.machine.owners() == {"g0": J1, "g1": J1}
    assert isinstance(local.ask(J2, 1), NotReserved)
    assert isinstance(local.ask(J2, 3, attempt=2), NotReserved)


def test_a_job_without_gpus_is_always_welcome() -> None:
    local = Local()
    local.ask(J1, 4)
    assert isinstance(local.ask(J2, 3, each=0), Reserved)


def grown(*gpus: str, **more: Any) -> Local:
    """A host where ranks of a job run on g0, and two more are about to join them."""
    local = Local()
    local.ask(J1, 1)
    local.dispatch(Starting(J1, 1, ("g0",)))
    answer = local.ask(J1, 2, attempt=5, joins=True, **more)
    assert isinstance(answer, Reserved) and answer.gpus == ("g1", "g2")
    return local


def test_ranks_that_join_others_have_gpus_of_their_own_until_the_log_has_them() -> None:
    local = grown(master=True)
    assert local.machine.owners() == {"g0": J1, "g1": J1, "g2": J1}
    assert local.ask(J1, 2, attempt=5, joins=True).gpus == ("g1", "g2"), "asked twice"
    local = local.restarted()
    assert local.dispatch(Starting(J1, 1, ("g0", "g1", "g2"))) == [Save(), Save()], "the port is the rank's"
    assert len(local.machine.all()) == 1 and local.machine.free() == ["g3"]
    assert local.dispatch(Starting(J1, 1, ("g0", "g1", "g2"))) == ()
    local.dispatch(RanksGone(J1, 1))
    assert len(local.machine.free()) == 4


def test_what_is_for_ranks_that_do_not_come_is_given_back_and_the_others_run_on() -> None:
    for gone in (Heard(HOME, Release(J1, 1, 5)), SecondWent(), Starting(J1, 1, ("g0",))):
        local = grown()
        local.dispatch(GrantNews(J1, 1, live=True, over=False))
        local.dispatch(GrantNews(J1, 1, live=False, over=False, joins=True))
        local.now_s = LEASE_S + 1
        local.dispatch(gone)
        assert local.machine.owners() == {"g0": J1}, gone
        assert isinstance(local.ask(J1, 1, attempt=6, joins=True), Reserved), gone


def test_ranks_join_none_where_none_runs_and_do_not_begin_beside_some() -> None:
    local = Local()
    assert "none of its ranks runs here" in local.ask(J1, 1, joins=True).reason
    local.ask(J1, 1)
    assert "none of its ranks runs here" in local.ask(J1, 1, attempt=2, joins=True).reason
    local.dispatch(Starting(J1, 1, ("g0",)))
    assert "its ranks run here already" in local.ask(J1, 1, attempt=3).reason


class AnyOrder(RuleBasedStateMachine):
    """Coordinators ask, release and vanish, leases end, ranks start and end, the agent restarts: no GPU is ever held
    twice, and what runs keeps its GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.local = Local()
        self.running: dict[tuple[JobId, int], tuple[str, ...]] = {}

    @rule(
        number=st.integers(1, 3),
        epoch=st.integers(1, 3),
        attempt=st.integers(1, 3),
        workers=st.integers(1, 4),
    )
    def ask(self, number: int, epoch: int, attempt: int, workers: int) -> None:
        over = self.local.machine.released.get(JobId(f"j{number}"), (-1, -1))
        before = self.local.machine.find(JobId(f"j{number}"), epoch)
        answer = self.local.ask(JobId(f"j{number}"), workers, epoch, attempt)
        if isinstance(answer, Reserved):
            assert (epoch, attempt) > over
            again = before is not None and before.attempt == attempt
            assert len(answer.gpus) == (len(before.gpus) if again and before else workers)

    @rule(number=st.integers(1, 3), epoch=st.integers(1, 3), attempt=st.integers(1, 3), workers=st.integers(1, 2))
    def join(self, number: int, epoch: int, attempt: int, workers: int) -> None:
        answer = self.local.ask(JobId(f"j{number}"), workers, epoch, attempt, joins=True)
        assert isinstance(answer, NotReserved) or (JobId(f"j{number}"), epoch) in self.running

    @rule(number=st.integers(1, 3), epoch=st.integers(1, 3))
    def joined(self, number: int, epoch: int) -> None:
        job = JobId(f"j{number}")
        more, here = self.local.machine.find(job, epoch, joins=True), self.running.get((job, epoch))
        if more is not None and here is not None:
            self.running[job, epoch] = (*here, *more.gpus)
            self.local.dispatch(Starting(job, epoch, self.running[job, epoch]))
            assert self.local.machine.find(job, epoch, joins=True) is None

    @rule(number=st.integers(1, 3), epoch=st.integers(1, 3), attempt=st.integers(1, 3))
    def release(self, number: int, epoch: int, attempt: int) -> None:
        self.local.dispatch(Heard(HOME, Release(JobId(f"j{number}"), epoch, attempt)))

    @rule(number=st.integers(1, 3), epoch=st.integers(1, 3))
    def start(self, number: int, epoch: int) -> None:
        """Start what the log starts: only what this host said yes to."""
        job = JobId(f"j{number}")
        hold = self.local.machine.find(job, epoch)
        if hold is not None:
            self.local.dispatch(Starting(job, epoch, hold.gpus))
            self.running[job, epoch] = hold.gpus

    @rule(number=st.integers(1, 3), epoch=st.integers(1, 3))
    def end(self, number: int, epoch: int) -> None:
        if self.running.pop((JobId(f"j{number}"), epoch), None) is not None:
            self.local.dispatch(RanksGone(JobId(f"j{number}"), epoch))
            assert self.local.machine.find(JobId(f"j{number}"), epoch) is None

    @rule(number=st.integers(1, 3), epoch=st.integers(1, 3), live=st.booleans(), over=st.booleans())
    def news(self, number: int, epoch: int, live: bool, over: bool) -> None:
        self.local.dispatch(GrantNews(JobId(f"j{number}"), epoch, live and not over, over))
        self.local.dispatch(GrantNews(JobId(f"j{number}"), epoch, False, over, joins=True))

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.local.now_s += seconds
        self.local.dispatch(SecondWent())

    @rule()
    def restart(self) -> None:
        self.local = self.local.restarted()

    @invariant()
    def all_holds(self) -> None:
        self.local.machine.check()
        owners = self.local.machine.owners()
        for (job, _), gpus in self.running.items():
            assert all(owners.get(gpu) == job for gpu in gpus), "what runs lost a GPU"


AnyOrder.TestCase.settings = hypothesis_settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
test_in_any_order_no_gpu_is_held_twice_and_what_runs_keeps_its_own = AnyOrder.TestCase


def test_a_gpu_that_takes_no_job_is_nobodys_whether_gpus_are_shared_or_not() -> None:
    sick = {"g1": "XID 48: an uncorrectable memory error", "g3": "the driver does not answer"}
    for sharing in (None, Sharing(beside=1)):
        local = Local()
        local.machine.sharing = sharing
        assert local.ask(J2, 1).gpus == ("g0",)
        local.dispatch(GpusSeen(("g0", "g1", "g2", "g3"), sick | {"g0": "lost"}))
        assert local.machine.free() == ["g2"] and local.machine.out() == sick, "what is held is its job's until it ends"
        no = local.ask(J1, 2)
        assert isinstance(no, NotReserved) and no.free == 1 and "XID 48" in no.reason and "does not answer" in no.reason
        local.dispatch(GpusSeen(("g0", "g1", "g2", "g3")))
        assert len(local.ask(J1, 3, attempt=2).gpus) == 3


def test_a_gpu_that_its_sharing_empties_is_nobodys_although_none_is_shared() -> None:
    local = Local()
    local.dispatch(UseSeen((GpuUse("g0", 0.0, 0, "g0 is out of use: rows to remap"),)))
    assert local.machine.free() == ["g1", "g2", "g3"] and isinstance(local.ask(J1, 4), NotReserved)
