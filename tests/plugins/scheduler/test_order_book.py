"""The fast order decides as the plain one does, and keeps what it promises."""

import random
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import JobId
from plugins.scheduler.machine.leader.order_book import JOB_BITS, JOB_MASK, OrderBook
from plugins.scheduler.machine.leader.run_queues import RunQueues
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import row_of
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import Submitted
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy import order
from plugins.scheduler.policy.history import History
from plugins.scheduler.policy.order import Row, ordered, queue_of, select
from plugins.scheduler.policy.rules import Discipline, OrderRules
from plugins.scheduler.policy.settings import SchedulerSettings
from sim.jobs.engine import Engine, Outcome, SimJob
from tests.plugins.scheduler.plain import Plain, PlainJob

WALKS = [name for name in get_args(Discipline) if name not in ("backfill", "gandiva")]
Case = tuple[list[PlainJob], int, OrderRules, History]


def case(seed: int, discipline: Discipline, jobs_max: int) -> Case:
    """A small crowded cluster; it has integers only, so that ties are common."""
    dice = random.Random(seed)
    capacity = dice.choice((1, 2, 4, 8))
    widths = [width for width in (1, 1, 1, 2, 2, 3, 4, 8) if width <= capacity]
    jobs = [
        PlainJob(id, dice.randrange(25), dice.choice(widths), dice.randrange(1, 25))
        for id in range(dice.randrange(1, jobs_max))
    ]
    thresholds = tuple(sorted(dice.sample((4, 6, 10, 16, 24, 40), dice.randrange(3))))
    rules = OrderRules(
        discipline=discipline,
        thresholds_gpu_s=thresholds if discipline in ("dlas", "dgittins") else (),
        inside=dice.choice(("sticky", "first")) if discipline == "dlas" else "sticky",
        knob=dice.choice((None, None, (1, 1), (2, 1), (7, 2))),
        starve_limit_s=dice.choice((None, None, 10, 20)),
        preempt_s=dice.choice((0, 0, 1, 2)),
        restore_s=dice.choice((0, 1, 3)),
        narrow_first=discipline == "dlas" and dice.random() < 0.4,
    )
    if rules.inside == "first" or discipline not in ("dlas", "dgittins"):
        rules = OrderRules(**{**{f: getattr(rules, f) for f in rules.__struct_fields__}, "narrow_first": False})
    if discipline not in ("dlas", "dgittins"):
        rules = OrderRules(discipline=discipline, preempt_s=rules.preempt_s, restore_s=rules.restore_s)
    return jobs, capacity, rules, History(job.width * job.duration for job in jobs)


def fast(jobs: list[PlainJob], capacity: int, rules: OrderRules, history: History) -> Outcome:
    given = [SimJob(job.id, job.submit, job.width, job.duration) for job in jobs]
    return Engine(given, capacity, rules, history).run()


def agree(seed: int, discipline: Discipline, jobs_max: int = 13, quantum_s: int | None = None) -> None:
    jobs, capacity, rules, history = case(seed, discipline, jobs_max)
    rules = msgspec.structs.replace(rules, quantum_s=quantum_s)
    out = fast(jobs, capacity, rules, history)
    plain = Plain(jobs, capacity, rules, history).run()
    ours = list(zip(out.end_s, out.preempted, out.promoted, out.wait_s, strict=True))
    theirs = [(job.end, job.preempted, job.promotions, job.wait_all) for job in plain]
    assert ours == theirs, f"seed {seed}: {discipline}, {capacity} GPUs, {rules}"


@pytest.mark.parametrize("discipline", WALKS)
def test_the_fast_order_and_a_plain_one_agree_on_random_cases(discipline: Discipline) -> None:
    for seed in range(60 if discipline != "dlas" else 300):
        agree(seed, discipline)


@pytest.mark.parametrize("discipline", WALKS)
def test_the_fast_order_and_a_plain_one_agree_on_random_cases_with_a_quantum(discipline: Discipline) -> None:
    """Promotions of one decision come in the order of the seconds in which they became due."""
    for seed in range(60 if discipline not in ("dlas", "dgittins") else 300):
        agree(seed, discipline, quantum_s=random.Random(seed).choice((2, 3, 5, 8)))


@pytest.mark.long
@pytest.mark.parametrize("discipline", WALKS)
def test_the_fast_order_and_a_plain_one_agree_on_10000_random_cases(discipline: Discipline) -> None:
    for seed in range(1000, 1000 + 10_000 // len(WALKS) + 1):
        agree(seed, discipline)


WIDTHS = st.lists(st.integers(1, 9), min_size=1, max_size=30)


@given(WIDTHS, st.integers(1, 20), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_a_decision_grants_whole_gangs_and_no_more_than_there_is(
    widths: list[int], capacity: int, merged: bool, blocking: bool, dice: random.Random
) -> None:
    book = OrderBook(2, widths, merged=merged, blocking=blocking)
    runs: set[int] = set()
    keys = {job: dice.randrange(6) << JOB_BITS | job for job in range(len(widths))}
    queues = {job: dice.randrange(2) for job in range(len(widths))}
    for job, width in enumerate(widths):
        if width + sum(widths[other] for other in runs) <= capacity and dice.random() < 0.5:
            runs.add(job)
            book.run(queues[job], keys[job])
        else:
            book.wait(queues[job], keys[job])
    book.check()
    vacant = capacity - sum(widths[job] for job in runs)
    start, stop = book.decide(capacity, vacant)
    assert set(stop) <= runs and not set(start) & runs and len(set(start)) == len(start)
    assert sum(widths[job] for job in start) <= vacant, "only what nobody holds is given"
    assert sum(widths[job] for job in {*start, *runs} - set(stop)) <= capacity
    for job in start:
        book.run(queues[job], keys[job])
    for job in stop:
        book.stop(queues[job], keys[job])
        book.wait(queues[job], keys[job])
    book.check()


@given(st.permutations(range(8)))
def test_who_came_first_does_not_matter_to_jobs_that_are_alike(order: list[int]) -> None:
    jobs = [SimJob(id, 0, 2, 10) for id in range(8)]
    rules = OrderRules(thresholds_gpu_s=(8,), preempt_s=1, restore_s=1)
    straight = Engine(jobs, 4, rules).run()
    mixed = Engine([jobs[at] for at in order], 4, rules).run()
    assert [mixed.end_s[order.index(id)] for id in range(8)] == straight.end_s


def test_a_job_that_leaves_the_middle_of_a_heap_and_comes_back_is_there_once() -> None:
    book = OrderBook(1, [1, 1, 1])
    for job in range(3):
        book.wait(0, job)
    book.leave(0, 1)
    book.check()
    assert book.decide(1, 0) == ([], [])
    book.wait(0, 1)
    assert [key & JOB_MASK for key in book.decide(3, 3)[0]] == [0, 1, 2]
    book.check()


ROWS = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 60), st.booleans(), st.integers(0, 9)), max_size=25)


@given(ROWS, st.integers(1, 30), st.booleans())
def test_the_book_decides_what_the_agents_walk_decides(
    asked: list[tuple[int, int, bool, int]], capacity: int, narrow: bool
) -> None:
    thresholds, rows, held = (10.0, 40.0), [], 0
    for number, (gpus, attained, running, first) in enumerate(asked):
        running = running and held + gpus <= capacity
        held += gpus if running else 0
        rows.append(
            Row(
                id=JobId(f"j{number}"),
                number=number,
                tenant="t",
                job_class="guaranteed",
                gpus=gpus,
                submitted=number,
                attained_gpu_s=attained,
                running=running,
                first=first if running or attained else None,
            )
        )
    book = OrderBook(3, [row.gpus for row in rows])
    for row in rows:
        key = int(1 << 40 if row.first is None else row.first) << JOB_BITS | row.number
        if row.running:
            book.run(queue_of(row.attained_gpu_s, thresholds), key)
        else:
            wide = (row.gpus << 41 << JOB_BITS) if narrow else 0
            book.wait(queue_of(row.attained_gpu_s, thresholds), wide + key)
    chosen = select(ordered(rows, thresholds, {}, None, narrow), capacity, {})
    start, stop = book.decide(capacity, capacity)
    there = {row.id for row in rows if row.running}
    assert [f"j{job}" for job in start] == [id for id in chosen.run if id not in there]
    assert {f"j{job}" for job in stop} == set(chosen.preempt)


def test_who_comes_first_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order inside a queue reaches the leader's books and the sorted order of those who explain waits."""
    urgent = {5: 0, 2: 1}

    def inside(row: Row, narrow_first: bool) -> tuple[float, float, float]:
        return urgent.get(row.number, 9), 0, row.submitted

    monkeypatch.setattr(order, "inside", inside)
    queue, settings = JobTable(), SchedulerSettings()
    books = RunQueues(settings)
    for number in range(1, 7):
        spec = JobSpec.parse({"argv": ["x"], "gpus_per_worker": 1})
        told = Submitted(wall_s=1.0, key=f"key-{number:05}", spec=spec)
        apply(queue, number, told)
    for job in queue.live():
        books.put(job, has_quota=False)
    expected = ["j5", "j2", "j1", "j3", "j4", "j6"]
    assert books.choose(6, lambda tenant: 0, queue.tenant_use).start == expected
    rows = [row_of(job, settings.queue_thresholds_gpu_s) for job in queue.live()]
    assert [row.id for row in ordered(rows, settings.queue_thresholds_gpu_s, {})] == expected
