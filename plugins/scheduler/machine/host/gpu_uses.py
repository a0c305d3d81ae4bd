"""Which of this host's GPUs are not used as the log says: by processes that no job started (*foreign*), or held by a
job and computing nothing (*idle*).

    GpusLooked, every few seconds --> foreign(): GPUs that no job gets now, and why
                                  --> idle(): GPUs of jobs, and since when

Where the driver does not tell the processes of a GPU, those that were known stay known. Where it does not tell the use
of a held GPU, the GPU is not idle: its time without use begins once the driver tells again.
"""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.ids import JobId
from covey.core.units import format_seconds
from covey.ports.devices import DeviceProcess

FOREIGN_BYTES = 64 << 20
"""Device memory of a process below which it does not count as one that uses the GPU; a CUDA context has more."""
FOREIGN_S = 10.0
"""Seconds for which processes must be seen on a GPU that no job holds: those of a job that has just ended leave within
one or two. Processes that are there when this agent first sees the GPU count at once: it cannot say since when."""
IDLE_S = 600.0
"""Seconds without any use after which a held GPU is called idle: loading data and compiling take minutes."""
NAMED_MAX = 3
"""The most processes of a GPU that are named."""


class GpuLook(msgspec.Struct, frozen=True):
    """What was seen of one GPU."""

    uuid: str
    job: JobId | None
    """The job that holds the GPU, or a part of it."""
    utilization: float | None
    """Share of the driver's last window in which the GPU was in use, 0..1; None: not known, as of MIG instances."""
    processes: tuple[DeviceProcess, ...] | None = None
    """The processes there; None: nobody asked, or the driver does not say."""


class GpusLooked(msgspec.Struct, frozen=True):
    """Event: all GPUs of this host were looked at."""

    gpus: tuple[GpuLook, ...]


class Foreign(msgspec.Struct, frozen=True):
    """Processes that no job started, on a GPU that no job holds."""

    since_s: float
    processes: tuple[DeviceProcess, ...]


class Idle(msgspec.Struct, frozen=True):
    """A GPU that its job has not used since then."""

    job: JobId
    since_s: float
    processes: tuple[DeviceProcess, ...] | None


class GpuUses:
    """What this host knows of the use of its GPUs; times are those of its clock, s."""

    def __init__(self) -> None:
        self._foreign: dict[str, Foreign] = {}
        self._idle: dict[str, Idle] = {}
        self._told: set[str] = set()
        """The GPUs whose processes are known, or were, or that a job has held."""
        self._used: set[str] = set()
        """The GPUs whose utilization was told at the last look."""

    def handle(self, event: GpusLooked, now_s: float) -> Sequence[object]:
        """Take in what was seen. There is nothing to be done about it: people decide."""
        here = {look.uuid for look in event.gpus}
        for known in (self._foreign, self._idle):
            for uuid in [uuid for uuid in known if uuid not in here]:
                del known[uuid]
        for look in event.gpus:
            self._see_foreign(look, now_s)
            self._see_idle(look, now_s)
        self._told = {look.uuid for look in event.gpus if look.uuid in self._told or _tells_processes(look)}
        self._used = {look.uuid for look in event.gpus if look.utilization is not None}
        return ()

    def _see_foreign(self, look: GpuLook, now_s: float) -> None:
        if look.job is not None:
            self._foreign.pop(look.uuid, None)
        elif look.processes is not None:
            using = tuple(
                one for one in look.processes if one.memory_bytes is None or one.memory_bytes >= FOREIGN_BYTES
            )
            known = self._foreign.pop(look.uuid, None)
            first_s = now_s if look.uuid in self._told else now_s - FOREIGN_S
            if using:
                self._foreign[look.uuid] = Foreign(known.since_s if known is not None else first_s, using)

    def _see_idle(self, look: GpuLook, now_s: float) -> None:
        if look.job is None or (look.utilization is not None and look.utilization > 0):
            self._idle.pop(look.uuid, None)
            return
        known = self._idle.get(look.uuid)
        if known is None or known.job != look.job or look.utilization is None:
            self._idle[look.uuid] = Idle(look.job, now_s, look.processes)
        elif look.processes is not None:
            self._idle[look.uuid] = msgspec.structs.replace(known, processes=look.processes)

    # ---- what is known ----

    def tells_processes(self, uuid: str) -> bool:
        """Whether it is known who uses the GPU: a job holds it, or its driver told its processes at least once."""
        return uuid in self._told

    def tells_utilization(self, uuid: str) -> bool:
        """Whether the driver told at the last look how much the GPU is in use."""
        return uuid in self._used

    def foreign(self, now_s: float) -> Mapping[str, str]:
        """GPUs that are used by processes that no job started, and why no job gets them, in words."""
        return {
            uuid: f"used by {_named(one.processes)}, which no job of the rack started"
            for uuid, one in self._foreign.items()
            if now_s - one.since_s >= FOREIGN_S
        }

    def idle(self, now_s: float) -> Mapping[str, Idle]:
        """GPUs that a job holds and has not used for `IDLE_S` seconds or more."""
        return {uuid: one for uuid, one in self._idle.items() if now_s - one.since_s >= IDLE_S}


def _tells_processes(look: GpuLook) -> bool:
    return look.job is not None or look.processes is not None


def idle_words(idle: Idle, now_s: float) -> str:
    """What is known of an idle GPU: `idle for 12 min: no process is there`."""
    for_s = f"idle for {format_seconds(now_s - idle.since_s)}"
    if idle.processes is None:
        return for_s
    return f"{for_s}: {f'{_named(idle.processes)} computes nothing' if idle.processes else 'no process is there'}"


def _named(processes: Sequence[DeviceProcess]) -> str:
    """`process 4242`, for a few; without what they use, which changes all the time, and this is gossiped."""
    found, more = [str(one.pid) for one in processes[:NAMED_MAX]], len(processes) - NAMED_MAX
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(found)}{f' and {more} more' if more > 0 else ''}"
