"""What the owner (`owner`) hears of the process that sums, and what it wants of it."""

from collections.abc import Mapping

import msgspec

from covey.core.ids import JobId
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.messages import NextOwner


class ProcessUp(msgspec.Struct, frozen=True):
    """The process answers: at `address`, serving these jobs under these epochs."""

    address: str
    serves: Mapping[JobId, int]
    lanes: int = 1
    """Additions at a time."""


class ProcessDown(msgspec.Struct, frozen=True):
    why: str


class LoadChanged(msgspec.Struct, frozen=True):
    load: float
    idle: frozenset[JobId] = frozenset()
    """Jobs that have not pushed anything yet."""


class Served(msgspec.Struct, frozen=True):
    """The process serves this offer; it is on disk too."""

    job: JobId
    epoch: int


class ServeJob(msgspec.Struct, frozen=True):
    """Action: write this plugin's state to disk, then have the process serve the job, then hand back `Served`."""

    held: ServedJob


class ForgetJob(msgspec.Struct, frozen=True):
    """Action: the process serves the job no more; its workers are told `instead`."""

    job: JobId
    epoch: int
    instead: int
    handed_over: bool = False
    """They stay until a moment between two iterations."""
    to: NextOwner | None = None
    """Then its state is brought there, under the epoch `instead`."""
