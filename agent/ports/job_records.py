"""Records of ended jobs in one SQLite file, bounded in rows and bytes.

`RecordFile` does the work, in whichever thread calls it; `ThreadedRecords` has a thread of its own for it, so that the
event loop never waits for a disk. The file is written with a write-ahead log and without fsync at each commit: a power
failure may take the newest records, never the file, and what is missing comes again from the log or from other hosts.

A file that cannot be read (cut short, overwritten, of another version) is moved aside as `NAME.damaged`, what happened
is told, and a new one is begun.
"""

import asyncio
import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from covey.core.job_records import By, GpuSeconds, JobRecord, Range, RecordsAsked, RecordSum
from covey.ports.log import Logger

R = TypeVar("R")
RECORDS = "scheduler/jobs.db"
"""The file of a host's records, below its state_dir."""
ROWS_MAX = 200_000
"""The most records that are kept; the oldest go first. At 2,700 jobs a day that is more than two months."""
BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of records, without what SQLite adds (a third for short ones)."""
PART = 256
"""Records that are written by one statement."""
TRIM = 64
"""When there is no room, 1/64 of the records goes at once."""
SCHEMA = 1
"""Version of the table, in the file's `user_version`."""
PARTS = GpuSeconds.__struct_fields__
ASIDE = ".damaged"
BESIDE = ("", "-wal", "-shm")
"""The files that SQLite makes for one data base."""
CREATE = f"""
CREATE TABLE jobs(number INTEGER PRIMARY KEY, submitted REAL NOT NULL, ended REAL NOT NULL, name TEXT NOT NULL,
    tenant TEXT NOT NULL, user TEXT NOT NULL, uid INTEGER, state TEXT NOT NULL, ended_as TEXT NOT NULL,
    hosts TEXT NOT NULL, {", ".join(f"{part} REAL NOT NULL" for part in PARTS)}, record BLOB NOT NULL);
CREATE INDEX by_end ON jobs(ended);
CREATE TABLE trimmed(below INTEGER NOT NULL);
INSERT INTO trimmed VALUES (0);
PRAGMA user_version = {SCHEMA};
"""
COLUMNS = (
    "number",
    "submitted",
    "ended",
    "name",
    "tenant",
    "user",
    "uid",
    "state",
    "ended_as",
    "hosts",
    *PARTS,
    "record",
)
PUT = (
    f"INSERT INTO jobs({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) ON CONFLICT(number) DO UPDATE "
    f"SET {', '.join(f'{name} = excluded.{name}' for name in COLUMNS[1:])} WHERE excluded.submitted > submitted"
)
RANGES = """SELECT min(number), max(number) FROM
(SELECT number, number - row_number() OVER (ORDER BY number) AS island FROM jobs) GROUP BY island ORDER BY 1"""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JobRecord).decode


class Unusable(Exception):
    """A file that holds no records of this version."""


class RecordFile:
    """The data base at `path`, which `:memory:` keeps in memory. Every call may raise OSError."""

    def __init__(self, path: str, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._path, self._rows_max, self._bytes_max = path, rows_max, bytes_max
        self._open: sqlite3.Connection | None = None
        self._rows = self._bytes = self.trimmed = 0
        self.told = ""

    # ---- what is asked of it ----

    def put(self, records: Sequence[JobRecord]) -> None:
        self._do(lambda base: self._put(base, records))

    def drop(self, numbers: Sequence[int]) -> None:
        """Lose the records of these jobs, as a power failure may."""
        self._do(lambda base: self._delete(base, numbers))

    def find(self, asked: RecordsAsked) -> list[JobRecord]:
        return self._do(lambda base: list(self._found(base, asked)))

    def sums(self, asked: RecordsAsked, by: By) -> list[RecordSum]:
        return self._do(lambda base: self._by_gpu(base, asked) if by == "gpu" else _sums(base, asked, by))

    def ranges(self) -> tuple[Range, ...]:
        return self._do(lambda base: tuple((low, high) for low, high in base.execute(RANGES)))

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    # ---- the file ----

    def _do(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """Do this with the data base. One that turns out to be damaged is moved aside, and the work done on a new one;
        OSError when that does not help, or there is another reason, such as a full disk."""
        for again in (True, False):
            try:
                with self._base() as base:
                    return work(base)
            except (Unusable, sqlite3.DatabaseError, msgspec.MsgspecError) as error:
                self.close()
                if not again or not _is_damage(error):
                    full = isinstance(error, sqlite3.OperationalError) and "full" in str(error)
                    raise OSError(errno.ENOSPC if full else errno.EIO, f"records of jobs: {error}") from error
                self._move_aside(str(error))
        raise AssertionError("the second try returns or raises")

    def _base(self) -> sqlite3.Connection:
        if self._open is None:
            new = self._path == ":memory:" or not os.path.exists(self._path)
            if not new and os.path.getsize(self._path) == 0:
                raise Unusable("the file is empty")
            if new and self._path != ":memory:":
                os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
                os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
            base = sqlite3.connect(self._path, isolation_level="DEFERRED", check_same_thread=False)
            self._open = base
            try:
                self._prepare(base, new)
            except sqlite3.Error:
                self.close()
                if new:
                    self._remove()
                raise
        return self._open

    def _prepare(self, base: sqlite3.Connection, new: bool) -> None:
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = NORMAL")
        if new:
            base.executescript(CREATE)
        version = base.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA:
            raise Unusable(f"its version is {version}, and this agent reads {SCHEMA}")
        said = base.execute("PRAGMA quick_check(1)").fetchone()[0]
        if said != "ok":
            raise Unusable(str(said))
        self._rows, self._bytes = base.execute("SELECT count(*), ifnull(sum(length(record)), 0) FROM jobs").fetchone()
        (self.trimmed,) = base.execute("SELECT below FROM trimmed").fetchone()

    def _move_aside(self, why: str) -> None:
        aside = self._path + ASIDE
        for end in BESIDE:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._path + end, aside + end)
        self.told = f"{self._path} could not be read ({why}); it is {aside} now, and a new one was begun"

    def _remove(self) -> None:
        for end in BESIDE:
            with contextlib.suppress(OSError):
                os.remove(self._path + end)

    # ---- the records ----

    def _put(self, base: sqlite3.Connection, records: Sequence[JobRecord]) -> None:
        for at in range(0, len(records), PART):
            part = records[at : at + PART]
            numbers = [record.number for record in part]
            before = _size(base, numbers)
            base.executemany(PUT, [_row(record) for record in part])
            after = _size(base, numbers)
            self._rows += after[0] - before[0]
            self._bytes += after[1] - before[1]
        while self._rows > self._rows_max or self._bytes > self._bytes_max:
            self._trim(base, max(1, self._rows // TRIM))

    def _trim(self, base: sqlite3.Connection, count: int) -> None:
        rows = base.execute("SELECT number FROM jobs ORDER BY ended, number LIMIT ?", (count,))
        oldest = [number for (number,) in rows]
        self._delete(base, oldest)
        self.trimmed = max(self.trimmed, *oldest)
        base.execute("UPDATE trimmed SET below = ?", (self.trimmed,))

    def _delete(self, base: sqlite3.Connection, numbers: Sequence[int]) -> None:
        for at in range(0, len(numbers), PART):
            part = numbers[at : at + PART]
            count, size = _size(base, part)
            base.executemany("DELETE FROM jobs WHERE number = ?", [(number,) for number in part])
            self._rows, self._bytes = self._rows - count, self._bytes - size

    def _found(self, base: sqlite3.Connection, asked: RecordsAsked) -> Iterator[JobRecord]:
        if asked.numbers:
            return self._of_numbers(base, asked.numbers, asked.limit)
        where, values = _where(asked)
        limit = f" LIMIT {int(asked.limit)}" if asked.limit else ""
        rows = base.execute(f"SELECT record FROM jobs{where} ORDER BY ended DESC, number DESC{limit}", values)
        return (_decode(record) for (record,) in rows)

    @staticmethod
    def _of_numbers(base: sqlite3.Connection, numbers: Sequence[Range], limit: int) -> Iterator[JobRecord]:
        """Records of these numbers, the highest first, without a look at more than are returned."""
        left = limit or -1
        for low, high in reversed(numbers):
            rows = "SELECT record FROM jobs WHERE number BETWEEN ? AND ? ORDER BY number DESC LIMIT ?"
            for (record,) in base.execute(rows, (low, high, left)):
                left -= left > 0
                yield _decode(record)
            if not left:
                return

    def _by_gpu(self, base: sqlite3.Connection, asked: RecordsAsked) -> list[RecordSum]:
        found: dict[str, RecordSum] = {}
        for record in self._found(base, msgspec.structs.replace(asked, limit=0)):
            for gpu, held in record.by_gpu.items():
                known = found.get(gpu) or RecordSum(gpu, 0, GpuSeconds())
                share = record.seconds.times(held / record.seconds.held) if record.seconds.held else GpuSeconds()
                found[gpu] = RecordSum(gpu, known.jobs + 1, known.seconds + share)
        return [found[gpu] for gpu in sorted(found)]


def _size(base: sqlite3.Connection, numbers: Sequence[int]) -> tuple[int, int]:
    """How many of these jobs have a record, and the bytes of these."""
    marks = ", ".join("?" * len(numbers))
    count = f"SELECT count(*), ifnull(sum(length(record)), 0) FROM jobs WHERE number IN ({marks})"
    rows, size = base.execute(count, list(numbers)).fetchone()
    return rows, size


def _row(record: JobRecord) -> tuple[Any, ...]:
    who = record.name, record.tenant, record.user, record.uid
    ends = record.state, record.ended_as, f" {' '.join(record.hosts)} "
    wall = record.number, record.submitted_wall_s, record.ended_wall_s
    return (*wall, *who, *ends, *msgspec.structs.astuple(record.seconds), _encode(record))


def _sums(base: sqlite3.Connection, asked: RecordsAsked, by: By) -> list[RecordSum]:
    where, values = _where(asked)
    sums = ", ".join(f"total({part})" for part in PARTS)
    rows = base.execute(f"SELECT {by}, count(*), {sums} FROM jobs{where} GROUP BY {by} ORDER BY {by}", values)
    return [RecordSum(of, jobs, GpuSeconds(*seconds)) for of, jobs, *seconds in rows]


def _where(asked: RecordsAsked) -> tuple[str, list[Any]]:
    """The condition of a query, and its values."""
    exact = [
        ("user", asked.user or None),
        ("tenant", asked.tenant or None),
        ("uid", asked.uid),
        ("number", asked.number),
    ]
    said: list[tuple[str, Sequence[Any]]] = [(f"{name} = ?", [value]) for name, value in exact if value is not None]
    if asked.name:
        said.append(("name GLOB ?", [asked.name]))
    if asked.state:
        word = asked.state
        said.append(("(state = ? OR ended_as = ? OR ended_as GLOB ?)", [word, word, f"{word}[ ,]*"]))
    if asked.host:
        said.append(("instr(hosts, ?) > 0", [f" {asked.host} "]))
    if asked.since_wall_s is not None:
        said.append(("ended >= ?", [asked.since_wall_s]))
    if not said:
        return "", []
    return f" WHERE {' AND '.join(words for words, _ in said)}", [value for _, values in said for value in values]


def _is_damage(error: Exception) -> bool:
    """Whether the file is at fault, and not the disk, or who else has it open."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR  # other tables than ours
    return True


class ThreadedRecords:
    """The `covey.core.job_records.JobRecords` of a host: a `RecordFile`, worked on in one thread."""

    def __init__(self, path: str, log: Logger) -> None:
        self._file, self._log, self._said = RecordFile(path), log, ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")

    @property
    def told(self) -> str:
        return self._file.told

    @property
    def trimmed(self) -> int:
        return self._file.trimmed

    async def put(self, records: Sequence[JobRecord]) -> None:
        await self._do(self._file.put, records)

    async def find(self, asked: RecordsAsked) -> list[JobRecord]:
        return await self._do(self._file.find, asked)

    async def sums(self, asked: RecordsAsked, by: By) -> list[RecordSum]:
        return await self._do(self._file.sums, asked, by)

    async def ranges(self) -> tuple[Range, ...]:
        return await self._do(self._file.ranges)

    async def _do(self, work: Callable[..., R], *arguments: object) -> R:
        found = await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        if self.told != self._said:
            self._said = self.told
            self._log.error("records of jobs were damaged", why=self.told)
        return found

    def close(self) -> None:
        """Finish what was asked for, and close the file."""
        self._thread.submit(self._file.close)
        self._thread.shutdown(wait=True)


class DirectRecords:
    """Records without a thread, for hosts that are simulated: a call takes no time, and nothing else runs in it."""

    def __init__(self, file: RecordFile) -> None:
        self._file = file

    @property
    def told(self) -> str:
        return self._file.told

    @property
    def trimmed(self) -> int:
        return self._file.trimmed

    async def put(self, records: Sequence[JobRecord]) -> None:
        self._file.put(records)

    async def find(self, asked: RecordsAsked) -> list[JobRecord]:
        return self._file.find(asked)

    async def sums(self, asked: RecordsAsked, by: By) -> list[RecordSum]:
        return self._file.sums(asked, by)

    async def ranges(self) -> tuple[Range, ...]:
        return self._file.ranges()
