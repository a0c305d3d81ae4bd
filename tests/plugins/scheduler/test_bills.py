"""What became of the time for which jobs held GPUs: every GPU·s is used, idle, lost or not known, and once. (That bills
hold what jobs hold, in any order of commands, is `Little.say`'s to check.)"""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from covey.core.job_records import GPUS_MAX, OTHERS, GpuSeconds
from plugins.facts import Place, SavedAt
from plugins.scheduler.machine.books.job_record import ended_as, record_of
from plugins.scheduler.machine.log.bills import JobBill
from plugins.scheduler.messages.commands import (
    Attained,
    CancelAsked,
    Command,
    JobUse,
    RanksReported,
    Result,
    TakenBack,
    TimeLimitReached,
)
from tests.plugins.scheduler.test_queue import H1, H2, Told

J1 = JobId("j1")


class Clocked(Told):
    """A queue whose commands carry the rack's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def say(self, command: Command) -> Result:
        return super().say(msgspec.structs.replace(command, rack_s=self.now_s, wall_s=1000.0 + self.now_s))

    def after(self, seconds: float) -> "Clocked":
        self.now_s += seconds
        return self

    def tells(self, host: HostId = H1, saved: float | None = None, served: float = 0.0, **use: Any) -> None:
        """A host says what it measured, and, `saved`, that a checkpoint of this age in seconds is complete."""
        at = {} if saved is None else {J1: SavedAt(round(self.now_s), 1000.0 + self.now_s - saved, "/c")}
        uses = {J1: JobUse(self[J1].grant.epoch, **use)} if use else {}
        self.say(Attained(wall_s=0.0, host=host, service_gpu_s={J1: served}, uses=uses, saved=at))

    def reports(self, code: int = 0, asked: bool = False, **more: Any) -> None:
        for host in (H1, H2):
            codes = {rank: code for place in self[J1].start.places if place.host == host for rank in place.ranks}
            epoch = self[J1].grant.epoch
            self.say(RanksReported(wall_s=0.0, job=J1, epoch=epoch, host=host, codes=codes, asked=asked, **more))

    def taken_back(self, cause: Any = "preempted") -> None:
        self.say(TakenBack(wall_s=0.0, job=J1, epoch=self[J1].grant.epoch, cause=cause, reason="why"))

    def again(self) -> None:
        """The job starts again on the same GPUs."""
        self.grant(J1)
        self.place(J1, Place(H1, (0,), ("h1.0",)), Place(H2, (1,), ("h2.0",)))

    @property
    def seconds(self) -> GpuSeconds:
        found = record_of(self[J1], self.now_s, 0.0).seconds
        found.check()
        return found


def of(**parts: float) -> GpuSeconds:
    return GpuSeconds(**{"held": sum(parts.values()), **parts})


def test_what_is_held_is_used_idle_or_not_known_where_nothing_is_lost() -> None:
    told = Clocked()
    told.run(2)
    told.after(100).tells(served=90.0, seen_gpu_s=95.0, used_gpu_s=70.0)
    told.tells(H2, served=90.0)  # whose driver does not say
    told.reports()
    assert told.seconds == of(used=70.0, idle=25.0, unknown=105.0)
    assert list(told[J1].bill.by_gpu(0.0).values()) == [100.0, 100.0]


def test_a_preemption_loses_what_came_after_a_checkpoint_and_a_restart_takes_time() -> None:
    told = Clocked()
    told.run(2)
    told.after(60).tells(saved=10.0)
    told.after(30).taken_back()
    told.after(5)
    for host in (H1, H2):
        told.tells(host, served=95.0, seen_gpu_s=95.0, used_gpu_s=76.0)
    told.reports(asked=True)
    assert told.seconds == of(used=80.0, idle=20.0, preempted=90.0), "since 50 s, when it was saved, on two GPUs"
    told.after(500).again()
    told.after(40)
    for host in (H1, H2):
        told.tells(host, served=135.0, seen_gpu_s=40.0, used_gpu_s=20.0, starting_gpu_s=7.0)
    told.reports()
    assert told.seconds == of(used=120.0, idle=46.0, preempted=90.0, restarts=14.0)


def test_a_checkpoint_after_the_order_to_stop_keeps_what_came_before_it() -> None:
    told = Clocked()
    told.run(2)
    told.after(60).taken_back()
    told.after(4).tells(saved=0.0, served=64.0)
    told.after(1).reports(asked=True)
    assert told.seconds.preempted == 10.0, "what it took to stop"


@pytest.mark.parametrize(
    ("ends", "lost", "word"),
    [
        (lambda told: told.say(TimeLimitReached(wall_s=0.0, job=J1, epoch=1)), "failed", "timeout"),
        (lambda told: told.say(CancelAsked(wall_s=0.0, job=J1)), "", "cancelled"),
        (lambda told: None, "failed", "failed 3"),
    ],
)
def test_what_ended_badly_is_lost_and_what_was_cancelled_is_not(ends: Any, lost: str, word: str) -> None:
    told = Clocked()
    told.run(2)
    told.after(50).tells(served=50.0, seen_gpu_s=50.0, used_gpu_s=50.0)
    told.tells(H2, served=50.0, seen_gpu_s=50.0, used_gpu_s=50.0)
    ends(told)
    told.reports(code=3)
    assert told.seconds == (of(failed=100.0) if lost else of(used=100.0)) and ended_as(told[J1]) == word


def test_how_a_job_ended_is_told_in_a_word() -> None:
    for cause, word in (("host lost", "node-lost"), ("preempted", "preempted")):
        told = Clocked()
        told.run(2, retries_lost=0, retries_preempted=0)
        told.taken_back(cause)
        told.reports(asked=True)
        assert (told[J1].state, ended_as(told[J1])) == ("failed", word)
    told = Clocked()
    told.run(2)
    told.reports(code=-9, oom_bytes=31 << 30)
    assert ended_as(told[J1]) == "oom, peak 31 GiB" and told[J1].ending.exit_code == 137
    told = Clocked()
    told.run(2)
    assert ended_as(told[J1]) == ""
    told.reports()
    assert ended_as(told[J1]) == "done"


def test_the_gpus_of_a_bill_are_bounded_and_none_of_its_time_is_dropped() -> None:
    bill = JobBill()
    for number in range(GPUS_MAX + 44):
        bill.hold(Place(H1, (0,), (f"GPU-{number}",)), 0.0, 2.0 * number)
        bill.release(H1, f"GPU-{number}", 2.0 * number + 2.0)
    assert len(bill.by_gpu(1e6)) == GPUS_MAX + 1 and bill.by_gpu(1e6)[OTHERS] == 88.0
    assert sum(bill.gpus.values()) == bill.held_gpu_s == 2.0 * (GPUS_MAX + 44)


def test_a_snapshot_of_an_agent_without_bills_is_counted_from_then_on() -> None:
    told = Clocked()
    told.run(2)
    told.after(10)
    told[J1].bill = JobBill()
    told.queue.rack_s = 10.0
    told.queue.rebuild()
    told.after(7).reports()
    assert told.seconds.held == sum(told[J1].bill.gpus.values()) == 14.0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("use", "save", "preempt", "report", "fail", "again", "stop late")), st.floats(0.0, 100.0)
    ),
    max_size=25,
)


@given(STEPS, st.floats(0.0, 1.0))
def test_whatever_happens_all_that_is_held_is_accounted_for_once(steps: list[tuple[str, float]], share: float) -> None:
    """`JobBill.check`, which `Told.say` calls, holds after each command; hosts may say what they like, and late."""
    told = Clocked()
    told.run(2, retries=1000, retries_lost=1000)
    for what, seconds in steps:
        told.after(seconds)
        state = told[J1].state
        match what:
            case "use":
                told.tells(seen_gpu_s=told.now_s * 2 * share, used_gpu_s=told.now_s * 1.5, starting_gpu_s=seconds)
            case "save":
                told.tells(saved=seconds, served=told.now_s)
            case "preempt" if state == "running":
                told.taken_back("preempted" if share > 0.5 else "host lost")
            case "report" | "fail" if state in ("running", "stopping"):
                told.reports(code=3 * (what == "fail"), asked=state == "stopping")
            case "again" if state == "queued":
                told.again()
            case _:
                told.say(Attained(wall_s=0.0, host=H1, service_gpu_s={J1: told.now_s}))
        assert told.seconds.held == pytest.approx(sum(told[J1].bill.by_gpu(told.now_s).values()))
