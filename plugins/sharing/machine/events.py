"""What happens to one GPU, and what its machine asks for. Jobs are named by `JobId`; bytes are device memory."""

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import JobId
from plugins.sharing.messages import Kind, Limits, Report

# ---- events ----------------------------------------------------------------------------------------------------------


class RankArrived(msgspec.Struct, frozen=True):
    """The scheduler placed a job here; it waits for `StartRank`."""

    job: JobId
    kind: Kind
    memory_bytes: int
    """Bytes that the job asks for: its peak; 0: it did not say, and is given all until it shows what it needs."""
    weight: float = 1.0
    """Weight of an opportunistic job among the opportunistic jobs of its GPU."""
    flag: bool = True
    """Whether the job can say when it is idle on the device."""


class Found(msgspec.Struct, frozen=True):
    """A job that ran here before the agent started: it announced itself and the limit it goes by."""

    job: JobId
    kind: Kind
    memory_bytes: int
    limit_bytes: int
    epoch: int
    """Epoch of the limits that the job has applied."""
    weight: float = 1.0
    flag: bool = True


class Reported(msgspec.Struct, frozen=True):
    """A job here finished a mini-batch."""

    report: Report


class Acked(msgspec.Struct, frozen=True):
    """A job has applied the limits of this epoch, and no mini-batch was finished since."""

    job: JobId
    epoch: int
    gate: bool
    """Whether the job can be held back."""
    flag: bool
    """Whether the job says when it is idle on the device."""


class TimePassed(msgspec.Struct, frozen=True):
    """Time passed; told several times a second. `busy`: the guaranteed job has work on the device now."""

    busy: bool


class RankEnded(msgspec.Struct, frozen=True):
    """The process of a job is gone; its memory may take a moment."""

    job: JobId


class Freed(msgspec.Struct, frozen=True):
    """The device shows no memory of this job any more."""

    job: JobId


class Retagged(msgspec.Struct, frozen=True):
    """The log upgraded or downgraded the whole gang, all ranks at one index (AntMan §3.3). An index older than one seen
    changes nothing."""

    job: JobId
    kind: Kind
    grant: int


class HardLimited(msgspec.Struct, frozen=True):
    """The driver enforces the limit of a `HardLimit` now (`ok`), or cannot."""

    job: JobId
    limit_bytes: int
    ok: bool


class Suspended(msgspec.Struct, frozen=True):
    """The outcome of a `Suspend`: the job holds no device memory now (`ok`), or could not be suspended."""

    job: JobId
    ok: bool


class DeviceLost(msgspec.Struct, frozen=True):
    """The device is to be used no more: an XID, uncorrectable errors, a recovery action of the driver."""

    reason: str


class DeviceDraining(msgspec.Struct, frozen=True):
    """The device asks to be emptied (a recovery action `drain`, rows to remap), but what runs on it may go on."""

    reason: str


GpuEvent = (
    RankArrived
    | Found
    | Reported
    | Acked
    | TimePassed
    | RankEnded
    | Freed
    | Retagged
    | HardLimited
    | Suspended
    | DeviceLost
    | DeviceDraining
)

# ---- actions ---------------------------------------------------------------------------------------------------------


class SetLimits(msgspec.Struct, frozen=True):
    """Tell the job its limits. They are sent again unchanged to renew the lease."""

    limits: Limits


class StartRank(msgspec.Struct, frozen=True):
    """The job's memory is there: it may start, under the limits sent last."""

    job: JobId


class Refuse(msgspec.Struct, frozen=True):
    """The job cannot be here."""

    job: JobId
    why: str


class HardLimit(msgspec.Struct, frozen=True):
    """Ask the driver to enforce a limit that the job did not apply."""

    job: JobId
    limit_bytes: int


class Suspend(msgspec.Struct, frozen=True):
    """Move the job off the device, its state kept in host memory."""

    job: JobId
    why: str


class Resume(msgspec.Struct, frozen=True):
    """Let a suspended job run again: its memory is there, under the limits sent last."""

    job: JobId


class Terminate(msgspec.Struct, frozen=True):
    """Ask the job to end."""

    job: JobId
    why: str


class Kill(msgspec.Struct, frozen=True):
    """Kill the job's processes."""

    job: JobId
    why: str


GpuAction = SetLimits | StartRank | Refuse | HardLimit | Suspend | Resume | Terminate | Kill | LogEvent
Actions = list[GpuAction]
