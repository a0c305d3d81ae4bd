"""The tables of jobs that this host knows (`covey.tensors.numbers.blocks`).

To the machines a table is what is summed under one assignment; they know it by its id, which is the job's own for table
0. A table is *open* on this host once a rank here has Blocks in it, or another host asks this one, its coordinator,
which host sums it. Table 0 is always open where aggregators sum the job; where its own ranks may (*direct*), it is like
the others: before ranks are there, none of them can own it.
"""

from collections.abc import Sequence

import msgspec

from covey.core.ids import HostId, JobId
from covey.tensors.numbers.blocks import job_of, number_of, table_id
from plugins.aggregator.machine.events import GangPlaced
from plugins.facts import JobPlaced, Place, TensorsSeen, owner_of_table

EARLY_MAX = 1024
"""Most jobs that are not placed whose ranks have said which tables they use: some come too early, some too late."""


class JobTables:
    """The tables of gangs that the log has placed. `direct`: ranks of a job on several hosts may own them."""

    def __init__(self, direct: bool = False) -> None:
        self._direct = direct
        self._early: dict[tuple[JobId, int], set[int]] = {}
        """Job and grant that is not placed yet -> tables that ranks here use."""
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

    def hosts_of_ranks(self, job: JobId) -> set[HostId]:
        """Hosts whose ranks may own tables of the job."""
        placed = self._placed.get(job)
        return {place.host for place in placed.places} if placed is not None and self._is_direct(placed) else set()

    def grant(self, job: JobId) -> int:
        """Grant of the present run of a job; 0 when it is not placed."""
        placed = self._placed.get(job)
        return placed.epoch if placed is not None else 0

    def place(self, fact: JobPlaced) -> tuple[list[GangPlaced], list[GangPlaced]]:
        """Place a gang; returns the tables that are open, and those that are not: others may sum them, and know of them
        by name."""
        anew = fact.epoch > self.grant(fact.job)
        self._placed[fact.job] = fact
        self._seen.pop(fact.job, None)
        if anew and self._is_direct(fact):
            self._open.pop(fact.job, None)  # its ranks are others, and will say
        known = self._open.setdefault(fact.job, set())
        for early in [each for each in self._early if each[0] == fact.job and each[1] <= fact.epoch]:
            tables = self._early.pop(early)
            known |= {table for table in tables if early[1] == fact.epoch and self._may_open(fact, table)}
        if not self._is_direct(fact):
            known = known | {0}
        each = [(table, self._gang(fact, table)) for table in range(fact.tables)]
        return [gang for table, gang in each if table in known], [gang for table, gang in each if table not in known]

    def unplace(self, job: JobId) -> list[JobId]:
        """Forget a job's gang; returns the ids of all tables that it may have had."""
        placed = self._placed.pop(job, None)
        self._seen.pop(job, None)
        for early in [each for each in self._early if each[0] == job and placed and each[1] <= placed.epoch]:
            del self._early[early]
        opened = self._open.pop(job, set()) | {0}
        tables = placed.tables if placed is not None else 1
        return [table_id(job, table) for table in sorted(opened | set(range(tables)))]

    def use(self, table: JobId, grant: int) -> None:
        """A rank of this grant here has Blocks in this table; the log may not have told this host of the gang yet."""
        job = job_of(table)
        if grant > self.grant(job):
            self._early.setdefault((job, grant), set()).add(number_of(table))
            for each in list(self._early)[: max(0, len(self._early) - EARLY_MAX)]:
                del self._early[each]

    def open(self, table: JobId) -> list[GangPlaced]:
        """Open a table here; where table 0 is always open, it is one of several from then on. Empty: it is open
        already, no such job is placed, or it has no such table."""
        fact, number = self._placed.get(job_of(table)), number_of(table)
        if fact is None or not self._may_open(fact, number) or number in self._open[fact.job]:
            return []
        self._open[fact.job].add(number)
        return [self._gang(fact, each) for each in ([number] if self._is_direct(fact) else [number, 0])]

    def _may_open(self, fact: JobPlaced, number: int) -> bool:
        return (0 if self._is_direct(fact) else 1) <= number < fact.tables

    def _is_direct(self, fact: JobPlaced) -> bool:
        """Whether ranks of the job may own its tables: on one host they share memory."""
        return self._direct and len({place.host for place in fact.places}) > 1

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
        """The gang of one table. Where nobody said which host is to own it, each table prefers another host of the
        job, so that no card carries more than its share."""
        said = fact.owners[table] if table < len(fact.owners) else None
        prefers = owner_of_table(fact, table)
        direct = self._is_direct(fact)
        stays = bool(said) or direct or table > 0 or bool(self._open[fact.job] - {0})
        what = table_id(fact.job, table), fact.epoch, fact.world_size, fact.places, prefers, stays
        return GangPlaced(*what, direct, fact.owners_since if said else 0, fact.config)
