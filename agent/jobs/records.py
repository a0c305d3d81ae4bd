"""The records of ranks that were started here: one per job and epoch, and where its files are."""

import re

import msgspec

from covey.core.ids import JobId
from covey.ports.processes import ProcessId
from covey.wire import checked
from plugins.base import RanksSpec

START_OR_FORGOTTEN = re.compile(r"^jobs/([a-z0-9][a-z0-9.-]{0,62})/(?:(\d{1,18})\.start|forgotten)$")
Key = tuple[JobId, int]


class StartRecord(msgspec.Struct, frozen=True):
    """The file `jobs/JOB/EPOCH.start`: what was started here under one epoch."""

    spec: RanksSpec
    token: str
    supervisor: ProcessId | None = None
    """The supervisor's process; None until it is started, or when the agent died in between."""
    output_bytes_max: int = 0
    """The most bytes of output that each rank may keep on this host."""
    joined: tuple[int, ...] = ()
    """Ranks that came from other hosts, or as new processes of an elastic job, while others of this epoch ran here."""
    changed: int = 0
    """How often processes of the elastic job joined or left those that run here."""
    left: tuple[int, ...] = ()
    """Ranks that left this place and, as far as was known when they did, have not all ended."""


class Fence(msgspec.Struct, frozen=True):
    """The file `jobs/JOB/forgotten`: no epoch up to this one starts here any more, nor ranks of this epoch that came
    here no later than these (`Place.since`)."""

    epoch: int
    wall_s: float = 0.0
    """When the epoch ended, on the wall clock, for people and for how long its output is kept."""
    since: int = 0

    @property
    def over(self) -> tuple[int, int]:
        return self.epoch, self.since

    def encode(self) -> bytes:
        return checked.seal(self)


_fence = msgspec.msgpack.Decoder(Fence)


def fence_of(data: bytes, now_wall_s: float) -> Fence:
    """The fence in a record. One that is damaged, or of another version, fences nothing: the scheduler's own fence
    still keeps an older grant from starting. A record without a date gets the time of now."""
    try:
        found = checked.unseal(data, _fence)
    except (checked.Damaged, checked.OtherFormat):
        found = Fence(0)
    return Fence(found.epoch, found.wall_s or now_wall_s)


def forgotten_of(job: JobId) -> str:
    return f"jobs/{job}/forgotten"


decoder: msgspec.msgpack.Decoder[StartRecord] = msgspec.msgpack.Decoder(StartRecord)


def instance_of(key: Key) -> str:
    return f"sup-{key[0]}-{key[1]}"


def spares_of(key: Key) -> str:
    """The instance name of the keeper of spares."""
    return f"spares-{key[0]}-{key[1]}"


def file_of(key: Key, ending: str) -> str:
    return f"jobs/{key[0]}/{key[1]}.{ending}"


def curve_of(job: JobId) -> str:
    return f"jobs/{job}/curve"


def log_of(job: JobId, rank: int) -> str:
    return f"jobs/{job}/rank{rank}.log"
