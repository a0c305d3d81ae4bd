"""How fast the scheduler decides, and the simulator runs."""

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugins.scheduler.machine.leader.order_book import JOB_BITS, OrderBook
from sim.jobs import jobs as simulator
from sim.jobs.jobs import plan_of
from sim.jobs.trace import read_trace
from sim.report import Cell, Progress, Report, Table

TRACES = Path(__file__).parents[1] / "traces"
TIMED: tuple[tuple[str, int | None], ...] = (
    *(
        (policy, None)
        for policy in ("covey", "las-published", "dlas", "fifo", "fjf", "sjf", "backfill", "srsf", "srtf")
    ),
    ("covey", 64),
)
"""(policy, hosts) of each timed run."""


def speed(progress: Progress) -> Report:
    """Measure how fast the simulator is, and how long one decision takes in a full cluster, in CPU time of this
    process."""
    file = TRACES / "philly_2017-09_10.csv.gz"
    trace = read_trace(file)
    rows: list[list[Cell]] = []
    data: dict[str, Any] = {}
    for at, (policy, hosts) in enumerate(TIMED):
        progress(0.8 * at / len(TIMED), f"{policy} on philly at 512 GPUs")
        began = time.process_time()
        found = simulator.simulate(trace, 512, plan_of(policy, {}), lambda share, text: None, hosts).data
        spent = time.process_time() - began
        policy = policy if hosts is None else f"{policy}, {hosts} hosts of {512 // hosts}"
        data[policy] = {"jobs_per_s": found["jobs"] / spent, "decisions_per_s": found["decisions"] / spent}
        rows.append([policy, found["jobs"], found["decisions"], spent, found["jobs"] / spent])
    columns = ["policy", "jobs", "decisions", "CPU (s)", "jobs/s"]
    notes = [
        "CPU time; what keeps its order while jobs run (las, srsf, srtf) is kept in order, not sorted anew",
        "not here: las stops jobs 2.6 million times, gittins and dgittins look at every running job at most events, "
        "gandiva changes turns each minute",
    ]
    tables = [Table("the simulator on philly, 512 GPUs", columns, rows, notes)]
    progress(0.8, "100,000 waiting jobs, 10,000 GPUs")
    steady = decisions(100_000, 10_000, 20_000, random.Random(1))
    data["decision"] = steady
    rows = [[f"{steady[name]:.1f}" for name in ("us_p50", "us_p99", "us_max")]]
    notes = [
        "timed: a job ends, another comes, every fourth time one sinks to a lower queue, a decision, and noting it",
        f"{steady['decisions']} decisions; CPU time; collection of garbage is as Python has it",
    ]
    tables.append(
        Table(
            "one decision, 100,000 waiting jobs, 10,000 GPUs", ["median (us)", "99 % (us)", "worst (us)"], rows, notes
        )
    )
    return Report("jobs-speed", data, tables)


def decisions(waiting: int, gpus: int, count: int, dice: random.Random) -> dict[str, Any]:
    """Microseconds of one decision in a cluster that is in its steady state."""
    total = waiting + 2 * gpus + count
    widths = [dice.choices((1, 2, 4, 8, 16, 32, 64), (60, 12, 12, 10, 3, 2, 1))[0] for _ in range(total)]
    book = OrderBook(3, widths)
    queue_of = [0] * total
    running: list[int] = []
    free = gpus

    def key(job: int) -> int:
        return (widths[job] << 45 | job) << JOB_BITS | job

    def begin(job: int) -> None:
        book.run(queue_of[job], job << JOB_BITS | job)
        running.append(job)

    for job in range(waiting):
        queue_of[job] = dice.choices((0, 1, 2), (1, 3, 6))[0]
        book.wait(queue_of[job], key(job))
    start, _ = book.decide(gpus, gpus)
    for job in start:
        begin(job)
    free -= sum(widths[job] for job in start)
    for job in range(waiting, waiting + len(start)):
        queue_of[job] = dice.choices((0, 1, 2), (1, 3, 6))[0]
        book.wait(queue_of[job], key(job))
    newest, times = waiting + len(start), []
    for step in range(count):
        at = dice.randrange(len(running))
        running[at], running[-1] = running[-1], running[at]
        done = running.pop()
        down = running[dice.randrange(len(running))] if step % 4 == 0 and running else None
        began = time.process_time()
        book.stop(queue_of[done], done << JOB_BITS | done)
        if down is not None and queue_of[down] < 2:
            book.stop(queue_of[down], down << JOB_BITS | down)
            queue_of[down] += 1
            book.run(queue_of[down], down << JOB_BITS | down)
        book.wait(0, key(newest))
        newest += 1
        start, stop = book.decide(gpus, gpus)
        for job in stop:
            book.stop(queue_of[job], job << JOB_BITS | job)
            book.wait(queue_of[job], key(job))
        for job in start:
            book.run(queue_of[job], job << JOB_BITS | job)
        times.append((time.process_time() - began) * 1e6)
        gone = set(stop)
        running[:] = [job for job in running if job not in gone] if gone else running
        running += start
        free += widths[done] + sum(widths[job] for job in stop) - sum(widths[job] for job in start)
        assert free >= 0, "a decision gave more than there is"
    times.sort()
    return {
        "us_p50": times[len(times) // 2], "us_p99": times[math.ceil(0.99 * len(times)) - 1], "us_max": times[-1],
        "decisions": count, "waiting": waiting, "gpus": gpus,
    }  # fmt: skip


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {"jobs-speed": speed}
