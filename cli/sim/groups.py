"""Many jobs on one set of hosts: each on its own hosts, thrown together, or in groups that fill each other's gaps
(Harmony, chapter 4).

Jobs are made by seed in the manner of the paper's 80, or read from a file: a JSON list of objects with `work_s`
(seconds of computing in one iteration, times the hosts it was measured on), `net_s` (seconds of communication),
`iterations`, and, if wanted, `name` and `submit_s`. Subtasks are run one by one in virtual time; groups come from the
policies of `plugins/interleave`, which see only measured times.
"""

import argparse
import copy
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cli.sim.group_cluster import PROFILED_ON, Cluster, Outcome, Shared, Work, workload
from cli.sim.report import Cell, Figure, Progress, Report, Series, Table, Wrong
from covey.core import HostId, JobId
from plugins.interleave.machine.groups import Groups, JobEnded, JobSubmitted, SetGroup, SubtaskTimed
from plugins.interleave.policy.model import Profile, Weights
from plugins.interleave.policy.schedule import Grouping, schedule

HELP = "many jobs on one set of hosts"
SEED = 1
PAPER = {"jct": 2.11, "makespan": 1.60, "cpu": 0.932, "net": 0.831}
"""Harmony §4.4.3: gains over isolated, and how busy its hosts were."""
TIMINGS = 1
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Whole = Annotated[int, msgspec.Meta(ge=1, le=10**7)]


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--jobs", type=int, default=80, help="jobs that are made (default 80)")
    add("--hosts", type=int, default=100, help="hosts (default 100)")
    add("--file", type=Path, help="jobs from a JSON file instead")
    add("--arrival-s", type=float, default=0.0, help="mean time between jobs (default 0: all at once)")
    add("--isolated-hosts", type=int, default=PROFILED_ON, help="hosts of a job on its own (default 16)")
    add("--contention", type=float, default=0.1, help="lost per other job in the same phase (default 0.1)")
    add("--error", type=float, default=0.05, help="relative error of measured times (default 0.05)")
    add("--move-s", type=float, default=30.0, help="pause of a job that changes groups (default 30)")
    add("--cpu-weight", type=float, default=0.6, help="of CPU in the score; the rest is network's")
    add("--once", action="store_true", help="do not run: print one decision for all the jobs")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    _check(options)
    rng = random.Random(options.seed)
    jobs = read(options.file) if options.file else workload(options.jobs, rng, options.arrival_s)
    weights = Weights(options.cpu_weight, 1 - options.cpu_weight)
    if options.once:
        return _decided(schedule([job.profile for job in jobs], options.hosts, weights), options.hosts)
    outcomes = compared(jobs, options.hosts, options, weights, progress)
    return report("groups", outcomes, len(jobs), options.hosts, options)


def compared(
    jobs: list[Work], hosts: int, options: argparse.Namespace, weights: Weights, progress: Progress
) -> dict[str, Outcome]:
    """The same jobs under each of the three."""
    found: dict[str, Outcome] = {}
    ways: tuple[tuple[str, Callable[[], Outcome]], ...] = (
        ("isolated", lambda: slots(copy.deepcopy(jobs), hosts, options.isolated_hosts, 1, 0.0, options.seed)),
        (
            "naive",
            lambda: slots(copy.deepcopy(jobs), hosts, options.isolated_hosts, 2, options.contention, options.seed),
        ),
        ("groups", lambda: grouped(copy.deepcopy(jobs), hosts, weights, options.error, options.move_s, options.seed)),
    )
    for at, (name, way) in enumerate(ways):
        progress(at / len(ways), name)
        found[name] = way()
    return found


def slots(jobs: list[Work], hosts: int, each: int, together: int, contention: float, seed: int) -> Outcome:
    """First come, first served, on sets of `each` hosts, `together` jobs in a set, as they come; `together` = 1:
    isolated. Hosts that are left over by division go to the first sets."""
    count = max(1, hosts // each)
    sizes = [hosts // count + (1 if n < hosts % count else 0) for n in range(count)]
    waiting: list[Work] = []

    def arrange(cluster: Cluster, event: str, job: Work) -> None:
        if not cluster.groups:
            cluster.groups = [Shared([], size, naive=True, contention=contention) for size in sizes]
        if event == "came":
            waiting.append(job)
        for group in cluster.groups:
            group.jobs = [other for other in group.jobs if other.end_s is None]
        for fill in range(together):
            for group in cluster.groups:
                if waiting and len(group.jobs) <= fill:
                    group.jobs.append(waiting.pop(0))

    return Cluster(jobs, hosts, arrange).run()


def grouped(jobs: list[Work], hosts: int, weights: Weights, error: float, move_s: float, seed: int) -> Outcome:
    """Groups as `plugins.interleave` makes them, from times measured with an error up to `error`."""
    rng = random.Random(seed)
    home = Groups([HostId(f"h{n:04}") for n in range(hosts)], weights, timings_min=TIMINGS)
    by_job = {job.profile.job: job for job in jobs}
    shared: dict[int, Shared] = {}

    def follow(cluster: Cluster, actions: Any) -> None:
        for action in actions:
            if not isinstance(action, SetGroup):
                continue
            old = shared.get(action.group)
            if not action.jobs:
                if old is not None:
                    del shared[action.group]
                continue
            group = shared.setdefault(action.group, Shared([], len(action.hosts)))
            group.jobs, group.hosts = [by_job[job] for job in action.jobs], len(action.hosts)
        cluster.groups = [shared[at] for at in sorted(shared)]
        for at, group in shared.items():
            for job in group.jobs:
                was, here = place.get(job.profile.job), home.groups[at].hosts
                if was is not None and was != here and cluster.now_s > job.submit_s:
                    cluster.moves += 1
                    job.from_s = cluster.now_s + move_s
                place[job.profile.job] = here
            group.reorder()

    place: dict[JobId, tuple[HostId, ...]] = {}

    def arrange(cluster: Cluster, event: str, job: Work) -> None:
        name = job.profile.job
        if event == "came":
            follow(cluster, home.handle(JobSubmitted(name), cluster.now_s))
        elif event == "ended":
            follow(cluster, home.handle(JobEnded(name), cluster.now_s))
        else:
            on = len(place[name])
            comp_s, comm_s = job.profile.work_s / on, job.profile.net_s
            wrong = (1 + rng.uniform(-error, error), 1 + rng.uniform(-error, error))
            for _ in range(TIMINGS):
                follow(cluster, home.handle(SubtaskTimed(name, "comp", comp_s * wrong[0], on), cluster.now_s))
                follow(cluster, home.handle(SubtaskTimed(name, "comm", comm_s * wrong[1], on), cluster.now_s))
        home.check()

    return Cluster(jobs, hosts, arrange, profile_after=TIMINGS).run()


def read(path: Path) -> list[Work]:
    """Jobs from a file. Wrong when it cannot be used."""
    want = 'a JSON list like [{"name": "a", "work_s": 640, "net_s": 20, "iterations": 100}]'
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_Row])
    except OSError as error:
        raise Wrong(f"{path} cannot be read", str(error), "name a file that is there") from None
    except msgspec.DecodeError as error:
        raise Wrong(f"{path} holds no jobs", str(error), f"expected: {want}") from None
    names = [row.name or f"j{n + 1}" for n, row in enumerate(found)]
    if not found or len(set(names)) != len(names):
        why = "it is empty" if not found else "two jobs have the same name"
        raise Wrong(f"{path} holds no usable jobs", why, f"expected: {want}")
    return [
        Work(Profile(JobId(name), row.work_s, row.net_s), row.iterations, submit_s=row.submit_s)
        for name, row in zip(names, found, strict=True)
    ]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    work_s: Positive
    net_s: Positive
    iterations: Whole
    name: str = ""
    submit_s: float = 0.0


def report(name: str, outcomes: dict[str, Outcome], jobs: int, hosts: int, options: argparse.Namespace) -> Report:
    base = outcomes["isolated"]
    rows: list[list[Cell]] = [
        [
            way,
            statistics.fmean(base.jct_s) / statistics.fmean(each.jct_s),
            base.makespan_s / each.makespan_s,
            100 * each.cpu,
            100 * each.net,
            each.running,
            each.groups,
            each.moves,
        ]
        for way, each in outcomes.items()
    ]
    paper: list[Cell] = [
        "paper: groups",
        PAPER["jct"],
        PAPER["makespan"],
        100 * PAPER["cpu"],
        100 * PAPER["net"],
        27.2,
        6.7,
        None,
    ]
    rows.append(paper)
    columns = ("how", "JCT gain", "makespan gain", "CPU %", "network %", "jobs at once", "groups", "moves")
    notes = (
        f"isolated: {options.isolated_hosts} hosts a job; naive: two jobs on those, "
        f"{options.contention:.0%} lost per other job in the same phase",
        f"measured times are up to {options.error:.0%} wrong; a job that changes groups pauses {options.move_s:g} s",
        "gains are over isolated; CPU and network: all hosts, from the first job to the last, start and tail included",
    )
    data: dict[str, Any] = {"schema": 1, "jobs": jobs, "hosts": hosts, "seed": options.seed}
    for way, each in outcomes.items():
        data[way] = {
            "jct_s_mean": statistics.fmean(each.jct_s),
            "makespan_s": each.makespan_s,
            "cpu_utilization": each.cpu,
            "network_utilization": each.net,
            "jobs_at_once_mean": each.running,
            "groups_mean": each.groups,
            "moves": each.moves,
        }
    data["jct_gain"] = rows[-2][1]
    data["makespan_gain"] = rows[-2][2]
    lines = [
        Series(f"{way}, {what}", [at / 3600 for at, *_ in each.curve], [100 * point[n] for point in each.curve])
        for way, each in outcomes.items()
        if way != "naive"
        for n, what in ((1, "CPU"), (2, "network"))
    ]
    figure = Figure("groups-use", "How busy the hosts are", "hours", "percent", lines)
    return Report(name, data, (Table(f"{jobs} jobs on {hosts} hosts", columns, rows, notes),), (figure,))


def _decided(found: Grouping, hosts: int) -> Report:
    rows: list[list[Cell]] = [
        [n + 1, group.hosts, len(group.jobs), " ".join(job.job for job in group.jobs[:12])]
        for n, group in enumerate(found.groups)
    ]
    data = {
        "schema": 1,
        "score": found.score,
        "cpu_utilization": found.use.cpu,
        "network_utilization": found.use.net,
        "groups": [{"hosts": group.hosts, "jobs": [job.job for job in group.jobs]} for group in found.groups],
    }
    title = f"score {found.score:.4f}: CPU {found.use.cpu:.1%}, network {found.use.net:.1%} of {hosts} hosts"
    return Report("groups-once", data, (Table(title, ("group", "hosts", "jobs", "first of them"), rows),))


def _check(options: argparse.Namespace) -> None:
    limits = {
        "--jobs": (options.jobs, 1, 100_000),
        "--hosts": (options.hosts, 1, 100_000),
        "--isolated-hosts": (options.isolated_hosts, 1, options.hosts),
        "--arrival-s": (options.arrival_s, 0, 1e9),
        "--contention": (options.contention, 0, 10),
        "--error": (options.error, 0, 0.9),
        "--move-s": (options.move_s, 0, 1e6),
        "--cpu-weight": (options.cpu_weight, 0, 1),
    }
    for flag, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise Wrong(f"{flag} {value:g}", f"it lies outside {low:g}..{high:g}", "give another value")
