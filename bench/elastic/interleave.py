"""Interleaving's tables: 80 jobs on 100 hosts against two ways without groups, what each part gives, other workloads,
wrong profiles, spilling, thousands of jobs, and all groupings.

The workload was chosen, and policies were tuned, on seeds 101 to 108. Everything here is run on others (`SEEDS`).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from covey.core.ids import JobId
from plugins.interleave.policy.exhaustive import exhaustive
from plugins.interleave.policy.model import JobProfile, Weights, iteration_s
from plugins.interleave.policy.rules import PRINTED
from plugins.interleave.policy.schedule import schedule
from sim.groups import groups
from sim.groups import memory as group_memory
from sim.groups.by_agents import by_agents
from sim.groups.cluster import Outcome
from sim.groups.memory import Load
from sim.groups.strategies import Setting, alone, grouped, isolated, thrown_best
from sim.groups.workload import PROFILED_ON, Job, arriving, bursting, leaning, workload
from sim.report import Cell, Figure, Progress, Report, Series, Table

WEIGHTS = Weights()
SEEDS = (301, 302, 303, 304, 305)
"""Seeds that were never used for tuning."""
FEW = SEEDS[:1]
"""Seeds for sweeps."""
TWO = SEEDS[:2]
FRESH = tuple(range(501, 521))
"""Seeds that were never used for anything except `groups-fresh`."""
T_95 = 2.093
"""Student's t, 95 % on two sides, 19 degrees of freedom: for the mean of `FRESH`."""
BARE_S = 40.0
"""Seconds of an iteration of the paper's 8 jobs on 32 hosts, less than its best with memory (44.3 s)."""
TALKING = 0.137
"""Share of processors that a COMM takes: inferred, see `talking`."""
RACK = 12, 16
"""Jobs and hosts of the rack whose agents make the groups: as many jobs a host as elsewhere, nearly."""
MEMORY_MAX = 3
"""Most jobs in a group when nothing is spilled."""


def eighty(progress: Progress) -> Report:
    """§4.4.3, figures 4.10 and 4.11, on five held-out seeds."""
    rows: list[list[Cell]] = []
    data: dict[str, object] = {"schema": 1}
    figures: Sequence[Figure] = ()
    for at, seed in enumerate(SEEDS):
        options = _options(seed)
        report = groups.run(options, lambda share, text, at=at: progress((at + share) / len(SEEDS), text))  # type: ignore[misc]
        figures = figures or report.figures
        data[f"seed_{seed}"] = report.data
        jobs = groups.made(options)
        at_best, on_16 = report.data["isolated"], report.data.get("isolated_16", report.data["isolated"])
        for way in ("isolated", "isolated_16", "naive", "printed", "groups", "groups_said"):
            one = report.data.get(way)
            if one is not None:
                rows.append(
                    [
                        *(seed, way, one["jct_gain"], one["makespan_gain"]),
                        *(on_16[key] / one[key] for key in ("jct_s_mean", "makespan_s")),
                        *(100 * one[key] for key in ("cpu_utilization", "cpu_useful", "network_utilization")),
                        *(one["jobs_at_once_mean"], one["groups_mean"]),
                    ]
                )
        ideal = at_best["jct_s_mean"] / shortest_first_s(jobs, options.hosts)
        rows.append([seed, "no schedule can", ideal, *[None] * 8])
    for way in ("naive", "printed", "groups", "groups_said"):
        those = [row[2:] for row in rows if row[1] == way]
        rows.append(
            [
                "mean",
                way,
                *(statistics.fmean(float(value or 0) for value in column) for column in zip(*those, strict=True)),
            ]
        )
    rows.append(["paper", "naive", 1.11, 1.09, *[None] * 7])
    paper = groups.PAPER
    rows.append(["paper", "groups", paper["jct"], paper["makespan"], None, None])
    rows[-1] += [paper["cpu"], None, paper["net"], paper["jobs"], paper["groups"]]
    columns = (
        *("seed", "how", "JCT gain", "makespan gain", "JCT gain, 16", "makespan gain, 16"),
        *("CPU %", "useful CPU %", "network %", "jobs at once", "groups"),
    )
    notes = (
        "gains are over isolated jobs on as many hosts each as keep CPUs busiest, tried out for each seed; '16': over "
        "isolated jobs on 16 hosts each",
        "printed: the paper's algorithms, repaired, and its rules: jobs as they came, turns one by one, CPU 2 : 1",
        "groups_said: jobs say how many iterations they will do",
        "no schedule can: all hosts compute without a pause, the job with the least computing first",
    )
    return Report("groups", data, (Table("80 jobs on 100 hosts, five held-out seeds", columns, rows, notes),), figures)


def fresh(progress: Progress) -> Report:
    """The gains on twenty more seeds, over isolated jobs at their best alone ("tries to maximize the CPU utilization
    rates", §4.4.1), with an interval for each mean."""
    ways: dict[str, Callable[[Sequence[Job], Setting], Outcome]] = {
        "printed": lambda jobs, s: grouped(jobs, replace(s, manner=PRINTED)),
        "groups": grouped,
        "groups_said": lambda jobs, s: grouped(jobs, replace(s, declared=True)),
    }
    rows: list[list[Cell]] = []
    for name, way in ways.items():
        found = []
        for at, seed in enumerate(FRESH):
            progress((len(rows) + at / len(FRESH)) / len(ways), f"{name}, seed {seed}")
            each = _gain(_jobs(seed), Setting(seed=seed), way)
            found.append([*each[:2], each[4], each[6]])
        rows.append([name, *(cell for column in zip(*found, strict=True) for cell in _interval(column))])
    paper = [groups.PAPER[key] for key in ("jct", "makespan", "cpu", "net")]
    rows.append(["paper", *(cell for value in paper for cell in (value, None, None))])
    figures = ("JCT gain", "makespan gain", "CPU %", "network %")
    columns = ("how", *(name for each in figures for name in (each, f"{each}: mean within", f"{each}: seeds")))
    notes = (
        "gains are over isolated jobs on as many hosts each as keep CPUs busiest, tried out for each seed",
        f"80 jobs on 100 hosts, seeds {FRESH[0]} to {FRESH[-1]}; mean within: 95 % interval (Student's t); seeds: "
        "least and most of them",
    )
    data = {"schema": 1, "seeds": list(FRESH), "ways": {str(row[0]): row[1:] for row in rows}}
    return Report("groups-fresh", data, (Table("Over isolated at its best, 20 fresh seeds", columns, rows, notes),))


def _interval(values: Sequence[float]) -> list[Cell]:
    """Mean, its 95 % interval, and the least and greatest of these values, one for each fresh seed."""
    assert len(values) == len(FRESH)
    mean, half = statistics.fmean(values), T_95 * statistics.stdev(values) / len(values) ** 0.5
    return [mean, f"{mean - half:.2f} to {mean + half:.2f}", f"{min(values):.2f} to {max(values):.2f}"]


def shortest_first_s(jobs: Sequence[Job], hosts: int) -> float:
    """A mean completion time in seconds that no schedule of jobs that are all there can beat: processors of all hosts
    busy without a pause, one job after another, the one with the least computing first."""
    at_s, ends = 0.0, []
    for work in sorted(job.profile.work_s * job.iterations for job in jobs):
        at_s += work / hosts
        ends.append(at_s)
    return statistics.fmean(ends)


def parts(progress: Progress) -> Report:
    """§4.4.4, figure 4.12: one technique after another."""
    paper = {
        "naive": (1.11, 1.09),
        "and subtasks": (1.27, 1.15),
        "and groups": (1.72, 1.35),
        "and spilling": (2.11, 1.60),
    }
    ways: dict[str, Callable[[Sequence[Job], Setting], Outcome]] = {
        "naive": lambda jobs, s: thrown_best(jobs, s)[0],
        "and subtasks": lambda jobs, s: thrown_best(jobs, s, turns=True)[0],
        "and groups": lambda jobs, s: grouped(jobs, replace(s, spill=False, group_max=MEMORY_MAX)),
        "and spilling": grouped,
        "and lengths said": lambda jobs, s: grouped(jobs, replace(s, declared=True)),
    }
    rows: list[list[Cell]] = []
    for at, (name, way) in enumerate(ways.items()):
        progress(at / len(ways), name)
        found = _mean([_gain(_jobs(seed), Setting(seed=seed), way) for seed in TWO])
        rows.append([name, *found, *paper.get(name, (None, None))])
    notes = (f"without spilling a group has at most {MEMORY_MAX} jobs", _on(TWO))
    table = Table("One technique after another", (*COLUMNS, "paper: JCT", "paper: makespan"), rows, notes)
    return Report("groups-parts", _data(rows), (table,))


def leans(progress: Progress) -> Report:
    """§4.4.5, figure 4.13: 60 of the 80 jobs."""
    paper = {True: (2.31, 1.58, 90.5, 82.1), False: (1.83, 1.57, 91.8, 80.9)}
    rows: list[list[Cell]] = []
    for at, computing in enumerate((True, False)):
        for said in (False, True):
            progress((2 * at + said) / 4, "leaning")
            found = [
                _gain(leaning(_jobs(seed), 60, computing), Setting(seed=seed, declared=said), grouped) for seed in FEW
            ]
            name = "compute most" if computing else "communicate most"
            rows.append([f"60 that {name}{', lengths said' if said else ''}", *_mean(found), *paper[computing]])
    columns = (*COLUMNS, "paper: JCT", "paper: makespan", "paper: CPU %", "paper: network %")
    return Report("groups-leaning", _data(rows), (Table("Jobs that lean one way", columns, rows, (_on(FEW),)),))


def arrivals(progress: Progress) -> Report:
    """§4.4.5, figure 4.15, and bursts in place of the Google traces."""
    rows: list[list[Cell]] = []
    cases = ((240.0, 1.0), (480.0, 1.0), (960.0, 1.0), (480.0, 8.0))
    for at, (every_s, burst) in enumerate(cases):
        progress(at / len(cases), f"every {every_s:g} s")
        found = []
        for seed in FEW:
            rng = random.Random(seed + 1000)
            jobs = bursting(_jobs(seed), rng, every_s, burst) if burst > 1 else arriving(_jobs(seed), rng, every_s)
            found.append(_gain(jobs, Setting(seed=seed), grouped))
        rows.append([f"{every_s / 60:g} min apart{f', {burst:g} at once' if burst > 1 else ''}", *_mean(found)])
    notes = ("the paper: less with rarer arrivals; with ten bursty windows of a trace 2.02x and 1.57x", _on(FEW))
    return Report("groups-arrivals", _data(rows), (Table("Jobs that arrive one by one", COLUMNS, rows, notes),))


def errors(progress: Progress) -> Report:
    """§4.4.6, figure 4.16a: what wrong profiles cost."""
    rows: list[list[Cell]] = []
    cases = (0.0, 0.075, 0.2, 0.4)
    for at, error in enumerate(cases):
        progress(at / len(cases), f"{error:.0%} wrong")
        found = [_gain(_jobs(seed), Setting(seed=seed, error=error, declared=True), grouped) for seed in FEW]
        rows.append([f"{error:.0%}", *_mean(found)])
    notes = ("lengths said; the paper: over 90 % of the gain up to 7.5 %, much less beyond", _on(FEW))
    return Report("groups-error", _data(rows), (Table("Measured times that are wrong", COLUMNS, rows, notes),))


def spreads(progress: Progress) -> Report:
    """Sweep what the paper does not say: how unlike the jobs are in length."""
    rows: list[list[Cell]] = []
    cases = (1.0, 5.0, 50.0)
    for at, ratio in enumerate(cases):
        progress(at / len(cases), f"ratio {ratio:g}")
        found, bound = [], []
        for seed in FEW:
            jobs = workload(80, random.Random(seed), ratio=ratio)
            found.append(_gain(jobs, Setting(seed=seed, declared=True), grouped))
            base = isolated(jobs, Setting(seed=seed))[0]
            bound.append(statistics.fmean(base.jct_s) / shortest_first_s(jobs, 100))
        rows.append([f"{ratio:g}", *_mean(found), statistics.fmean(bound)])
    notes = ("how: work of a long job (30 of 80) to that of a short one; elsewhere 20; lengths said", _on(FEW))
    table = Table("How unlike jobs are in length", (*COLUMNS, "JCT gain that no schedule can beat"), rows, notes)
    return Report("groups-spread", _data(rows), (table,))


def talking(progress: Progress) -> Report:
    """Add what the model of the paper leaves out and its figures include (§4.4.3): communicating takes processors
    too."""
    rows: list[list[Cell]] = []
    cases = (TALKING / 2, TALKING)
    ways: dict[str, Callable[[Sequence[Job], Setting], Outcome]] = {
        "isolated, 16 hosts each": lambda jobs, s: alone(jobs, s, PROFILED_ON),
        "as printed": lambda jobs, s: grouped(jobs, replace(s, manner=PRINTED)),
        "groups": grouped,
        "groups, lengths said": lambda jobs, s: grouped(jobs, replace(s, declared=True)),
    }
    for at, share in enumerate(cases):
        for name, way in ways.items():
            progress(at / len(cases), f"{share:.1%} of processors, {name}")
            found = [_gain(_jobs(seed), Setting(seed=seed, talking=share), way) for seed in SEEDS]
            rows.append([f"{share:.1%}, {name}", *_mean(found)])
    rows.append(["paper: isolated", *[None] * 4, 56.5, None, 50.4])
    rows.append(["paper: groups", None, None, groups.PAPER["jct"], groups.PAPER["makespan"], 93.2, None, 83.1])
    notes = (
        "how: share of processors that a COMM takes, and so a COMP beside it is slower",
        "a job alone computes or communicates; if 93.2 and 83.1 % are each 1.65x isolated's, isolated's are 56.5 and "
        "50.4 %, 106.9 % in all, so COMMs took at least 6.9 / 50.4 = 13.7 % of processors",
        _on(SEEDS),
    )
    return Report("groups-talking", _data(rows), (Table("Communicating takes processors", COLUMNS, rows, notes),))


def agents(progress: Progress) -> Report:
    """Without a master: the machines of agents, one for each host of a rack, beside the one mind of the paper, which
    may let jobs wait. Both assume that a move pauses a job for 30 s, as everywhere here; and once what was measured."""
    ways: dict[str, Callable[[Sequence[Job], Setting], Outcome]] = {
        "naive": lambda jobs, s: thrown_best(jobs, s)[0],
        "as printed": lambda jobs, s: grouped(jobs, replace(s, manner=PRINTED)),
        "groups (one mind)": grouped,
        "agents": by_agents,
        f"agents, moves of {groups.MEASURED_MOVE_S:g} s": lambda jobs, s: by_agents(
            jobs, replace(s, move_s=groups.MEASURED_MOVE_S)
        ),
    }
    rows: list[list[Cell]] = []
    for name, way in ways.items():
        found, moves = [], 0
        for at, seed in enumerate(SEEDS):
            progress((len(rows) + at / len(SEEDS)) / len(ways), f"{name}, seed {seed}")
            jobs, setting = workload(RACK[0], random.Random(seed)), Setting(hosts=RACK[1], seed=seed)
            outcome = way(jobs, setting)
            base, moves = isolated(jobs, setting)[0], moves + outcome.moves
            figures = (outcome.cpu, outcome.useful, outcome.net)
            found.append([*groups.gains(base, outcome), *(100 * each for each in figures), outcome.running])
        rows.append([name, *_mean(found), moves / len(SEEDS)])
    notes = (
        f"{RACK[0]} jobs on {RACK[1]} hosts, seeds {', '.join(map(str, SEEDS))}; gains over isolated at its best",
        "agents: each host decides for itself, with the code that agentd runs; no job waits",
    )
    columns = ("how", *COLUMNS[1:3], *COLUMNS[5:], "jobs at once", "moves")
    return Report("groups-agents", _data(rows), (Table("One rack, without a master", columns, rows, notes),))


def spilled(progress: Progress) -> Report:
    """§4.4.8, figure 4.19: 8 jobs on 32 hosts, the same share on disk for all against shares that walk."""
    rng = random.Random(SEEDS[0])
    by_kind = {(job.app, job.input_gb): job for job in workload(80, rng)}
    chosen = [job for _, job in sorted(by_kind.items())]
    plain_s = iteration_s([job.profile for job in chosen], 32)
    loads = [
        Load(
            job.profile.work_s / 32 * BARE_S / plain_s,
            job.profile.net_s * BARE_S / plain_s,
            job.input_gb / 32,
            job.model_gb / 32,
        )
        for job in chosen
    ]
    rows: list[list[Cell]] = []
    for tenth in range(11):
        felt = group_memory.felt(loads, [tenth / 10] * len(loads))
        rows.append([f"{tenth / 10:.1f}", group_memory.iteration_s(loads, felt.comp_s), sum(felt.comp_s), felt.full])
    walked = group_memory.spilling(loads)
    mean = statistics.fmean(walked.spilled)
    took = group_memory.iteration_s(loads, walked.comp_s)
    rows.append([f"each its own, {mean:.2f} in the mean", took, sum(walked.comp_s), walked.full])
    best = min(float(row[1] or 0) for row in rows[:-1])
    columns = ("share on disk", "iteration s", "computing s", "heap full")
    notes = (
        f"the best fixed share takes {best:.1f} s, shares that walk {took:.1f} s; the paper: 52.9 and 44.3 s",
        f"iterations as long as the paper's there: {BARE_S:g} s if memory were no concern",
        "memory as modelled (sim/groups/memory.py), not measured",
    )
    line = Series("iteration", [n / 10 for n in range(11)], [float(row[1] or 0) for row in rows[:-1]])
    figure = Figure("groups-spilled", "Seconds of a group's iteration", "share on disk", "seconds", (line,))
    data = {"schema": 1, "fixed_best_s": best, "walked_s": took, "spilled_mean": mean}
    return Report("groups-spilled", data, (Table("8 jobs on 32 hosts", columns, rows, notes),), (figure,))


COLUMNS = (
    "how",
    "JCT gain",
    "makespan gain",
    "JCT gain, 16",
    "makespan gain, 16",
    "CPU %",
    "useful CPU %",
    "network %",
)


def _gain(jobs: Sequence[Job], setting: Setting, way: Callable[[Sequence[Job], Setting], Outcome]) -> list[float]:
    """The values of `COLUMNS` after the first."""
    found = way(jobs, setting)
    best, on_16 = isolated(jobs, setting)[0], alone(jobs, setting, PROFILED_ON)
    return [
        *groups.gains(best, found),
        *groups.gains(on_16, found),
        *(100 * each for each in (found.cpu, found.useful, found.net)),
    ]


def _jobs(seed: int) -> list[Job]:
    return workload(80, random.Random(seed))


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def _on(seeds: Sequence[int]) -> str:
    return f"80 jobs on 100 hosts, held-out seeds {', '.join(map(str, seeds))}; gains as in `groups`"


def _data(rows: Sequence[Sequence[Cell]]) -> dict[str, object]:
    return {"schema": 1, "gains": {str(row[0]): {"jct": row[1], "makespan": row[2]} for row in rows}}


def _options(seed: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    groups.arguments(parser)
    options = parser.parse_args([])
    options.seed = seed
    return options


def made(count: int, rng: random.Random, on: int = 16) -> list[JobProfile]:
    return [JobProfile(JobId(f"j{n + 1}"), on * rng.uniform(10, 120), rng.uniform(5, 60)) for n in range(count)]


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
    for count, hosts, cases in ((9, 14, 40), (10, 12, 40), (10, 20, 20), (11, 8, 20)):
        progress(len(rows) / 4, f"{count} jobs on {hosts} hosts")
        ratios = []
        for _ in range(cases):
            jobs = made(count, rng, on=4)
            ratios.append(schedule(jobs, hosts, WEIGHTS).score / exhaustive(jobs, hosts, WEIGHTS)[0])
        rows.append([count, hosts, cases, 100 * sum(ratios) / cases, 100 * min(ratios)])
    notes = (
        "the first row: so few that the policy itself looks at all, as up to 3^jobs hosts^2 = 7 million",
        "the paper: about 2 % below (§4.4.7)",
    )
    table = Table(
        "Score against the best of all groupings", ("jobs", "hosts", "cases", "mean %", "least %"), rows, notes
    )
    return Report(
        "groups-exhaustive", {"schema": 1, "least_percent": min(float(row[4] or 0) for row in rows)}, (table,)
    )


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {
    "groups": eighty,
    "groups-fresh": fresh,
    "groups-parts": parts,
    "groups-leaning": leans,
    "groups-arrivals": arrivals,
    "groups-error": errors,
    "groups-spread": spreads,
    "groups-talking": talking,
    "groups-agents": agents,
    "groups-spilled": spilled,
    "groups-many": many,
    "groups-exhaustive": against_all,
}
