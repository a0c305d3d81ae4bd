"""Interleaving's tables: 80 jobs on 100 hosts against two ways without groups, thousands of jobs, and all groupings."""

import argparse
import random
import time
from collections.abc import Callable

from cli.sim import groups
from cli.sim.report import Cell, Progress, Report, Table
from covey.core import JobId
from plugins.interleave.policy.exhaustive import exhaustive
from plugins.interleave.policy.model import Profile, Weights
from plugins.interleave.policy.schedule import schedule

WEIGHTS = Weights()


def eighty(progress: Progress) -> Report:
    parser = argparse.ArgumentParser()
    groups.arguments(parser)
    options = parser.parse_args([])
    options.seed = groups.SEED
    return groups.run(options, progress)


def made(count: int, rng: random.Random, on: int = 16) -> list[Profile]:
    return [Profile(JobId(f"j{n + 1}"), on * rng.uniform(10, 120), rng.uniform(5, 60)) for n in range(count)]


def many(progress: Progress) -> Report:
    rows: list[list[Cell]] = []
    for count, hosts in ((80, 100), (1000, 1000), (8000, 10000)):
        progress(0.0, f"{count} jobs")
        jobs = made(count, random.Random(3))
        began = time.process_time()
        found = schedule(jobs, hosts, WEIGHTS)
        took = time.process_time() - began
        rows.append([count, hosts, found.score, found.use.cpu, found.use.net, found.jobs, len(found.groups), took])
    columns = ("jobs", "hosts", "score", "CPU", "network", "jobs that run", "groups", "CPU s")
    notes = ("the paper: 8,000 jobs on 10,000 hosts within 5 s (§4.4.7)",)
    table = Table("One decision", columns, rows, notes)
    return Report("groups-many", {"schema": 1, "score": rows[-1][2], "seconds": rows[-1][7]}, (table,))


def against_all(progress: Progress) -> Report:
    rng = random.Random(5)
    rows: list[list[Cell]] = []
    for count, hosts, cases in ((7, 14, 40), (9, 8, 40), (9, 14, 40), (10, 12, 20)):
        progress(len(rows) / 4, f"{count} jobs on {hosts} hosts")
        ratios = []
        for _ in range(cases):
            jobs = made(count, rng, on=4)
            ratios.append(schedule(jobs, hosts, WEIGHTS).score / exhaustive(jobs, hosts, WEIGHTS)[0])
        rows.append([count, hosts, cases, 100 * sum(ratios) / cases, 100 * min(ratios)])
    notes = ("up to 8 jobs on 32 hosts the policy itself looks at all; the paper: about 2 % below (§4.4.7)",)
    table = Table(
        "Score against the best of all groupings", ("jobs", "hosts", "cases", "mean %", "least %"), rows, notes
    )
    return Report(
        "groups-exhaustive", {"schema": 1, "least_percent": min(float(row[4] or 0) for row in rows)}, (table,)
    )


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {
    "groups": eighty,
    "groups-many": many,
    "groups-exhaustive": against_all,
}
