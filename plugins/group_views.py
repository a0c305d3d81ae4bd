"""What is shown of jobs that take turns on hosts that they share (`agentctl groups`)."""

import msgspec

from covey.core.ids import HostId, JobId


class GroupJobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a group that shares hosts in turns."""

    job: JobId
    hosts: tuple[HostId, ...]
    processes: int
    elastic: bool
    """Whether the job can be moved to another group."""
    profiled: bool
    """Whether enough of its mini-batches were measured; until then nothing is decided about it."""
    work_s: float
    """Host-seconds of computing in one mini-batch, its hosts together."""
    net_s: float
    """Seconds of communication in one mini-batch."""
    step_s: float
    """Seconds from one mini-batch to the next, as measured, waits for turns included; 0: not known."""
    left_s: float | None
    """What it has left, in seconds alone, as far as that is known; it decides the order of turns."""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group of jobs that share hosts in turns (`agentctl groups`)."""

    group: str
    """The group's name: its pool, and its lowest job."""
    pool: str
    """The jobs that may share hosts: `auto`, or `TENANT/NAME`."""
    hosts: tuple[HostId, ...]
    jobs: tuple[GroupJobView, ...]
    """The jobs, in the order of their turns."""
    decided: str
    """What was decided last about the pool, or why nothing was, in words."""
    predicted_s: float | None = None
    """Seconds in which every job of the group runs one mini-batch, as predicted (Harmony, equation 4.1); None: a job is
    not profiled."""
    cpu: float | None = None
    """Share of the time in which processors compute, as predicted, 0..1."""
    net: float | None = None
    """Share of the time in which the network is used, as predicted, 0..1."""
    cpu_measured: float | None = None
    """Share of the time in which processors compute, from what was measured of its jobs."""
    net_measured: float | None = None
    """Share of the time in which the network is used, from what was measured of its jobs."""
    age_s: float = 0.0
