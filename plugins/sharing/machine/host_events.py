"""What happens to the shared GPUs of one host, and what `machine.host` asks for."""

from collections.abc import Mapping, Set

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import JobId
from covey.kernel.pages import RankLimits, RankReport
from covey.ports.devices import Condition
from plugins.facts import JobKind
from plugins.sharing.machine.events import HardLimited, Suspended

# ---- events ----------------------------------------------------------------------------------------------------------


class GpusHere(msgspec.Struct, frozen=True):
    """The GPUs of this host, with the memory of each, bytes."""

    memory_bytes: Mapping[str, int]


class JobsBefore(msgspec.Struct, frozen=True):
    """The agent starts, and these jobs with GPUs ran here before it: they are found first, all together."""

    jobs: Set[JobId]


class GangComing(msgspec.Struct, frozen=True):
    """A gang is coming, as in `plugins.facts.RanksComing`."""

    job: JobId
    epoch: int
    kind: JobKind
    gpus: Mapping[int, tuple[str, ...]]
    memory_bytes: int
    running: bool


class PagesMade(msgspec.Struct, frozen=True):
    """This rank goes by limits from now on; by the given ones when it got them from an earlier agent."""

    job: JobId
    epoch: int
    rank: int
    limits_epoch: int
    memory_limit_bytes: int


class RankReported(msgspec.Struct, frozen=True):
    """What a rank wrote since the last look."""

    job: JobId
    epoch: int
    rank: int
    report: RankReport


class GangChanged(msgspec.Struct, frozen=True):
    """A gang's class changed, as in `plugins.facts.KindChanged`."""

    job: JobId
    epoch: int
    kind: JobKind
    grant: int


class GangGone(msgspec.Struct, frozen=True):
    """The gang's processes here have ended, or it will not start here."""

    job: JobId
    epoch: int


class GpuLooked(msgspec.Struct, frozen=True):
    """The device was looked at: jobs that still hold some of it."""

    uuid: str
    holders: Set[JobId]


class GpuHealth(msgspec.Struct, frozen=True):
    """What the driver says of a device's health."""

    uuid: str
    condition: Condition
    why: str


class HostTick(msgspec.Struct, frozen=True):
    """A tick, several times a second: guaranteed ranks that say that they have no work on the device now."""

    idle: Set[tuple[JobId, int]]


class GpuAnswer(msgspec.Struct, frozen=True):
    """What became of a `PressRank`."""

    uuid: str
    answer: HardLimited | Suspended


HostEvent = (
    GpusHere | JobsBefore | GangComing | PagesMade | RankReported | GangChanged | GangGone
    | GpuLooked | GpuHealth | HostTick | GpuAnswer
)  # fmt: skip

# ---- actions ---------------------------------------------------------------------------------------------------------


class WriteLimits(msgspec.Struct, frozen=True):
    """Write limits into the page of this rank."""

    job: JobId
    rank: int
    limits: RankLimits


class ShowNeighbour(msgspec.Struct, frozen=True):
    """Show this rank the flag of a guaranteed rank on its GPU, or none."""

    job: JobId
    rank: int
    neighbour: tuple[JobId, int] | None


class LetStart(msgspec.Struct, frozen=True):
    """Let the gang start: all its GPUs here are ready for it."""

    job: JobId
    epoch: int


class GiveBack(msgspec.Struct, frozen=True):
    """Give the gang back: it cannot be here, and the scheduler takes it back."""

    job: JobId
    epoch: int
    why: str


class PressRank(msgspec.Struct, frozen=True):
    """Have the device's driver hold a rank to a limit, take it off the device, or let it on again."""

    uuid: str
    job: JobId
    rank: int
    limit_bytes: int | None
    """The limit in bytes where `how` is `limit`."""
    how: str
    """What to do: `limit`, `suspend` or `resume`."""


class EndGang(msgspec.Struct, frozen=True):
    """End the gang's processes here now: it was asked to end, and did not."""

    job: JobId
    epoch: int
    why: str


class PairFound(msgspec.Struct, frozen=True):
    """`beside` harms `job` whatever limits it has."""

    job: JobId
    beside: JobId
    slowdown: float
    error: float


HostAction = WriteLimits | ShowNeighbour | LetStart | GiveBack | PressRank | EndGang | PairFound | LogEvent
