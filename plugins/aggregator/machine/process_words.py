"""Events from the process that sums, as `owner` hears them, and the actions that it asks for."""

from collections.abc import Mapping

import msgspec

from covey.core.ids import JobId
from covey.wire.sums import NextOwner
from plugins.aggregator.machine.served_job import ServedJob


class ProcessUp(msgspec.Struct, frozen=True):
    """The process answers: at `address`, serving these jobs under these epochs."""

    address: str
    serves: Mapping[JobId, int]
    lanes: int = 1
    """Number of additions that it does at a time."""


class ProcessDown(msgspec.Struct, frozen=True):
    why: str


class LoadChanged(msgspec.Struct, frozen=True):
    load: float
    idle: frozenset[JobId] = frozenset()
    """Jobs that have not pushed anything yet."""


class Served(msgspec.Struct, frozen=True):
    """The process serves this offer, which is on disk too."""

    job: JobId
    epoch: int


class ServeJob(msgspec.Struct, frozen=True):
    """Action: write this plugin's state to disk, then have the process serve the job, then hand back `Served`."""

    held: ServedJob


class ForgetJob(msgspec.Struct, frozen=True):
    """Action: let the process stop serving the job; its workers are told `instead`."""

    job: JobId
    epoch: int
    instead: int
    handed_over: bool = False
    """The workers stay until a moment between two iterations."""
    to: NextOwner | None = None
    """Owner to which the job's state is then brought, under the epoch `instead`."""
