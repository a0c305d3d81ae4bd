"""Two jobs on one GPU: how much a guaranteed job is slowed, and how much an opportunistic one gets, per controller.

Six scenarios and two more, each run for a while of virtual time with several seeds. The ladder is the controller of
plugins/sharing, the others are the laws of other systems behind the same interface. Nothing is measured on a GPU: the
device is modelled (sim/sharing/device.py says how). With --trace: jobs of a trace on a cluster that shares its GPUs,
beside 2D-LAS on one that does not (sim/jobs/sharing_cluster.py says what is assumed).
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from plugins.sharing.machine.ablations import RULES
from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.machine.rivals import Flag, Flagged, Naive, Orphaned, SpreadLadder, Throttle
from plugins.sharing.policy.interference import TOLERANCE
from plugins.sharing.policy.rivals import Aimd, Pi, StepUp, Tgs
from sim.jobs.sharing_cluster import Sharing
from sim.report import Figure, Progress, Report, Series, Table, Wrong
from sim.sharing.device import Controller, Outcome, Scenario, simulate
from sim.sharing.reports import GPUS, trace

HELP = "two jobs on one GPU"
SEED = 1
SECONDS, SEEDS = 40.0, 4

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("bursty", 0.010, 0.012, 0.001),
    Scenario("long-operations", 0.010, 0.012, 0.008),
    Scenario("saturated", 0.020, 0.0, 0.001),
    Scenario("idle-processors", 0.020, 0.0, 0.001, contention=0.15, beside=0.79),
    Scenario("drift", 0.010, 0.012, 0.001, drift_at_s=15.0, drift=1.5),
    Scenario("noisy", 0.010, 0.032, 0.001, variation=0.25),
    Scenario("away", 0.010, 0.012, 0.001, away_s=(15.0, 20.0)),
    Scenario("two-opportunistic", 0.010, 0.012, 0.001, opportunistic=2),
)
"""Scenarios. In the first six a mini-batch of the guaranteed job is 10 ms of work on the device and 12 ms of waiting;
the same beside operations of 8 ms; no wait at all; no wait, but most of the device unused; work growing by half at 15
s; 10 and 32 ms that vary by a quarter. Two more: a phase of 5 s without the device (AntMan figure 12), two
opportunistic jobs."""
RULED: tuple[Scenario, ...] = (
    Scenario("quickens", 0.010, 0.012, 0.001, drift_at_s=15.0, drift=0.96),
    Scenario("sudden", 0.200, 0.100, 0.005, drift_at_s=60.0, op_drift=100.0),
    Scenario("away-long-operations", 0.010, 0.012, 0.008, away_s=(15.0, 20.0)),
)
"""Scenarios for single rules of the ladder: work that shrinks so little that no job is accused; operations of the
other job that take half a second from then on; and a job that leaves when the others have not all of its idle
phases."""

CONTROLLERS: dict[str, Callable[[float], Controller]] = {
    "naive": lambda tolerance: Naive(),
    "step-up": lambda tolerance: Throttle(StepUp(), tolerance),
    "aimd": lambda tolerance: Throttle(Aimd(), tolerance),
    "pi": lambda tolerance: Throttle(Pi(), tolerance),
    "tgs": lambda tolerance: Throttle(Tgs(), tolerance, ticks=True),
    "flag": lambda tolerance: Flag(),
    "step-up+flag": lambda tolerance: Flagged(StepUp(), tolerance),
    "aimd+flag": lambda tolerance: Flagged(Aimd(), tolerance),
    "pi+flag": lambda tolerance: Flagged(Pi(), tolerance),
    "tgs+flag": lambda tolerance: Flagged(Tgs(), tolerance, ticks=True),
    "ladder-spread": lambda tolerance: SpreadLadder(tolerance),
    "ladder": lambda tolerance: Ladder(tolerance),
    "orphaned": lambda tolerance: Orphaned(tolerance),
    **{f"without-{rule}": made for rule, made in RULES.items()},
}
WITHOUT = tuple(f"without-{rule}" for rule in RULES)
"""Controllers that are the ladder with one rule taken out: their own table (`make tables ONLY=sharing-rules`)."""
COMPARED = tuple(name for name in CONTROLLERS if name not in ("orphaned", *WITHOUT))
"""Controllers that the tables show; the others are asked for by name."""
TOLD = tuple(name for name in CONTROLLERS if name.endswith("flag"))
"""Rivals that get the flag whether the guaranteed job is idle on the device, as the ladder does: their own table."""
MEANING = {
    "naive": "no control: packing",
    "step-up": "AntMan: up by one percent while the guaranteed job is not affected",
    "aimd": "one percent up, a quarter down",
    "pi": "proportional and integral",
    "tgs": "TGS's law with this tolerance",
    "flag": "idle phases of the guaranteed job are free, busy ones closed; no control",
    "step-up+flag": "the same, and AntMan's law in busy phases",
    "aimd+flag": "the same with that law",
    "pi+flag": "the same with that law",
    "tgs+flag": "the same with that law",
    "ladder-spread": "ours without its head: below 1 a rate spread over idle phases",
    "ladder": "ours",
    "orphaned": "ours, whose agent dies while the others are stopped: they go by their lease",
    **{
        f"without-{rule}": f"ours, but: {(made.__doc__ or '').partition('.')[0].lower()}"
        for rule, made in RULES.items()
    },
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", action="append", choices=[s.name for s in SCENARIOS], help="only these")
    parser.add_argument("--controller", action="append", choices=list(CONTROLLERS), help="only these")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="how much slower is too much (0.05)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="virtual time of each run (40)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each, with seeds counted from --seed (4)")
    parser.add_argument(
        "--trace", action="append", type=Path, metavar="FILE", help="instead: these jobs on a cluster that shares GPUs"
    )
    parser.add_argument("--gpus", type=int, default=GPUS, help="of that cluster (60)")
    parser.add_argument("--interference", type=float, default=TOLERANCE, help="assumed for that cluster (0.05)")
    parser.add_argument("--busy-low", type=float, default=0.1, help="jobs use their GPU at least so much (0.1)")
    parser.add_argument("--busy-high", type=float, default=0.9, help="... and at most so much (0.9)")
    parser.add_argument("--story", action="store_true", help="say what the last controller decided in its first run")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    for name, value, low, high in (
        ("--tolerance", options.tolerance, 0.005, 1.0),
        ("--seconds", options.seconds, 5.0, 3600.0),
        ("--seeds", options.seeds, 1, 1000),
        ("--gpus", options.gpus, 1, 4096),
        ("--interference", options.interference, 0.0, 1.0),
        ("--busy-high", options.busy_high, 0.01, 1.0),
        ("--busy-low", options.busy_low, 0.01, options.busy_high),
    ):
        if not low <= value <= high:
            raise Wrong(f"{name} {value:g}", f"expected {low:g} to {high:g}", f"for example {name} {low:g}")
    if options.trace:
        sharing = Sharing(interference=options.interference, busy=(options.busy_low, options.busy_high))
        return trace(options.trace, progress, options.gpus, sharing)
    return compare(
        [scenario for scenario in SCENARIOS if not options.scenario or scenario.name in options.scenario],
        [name for name in CONTROLLERS if name in (options.controller or COMPARED)],
        options.tolerance,
        range(options.seed, options.seed + options.seeds),
        options.seconds,
        progress,
        options.story,
    )


def compare(
    scenarios: Sequence[Scenario],
    controllers: Sequence[str],
    tolerance: float,
    seeds: Sequence[int],
    seconds: float,
    progress: Progress,
    story: bool = False,
    name: str = "sharing",
) -> Report:
    """Run every controller in every scenario, with the same seeds."""
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    total, done = len(scenarios) * len(controllers), 0
    for scenario in scenarios:
        for controller in controllers:
            progress(done / total, f"{scenario.name}: {controller}")
            make = CONTROLLERS[controller]
            outcomes[scenario.name, controller] = [
                simulate(scenario, lambda make=make: make(tolerance), seed, seconds)  # type: ignore[misc]
                for seed in seeds
            ]
            done += 1
    rows = [_row(*key, runs) for key, runs in outcomes.items()]
    tables = [
        *(_overview(title, scenarios, names, outcomes, tolerance) for title, names in _beside(controllers)),
        _details(rows),
    ]
    if story:
        tables.append(_story(*list(outcomes.items())[-1]))
    data = {
        "schema": 1,
        "tolerance": tolerance,
        "seconds": seconds,
        "seeds": list(seeds),
        "runs": rows,
    }
    return Report(name, data, tables, _figures(scenarios, controllers, outcomes))


def _beside(controllers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Title and columns of each overview: rivals as they are, and rivals that get the flag, beside the ladder."""
    title = "Guaranteed job slower by %, opportunistic work in % of alone"
    told, rest = ([name for name in controllers if (name in TOLD) is flag] for flag in (True, False))
    found = [(title, rest)] if rest else []
    return [*found, (f"{title}: told the idle flag", [*told, *(n for n in rest if n == "ladder")])] if told else found


def _row(scenario: str, controller: str, runs: Sequence[Outcome]) -> dict[str, str | float | int]:
    return {
        "scenario": scenario,
        "controller": controller,
        "slowdown_percent": 100 * fmean(run.slowdown for run in runs),
        "slowdown_percent_max": 100 * max(run.slowdown for run in runs),
        "share_percent": 100 * fmean(run.share for run in runs),
        "share_percent_min": 100 * min(run.share for run in runs),
        "bad_windows_percent": 100 * fmean(run.bad_windows for run in runs),
        "first_s": fmean(run.first_s for run in runs),
    }


def _overview(
    title: str,
    scenarios: Sequence[Scenario],
    controllers: Sequence[str],
    outcomes: dict[tuple[str, str], list[Outcome]],
    tolerance: float,
) -> Table:
    rows = []
    for scenario in scenarios:
        cells = []
        for name in controllers:
            runs = outcomes[scenario.name, name]
            slow, share = 100 * fmean(run.slowdown for run in runs), 100 * fmean(run.share for run in runs)
            cells.append(f"{slow:+.1f} / {share:.1f}")
        rows.append([scenario.name, *cells])
    return Table(
        title,
        ["scenario", *controllers],
        rows,
        [f"{name}: {MEANING[name]}." for name in controllers]
        + [
            f"Tolerance {100 * tolerance:g} %. Virtual time; the device is a model, nothing here was measured on a GPU."
        ],
    )


def _details(rows: Sequence[dict[str, str | float | int]]) -> Table:
    columns = [
        "scenario",
        "controller",
        "slower_%",
        "worst_run_%",
        "others_%",
        "least_run_%",
        "bad_windows_%",
        "ramp_s",
    ]
    return Table(
        "In detail",
        columns,
        [list(row.values()) for row in rows],
        [
            "worst_run, least_run: over the seeds. bad_windows: runs of 50 mini-batches slower than the tolerance.",
            "ramp: seconds until the others had 80 % of their final share, the measuring of the baseline included.",
        ],
    )


def _story(key: tuple[str, str], runs: Sequence[Outcome]) -> Table:
    return Table(f"What {key[1]} decided ({key[0]})", ["s", "why"], [[round(at, 2), why] for at, why in runs[0].story])


def _figures(
    scenarios: Sequence[Scenario], controllers: Sequence[str], outcomes: dict[tuple[str, str], list[Outcome]]
) -> list[Figure]:
    figures = [
        Figure(
            "sharing-trade",
            "What the others get for what the guaranteed job loses (one point per scenario)",
            "guaranteed job slower, %",
            "opportunistic work, % of alone",
            [_trade(name, [outcomes[scenario.name, name] for scenario in scenarios]) for name in controllers],
        )
    ]
    for scenario in scenarios:
        if scenario.name in ("drift", "away"):
            lines = [
                Series(
                    name,
                    [at for at, _, _ in outcomes[scenario.name, name][0].timeline],
                    [100 * share for _, _, share in outcomes[scenario.name, name][0].timeline],
                )
                for name in controllers
            ]
            title = f"Opportunistic work over time ({scenario.name})"
            figures.append(Figure(f"sharing-{scenario.name}", title, "s", "% of alone", lines))
    return figures


def _trade(name: str, runs: Sequence[Sequence[Outcome]]) -> Series:
    points = sorted(
        (100 * fmean(run.slowdown for run in each), 100 * fmean(run.share for run in each)) for each in runs
    )
    return Series(name, [x for x, _ in points], [y for _, y in points])
