"""Other users of this host: Covey's programs that run as them, and the files that those programs write."""

from collections.abc import Mapping
from typing import Annotated, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from covey.core.ids import JobId
from covey.ports.addresses import Address
from covey.ports.processes import ProcessId

ENFORCED = "enforced"
"""What `StartsAs.limits` says where limits hold."""


class OtherUser(msgspec.Struct, frozen=True):
    """A user, by name and number: a host where the name has another number starts nothing."""

    name: str
    uid: int


Numbers = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 20)], ...], Meta(max_length=1024)]


class EpochLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all processes of an epoch may take of a host together."""

    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    """Most memory; 0: no limit."""
    cpus: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Most processors; 0: no limit."""
    weight: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Its share of the processors, beside those of others, where jobs want more than there are."""
    gpus: Numbers | None = None
    """Numbers of the NVIDIA devices (/dev/nvidiaN) that it may open; None: every device of the host."""
    caps: Numbers = ()
    """Numbers of MIG's nodes (/dev/nvidia-caps/nvidia-capN) that it may open besides."""


class MemoryPeak(msgspec.Struct, frozen=True):
    """What the kernel counted of an epoch's memory."""

    peak_bytes: int
    """The most that it had at once; 0: this kernel does not say."""
    killed: int
    """Processes that the kernel killed, as its memory was at its limit."""
    limit_bytes: int
    """0: no limit."""


class ProgramAs(msgspec.Struct, frozen=True, kw_only=True):
    """A program of one job and epoch that is to run as another user."""

    user: OtherUser
    job: JobId
    epoch: int
    program: str
    """`supervisor`, `spares` or `beside`."""
    instance: str
    limits: EpochLimits = EpochLimits()
    """Limits of all programs of the epoch and of what they start, where the host enforces them. Only a supervisor
    changes those of an epoch that runs."""
    seconds: int = 0
    """Seconds after which all that runs of the epoch is killed; 0: never."""
    private_tmp: bool = False
    """Whether the program has a /tmp of its own."""


class TheirFiles(Protocol):
    """Files of other users' jobs, by the names that files of the agent's own jobs have (`jobs/JOB/...`). What is
    there was put there by a user who may wish this agent ill: only plain files of the folder's owner are read."""

    async def read(self, name: str, uid: int) -> bytes | None:
        """A small file, if the folder belongs to `uid`; empty where something else has its name. None: there is none.
        OSError from a sick disk."""

    async def jobs(self) -> list[str]:
        """Jobs that have a folder."""

    async def names(self, prefix: str) -> list[str]: ...
    async def size(self, name: str) -> int: ...
    async def peek(self, name: str, offset: int, size: int) -> bytes: ...
    async def delete(self, name: str) -> None: ...


class StartsAs(Protocol):
    """Programs as other users. Every method raises OSError, whose text says why not, and what to do."""

    @property
    def uid(self) -> int:
        """The user as whom this process runs."""

    def is_own(self, uid: int) -> bool:
        """Whether what belongs to this user runs as this process's own."""

    @property
    def refusal(self) -> str:
        """Why no program runs as another user now, and what to do; empty: programs do."""

    @property
    def limits(self) -> str:
        """Whether the memory and the number of processes of other users' jobs are limited: `enforced`, or why not."""

    @property
    def files(self) -> TheirFiles: ...

    def path(self, name: str) -> str:
        """The absolute path of a file of another user's job."""

    def socket(self, job: JobId, name: str) -> Address:
        """The address of a socket in the folder of a job."""

    def owner(self, process: ProcessId) -> int | None:
        """The user as whom that very process runs; None: it has ended."""

    async def start_program(self, which: ProgramAs, config: msgspec.Struct) -> ProcessId:
        """Start one of Covey's programs as another user."""

    async def limit(self, job: JobId, epoch: int, limits: EpochLimits) -> None:
        """Give an epoch that runs as another user these limits from now on."""

    async def memory_peak(self, job: JobId, epoch: int) -> MemoryPeak | None:
        """What the kernel counted of the memory of an epoch that `end` has not ended yet; None: it does not count."""

    async def end(self, job: JobId, epoch: int) -> None:
        """End all that runs of this epoch as another user, whatever its supervisor says."""

    async def forget(self, job: JobId) -> None:
        """Remove the folder of a job, with all that its user left there, and what stands for epochs that are over."""


@runtime_checkable
class LooksAgain(Protocol):
    """A starter that may come and go: the real one."""

    @property
    def counted(self) -> Mapping[str, int]:
        """What the starter did since it began, when last looked."""

    async def look(self) -> None:
        """Look whether programs can run as other users."""


class NobodyElse:
    """The `StartsAs` of a process that starts nothing as another user."""

    limits = "not enforced"

    def __init__(self, uid: int, refusal: str = "this process starts nothing as another user") -> None:
        self.uid, self.refusal = uid, refusal

    def is_own(self, uid: int) -> bool:
        return uid == self.uid

    @property
    def files(self) -> "NoFiles":
        return NoFiles()

    def path(self, name: str) -> str:
        return f"/nonexistent/{name}"

    def socket(self, job: JobId, name: str) -> Address:
        return f"unix:/nonexistent/{job}/{name}"

    def owner(self, process: ProcessId) -> int | None:
        return None

    async def start_program(self, which: ProgramAs, config: msgspec.Struct) -> ProcessId:
        raise OSError(self.refusal)

    async def limit(self, job: JobId, epoch: int, limits: EpochLimits) -> None:
        """Nothing runs as another user."""

    async def memory_peak(self, job: JobId, epoch: int) -> MemoryPeak | None:
        return None

    async def end(self, job: JobId, epoch: int) -> None:
        """Nothing runs as another user."""

    async def forget(self, job: JobId) -> None:
        """No job has a folder."""


class NoFiles:
    """No files of other users."""

    async def read(self, name: str, uid: int) -> bytes | None:
        return None

    async def jobs(self) -> list[str]:
        return []

    async def names(self, prefix: str) -> list[str]:
        return []

    async def size(self, name: str) -> int:
        raise FileNotFoundError(name)

    async def peek(self, name: str, offset: int, size: int) -> bytes:
        raise FileNotFoundError(name)

    async def delete(self, name: str) -> None:
        """There is none."""


class OneUser(NobodyElse):
    """The `StartsAs` of a simulated host: all jobs run as its one user, whose ever they are."""

    def is_own(self, uid: int) -> bool:
        return True


NOBODY_ELSE = NobodyElse(-1)
"""For a process of which nobody said as whom it runs: every owner is somebody else."""
