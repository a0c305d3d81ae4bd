"""covey-sim aggregators: tensors of many jobs on few CPUs, against parameter servers of each job's own (AutoPS).

Each question a table: how many aggregators a few jobs of one model share (in the form of the thesis's figure
4.9), what becomes of plans when bursts meet, how much CPU a trace of jobs saves (4.5.2.4), what pools cost and gain for
one job with many tensors (4.3.3.4).
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from covey.core.ids import JobId
from plugins.aggregator.machine.pool import Pool, PoolRules
from plugins.aggregator.policy.cycle import FILL, LOSS_LIMIT
from plugins.aggregator.policy.pools import POOL_HOSTS
from sim.jobs.trace import read_trace
from sim.report import Cell, Figure, Progress, Report, Series, Table, Wrong
from sim.tensors.jobs import MODELS, Model, Workload, profile, recorded
from sim.tensors.pools import compared
from sim.tensors.rounds import Job, Shared, alone
from sim.tensors.trace import Outcome, Trace

HELP = __doc__ or ""
SEED = 1
PARTS = ("sharing", "measured", "trace", "pools")
MOST = {"jobs": 2000, "seeds": 100, "tensors": 20_000, "aggregators": 20_000, "pool": 20_000}
"""Largest numbers that can be asked for. 1,000 jobs take about a minute for each seed."""
LOOKED_AT_MAX = 20_000_000
ITERATIONS = 450
"""Iterations of a shared run: four times over, the 100 iterations after which a job's speed is judged."""
AS_PUBLISHED = PoolRules()
PERIOD_S = 600.0
"""Scaling period of the hybrid rows in seconds; the thesis names none."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, help="one of them only")
    parser.add_argument("--jobs", type=int, default=150, help="jobs of the trace (150)")
    parser.add_argument("--seeds", type=int, default=3, help="traces and sets of jobs, from --seed on (3)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and durations from a trace of jobs")
    parser.add_argument("--loss-limit", type=float, help="run the trace with this limit too, e.g. 0.07")
    parser.add_argument("--tensors", type=int, default=1000, help="of the job that pools are compared for (1000)")
    parser.add_argument("--aggregators", type=int, default=1000, help="that it may use (1000)")
    parser.add_argument("--pool", type=int, default=POOL_HOSTS, help=f"aggregators of one pool ({POOL_HOSTS})")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    for name, high in MOST.items():
        given = getattr(options, name)
        if not 1 <= given <= high:
            why = "it must be 1 or more" if given < 1 else f"at most {high} are simulated; more would take hours"
            raise Wrong(f"--{name} {given}", why, f"give --{name} another number")
    if options.tensors * options.aggregators > LOOKED_AT_MAX:
        what = f"--tensors {options.tensors} on --aggregators {options.aggregators}"
        why = f"the printed loop looks at each for each, and at most {LOOKED_AT_MAX} times here"
        raise Wrong(what, why, "give less of one")
    limit = options.loss_limit
    if limit is not None and not 0 < limit < 0.5:
        raise Wrong(f"--loss-limit {limit}", "it must lie between 0 and 0.5", "give a part of a job's speed, as 0.07")
    seed = options.seed
    wanted = (options.part,) if options.part else PARTS
    reports = []
    for at, part in enumerate(wanted):
        tell = _within(progress, at / len(wanted), 1 / len(wanted))
        if part == "sharing":
            reports.append(sharing(seed, tell))
        elif part == "measured":
            reports.append(measured(range(seed, seed + options.seeds), tell))
        elif part == "trace":
            workload = Workload(jobs=options.jobs)
            if options.trace is not None:
                workload = replace(workload, recorded=read_recorded(options.trace, options.jobs))
            reports.append(trace(range(seed, seed + options.seeds), workload, tell, limit))
        else:
            reports.append(pools(seed, options.tensors, options.aggregators, options.pool, tell))
    data: dict[str, Any] = {"schema": 1, "seed": seed}
    for report in reports:
        data |= report.data
    tables = [table for report in reports for table in report.tables]
    return Report("aggregators", data, tables, [figure for report in reports for figure in report.figures])


def _within(progress: Progress, start: float, part: float) -> Progress:
    return lambda done, what: progress(start + part * done, what)


# ---- a few jobs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedRun:
    aggregators_planned: int
    aggregators: int
    """Aggregators after every job that lost too much was given more."""
    loss_first: float
    """Loss of the worst job over its first 100 iterations."""
    loss: float
    """Loss of the worst job over its last 100 iterations."""
    over_first: int
    """Jobs at their limit or over it, over their first 100 iterations."""
    over: int
    """Jobs at their limit or over it, over their last 100 iterations."""
    moves: int
    """Times that a job was given other aggregators."""


def settled(
    jobs: Sequence[Job],
    seed: int,
    rules: PoolRules = AS_PUBLISHED,
    seconds: float = 0.0,
    by_arrival: bool = False,
) -> SharedRun:
    """Run these jobs on one pool until each was judged several times, and for at least `seconds`."""
    rng, shared = random.Random(seed), Shared(Pool(rules), by_arrival)
    for job in jobs:
        shared.arrive(job, rng.randrange(job.profile.period_us))
    planned = len(shared.pool.cycles)
    longest_us = max(job.profile.period_us for job in jobs)
    shared.run(max(seconds, ITERATIONS * longest_us / 1e6))
    limits = {job.profile.job: float(job.profile.limit) for job in jobs}
    first = {job.profile.job: 1 - 100 * job.profile.period_us / sum(job.periods_us[:100]) for job in jobs}
    last = shared.losses(100)
    over_first, over = (sum(one[name] >= limits[name] for name in limits) for one in (first, last))
    worst_first, worst = max(0.0, *first.values()), max(0.0, *last.values())
    return SharedRun(planned, len(shared.pool.cycles), worst_first, worst, over_first, over, len(shared.story))


def trial(name: str, model: Model, servers: int, workers: int, seed: int) -> Job:
    """A job of this model after its trial; its work is that of one server and two workers, times workers / 2."""
    rng = random.Random(f"{seed} {name} {model.name}")
    use = model.use * workers / 2 / servers
    return alone(profile(name, model, servers, use, model.period_us, rng), rng.randrange(1 << 30))


THESIS = {("AlexNet", 2, 2): 3, ("VGG19", 2, 4): 2, ("AlexNet", 4, 2): 5, ("VGG19", 4, 2): 4, ("AWD-LM", 4, 2): 4,
          ("BERT", 4, 2): 4}  # fmt: skip
"""(model, servers of a job, jobs) -> aggregators that §4.5.2.3 and table 4.4 give in numbers."""


def sharing(seed: int, progress: Progress) -> Report:
    cases: list[tuple[str, list[Job], int, int | None]] = []
    for model in MODELS:
        for count in (1, 2, 3, 4):
            jobs = [trial(f"j{at}", model, 2, 2, seed) for at in range(count)]
            cases.append((f"{model.name}, {count} x 2s-2w", jobs, 2 * count, THESIS.get((model.name, 2, count))))
    for model in MODELS:
        jobs = [trial(f"j{at}", model, 4, 4, seed) for at in range(2)]
        cases.append((f"{model.name}, 2 x 4s-4w", jobs, 8, THESIS.get((model.name, 4, 2))))
    mixed = [trial(f"j{at}", model, 2, 2, seed) for at, model in enumerate((MODELS[0], MODELS[1], MODELS[3]))]
    cases.append(("AlexNet + VGG19 + BERT, 2s-2w each", mixed, 6, None))
    rows: list[list[Cell]] = []
    found = []
    for at, (name, jobs, servers, theirs) in enumerate(cases):
        progress(at / (len(cases) + 1), name)
        one = settled(jobs, seed)
        rows.append(
            [name, servers, theirs, one.aggregators_planned, one.aggregators, _percent(1 - one.aggregators / servers),
             _percent(one.loss_first), _percent(one.loss)]
        )  # fmt: skip
        found.append({"case": name, "servers": servers, "aggregators_planned": one.aggregators_planned,
                      "aggregators": one.aggregators, "loss_first": one.loss_first, "loss": one.loss})  # fmt: skip
    columns = ("jobs", "servers", "thesis", "planned", "settled", "saved %", "lost at first %", "lost when settled %")
    table = Table("Jobs that share aggregators", columns, rows, (
        "servers: parameter servers they would have had. thesis: aggregators, where its text has a number "
        "(figure 4.9, table 4.4).",
        "planned: by cycles. settled: after jobs at their loss limit over 100 iterations were given more aggregators.",
        "lost: by the worst job, measured in rounds whose sums are made as they are due; iterations and CPU use of "
        "models are assumed, VGG19's use is the thesis's.",
    ))  # fmt: skip
    story, figure = two_jobs(seed)
    progress(1.0, "two jobs")
    return Report("aggregators-sharing", {"sharing": found}, (table, story), (figure,))


def two_jobs(seed: int) -> tuple[Table, Figure]:
    """Two AlexNets: one runs; the other comes at 11 s and leaves at 42 s (the form of figure 4.11). Sums are made in
    order of arrival: made as they are due, no job would lose enough."""
    shared = Shared(Pool(PoolRules()), by_arrival=True)
    first, second = trial("first", MODELS[0], 2, 2, seed), trial("second", MODELS[0], 2, 2, seed)
    shared.arrive(first)
    shared.run(11)
    shared.arrive(second, second.profile.period_us // 3)
    shared.run(31)
    shared.leave(JobId("second"))
    shared.run(18)
    happened = [(0.0, "first arrives"), (11.0, "second arrives"), *shared.story, (42.0, "second leaves")]
    happened.sort(key=lambda one: one[0])
    rows: list[list[Cell]] = [[at_s, what, _last(shared.counts, at_s)] for at_s, what in happened]
    series = [_speed("first", first, 0.0), _speed("second", second, 11.0)]
    times, counts = [at_s for at_s, _ in shared.counts], [float(count) for _, count in shared.counts]
    series.append(Series("aggregators", [*times, 60.0], [*counts, counts[-1]]))
    table = Table("Two jobs in time", ("s", "what happened", "aggregators"), rows, (
        "Both are AlexNets (2s-2w). Thesis, figure 4.11: one beside a VGG19 loses 22 % from 11 s on, gets an "
        "aggregator at 27 s, and leaves at 42 s, when that is freed. Beside VGG19 ours loses less than the limit. Here "
        "sums are made in order of arrival; as they are due, the two would share one aggregator all the time.",
    ))  # fmt: skip
    title, y_label = "Two jobs share aggregators", "speed (alone: 1), aggregators"
    return table, Figure("aggregators-two-jobs", title, "s", y_label, series, steps=True)


def _last(counts: Sequence[tuple[float, int]], at_s: float) -> int:
    return [count for when_s, count in counts if when_s <= at_s][-1]


def _speed(label: str, job: Job, from_s: float) -> Series:
    """Speed over one second, as a part of the speed alone."""
    times: list[float] = []
    speeds: list[float] = []
    now_us, since_us, count = from_s * 1e6, from_s * 1e6, 0
    for period_us in job.periods_us:
        now_us, count = now_us + period_us, count + 1
        if now_us - since_us >= 1e6:
            times.append(now_us / 1e6)
            speeds.append(count * job.profile.period_us / (now_us - since_us))
            since_us, count = now_us, 0
    return Series(label, times, speeds)


class Plan(NamedTuple):
    name: str
    rules: PoolRules
    window: bool
    """Whether the time from first to last push is known."""
    by_arrival: bool
    """Whether sums are made in order of arrival."""


PLANS = (
    Plan("as published, in order of arrival", PoolRules(quiet=Fraction(0)), False, True),
    Plan("cycles of up to 8, bursts bounded, in order of arrival", PoolRules(times=8), True, True),
    Plan("as published", PoolRules(quiet=Fraction(0)), False, False),
    Plan("as published, moved to quiet ones", AS_PUBLISHED, False, False),
    Plan("the same, bursts bounded", AS_PUBLISHED, True, False),
    Plan("cycles of up to 8, bursts bounded", PoolRules(times=8), True, False),
    Plan("the same, promised up to 3/4", PoolRules(times=8, fill=FILL), True, False),
    Plan("the same in order of arrival", PoolRules(times=8, fill=FILL), True, True),
)
MIXED_JOBS = 12
MIXED_S = 360.0


def measured(seeds: Sequence[int], progress: Progress) -> Report:
    """Measure what becomes of plans when bursts meet."""
    rows: list[list[Cell]] = []
    found: list[dict[str, Any]] = []
    for at, (name, rules, window, by_arrival) in enumerate(PLANS):
        runs, servers = [], 0
        for n, seed in enumerate(seeds):
            progress((at + n / len(seeds)) / len(PLANS), f"{name}, seed {seed}")
            drawn = Workload(jobs=MIXED_JOBS).drawn(random.Random(seed))
            servers += sum(one.profile.servers for one in drawn)
            jobs = [alone(one.profile, seed, window) for one in drawn]
            runs.append(settled(jobs, seed, rules, MIXED_S, by_arrival))
        planned, after = sum(one.aggregators_planned for one in runs), sum(one.aggregators for one in runs)
        over_first, over = sum(one.over_first for one in runs), sum(one.over for one in runs)
        rows.append([name, servers, planned, after, _percent(1 - planned / servers), _percent(1 - after / servers),
                     over_first, over, sum(one.moves for one in runs)])  # fmt: skip
        found.append({"plan": name, "servers": servers, "aggregators_planned": planned, "aggregators": after,
                      "jobs_over_limit_first": over_first, "jobs_over_limit": over})  # fmt: skip
    columns = (
        "plan",
        "servers",
        "planned",
        "settled",
        "plan saves %",
        "settled saves %",
        "over first",
        "over",
        "moves",
    )
    table = Table(f"{MIXED_JOBS} jobs at once, in rounds as they happen", columns, rows, (
        f"{len(seeds)} sets of {MIXED_JOBS} jobs added up; each server busy 15-50 %, 10 % loss limit, "
        f"{MIXED_S:g} s of rounds; what is due first is summed first, as `aggd` does, or what came first.",
        "A plan counts means, and bursts that meet are not in it. over first: jobs that measured their limit or more "
        "over their first 100 iterations; over: those that still do over their last 100.",
    ))  # fmt: skip
    return Report("aggregators-measured", {"measured": found}, (table,))


# ---- a trace -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssignmentStrategy:
    name: str
    rules: PoolRules = AS_PUBLISHED
    limit: Fraction = LOSS_LIMIT
    window: bool = False
    pools: int = 1
    period_s: float | None = None


WAYS = (
    AssignmentStrategy("as published: cycle = longest iteration, limit 10 %"),
    AssignmentStrategy("the same, limit 20 %", limit=Fraction(1, 5)),
    AssignmentStrategy("as published, hybrid scaling each 10 min", PoolRules(scaling="hybrid"), period_s=PERIOD_S),
    AssignmentStrategy("as published, in 4 pools", pools=4),
    AssignmentStrategy("cycles of up to 8 iterations, limit 10 %", PoolRules(times=8)),
    AssignmentStrategy("cycles of up to 8, limit 5 %", PoolRules(times=8), Fraction(1, 20)),
    AssignmentStrategy(
        "cycles of up to 8, bursts bounded, limit 5 %", PoolRules(times=8), Fraction(1, 20), window=True
    ),
    AssignmentStrategy(
        "the same, hybrid scaling each 10 min", PoolRules(scaling="hybrid", times=8), Fraction(1, 20), True, 1, PERIOD_S
    ),
    AssignmentStrategy(
        "cycles of up to 8, bursts bounded, limit 10 %, promised up to 3/4", PoolRules(times=8, fill=FILL), window=True
    ),
)


def read_recorded(path: Path, most: int) -> tuple[tuple[float, float, int], ...]:
    """Jobs of a trace that would have parameter servers; raises `Wrong` when there is none."""
    found = recorded(read_trace(path), most)
    if not found:
        raise Wrong(
            f"{path} holds no job of two or more GPUs", "only those have parameter servers", "give another trace"
        )
    return found


def trace(seeds: Sequence[int], workload: Workload, progress: Progress, limit: float | None = None) -> Report:
    jobs = len(workload.recorded) or workload.jobs
    ways = list(WAYS)
    if limit is not None:
        exact = Fraction(str(limit))
        ways.append(
            AssignmentStrategy(f"cycles of up to 8, bursts bounded, limit {limit:.1%}", PoolRules(times=8), exact, True)
        )
    rows: list[list[Cell]] = []
    found: list[dict[str, Any]] = []
    series = []
    for at, way in enumerate(ways):
        outcomes: list[Outcome] = []
        for n, seed in enumerate(seeds):
            progress((at + n / len(seeds)) / len(ways), f"{way.name}, seed {seed}")
            drawn = replace(workload, limit=way.limit, window=way.window).drawn(random.Random(seed))
            outcomes.append(Trace(way.rules, way.pools, way.period_s).run(drawn))
        saved = [one.saved for one in outcomes]
        slower = mean(mean(one.slower) - 1 for one in outcomes)
        over, worst = sum(one.over_limit for one in outcomes), max(one.loss_max for one in outcomes)
        moves = mean(one.moves / jobs for one in outcomes)
        peak = max(one.aggregators_max for one in outcomes)
        rows.append([way.name, _percent(mean(saved)), _percent(min(saved)), _percent(max(saved)),
                     round(100 * worst, 3), over, _percent(slower), round(moves, 1), peak])  # fmt: skip
        found.append({"way": way.name, "loss_limit": float(way.limit), "saved_mean": mean(saved),
                      "saved_min": min(saved), "saved_max": max(saved), "loss_max": worst, "jobs_over_limit": over,
                      "slower_mean": slower, "moves_per_job": moves})  # fmt: skip
        if at in (0, 2, 6):
            series.append(_distribution(way.name, outcomes[0]))
    origin = "arrivals each 2 min (Poisson), 1, 2 or 4 servers"
    if workload.recorded:
        origin = "arrivals and run times of a trace's jobs of several GPUs, a server for each 4 GPUs, at most 4"
    columns = ("how", "saved %", "least", "most", "worst loss %", "over limit", "slower %", "moves/job", "peak")
    table = Table(f"CPU time of {jobs} jobs against servers of their own", columns, rows, (
        f"{len(seeds)} seeds; {origin}; models drawn, servers busy 15-50 %. Trial iterations on servers of their own "
        "are counted, and so is every second that a job runs longer.",
        "worst loss: of any job at any time, by its cycles; over limit: jobs that ever reached their limit; slower: "
        "mean run time against alone.",
        "Thesis: 52.7 % saved on a trace that is not public (4.5.2.4), period of scaling not named.",
    ))  # fmt: skip
    title = "Servers in use over servers asked for, share of time"
    figure = Figure("aggregators-trace", title, "allocated / asked for", "share of time", series, steps=True)
    return Report("aggregators-trace", {"trace": found, "jobs": jobs, "seeds": len(seeds)}, (table,), (figure,))


def _distribution(label: str, outcome: Outcome) -> Series:
    """Share of time at or below each ratio (figure 4.12's form)."""
    total_s = sum(seconds for seconds, _ in outcome.ratios)
    xs: list[float] = []
    ys: list[float] = []
    passed_s = 0.0
    for seconds, ratio in sorted(outcome.ratios, key=lambda one: one[1]):
        passed_s += seconds
        xs.append(ratio)
        ys.append(passed_s / total_s)
    return Series(label, xs, ys)


# ---- pools -------------------------------------------------------------------------------------------------------


def pools(seed: int, tensors: int, aggregators: int, size: int, progress: Progress) -> Report:
    progress(0.0, f"{tensors} tensors over {aggregators} aggregators")
    rows: list[list[Cell]] = []
    found: list[dict[str, Any]] = []
    for one in compared(tensors, aggregators, size, random.Random(seed)):
        rows.append([one.how, one.looked_at, one.seconds, one.used, one.new, _percent(one.loss), one.others])
        found.append({"how": one.how, "seconds": one.seconds, "used": one.used, "new": one.new, "loss": one.loss,
                      "others": one.others})  # fmt: skip
    columns = ("looks at", "aggregators", "CPU s", "used", "new", "loss %", "jobs beside it")
    table = Table(f"One job of {tensors} tensors over {aggregators} busy aggregators", columns, rows, (
        "The index gives the answer of the printed loop. Pools bound what a decision may touch: the jobs beside it.",
        "Seconds are CPU time on this machine and vary; the rest is the same for a seed.",
    ))  # fmt: skip
    progress(1.0, "pools")
    return Report("aggregators-pools", {"pools": found}, (table,))


def _percent(part: float) -> float:
    return round(100 * part, 1)
