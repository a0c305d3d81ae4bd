"""The aggregator's tables: a few jobs that share, plans against bursts, a trace of jobs, pools for 1,000 tensors."""

from collections.abc import Callable
from pathlib import Path

from plugins.aggregator.policy.pools import POOL_HOSTS
from sim.report import Progress, Report
from sim.tensors import aggregators
from sim.tensors.jobs import Workload

SEEDS = range(1, 6)
PHILLY = Path(__file__).parents[1] / "traces" / "philly_vc_ee9e8c.csv.gz"


def philly() -> tuple[tuple[float, float, int], ...]:
    """The first 150 jobs of several GPUs of one virtual cluster; the thesis's trace is from the same firm."""
    return aggregators.read_recorded(PHILLY, 150)


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {
    "aggregators-sharing": lambda progress: aggregators.sharing(1, progress),
    "aggregators-measured": lambda progress: aggregators.measured(SEEDS, progress),
    "aggregators-trace": lambda progress: aggregators.trace(SEEDS, Workload(), progress),
    "aggregators-philly": lambda progress: aggregators.trace(SEEDS, Workload(recorded=philly()), progress),
    "aggregators-pools": lambda progress: aggregators.pools(1, 1000, 1000, POOL_HOSTS, progress),
}
