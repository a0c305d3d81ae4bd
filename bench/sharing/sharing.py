"""Sharing's tables: controllers, sharing on job traces, what is assumed swept, AntMan's tenants, memory by trial."""

from collections.abc import Callable
from pathlib import Path

from plugins.sharing.policy.interference import TOLERANCE
from sim.report import Progress, Report
from sim.sharing import reports as sharing_reports
from sim.sharing import sharing

TRACES = [Path(__file__).parents[1] / "traces" / f"tiresias480r_seed{seed}.csv.gz" for seed in range(1, 6)]
"""Traces of 480 jobs each, rebuilt from the text of the Tiresias paper (bench/traces/README.md)."""


def controllers(progress: Progress) -> Report:
    seeds = range(sharing.SEED, sharing.SEED + sharing.SEEDS)
    return sharing.compare(sharing.SCENARIOS, sharing.COMPARED, TOLERANCE, seeds, sharing.SECONDS, progress)


def rules(progress: Progress) -> Report:
    """Run the ladder, and the ladder without each of its rules, for three times the usual time: rules may act minutes
    apart."""
    seeds, controllers = range(sharing.SEED, sharing.SEED + 2 * sharing.SEEDS), ("ladder", *sharing.WITHOUT)
    scenarios = (*sharing.SCENARIOS, *sharing.RULED)
    return sharing.compare(
        scenarios, controllers, TOLERANCE, seeds, 3 * sharing.SECONDS, progress, name="sharing-rules"
    )


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {
    "sharing": controllers,
    "sharing-rules": rules,
    "sharing-trace": lambda progress: sharing_reports.trace(TRACES, progress),
    "sharing-sweep": lambda progress: sharing_reports.sweep(TRACES, progress),
    "sharing-classes": lambda progress: sharing_reports.classes(TRACES, progress),
    "sharing-pairs": sharing_reports.pairs,
    "sharing-split": sharing_reports.split,
}
