"""Limits end: what a job may do when its agent has fallen silent.

AntMan's published job side waits for ever at a limit of 0, HAMi's while its monitor is dead. Here every limit carries a
lease. When it is over a guaranteed job runs free, an opportunistic one falls back to its failsafe rate, which is never
0; memory stays as it was, since there is no agent to make room.
"""

from plugins.sharing.messages import LEASE_S
from plugins.sharing.policy.ladder import FREE, Rates, plain

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
