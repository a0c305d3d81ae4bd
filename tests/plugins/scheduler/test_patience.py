"""Nobody who is within a quota waits for ever: what `machine/leader/gang_clocks.py` promises wide gangs."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.scheduler.machine.leader.gang_clocks import GangClocks
from plugins.scheduler.policy.order import due_after, is_calm, widest_narrow
from plugins.scheduler.policy.rules import COVEY, LAS_PUBLISHED, OrderRules
from sim.jobs.engine import DONE, UNBORN, WAIT, Engine, Outcome, SimJob

GPUS = 16


class Watched(Engine):
    """The engine, and for how many seconds each wide gang waited though it could have run by age in a pool that is not
    overloaded: counted anew at every step, from the states of all jobs."""

    def _prepare(self) -> None:
        self.late_s = [0] * len(self.jobs)
        self.stopped_last = [False] * len(self.jobs)
        """Jobs that were stopped after they had been promoted."""
        self.before = (0, list[int]())

    def _next(self) -> int:
        at, late = super()._next(), self._late()
        for job in late:
            self.late_s[job] += at - self.now
        return at

    def _late(self) -> list[int]:
        live = [job for job, state in enumerate(self.state) if state not in (UNBORN, DONE)]
        front, held = [], 0
        for job in live:
            held += self.width[job]
            if held > self.capacity:
                break
            front.append(job)
        wide = [job for job in front if self.state[job] == WAIT and self.width[job] > widest_narrow(self.capacity)]
        unpromoted = [job for job in wide if not self.lasts[job]]
        asked = sum(self.width[job] for job in live) - sum(self.width[job] for job in unpromoted)
        return wide if is_calm(asked, self.capacity) else []

    def _preempt(self, job: int, preempt_s: int) -> None:
        self.stopped_last[job] |= self.lasts[job]
        super()._preempt(job, preempt_s)


workloads = st.lists(
    st.tuples(st.integers(0, 120), st.sampled_from((1, 1, 1, 2, 4, 8, 16)), st.integers(1, 60)), min_size=1, max_size=40
)


@given(workloads, st.integers(1, 40), st.sampled_from((0, 3)), st.booleans())
def test_a_wide_gang_waits_its_patience_and_what_it_ran_longer_than_by_age(
    drawn: list[tuple[int, int, int]], patience_s: int, stop_s: int, narrow_first: bool
) -> None:
    jobs = [SimJob(at, *each) for at, each in enumerate(sorted(drawn))]
    rules = OrderRules(
        thresholds_gpu_s=(8, 64),
        gang_patience_s=patience_s,
        narrow_first=narrow_first,
        preempt_s=stop_s,
        restore_s=stop_s,
    )
    engine = Watched(jobs, GPUS, rules)
    engine.run()
    for at, job in enumerate(jobs):
        if job.gpus > widest_narrow(GPUS):
            assert engine.late_s[at] <= patience_s + job.duration_s + stop_s
        assert not engine.stopped_last[at], "a gang whose turn came is not stopped any more"


def stream(days: float) -> list[SimJob]:
    """Jobs of one GPU and up to 50 minutes that ask for 76 % of 64 GPUs, and a gang of half of these after 6 hours."""
    dice, jobs, at_s = random.Random(1), list[SimJob](), 0.0
    while (at_s := at_s + dice.expovariate(0.76 * 64 / 1500)) < days * 86400:
        jobs.append(SimJob(len(jobs), int(at_s), 1, dice.randint(1, 3000)))
    return [*jobs, SimJob(len(jobs), 6 * 3600, 32, 1800)]


def test_a_stream_of_narrow_jobs_does_not_keep_a_gang_waiting() -> None:
    jobs = stream(1.0)

    def run(rules: OrderRules) -> tuple[float, Outcome]:
        out = Engine(jobs, 64, msgspec.structs.replace(rules, preempt_s=30, restore_s=30)).run()
        return (out.end_s[-1] - jobs[-1].submit_s) / 3600, out

    ends_h, out = run(COVEY)
    starved_h, before = run(msgspec.structs.replace(COVEY, gang_patience_s=None))
    assert ends_h < 2 < 10 < starved_h and out.promoted[-1] == 1
    narrow = [sum(each.end_s[at] - jobs[at].submit_s for at in range(len(jobs) - 1)) for each in (out, before)]
    assert narrow[0] < 1.02 * narrow[1], "and what the others pay is small"
    assert run(LAS_PUBLISHED)[0] > 10, "published policies stay as they are"


def test_clocks_of_a_pool() -> None:
    clocks = GangClocks(10.0)
    clocks.begin(0.0)
    clocks.put(1, 8, waits=False)
    clocks.put(2, 4, waits=True)
    clocks.put(3, 9, waits=True, ran_s=5.0)
    clocks.settle(16)
    assert clocks.front == [1, 2] and clocks.next_s() == 10.0, "3 does not fit beside the older ones"
    clocks.begin(4.0)
    clocks.drop(1)
    clocks.settle(16)
    assert clocks.next_s() == 10.0 and list(clocks.began_s) == [2, 3]
    clocks.put(4, 32, waits=True)
    clocks.settle(16)
    assert clocks.calm and clocks.asked == 45, "those whose clock runs are not counted"
    clocks.put(5, 1, waits=True)
    clocks.settle(16)
    assert clocks.next_s() is None, "the others ask for over twice the GPUs: no clock runs"
    clocks.begin(20.0)
    clocks.drop(4)
    clocks.settle(16)
    assert clocks.next_s() == 26.0 and not clocks.due()
    clocks.begin(26.0)
    clocks.put(2, 4, waits=False)
    clocks.settle(16)
    assert not clocks.due() and clocks.waited_s == {2: 10.0}, "2 has started in the second in which it was due"
    clocks.put(2, 4, waits=True, ran_s=1.0)
    clocks.begin(27.0)
    clocks.settle(16)
    assert not clocks.due() and clocks.next_s() == 28.0, "what it waited before counts"
    clocks.check()


@pytest.mark.parametrize(("pool", "wide"), [(1, 2), (8, 2), (16, 2), (17, 3), (64, 8), (65, 9), (10_000, 1250)])
def test_which_gangs_are_wide(pool: int, wide: int) -> None:
    assert widest_narrow(pool) == wide - 1


def test_when_a_gang_is_due() -> None:
    assert due_after(2700.0, 0.0, 0.0) == 2700.0 and due_after(2700.0, 600.0, 3000.0) == 300.0
    assert due_after(2700.0, 0.0, 4000.0) == 0.0
    assert is_calm(128, 64) and not is_calm(129, 64)
