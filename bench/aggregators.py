"""The aggregator's tables: a few jobs that share, plans against bursts, a trace of jobs, pools for 1,000 tensors."""

from collections.abc import Callable

from cli.sim import aggregators
from cli.sim.report import Progress, Report
from plugins.aggregator.policy.pools import POOL_HOSTS

SEEDS = range(1, 6)

EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {
    "aggregators-sharing": lambda progress: aggregators.sharing(1, progress),
    "aggregators-measured": lambda progress: aggregators.measured(SEEDS, progress),
    "aggregators-trace": lambda progress: aggregators.trace(SEEDS, 150, progress),
    "aggregators-pools": lambda progress: aggregators.pools(1, 1000, 1000, POOL_HOSTS, progress),
}
