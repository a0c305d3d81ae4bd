"""What a job and the agent of its host tell one another about one GPU, in the agent's terms. It travels in shared pages
(`covey.kernel.pages`); nothing of it crosses the network.

    job                               agent
     |-- Report (each mini-batch) ----->|
     |<------------------ Limits -------|
     |   (rates at once, memory at the next boundary; then a Report says so)
"""

import math

import msgspec

from covey.core.ids import JobId
from plugins.facts import JobKind

LEASE_S = 2.0
"""Seconds for which limits hold without a word from the agent."""
Kind = JobKind
"""A job's class as the scheduler tells it."""


class Report(msgspec.Struct, frozen=True):
    """A job's report at the end of a mini-batch."""

    job: JobId
    acked: int
    """The newest `Limits.epoch` it has applied."""
    step: int
    step_s: float
    idle_s: float
    """Seconds of `step_s` without work on the device."""
    peak_bytes: int
    """The most bytes of device memory that the job held in this mini-batch."""
    stable_bytes: int
    """The fewest bytes of device memory: model and optimizer, which the job cannot give back between mini-batches."""
    spill_bytes: int = 0
    """Bytes that the job had to place in host memory because of its limit (AntMan §3.1.1)."""
    retries: int = 0
    """Allocations that failed at first because of its limit: it is about to spill."""
    gate: bool = True
    """Whether the job can be held back."""
    flag: bool = True
    """Whether the job says when it has no work on the device."""
    ended_s: float | None = None
    """When the mini-batch ended, on the agent's clock: a report is up to a tenth of a second late."""
    fixed: bool = False
    """Whether the job took `stable_bytes` when it started, and goes by no smaller limit (JAX)."""


class Limits(msgspec.Struct, frozen=True):
    """The agent's limits: in force from the next operation (rates) and the next mini-batch (memory) on."""

    job: JobId
    epoch: int
    idle: float
    head_s: float | None
    """The first seconds of each idle phase in which the job may run; None: all of it."""
    busy: float
    memory_bytes: int
    failsafe: float
    """The rate to fall back to when the lease is over; never 0."""
    lease_s: float = LEASE_S

    @property
    def head(self) -> float:
        """`head_s` as `policy.ladder.Rates` has it, s."""
        return math.inf if self.head_s is None else self.head_s
