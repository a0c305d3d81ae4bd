"""The port for records of jobs that have ended: a small data base on each host, bounded, which outlives the log's own
list of ended jobs.

A record is made from the log alone, so all hosts make the same one of a job; a job is told from others by its number
and by when it was submitted. What a host lacks it asks of the others (`plugins/scheduler/service/history.py`).
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

GpuS = Annotated[float, Meta(ge=0, le=1e15)]
"""GPU·s: seconds times GPUs."""
Wall = Annotated[float, Meta(ge=0, le=1e12)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(max_length=64)]
REASON_MAX = 300
"""The most characters of why a job ended that are recorded."""
HOSTS_MAX = 64
"""The most hosts of a job's last start that are recorded."""
GPUS_MAX = 256
"""The most GPUs of a job that are recorded one by one; the time of others is kept under `OTHERS`."""
OTHERS = "others"
NUMBER_MAX = 1 << 53


class GpuSeconds(msgspec.Struct, frozen=True, array_like=True):
    """What became of the time for which a job held GPUs, in GPU·s: `held` is the sum of all others."""

    held: GpuS = 0.0
    used: GpuS = 0.0
    """In which GPUs computed for the job, and what they computed was not lost: seconds times utilization."""
    idle: GpuS = 0.0
    """In which GPUs computed nothing."""
    unknown: GpuS = 0.0
    """In which no driver said whether GPUs were in use."""
    preempted: GpuS = 0.0
    """Lost to preemption: from the newest checkpoint, or else from the start that was preempted, to the end of its
    ranks."""
    failed: GpuS = 0.0
    """Lost to failures, lost hosts and time limits, likewise."""
    restarts: GpuS = 0.0
    """Spent on starting again, in starts after the first: until the first step, or until ranks ran where steps are not
    seen."""

    @property
    def lost(self) -> float:
        return self.preempted + self.failed + self.restarts

    def __add__(self, other: "GpuSeconds") -> "GpuSeconds":
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return GpuSeconds(*(one + more for one, more in zip(mine, others, strict=True)))

    def times(self, share: float) -> "GpuSeconds":
        """This share of each."""
        return GpuSeconds(*(each * share for each in msgspec.structs.astuple(self)))

    def check(self) -> None:
        """Raise AssertionError unless everything that was held is accounted for, once."""
        parts = msgspec.structs.astuple(self)
        assert all(each >= 0 and math.isfinite(each) for each in parts), f"less than nothing: {self}"
        told = self.used + self.idle + self.unknown + self.lost
        assert math.isclose(self.held, told, rel_tol=1e-6, abs_tol=1e-3), f"held {self.held} GPU s, told {told}: {self}"


class JobRecord(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a job that has ended. Later versions add fields at the end, with defaults."""

    number: Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
    submitted_wall_s: Wall
    ended_wall_s: Wall
    name: Name
    tenant: Name
    user: Name
    """The user whose job it was; empty: the agent's own."""
    uid: Annotated[int, Meta(ge=0, le=1 << 32)] | None
    job_class: Name
    state: Name
    """`done`, `failed` or `cancelled`."""
    ended_as: Annotated[str, Meta(max_length=64)]
    """How it ended, in a word or two: `done`, `cancelled`, `timeout`, `oom, peak 31 GiB`, `node-lost`, `preempted`,
    `failed 3`."""
    reason: Annotated[str, Meta(max_length=REASON_MAX)]
    exit_code: Annotated[int, Meta(ge=-255, le=255)]
    workers: Count
    gpus: Count
    """The job's GPUs in all."""
    started_wall_s: Wall | None = None
    """When it first started; None: it never did."""
    waited_s: Seconds = 0.0
    """Seconds from its submission to its first start, or to its end."""
    took_s: Seconds = 0.0
    """Seconds from its first start to its end."""
    attempts: Count = 0
    preemptions: Count = 0
    hosts_lost: Count = 0
    failures: Count = 0
    requeues: Count = 0
    """How often it asked to be started again (exit 75)."""
    hosts: Annotated[tuple[Name, ...], Meta(max_length=HOSTS_MAX)] = ()
    """The hosts of its last start."""
    seconds: GpuSeconds = GpuSeconds()
    by_gpu: Annotated[dict[Annotated[str, Meta(max_length=200)], GpuS], Meta(max_length=GPUS_MAX + 1)] = {}
    """GPU·s for which it held each GPU, named by host and UUID."""
    oom_bytes: Bytes = 0
    """Memory of the host's ranks whose process the kernel killed at their limit, bytes; 0: it did not."""
    gpu_bytes: Bytes = 0
    """The most device memory that was seen in use on one of its GPUs, or of one rank, bytes; 0: not known."""
    host_bytes: Bytes = 0
    """The most memory that its processes had on one host, bytes; 0: not known."""
    steps: Count | None = None
    """The newest step that the log knew; None: none was reported."""
    step_s: Seconds | None = None
    """Median seconds of a step of its last start, on its slowest host; None: too few were reported. The next three are
    parts of it."""
    input_s: Seconds = 0.0
    communicate_s: Seconds = 0.0
    turns_s: Seconds = 0.0
    time_limit_s: Seconds | None = None

    @property
    def id(self) -> str:
        return f"j{self.number}"


Range = tuple[Annotated[int, Meta(ge=0, le=NUMBER_MAX)], Annotated[int, Meta(ge=0, le=NUMBER_MAX)]]
"""Job numbers from the first up to and with the second."""


class RecordsAsked(msgspec.Struct, frozen=True):
    """Which records are wanted. Empty fields ask for all."""

    user: str = ""
    tenant: str = ""
    name: str = ""
    """The job's name; `*` stands for any characters, `?` for one."""
    state: str = ""
    """A state, or the first word of how it ended, such as `oom`."""
    host: str = ""
    """A host of its last start."""
    since_wall_s: float | None = None
    """Jobs that ended then or later."""
    uid: int | None = None
    """Jobs of this user's number."""
    number: int | None = None
    numbers: tuple[Range, ...] = ()
    """These numbers, the highest first; other fields but `limit` do not count then."""
    limit: int = 0
    """The newest so many, by when they ended; 0: all."""


By = Literal["user", "tenant", "gpu"]
"""By what GPU·s are added up; `gpu`: by host and UUID, each with its part, by time, of what became of its jobs'
GPU·s."""


class RecordSum(msgspec.Struct, frozen=True):
    """Jobs added up that have one user, tenant or GPU."""

    of: str
    jobs: int
    seconds: GpuSeconds


class JobRecords(Protocol):
    """Records of ended jobs on this host. All work is done elsewhere than in the event loop. OSError: the data base
    cannot be read or written now; it is tried again with the next call."""

    @property
    def told(self) -> str:
        """What became of an earlier file that could not be read, in words; empty: nothing."""

    @property
    def trimmed(self) -> int:
        """The highest number of a record that was dropped here to make room; 0: none was."""

    async def put(self, records: Sequence[JobRecord]) -> None:
        """Keep these records, durably on return; of one number the newer submission stays. The oldest go where there
        are too many."""

    async def find(self, asked: RecordsAsked) -> list[JobRecord]:
        """The records that are asked for, the newest end first."""

    async def sums(self, asked: RecordsAsked, by: By) -> list[RecordSum]:
        """The jobs that are asked for (`RecordsAsked.limit` does not count), added up."""

    async def ranges(self) -> tuple[Range, ...]:
        """The numbers of all jobs that have a record here, ascending."""


class NoJobRecords:
    """A host that keeps no records."""

    told = ""
    trimmed = 0

    async def put(self, records: Sequence[JobRecord]) -> None:
        """Keep nothing."""

    async def find(self, asked: RecordsAsked) -> list[JobRecord]:
        return []

    async def sums(self, asked: RecordsAsked, by: By) -> list[RecordSum]:
        return []

    async def ranges(self) -> tuple[Range, ...]:
        return ()


NO_JOB_RECORDS = NoJobRecords()


def ranges_of(numbers: Sequence[int]) -> tuple[Range, ...]:
    """Ascending numbers as ranges."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def lacking(below: int, ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The numbers from 1 up to, and without, `below` that are in none of these ascending ranges, which do not meet."""
    found, first = [], 1
    for low, high in ranges:
        if low >= below:
            break
        if first < low:
            found.append((first, low - 1))
        first = max(first, high + 1)
    return (*found, (first, below - 1)) if first < below else tuple(found)
