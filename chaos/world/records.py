"""Records of ended jobs on a simulated host: the data base that agents use, in memory, on a disk that may fail.

A call takes no simulated time. While the disk is full, read-only or sick, calls raise OSError as those of files do. A
power failure takes some of the newest records: SQLite syncs its log now and then, and not for each of them.
"""

import errno
from collections import deque
from collections.abc import Sequence

from agent.ports.job_records import RecordFile
from chaos.world.disk import SimDisk
from covey.core.job_records import By, JobRecord, RecordsAsked, RecordsKept, RecordSum

UNSYNCED = 8
"""The most records that a power failure may take."""


class SimRecords:
    """The `covey.core.job_records.JobRecords` of a simulated host, which outlives its processes."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.file = RecordFile(":memory:")
        self._unsynced: deque[int] = deque(maxlen=UNSYNCED)

    @property
    def told(self) -> str:
        return self.file.told

    async def put(self, records: Sequence[JobRecord]) -> None:
        self._try(writes=bool(records))
        self.file.put(records)
        self._unsynced += [record.number for record in records]

    async def find(self, asked: RecordsAsked) -> list[JobRecord]:
        self._try()
        return self.file.find(asked)

    async def sums(self, asked: RecordsAsked, by: By) -> list[RecordSum]:
        self._try()
        return self.file.sums(asked, by)

    async def kept(self) -> RecordsKept:
        self._try()
        return self.file.kept()

    def power_failed(self) -> None:
        self.file.drop([number for number in self._unsynced if self._disk.rng.random() < 0.5])
        self._unsynced.clear()

    def _try(self, writes: bool = False) -> None:
        """OSError, when the disk has one now."""
        if self._disk.sick and self._disk.rng.random() < self._disk.sick:
            raise OSError(errno.EIO, "the simulated disk is sick", "scheduler/jobs.db")
        if writes and self._disk.read_only:
            raise OSError(errno.EROFS, "the simulated disk is read-only", "scheduler/jobs.db")
        if writes and not self._disk.free_bytes:
            raise OSError(errno.ENOSPC, "the simulated disk is full", "scheduler/jobs.db")
