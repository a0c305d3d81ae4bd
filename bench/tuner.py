"""The tuner's tables: Cruise's four applications, unequal hosts against all assignments, and the time of a search."""

from collections.abc import Callable

from cli.sim import tuner
from cli.sim.report import Progress, Report


def applications(progress: Progress) -> Report:
    return tuner.equal_hosts(32, 0.1, 8, tuner.SEED, progress)


def unequal(progress: Progress) -> Report:
    return tuner.unequal_hosts(tuner.SEED, 200, progress)


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {"tuner": applications, "tuner-unequal": unequal}
