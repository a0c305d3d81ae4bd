"""What is shown of jobs that have ended, and of the GPU·s of all jobs (`agentctl history`, `agentctl report`)."""

import msgspec

from covey.core.ids import HostId
from covey.core.job_records import GpuSeconds, JobRecord


class GpuSecondsView(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the time for which GPUs were held, GPU·s: `held` is the sum of all others."""

    held_gpu_s: float
    used_gpu_s: float
    """In which GPUs computed, and what they computed was not lost."""
    idle_gpu_s: float
    unknown_gpu_s: float
    """In which no driver said whether GPUs were in use."""
    preempted_gpu_s: float
    """Lost to preemption: since the newest checkpoint that Covey knows of, or since the job's start."""
    failed_gpu_s: float
    """Lost likewise to failures, lost hosts and time limits."""
    restarts_gpu_s: float
    """Spent on starting again."""


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job of `agentctl history`. Fields that are not described are as in `JobView`."""

    id: str
    name: str
    tenant: str
    user: str
    """The user whose job it was; empty: the agent's own."""
    uid: int | None
    job_class: str
    state: str
    ended_as: str
    """How it ended: `done`, `cancelled`, `timeout`, `oom, peak 31 GiB`, `node-lost`, `preempted`, `failed 3`; empty: it
    has not ended."""
    reason: str
    exit_code: int | None
    workers: int
    gpus: int
    submitted_wall_s: float
    started_wall_s: float | None
    ended_wall_s: float | None
    waited_s: float
    """Seconds from its submission to its first start, or to its end."""
    took_s: float
    """Seconds from its first start to its end, or to now."""
    attempts: int
    preemptions: int
    hosts_lost: int
    failures: int
    requeues: int
    hosts: tuple[str, ...]
    """The hosts of its last start."""
    seconds: GpuSecondsView
    by_gpu: dict[str, float]
    """GPU·s for which it held each GPU, named by host and UUID."""
    oom_bytes: int
    gpu_bytes: int
    """The most device memory that was seen in use on one of its GPUs, bytes; 0: not known."""
    host_bytes: int
    """The most memory that its processes had on one host, bytes; 0: not known."""
    steps: int | None
    step_s: float | None
    input_s: float
    communicate_s: float
    turns_s: float
    time_limit_s: float | None
    """The longest time that it was to run; None: no limit."""


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `agentctl history`."""

    jobs: list[HistoryRow]
    """The newest end first."""
    unanswered: dict[HostId, str]
    """Hosts that may have records which are missing here, and why they did not give them; empty: none is known to
    be missing."""
    missing: int
    """The number of jobs of which no host that answered has a record."""
    trimmed: int
    """The highest number of a job whose record was dropped to make room; 0: none was."""
    damaged: str
    """What became of a file of this host that could not be read; empty: nothing."""


class ReportRow(msgspec.Struct, frozen=True):
    """The jobs of one user, tenant or GPU, added up."""

    of: str
    jobs: int
    seconds: GpuSecondsView


class ReportView(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `agentctl report`; what is not described is as in `HistoryView`."""

    by: str
    rows: list[ReportRow]
    total: GpuSecondsView
    live: int
    """How many of the jobs have not ended; what they held up to now is in it."""
    unanswered: dict[HostId, str]
    missing: int
    trimmed: int
    damaged: str


class JobReportView(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `agentctl report JOB`."""

    job: HistoryRow
    over: bool
    """Whether the job has ended."""


def history_row(record: JobRecord, over: bool = True) -> HistoryRow:
    said = msgspec.structs.asdict(record) | {"id": record.id, "seconds": gpu_seconds(record.seconds)}
    said |= {} if over else {"exit_code": None, "ended_wall_s": None}
    return HistoryRow(**{field: said[field] for field in HistoryRow.__struct_fields__})


def gpu_seconds(seconds: GpuSeconds) -> GpuSecondsView:
    each = msgspec.structs.asdict(seconds)
    return GpuSecondsView(**{f"{name}_gpu_s": round(value, 3) for name, value in each.items()})
