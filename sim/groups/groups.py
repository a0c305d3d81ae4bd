"""Many jobs on one set of hosts: each on its own hosts, thrown together, or in groups that fill each other's gaps
(Harmony, chapter 4).

Jobs are made by seed in the manner of the paper's 80, or read from a file: a JSON list of objects with `work_s`
(seconds of computing in one iteration, times the hosts it was measured on), `net_s` (seconds of communication),
`iterations`, and, if wanted, `name`, `submit_s`, `input_gb` and `model_gb`. Subtasks are run one by one in virtual
time; groups come from the policies of `plugins/interleave`, which see only measured times. On the hosts of one rack
(`--jobs 12 --hosts 16`) groups are also those that agents make, without anybody who knows everything.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from covey.core.ids import JobId
from plugins.interleave.policy.decide import WHOLE_JOBS_MAX
from plugins.interleave.policy.model import JobProfile, Weights
from plugins.interleave.policy.rules import OURS, PRINTED, WEIGHTS
from plugins.interleave.policy.schedule import Grouping, schedule
from sim.files import text_of
from sim.groups.by_agents import by_agents
from sim.groups.cluster import Outcome
from sim.groups.strategies import Setting, alone, grouped, isolated, thrown_best
from sim.groups.workload import PROFILED_ON, RATIO, SPREAD, Job, arriving, bursting, leaning, workload
from sim.report import Cell, Figure, Progress, Report, Series, Table, Wrong

HELP = "many jobs on one set of hosts"
SEED = 1
PAPER = {"jct": 2.11, "makespan": 1.60, "cpu": 93.2, "net": 83.1, "jobs": 27.2, "groups": 6.7, "spilled": 34.0}
"""Harmony §4.4.3: gains over isolated, how busy its hosts were in percent, jobs and groups at once; §4.4.8: percent of
input on disk."""
RACK_HOSTS = 32
"""Most hosts on which the machines of agents are run, one for each host: a rack."""
MEASURED_MOVE_S = 0.5
"""Seconds for which a change of its hosts stops a job of this runtime: above the 0.24 s that were measured in the
median, below what one in ten took (docs/results/tuner.md)."""
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Size = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Whole = Annotated[int, msgspec.Meta(ge=1, le=10**7)]


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--jobs", type=int, default=80, help="jobs that are made (default 80)")
    add("--hosts", type=int, default=100, help="hosts (default 100)")
    add("--file", type=Path, help="jobs from a JSON file instead")
    add("--spread", type=float, default=SPREAD, help=f"of the logarithm of lengths in a class (default {SPREAD})")
    add("--ratio", type=float, default=RATIO, help=f"of long jobs to short ones (default {RATIO:g})")
    add("--lean", choices=("comp", "comm"), help="only the three quarters that compute, or communicate, most")
    add("--arrival-s", type=float, default=0.0, help="mean time between jobs (default 0: all at once)")
    add("--burst", type=float, default=1.0, help="jobs that arrive in one moment, in the mean (default 1)")
    add("--contention", type=float, default=0.1, help="naive: lost per other job in the same phase (default 0.1)")
    add("--gap", type=float, default=0.1, help="share of a COMM that a secondary one can use (default 0.1)")
    add(
        "--comm-cpu",
        type=float,
        default=0.0,
        help="share of processors that a COMM takes (default 0, as in the paper's model)",
    )
    add("--error", type=float, default=0.05, help="relative error of measured times (default 0.05)")
    add("--move-s", type=float, default=30.0, help="pause of a job that changes groups (default 30)")
    add("--no-spill", action="store_true", help="keep all input data in memory")
    add("--cpu-weight", type=float, default=WEIGHTS.cpu, help=f"of CPU in the score (default {WEIGHTS.cpu:g})")
    add("--once", action="store_true", help="do not run: print one decision for all the jobs")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    _check(options)
    jobs = made(options)
    weights = Weights(options.cpu_weight, 1 - options.cpu_weight)
    if options.once:
        return _decided(schedule([job.profile for job in jobs], options.hosts, weights), options.hosts)
    setting = Setting(
        hosts=options.hosts,
        manner=msgspec.structs.replace(OURS, weights=weights),
        error=options.error,
        move_s=options.move_s,
        gap=options.gap,
        contention=options.contention,
        talking=options.comm_cpu,
        spill=not options.no_spill,
        seed=options.seed,
    )
    return report("groups", compared(jobs, setting, progress), jobs, setting)


def made(options: argparse.Namespace) -> list[Job]:
    """The jobs that these options describe."""
    rng = random.Random(options.seed)
    jobs = read(options.file) if options.file else workload(options.jobs, rng, options.spread, options.ratio)
    if options.lean:
        jobs = leaning(jobs, max(1, round(0.75 * len(jobs))), options.lean == "comp")
    if options.burst > 1:
        return bursting(jobs, rng, options.arrival_s, options.burst)
    return arriving(jobs, rng, options.arrival_s) if options.arrival_s else jobs


def compared(jobs: Sequence[Job], setting: Setting, progress: Progress) -> dict[str, Outcome]:
    """Run these jobs under each way of sharing hosts; outcomes by the way's name."""
    best, each = isolated(jobs, setting)
    found = {f"isolated, {each} hosts each": best}
    on = min(PROFILED_ON, setting.hosts)
    if on != each:
        found[f"isolated, {on} hosts each"] = alone(jobs, setting, on)
    progress(0.05, "naive")
    naive, size = thrown_best(jobs, setting)
    found[f"naive, two on {size}"] = naive
    ways: tuple[tuple[str, Callable[[], Outcome]], ...] = (
        ("as printed", lambda: grouped(jobs, replace(setting, manner=PRINTED))),
        ("groups", lambda: grouped(jobs, setting, lambda share: progress(0.2 + 0.4 * share, "groups"))),
        (
            "groups, lengths said",
            lambda: grouped(
                jobs, replace(setting, declared=True), lambda share: progress(0.6 + 0.4 * share, "lengths said")
            ),
        ),
    )
    for name, way in ways:
        found[name] = way()
    if setting.hosts <= RACK_HOSTS and len(jobs) <= WHOLE_JOBS_MAX:
        found["agents"] = by_agents(jobs, setting, lambda share: progress(share, "agents"))
        soon = replace(setting, move_s=MEASURED_MOVE_S)
        found[f"agents, moves of {MEASURED_MOVE_S:g} s"] = by_agents(jobs, soon)
    return found


def gains(base: Outcome, other: Outcome) -> tuple[float, float]:
    """How many times shorter the mean completion time and the makespan are than in `base`."""
    return statistics.fmean(base.jct_s) / statistics.fmean(other.jct_s), base.makespan_s / other.makespan_s


def read(path: Path) -> list[Job]:
    """Read jobs from a file; raises Wrong when it cannot be used."""
    want = 'a JSON list like [{"name": "a", "work_s": 640, "net_s": 20, "iterations": 100}]'
    try:
        found = msgspec.json.decode(text_of(path), type=list[_Row])
    except msgspec.DecodeError as error:
        raise Wrong(f"{path} holds no jobs", str(error), f"expected: {want}") from None
    names = [row.name or f"j{n + 1}" for n, row in enumerate(found)]
    if not found or len(set(names)) != len(names):
        why = "it is empty" if not found else "two jobs have the same name"
        raise Wrong(f"{path} holds no usable jobs", why, f"expected: {want}")
    return [
        Job(
            JobProfile(JobId(name), row.work_s, row.net_s), row.iterations, "", row.submit_s, row.input_gb, row.model_gb
        )
        for name, row in zip(names, found, strict=True)
    ]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    work_s: Positive
    net_s: Positive
    iterations: Whole
    name: str = ""
    submit_s: Size = 0.0
    input_gb: Size = 0.0
    model_gb: Size = 0.0


def report(name: str, outcomes: dict[str, Outcome], jobs: Sequence[Job], setting: Setting) -> Report:
    base = next(iter(outcomes.values()))
    rows: list[list[Cell]] = [
        [
            way,
            *gains(base, each),
            100 * each.cpu,
            100 * each.useful,
            100 * each.net,
            each.running,
            each.groups,
            100 * each.spilled if way.startswith(("groups", "as printed", "agents")) else None,
            each.moves,
        ]
        for way, each in outcomes.items()
    ]
    paper: list[Cell] = ["paper: groups", PAPER["jct"], PAPER["makespan"], PAPER["cpu"], None, PAPER["net"]]
    paper += [PAPER["jobs"], PAPER["groups"], PAPER["spilled"], None]
    columns = (
        *("how", "JCT gain", "makespan gain", "CPU %", "useful CPU %", "network %"),
        *("jobs at once", "groups", "spilled %", "moves"),
    )
    notes = (
        "isolated: first come, first served; first the number of hosts that keeps CPUs busiest, of nine tried",
        f"naive: two jobs in a set, the best of five sizes of sets; in one phase both lose {setting.contention:.0%}",
        f"measured times are up to {setting.error:.0%} wrong; a job that changes hosts pauses {setting.move_s:g} s",
        "as printed: the paper's algorithms, repaired, and its rules: jobs as they came, turns one by one, CPU 2 : 1",
        "groups: one mind knows everything and lets jobs wait; agents: each host decides for itself, with the code "
        f"that agentd runs, and no job waits (shown for at most {RACK_HOSTS} hosts and {WHOLE_JOBS_MAX} jobs)",
        "network % of agents: as if all jobs of a group were on as many hosts as the group effectively has",
        "gains are over the first row; CPU and network: all hosts, from the first job to the last, start and tail "
        "included; useful: without collecting garbage and reloading",
    )
    data: dict[str, Any] = {"schema": 1, "jobs": len(jobs), "hosts": setting.hosts, "seed": setting.seed}
    for way, each in outcomes.items():
        key = _key(way, data)
        jct, makespan = gains(base, each)
        data[key] = {
            "jct_s_mean": statistics.fmean(each.jct_s),
            "makespan_s": each.makespan_s,
            "jct_gain": jct,
            "makespan_gain": makespan,
            "cpu_utilization": each.cpu,
            "cpu_useful": each.useful,
            "network_utilization": each.net,
            "jobs_at_once_mean": each.running,
            "groups_mean": each.groups,
            "spilled_mean": each.spilled,
            "moves": each.moves,
        }
    data["jct_gain"], data["makespan_gain"] = data["groups"]["jct_gain"], data["groups"]["makespan_gain"]
    lines = [
        Series(f"{way}, {what}", [at / 3600 for at, *_ in each.curve], [100 * point[n] for point in each.curve])
        for at, (way, each) in enumerate(outcomes.items())
        if at == 0 or way.startswith("groups")
        for n, what in ((1, "CPU"), (2, "network"))
    ]
    figure = Figure("groups-use", "How busy the hosts are", "hours", "percent", lines)
    title = f"{len(jobs)} jobs on {setting.hosts} hosts"
    return Report(name, data, (Table(title, columns, [*rows, paper], notes),), (figure,))


def _key(way: str, taken: dict[str, Any]) -> str:
    """The name of a way in the JSON: isolated, isolated_16, naive, printed, groups, groups_said, agents, or
    agents_soon."""
    first, _, rest = way.partition(",")
    if first == "groups":
        return "groups_said" if rest else "groups"
    if first == "agents":
        return "agents_soon" if rest else "agents"
    if first == "as printed":
        return "printed"
    return f"{first}_{PROFILED_ON}" if first in taken else first


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
        "--spread": (options.spread, 0, 3),
        "--ratio": (options.ratio, 1, 1000),
        "--arrival-s": (options.arrival_s, 0, 1e9),
        "--burst": (options.burst, 1, 1e6),
        "--contention": (options.contention, 0, 10),
        "--gap": (options.gap, 0, 0.9),
        "--comm-cpu": (options.comm_cpu, 0, 0.9),
        "--error": (options.error, 0, 0.9),
        "--move-s": (options.move_s, 0, 1e6),
        "--cpu-weight": (options.cpu_weight, 0, 1),
    }
    for flag, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise Wrong(f"{flag} {value:g}", f"it lies outside {low:g}..{high:g}", "give another value")
