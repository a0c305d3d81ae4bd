"""The tuner's tables: Cruise's four applications on equal hosts, hosts of two kinds, hosts that change, the search of
unequal hosts against all assignments, with its time, and the tuner of agents on hosts that may be both."""

from collections.abc import Callable

from plugins.tuner.machine.disjoint import BATCHES_MIN
from sim.report import Progress, Report
from sim.tuner import tuner
from sim.tuner.arranged import arranged_hosts

NOISE = 0.1


def applications(progress: Progress) -> Report:
    return tuner.equal_hosts(32, NOISE, BATCHES_MIN, tuner.EPOCHS, tuner.SEED, progress)


def mixed(progress: Progress) -> Report:
    return tuner.mixed_hosts(NOISE, BATCHES_MIN, tuner.EPOCHS, tuner.SEED, progress)


def changing(progress: Progress) -> Report:
    return tuner.changing_hosts(NOISE, BATCHES_MIN, tuner.SEED, progress)


def unequal(progress: Progress) -> Report:
    return tuner.unequal_hosts(tuner.SEED, 200, progress)


def both(progress: Progress) -> Report:
    return arranged_hosts(NOISE, tuner.SEED, progress)


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {
    "tuner": applications,
    "tuner-mixed": mixed,
    "tuner-changing": changing,
    "tuner-unequal": unequal,
    "tuner-both": both,
}
