"""What stopping jobs loses where they save every so often: covey with its bounds and without, beside backfill and best
effort, which stop nobody."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.jobs.jobs import plan_of, simulate
from sim.jobs.trace import read_trace
from sim.report import Cell, Progress, Report, Table

_spec = importlib.util.spec_from_file_location("bench_jobs_jobs", Path(__file__).with_name("jobs.py"))
assert _spec is not None and _spec.loader is not None
jobs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(jobs)

EVERY = ("10m", "30m", "2h", "never")
KINDS = {"covey": {}, "covey, unsaved_stops=0": {"unsaved_stops": "0"}, "no bounds": {"unsaved_stops": "inf"}}


def checkpoints(progress: Progress) -> Report:
    """Mean and 99th percentile of completion as multiples of the better of two orders, and restarts, on every trace."""
    rows: list[list[Cell]] = []
    data: dict[str, Any] = {}
    cases = jobs.there()
    for done, (name, gpus, file) in enumerate(cases):
        trace = read_trace(file)

        def run(policy: str, more: dict[str, str], trace: Any = trace, gpus: int = gpus) -> dict[str, Any]:
            return simulate(trace, gpus, plan_of(policy, more), lambda share, text: None).data

        others = [run(policy, {}) for policy in ("backfill", "fjf")]
        best = {what: min(other[what] for other in others) for what in ("jct_s_mean", "jct_s_p99")}
        for every in EVERY:
            progress(done / len(cases), f"{name}, {gpus} GPUs, every {every}")
            row: list[Cell] = [name, gpus, every]
            for kind, more in KINDS.items():
                found = run("covey", {"checkpoint_every": every, **more})
                mean, p99 = (found[what] / best[what] for what in ("jct_s_mean", "jct_s_p99"))
                data[f"{name}/{gpus}/{every}/{kind}"] = mean, p99, found["restarts_of_held"]
                row += [round(mean, 2), round(p99, 2), round(100 * found["restarts_of_held"], 1)]
            rows.append(row)
    whats = ("mean", "99 %", "restarts (%)")
    columns = ["trace", "GPUs", "saves every", *(f"{kind}: {what}" for kind in KINDS for what in whats)]
    notes = [
        "as multiples of the better of backfill (which knows every length) and best effort, which stop nobody",
        "a stop loses what a job ran since it saved, and 30 s + 30 s; restarts: of the GPU time held",
        "unsaved_stops=0: a job that never saved is not stopped; by default until three stops lost something, "
        "since it may save when it is told to end",
    ]
    return Report("jobs-checkpoints", {"runs": data}, [Table("what stops lose", columns, rows, notes)])


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {"jobs-checkpoints": checkpoints}
