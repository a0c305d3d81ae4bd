"""Remote memory's tables: the paper's cluster, a full and a lost rack, batch eviction, thousands of old views."""

from collections.abc import Callable

from sim.memory import racks as memory_racks
from sim.memory import reports as memory_reports
from sim.memory.memory import AGES_S
from sim.memory.reports import Setting
from sim.report import Progress, Report

EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {
    "memory-cluster": lambda progress: memory_reports.cluster(Setting(), progress),
    "memory-sensitivity": lambda progress: memory_reports.sensitivity(Setting(), progress),
    "memory-fill": lambda progress: memory_reports.fill(Setting(), progress),
    "memory-eviction": lambda progress: memory_reports.batch_eviction(10, 500, 5000, 1, progress),
    "memory-racks": lambda progress: memory_racks.report(1, progress),
    "memory-views": lambda progress: memory_reports.views((1000, 5000), AGES_S, 1, progress),
}
