"""The sum that is due first is done first: the order, the queue of a process, and how it learns what each job was
promised (AutoPS §4.3.3.2, for whose slots it stands)."""

import asyncio
import math
import random
from collections.abc import Coroutine
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.wire.sums import UNKNOWN, JobCounters, Now, SetPace
from plugins.aggregator.datapath.iteration_gaps import SHORT_S
from plugins.aggregator.datapath.lanes.addition_queue import AdditionQueue
from plugins.aggregator.datapath.lanes.lanes import Lanes
from plugins.aggregator.datapath.rounds_under_way import RoundsUnderWay
from plugins.aggregator.machine.cycle_ledger import CycleLedger
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.pool import Pool, PoolRules
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.messages import AggregatorSettings, Demand
from plugins.aggregator.policy.assign import AggregationProfile, Tensor, refusal_of
from plugins.aggregator.policy.cycle import FILL, Cycle, Share, cycle_of
from plugins.aggregator.policy.urgency import LAST, LAST_S, MostUrgent, due, may_take
from plugins.aggregator.service.paces import paces
from sim.tensors.rounds import Job, Rounds
from tests.plugins.aggregator.loopback import AggdThread
from tests.virtual_time import play

JOB, OTHER = JobId("j1"), JobId("j2")
SECRET = b"sixteen bytes !!"


@given(st.lists(st.floats(0, 10) | st.just(math.inf)))
def test_what_is_due_first_comes_first_and_of_equals_what_came_first(dues: list[float]) -> None:
    urgent = MostUrgent[int]()
    for at, when in enumerate(dues):
        urgent.put(when, at)
    found = [urgent.pop() for _ in range(len(urgent))]
    assert found == sorted(range(len(dues)), key=lambda at: (dues[at], at)) and not urgent


@pytest.mark.parametrize(("limit", "allowed"), [(Fraction(1, 10), 1000), (Fraction(1, 2), 1800), (Fraction(1), LAST)])
def test_an_iteration_may_take_what_its_limit_allows(limit: Fraction, allowed: float) -> None:
    """The loss is (d - D) / d."""
    assert may_take(900, limit) == pytest.approx(allowed)


@given(began=st.floats(0, 1e6), allowed=st.floats(0, 1e6), now=st.floats(0, 2e6))
def test_what_comes_late_waits_as_if_its_iteration_began_now(began: float, allowed: float, now: float) -> None:
    """Reference: §4.3.3.2, outliers."""
    found = due(began, allowed, now)
    assert found == (began + allowed if began + allowed >= now else now + allowed) and found >= now


# ---- the queue of a process ------------------------------------------------------------------------------------------


class Parts:
    """A tensor with so many additions to do."""

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def busy(self) -> bool:
        return self.count > 0

    @property
    def is_large(self) -> bool:
        return True


class Adds:
    """A job whose sums are due at some time, and the additions done for all of them."""

    def __init__(self, name: str, due_s: float, done: list[str], count: int = 3) -> None:
        self.name, self.due_s, self.over, self._done = name, due_s, False, done
        self.tensors = {key: Parts(count) for key in range(2)}

    def broken(self, key: int, error: Exception) -> None:
        self._done.append(f"{self.name}{key} {error}")

    def hand_part(self, key: int, lanes: Lanes) -> None:
        cast(Any, lanes).given.append(f"{self.name}{key}")
        self.add_part(key)

    def add_part(self, key: int) -> None:
        if self.name == "bad":
            raise ValueError("cannot")
        assert not self.over
        self.tensors[key].count -= 1
        self._done.append(f"{self.name}{key}")


def queue() -> AdditionQueue:
    def spawn(name: str, work: Coroutine[Any, Any, Any]) -> None:
        tasks.add(asyncio.get_running_loop().create_task(work))

    tasks: set[asyncio.Task[Any]] = set()
    ticks = iter(range(1 << 30))
    clock = SimpleNamespace(cpu_s=lambda: next(ticks) * 0.001)  # so that a turn has one or two additions
    return AdditionQueue(cast(Env, SimpleNamespace(clock=clock, spawn=spawn)))


def put(additions: AdditionQueue, job: Adds, key: int) -> None:
    additions.put(job, key, job.tensors[key])


def test_what_comes_while_nothing_waits_is_added_at_once() -> None:
    done: list[str] = []

    async def story() -> None:
        put(queue(), Adds("a", 1.0, done, count=1), 0)
        assert done == ["a0"]

    play(story())


def test_what_is_due_earlier_goes_between_the_parts_of_what_is_due_later() -> None:
    done: list[str] = []

    async def story() -> None:
        additions = queue()
        late, early = Adds("late", 9.0, done, count=20), Adds("early", 5.0, done)
        put(additions, late, 0)
        put(additions, late, 1)
        put(additions, late, 0)  # a part more of it; it waits already
        for _ in range(3):
            await asyncio.sleep(0)
        assert 1 < len(done) < 20
        put(additions, early, 1)
        put(additions, early, 0)
        await asyncio.sleep(1.0)

    play(story())
    first = min(at for at, what in enumerate(done) if what.startswith("early"))
    assert done[first : first + 6] == ["early1"] * 3 + ["early0"] * 3
    assert done.count("late0") == done.count("late1") == 20


def test_a_job_that_ended_leaves_nothing_to_add() -> None:
    done: list[str] = []

    async def story() -> None:
        additions = queue()
        over, other = Adds("over", 1.0, done), Adds("other", 2.0, done)
        put(additions, over, 0)
        put(additions, other, 0)
        over.over = True
        await asyncio.sleep(1.0)
        put(additions, other, 1)
        await asyncio.sleep(1.0)

    play(story())
    assert done == ["over0"] + ["other0"] * 3 + ["other1"] * 3


def test_an_addition_that_fails_is_nobody_elses_business() -> None:
    done: list[str] = []

    async def story() -> None:
        additions = queue()
        for job in (Adds("good", 1.0, done), Adds("bad", 0.5, done), Adds("other", 2.0, done)):
            put(additions, job, 0)
        await asyncio.sleep(1.0)
        put(additions, Adds("late", 1.0, done), 1)
        await asyncio.sleep(1.0)

    play(story())
    assert done == ["good0", "bad0 cannot", "good0", "good0"] + ["other0"] * 3 + ["late1"] * 3


# ---- when an iteration began -----------------------------------------------------------------------------------------


def test_an_iteration_begins_where_the_longest_pause_does() -> None:
    """Rounds a and b follow one another at once; then there is a long pause."""
    now = [0.0]
    rounds = RoundsUnderWay(cast(Any, SimpleNamespace(now_s=lambda: now[0])))
    began = []
    for at in range(4):
        for key, pause_s in ((1, SHORT_S / 10), (2, 1.0)):
            rounds.follow(key, True)
            now[0] += 0.1
            rounds.owe()
            rounds.follow(key, False)
            rounds.paid(key)
            began.append((at, key, rounds.iteration_s))
            now[0] += pause_s
    ends = [at * (0.2 + SHORT_S / 10 + 1.0) - 1.0 for at in range(1, 4)]
    assert [since for at, _, since in began if at > 1] == pytest.approx([ends[1], ends[1], ends[2], ends[2]])


# ---- what was promised is what is told -------------------------------------------------------------------------------


def counters(job: JobId, told: int | None, epoch: int = 7) -> JobCounters:
    return JobCounters(job, epoch, 2, 2, 1, 4, 9, 0, 0, may_take_us=told)


def told_of(held: ServedJob, told: int | None) -> list[SetPace]:
    owner = Owner(AggregatorSettings(), [held])
    return list(paces(owner, Now("h:1", [counters(JOB, told), counters(OTHER, 1)], 0.0, 0, 0, 0)))


@pytest.mark.parametrize(
    ("demand", "unpromised", "wanted"),
    [
        (None, False, 0),
        (None, True, None),
        (Demand(90_000, 1_000), False, 100_000),
        (Demand(90_000, 1_000, 1000), False, None),
    ],
)
def test_a_process_is_told_once_how_long_an_iteration_may_take(
    demand: Demand | None, unpromised: bool, wanted: int | None
) -> None:
    """On trial a job goes first, without a promise last; a job that is not held here is not told."""
    held = ServedJob(JOB, 7, 2, SECRET, HostId("h1"), demand, 1, "c: full", unpromised=unpromised)
    assert told_of(held, 5) == [SetPace(JOB, 7, wanted)]
    assert told_of(held, wanted) == []
    assert told_of(held, UNKNOWN) == [], "a process of before would not understand"


def test_a_process_hears_of_the_epoch_that_it_serves_only(tmp_path: Any) -> None:
    running = AggdThread(tmp_path)
    running.serve("j1", 7, 2)
    assert running.now().jobs[0].may_take_us == 0
    for epoch, told, known in ((6, 5, 0), (7, 100_000, 100_000), (8, 5, 100_000), (7, None, None)):
        assert running.order(SetPace(JOB, epoch, told)).jobs[0].may_take_us == known
    job = running.aggd.jobs[JOB]
    assert job.due_s == pytest.approx(job.env.clock.now_s() + LAST_S, abs=1.0), "at last, and not for ever"
    running.order(SetPace(JOB, 7, 0))
    assert job.due_s == 0
    running.order(SetPace(JOB, 7, 60_000_000))
    assert job.due_s == pytest.approx(job.rounds_here.iteration_s + 60)
    running.order(SetPace(JOB, 7, 1))
    assert job.due_s == pytest.approx(job.env.clock.now_s(), abs=1.0), "it never rests, and is no more urgent for that"
    running.finish()


# ---- a part of the cycle is for bursts -------------------------------------------------------------------------------


def test_several_jobs_are_promised_three_quarters_and_one_alone_all() -> None:
    ledger = CycleLedger()
    assert not ledger.take(JOB, Demand(100_000, 70_000))
    why = ledger.refusal(OTHER, Demand(100_000, 10_000))
    assert why == "10000 us of work and 5000 us free in a cycle of 100000 us, of which several jobs may be promised 75%"
    assert not ledger.take(OTHER, Demand(100_000, 5_000))
    ledger.leave(OTHER)
    assert not ledger.take(JOB, Demand(100_000, 100_000)), "nobody else's bursts meet its own"
    assert ledger.refusal(OTHER, Demand(100_000, 1)) != ""
    ledger.check()


def test_a_burst_has_the_same_part_of_its_time_beside_others() -> None:
    """The burst takes 100 us from the first push to the last: 75 of them where others push too."""
    share = Share(1000, 80, most_us=100)
    assert not refusal_of(Cycle(fill=FILL), JOB, share)
    beside = cycle_of({OTHER: Share(1000, 10)}, fill=FILL)
    assert "75 us free" in refusal_of(beside, JOB, share)
    assert not refusal_of(cycle_of({OTHER: Share(1000, 10)}), JOB, share)


# ---- what comes of it ------------------------------------------------------------------------------------------------


def job(name: str, period_us: int, work_us: int, tensors: int) -> Job:
    parts = tuple(Tensor(f"t{at}", work_us // tensors) for at in range(tensors))
    return Job(AggregationProfile(JobId(name), period_us, parts), period_us, random.Random(name))


@pytest.mark.parametrize(("by_arrival", "slower"), [(False, 1.05), (True, 1.2)])
def test_a_short_iteration_does_not_wait_behind_a_long_ones_tensors(by_arrival: bool, slower: float) -> None:
    """One aggregator is half busy with both jobs. Alone an iteration of the short one takes 100 ms and its last sum 2
    ms."""
    rounds = Rounds(lambda name, period_us: None, by_arrival)
    here = HostId("a")
    for one in (job("short", 100_000, 10_000, 5), job("long", 1_000_000, 400_000, 4)):
        rounds.add(one, {tensor.name: here for tensor in one.profile.tensors}, 0)
    rounds.run_until(60_000_000)
    periods = rounds.jobs[JobId("short")].periods_us
    mean = sum(periods) / len(periods) / 102_000
    assert mean < slower if not by_arrival else mean > slower
    assert len(rounds.jobs[JobId("long")].periods_us) > 60 / 1.4 * 0.9


def test_a_pool_promises_as_much_as_its_rules_say() -> None:
    full, three_quarters = (Pool(PoolRules(fill=fill)) for fill in (Fraction(1), FILL))
    assert full._empty.fill == 1 and three_quarters._empty.fill == FILL
