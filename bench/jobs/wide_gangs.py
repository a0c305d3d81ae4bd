"""Wide gangs beside a stream of narrow jobs: how long they wait, how often they are stopped, what the others pay."""

import random
from collections.abc import Callable

from plugins.scheduler.policy.rules import COVEY
from sim.jobs.engine import Outcome, SimJob
from sim.jobs.engine_baselines import engine_for
from sim.jobs.jobs import Plan, plan_of
from sim.jobs.live import Live, settings_of
from sim.report import Cell, Progress, Report, Table

GPUS = 64
DAYS = 5
NARROW_S = 50 * 60
"""The length of the longest narrow job, of one GPU; all lengths up to it are as likely."""
GANG_S = 30 * 60
COME_H = (6, 15, 24, 33)
"""Hours after which each of the gangs comes."""
LOADS = (0.60, 0.76, 0.85, 0.95)
WIDTHS = (8, 16, 32, 64)
DRAWS = (1, 2, 3)
PLANS: dict[str, Callable[[], Plan]] = {
    "covey": lambda: plan_of("covey", {}),
    "covey without patience": lambda: plan_of("covey", {"gang_patience": "inf"}),
    "las-published": lambda: plan_of("las-published", {}),
    "backfill": lambda: plan_of("backfill", {}),
    "fjf": lambda: plan_of("fjf", {}),
}
"""Backfill knows how long each job takes."""


def stream(load: float, draw: int) -> list[SimJob]:
    """Narrow jobs that come by chance and ask for this share of the GPUs, for five days."""
    dice, jobs, at_s = random.Random(draw), list[SimJob](), 0.0
    every_s = (NARROW_S + 1) / 2 / (load * GPUS)
    while (at_s := at_s + dice.expovariate(1 / every_s)) < DAYS * 86400:
        jobs.append(SimJob(len(jobs), int(at_s), 1, dice.randint(1, NARROW_S)))
    return jobs


def with_gangs(narrow: list[SimJob], width: int) -> list[SimJob]:
    """The stream, and four gangs after it."""
    return [*narrow, *(SimJob(10**6 + hour, hour * 3600, width, GANG_S) for hour in COME_H)]


def wide(progress: Progress) -> Report:
    """Gangs of 8 to 64 of 64 GPUs at loads from 60 to 95 %, under five orders."""
    rows: list[list[Cell]] = []
    data: dict[str, object] = {}
    total = len(LOADS) * len(WIDTHS) * len(PLANS)
    for load in LOADS:
        narrow = [stream(load, draw) for draw in DRAWS]
        alone = {name: [_mean(jobs, _run(plan(), jobs)) for jobs in narrow] for name, plan in PLANS.items()}
        for width in WIDTHS:
            for name, plan in PLANS.items():
                progress(len(rows) / total, f"{name}, {width} GPUs at {load:.0%}")
                waits, stops, pays, ends = list[float](), 0, list[float](), list[float]()
                for jobs, mean_alone in zip(narrow, alone[name], strict=True):
                    mixed = with_gangs(jobs, width)
                    out = _run(plan(), mixed)
                    gangs = range(len(jobs), len(mixed))
                    spans = [(out.end_s[at] - mixed[at].submit_s) / 3600 for at in gangs]
                    ends += spans
                    waits += [span - GANG_S / 3600 for span in spans]
                    stops += sum(out.preempted[at] for at in gangs)
                    pays.append(100 * (_mean(jobs, out) / mean_alone - 1))
                found = [sum(waits) / len(waits), max(waits), max(ends), stops / len(waits), sum(pays) / len(pays)]
                data[f"{load}/{width}/{name}"] = found
                rows.append([f"{load:.0%}", width, name, *(round(value, 2) for value in found)])
    columns = ["load", "GPUs of a gang", "policy", "waits, mean (h)", "waits, worst (h)", "ends after, worst (h)"]
    columns += ["stops of a gang", "narrow jobs pay (%)"]
    notes = [
        f"{GPUS} GPUs, {DAYS} days of jobs of one GPU and up to {NARROW_S // 60} minutes; four gangs of "
        f"{GANG_S // 60} minutes, {', '.join(map(str, COME_H))} h after the start; {len(DRAWS)} draws",
        "waits: from submission to end, less its length; narrow jobs pay: their mean completion time over that of the "
        "same policy without gangs",
        f"covey: patience of {COVEY.gang_patience_s} s; backfill knows how long each job takes",
        f"one case by the agents' own queue and leader: {_live()}",
    ]
    return Report("jobs-wide", {"found": data}, [Table("wide gangs beside narrow jobs", columns, rows, notes)])


def _run(plan: Plan, jobs: list[SimJob]) -> Outcome:
    return engine_for(plan.rules)(jobs, GPUS, plan.rules).run()


def _mean(jobs: list[SimJob], out: Outcome) -> float:
    """The mean completion time of the narrow jobs, in seconds."""
    return sum(out.end_s[at] - job.submit_s for at, job in enumerate(jobs)) / len(jobs)


def _live() -> str:
    """Run one case by the scheduler of agents, and say whether it is the same to the second."""
    plan = plan_of("covey", {})
    mixed = with_gangs(stream(0.76, 1), 32)
    live = Live(mixed, 1, GPUS, plan.rules, settings_of(plan.rules, {}, None, None)).run()
    same = live.end_s == _run(plan, mixed).end_s
    return f"32 GPUs at 76 %, every job ends at {'the same' if same else 'ANOTHER'} second"


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {"jobs-wide": wide}
