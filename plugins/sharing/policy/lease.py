"""What one rank is told, from what the machines of its GPUs say (the strictest of them counts), and what it may do when
its agent has fallen silent: limits end.

AntMan's published job side waits for ever at a limit of 0, HAMi's while its monitor is dead. Here every limit carries a
lease. When it is over a guaranteed job runs free, an opportunistic one falls back to its failsafe rate, which is never
0; memory stays as it was, since there is no agent to make room.
"""

from collections.abc import Sequence

from covey.kernel.pages import RankLimits
from plugins.sharing.messages import LEASE_S, Limits
from plugins.sharing.policy.ladder import FREE, Rates, plain

NS = 1_000_000_000
FAILSAFE_BESIDE = 0.1
"""The rate of an opportunistic job that outlives its lease beside a guaranteed one."""
FAILSAFE_ALONE = 1.0
"""The rate of an opportunistic job that outlives its lease without a guaranteed one."""


def failsafe(beside_guaranteed: bool) -> float:
    """The rate that goes out with every limit, for the time when no more of them come."""
    return FAILSAFE_BESIDE if beside_guaranteed else FAILSAFE_ALONE


def effective(rates: Rates, failsafe: float, age_s: float, lease_s: float = LEASE_S) -> Rates:
    """The rates in force `age_s` seconds after the agent's last message."""
    if age_s <= lease_s:
        return rates
    return FREE if failsafe >= 1 else plain(failsafe)


def combined(limits: Sequence[Limits], epoch: int, guaranteed: bool, alone: bool, now_s: float) -> RankLimits:
    """The page of a rank. A rank that is held back is held back for a lease, and one that may do all that it wants
    beside a guaranteed job may do so for a lease; memory is that of each of its GPUs. `alone`: no other job is on any
    of these."""
    heads = [limit.head_s for limit in limits if limit.head_s is not None]
    idle, busy = min(limit.idle for limit in limits), min(limit.busy for limit in limits)
    failsafe = min(limit.failsafe for limit in limits)
    endless = idle >= 1 and busy >= 1 and not heads and failsafe >= 1
    return RankLimits(
        epoch=epoch,
        idle=idle,
        head_ns=round(min(heads) * NS) if heads else -1,
        busy=busy,
        memory_bytes=max(1, min(limit.memory_bytes for limit in limits)),  # 0 would be no limit
        failsafe=failsafe,
        lease_ns=0 if endless else round((now_s + min(limit.lease_s for limit in limits)) * NS),
        guaranteed=guaranteed,
        alone=alone,
    )


def same_but_for_time(one: RankLimits | None, other: RankLimits) -> bool:
    """Whether two pages differ only in epoch and lease: nothing that the rank would have to apply."""
    return one is not None and _timeless(one) == _timeless(other)


def _timeless(limits: RankLimits) -> tuple[float | int | bool, ...]:
    rates = (limits.idle, limits.head_ns, limits.busy, limits.failsafe)
    return (*rates, limits.memory_bytes, limits.guaranteed, limits.alone, limits.lease_ns == 0)
