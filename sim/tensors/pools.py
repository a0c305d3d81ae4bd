"""One job with many tensors over many aggregators: looking at all of them, by index, and in pools (AutoPS §4.3.3.4)."""

import random
import time
from dataclasses import dataclass
from fractions import Fraction

from covey.core.ids import HostId, JobId
from plugins.aggregator.policy.assign import (
    AggregationProfile,
    Assignment,
    Tensor,
    assign,
    by_scan,
    largest_first,
    refusal_of,
)
from plugins.aggregator.policy.cycle import Cycle, Share, grown, loss
from plugins.aggregator.policy.pools import best_pool, free_of, need_of, pools_of


@dataclass(frozen=True)
class Found:
    how: str
    looked_at: int
    """Number of aggregators that could get a tensor."""
    seconds: float
    used: int
    """Number of aggregators that got one."""
    new: int
    loss: float
    """Loss of the new job."""
    others: int
    """Jobs that share an aggregator with the new job: a later move of either touches the other."""


def busy(count: int, rng: random.Random) -> list[Cycle]:
    """Aggregators with a few jobs each, 40 to 90 % of their time taken."""
    found = []
    for at in range(count):
        cycle, aim = Cycle(), rng.uniform(0.4, 0.9)
        for n in range(12):
            period_us = round(rng.choice((100_000, 300_000, 450_000, 600_000)) * rng.uniform(0.95, 1.05))
            share = Share(period_us, round(period_us * rng.uniform(0.05, 0.3)))
            after = grown(cycle, JobId(f"b{at}-{n}"), share) if not refusal_of(cycle, JobId("b"), share) else cycle
            cycle = after if after.load <= aim else cycle
        found.append(cycle)
    return found


def large(tensors: int, rng: random.Random, lanes: float = 4.0) -> AggregationProfile:
    """A job that keeps this many lanes busy."""
    sizes = [rng.lognormvariate(0, 1.2) for _ in range(tensors)]
    works = [round(min(0.1, lanes * size / sum(sizes)) * 600_000) for size in sizes]
    every = largest_first([Tensor(f"t{at}", work) for at, work in enumerate(works)])
    return AggregationProfile(JobId("large"), 600_000, tuple(every), 4)


def compared(tensors: int, count: int, size: int, rng: random.Random) -> list[Found]:
    """Assign a large job in each way. Seconds are CPU time on this machine and the only result here that is not the
    same each time."""
    cycles, job = busy(count, rng), large(tensors, rng)
    began_s = time.process_time()
    scan = by_scan(job, cycles)
    scan_s = time.process_time() - began_s
    began_s = time.process_time()
    index = assign(job, cycles)
    index_s = time.process_time() - began_s
    assert index == scan, "the index and the scan must agree"
    found = [
        _found("all, looking at each for each tensor (as printed)", count, scan_s, cycles, scan, job),
        _found("all, by index", count, index_s, cycles, scan, job),
    ]
    hosts = [HostId(f"h{at:05}") for at in range(count)]
    at_host = dict(zip(hosts, cycles, strict=True))
    for how, decide in (("one pool, looking at each", by_scan), ("one pool, by index", assign)):
        pools = {f"p{at:04}": [at_host[host] for host in pool] for at, pool in enumerate(pools_of(hosts, size))}
        free = {name: free_of(pool) for name, pool in pools.items()}  # kept as jobs come and go, not counted again
        began_s = time.process_time()
        name = best_pool(free, need_of(job)) or max(free, key=lambda one: (free[one], one))
        result = decide(job, pools[name])
        seconds = time.process_time() - began_s
        assert result is not None
        found.append(
            _found(f"{how} ({len(pools)} pools of {size})", len(pools[name]), seconds, pools[name], result, job)
        )
    return found


def _found(
    how: str, looked_at: int, seconds: float, before: list[Cycle], result: Assignment, job: AggregationProfile
) -> Found:
    used = sorted(set(result.on))
    lost = max(loss(result.cycles[at].us, job.period_us) for at in used)
    others = len({name for at in used for name in result.cycles[at].shares} - {job.job})
    new = len(result.cycles) - len(before)
    return Found(how, looked_at, seconds, len(used), new, float(Fraction(lost)), others)
