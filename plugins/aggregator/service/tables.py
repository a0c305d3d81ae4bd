"""The tables of jobs that this host knows (`covey.tensors.numbers.blocks`).

To the three machines a table is what is summed under one assignment; they know it by its id, which is the job's own for
table 0. Table 0 is there as long as the job's gang. Another one is *open* on this host once a rank here has Blocks in
it, or another host asks this one, its coordinator, which host sums it.
"""

from collections.abc import Sequence

import msgspec

from covey.core.ids import HostId, JobId
from covey.tensors.numbers.blocks import job_of, number_of, table_id
from plugins.aggregator.machine.events import GangPlaced
from plugins.facts import JobPlaced, Place, TensorsSeen

EARLY_MAX = 1024
"""Most jobs that are not placed whose ranks have said which tables they use: some come too early, some too late."""


class JobTables:
    """The tables of gangs that the log has placed."""

    def __init__(self) -> None:
        self._placed: dict[JobId, JobPlaced] = {}
        self._open: dict[JobId, set[int]] = {}
        self._seen: dict[JobId, dict[int, tuple[int, int]]] = {}
        """Job -> table -> bytes of the table's largest tensor, and of all its Blocks."""

    def hosts(self) -> set[HostId]:
        """The hosts of all gangs."""
        return {place.host for fact in self._placed.values() for place in fact.places}

    def places(self, job: JobId) -> Sequence[Place]:
        placed = self._placed.get(job)
        return placed.places if placed is not None else ()

    def place(self, fact: JobPlaced) -> tuple[list[GangPlaced], list[GangPlaced]]:
        """Place a gang; returns the tables that are open, and those that are not: others may sum them, and know of them
        by name."""
        self._placed[fact.job] = fact
        self._seen.pop(fact.job, None)
        known = self._open.setdefault(fact.job, set()) | {0}
        each = [(table, self._gang(fact, table)) for table in range(fact.tables)]
        return [gang for table, gang in each if table in known], [gang for table, gang in each if table not in known]

    def unplace(self, job: JobId) -> list[JobId]:
        """Forget a job's gang; returns the ids of all tables that it may have had."""
        placed = self._placed.pop(job, None)
        self._seen.pop(job, None)
        opened = self._open.pop(job, set()) | {0}
        tables = placed.tables if placed is not None else 1
        return [table_id(job, table) for table in sorted(opened | set(range(tables)))]

    def use(self, table: JobId) -> None:
        """A rank here has Blocks in this table; the log may not have told this host of its gang yet."""
        job = job_of(table)
        if job not in self._placed:
            self._open.setdefault(job, set()).add(number_of(table))
            early = [each for each in self._open if each not in self._placed]
            for each in early[: max(0, len(early) - EARLY_MAX)]:
                del self._open[each]

    def open(self, table: JobId) -> list[GangPlaced]:
        """Open a table here; table 0 is one of several from then on. Empty: it is open already, no such job is placed,
        or it has no such table."""
        fact, number = self._placed.get(job_of(table)), number_of(table)
        if fact is None or not 0 < number < fact.tables or number in self._open[fact.job]:
            return []
        self._open[fact.job].add(number)
        return [self._gang(fact, number), self._gang(fact, 0)]

    def ids(self, job: JobId) -> list[JobId]:
        """The ids of the job's open tables."""
        return [table_id(job, table) for table in sorted({0, *self._open.get(job, ())})]

    def seen(self, fact: TensorsSeen) -> TensorsSeen:
        """Combine what one table's owner has seen with what those of the other tables have."""
        job = job_of(fact.job)
        tables = self._seen.setdefault(job, {})
        tables[number_of(fact.job)] = fact.largest_bytes, fact.total_bytes
        largest, total = max(size for size, _ in tables.values()), sum(size for _, size in tables.values())
        return msgspec.structs.replace(fact, job=job, largest_bytes=largest, total_bytes=max(largest, total))

    def _gang(self, fact: JobPlaced, table: int) -> GangPlaced:
        """The gang of one table. Each table prefers another host of the job, so that no card carries more than its
        share."""
        hosts = list(dict.fromkeys(place.host for place in fact.places))
        prefers = hosts[table % len(hosts)] if hosts else None
        several = table > 0 or bool(self._open[fact.job])
        return GangPlaced(table_id(fact.job, table), fact.epoch, fact.world_size, fact.places, prefers, several)
