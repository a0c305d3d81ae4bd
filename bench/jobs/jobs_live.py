"""The simulator's engine beside the scheduler that agents run, on a whole trace: the same outcome, and how fast."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.jobs.engine import Engine, Outcome, SimJob
from sim.jobs.jobs import plan_of
from sim.jobs.live import Live, settings_of
from sim.jobs.trace import read_trace
from sim.report import Cell, Progress, Report, Table

TRACES = Path(__file__).parents[1] / "traces"
GPUS = 512
RUNS: tuple[tuple[str, int | None], ...] = (
    ("engine", None),
    ("Queue and Leader", 1),
    ("Queue and Leader, 64 hosts of 8", 64),
)
"""(what decides, hosts; None: the engine) of each run."""


def tied(progress: Progress) -> Report:
    """Run the Philly trace under `covey` by each of them."""
    jobs = read_trace(TRACES / "philly_2017-09_10.csv.gz").jobs
    jobs = [job for job in jobs if job.gpus <= GPUS]
    data: dict[str, dict[str, Any]] = {}
    rows: list[list[Cell]] = []
    first: Outcome | None = None
    for at, (name, hosts) in enumerate(RUNS):
        progress(at / len(RUNS), f"{name} on philly at {GPUS} GPUs")
        began = time.process_time()
        out = _run(jobs, hosts)
        spent_s = time.process_time() - began
        first = first or out
        found = data[name] = _found(jobs, out, first) | {"jobs_per_s": len(jobs) / spent_s}
        rows.append([name, *found.values()])
    columns = ["decided by", "average completion (s)", "stops", "promotions", "jobs unlike the engine's", "jobs/s"]
    notes = [
        f"covey, {len(jobs)} jobs, stops and restarts of 30 s; unlike: it starts, ends, waits or is stopped otherwise",
        "on hosts a gang for which others stop claims GPUs of certain hosts; the engine counts GPUs only",
        "jobs/s: CPU time of this process",
    ]
    return Report("jobs-live", data, [Table(f"philly, {GPUS} GPUs", columns, rows, notes)])


def _run(jobs: list[SimJob], hosts: int | None) -> Outcome:
    rules = plan_of("covey", {}).rules
    if hosts is None:
        return Engine(jobs, GPUS, rules).run()
    return Live(jobs, hosts, GPUS // hosts, rules, settings_of(rules, {}, None, None)).run()


def _found(jobs: list[SimJob], out: Outcome, first: Outcome) -> dict[str, Any]:
    spans = [end - job.submit_s for job, end in zip(jobs, out.end_s, strict=True)]
    ours, theirs = _each(out), _each(first)
    return {
        "jct_s_mean": sum(spans) / len(spans),
        "preemptions": sum(out.preempted),
        "promotions": sum(out.promoted),
        "jobs_unlike": sum(one != other for one, other in zip(ours, theirs, strict=True)),
    }


def _each(out: Outcome) -> list[tuple[int, ...]]:
    return list(zip(out.end_s, out.first_s, out.wait_s, out.preempted, out.promoted, strict=True))


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {"jobs-live": tied}
