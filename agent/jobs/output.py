"""What ranks wrote, on this host's disk: bounded for each rank, for the host, and in time.

    jobs/j7/rank0.log                      the head of what rank 0 wrote, for good
    jobs/j7/rank0.log.000000067108864      parts of the ring behind it, from `agent/ports/processes/shim.py`; the
    jobs/j7/rank0.log.000000083886080      number is the offset of a part's first byte in all that was ever written
    jobs/j7/rank0.log.times                when what was written (`Times` of the same)
    jobs/j7/curve                          steps and metrics that the job's ranks reported here

What lay between two files was dropped: a read from an offset in the gap continues at the next file.
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from covey.core.ids import JobId
from covey.core.units import parse_seconds, parse_size
from covey.ports.env import Env
from covey.ports.starter import LooksAgain, TheirFiles
from plugins.base import LogRead

LOG_BYTES_MAX = 1 << 20
"""The most bytes that one `read_log` returns."""
RANK_BYTES_MIN = 1 << 20
"""The least bytes that a rank may keep, however little is left of its host's budget."""
TIMES_BYTES_MAX = 1 << 17
"""The most bytes that are read of a file of times: twice what is ever written."""
TIMES_EVERY_S = 1.0
"""Seconds of output that a time in that file may stand for, by the wall clock."""
USERS_DIR_BYTES_MAX = 40
FENCE_S = 86_400.0
"""Seconds for which the fence of an ended job stays, with or without its output: no message about the job is older than
that."""
_LOG = re.compile(r"^jobs/([a-z0-9][a-z0-9.-]{0,62})/(?:rank\d{1,5}\.log(?:\.\d{15}|\.times(?:\.new)?)?|curve)$")

_TIME = re.compile(rb"^(\d{1,15}) (\d{1,12}\.\d\d) (\d{1,12}\.\d\d)$")


class JobsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[jobs]: what ranks may leave on this host's disk."""

    output_rank_max: str = "256 MiB"
    """The most output of one rank that is kept: its first quarter for good, then the newest of the rest."""
    output_host_max: str = "16 GiB"
    """The most output of all ranks on this host. Ranks that start share what is not promised to others; output of ended
    jobs goes, the oldest first, when there is more."""
    keep_ended: int = 1000
    """The number of ended jobs, the newest, whose output is kept."""
    keep_ended_for: str = "30 d"
    """How long output of an ended job is kept."""
    disk_free_min: str = "1 GiB"
    """The least free space in the state directory: with less this host takes no submissions, and no ranks."""
    shell_kept: str = "10 min"
    """How long a shell (`agentctl shell`) whose terminal was lost is kept: the same command finds it again until then
    (chosen)."""
    shell_idle: str = "8 h"
    """How long a shell may have neither input nor output before it is ended; a minute ahead it is told so. `0 s`: for
    ever (chosen)."""
    users_dir: str = "/var/lib/covey-jobs"
    """The folder of `covey-starter`, which starts jobs as the users who submitted them: its socket, and their files."""
    separate: Literal["yes", "no"] = "yes"
    """Whether tenants have to be kept apart: several in `[scheduler] quotas` are then *wrong* on a host that has no
    starter, where all jobs run as the agent's user without limits. `agentctl doctor` and the log say so there, and
    `agentd --check` ends with 1; the agent starts. `no`: they trust one another."""

    def __post_init__(self) -> None:
        for name in ("output_rank_max", "output_host_max"):
            if parse_size(getattr(self, name)) < RANK_BYTES_MIN:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected at least 1 MiB")
        parse_size(self.disk_free_min)
        if parse_seconds(self.shell_kept) <= 0 or parse_seconds(self.shell_idle) < 0:
            raise ValueError("shell_kept, shell_idle: expected a time over 0 to keep a shell, and none under 0")
        if not self.users_dir.startswith("/") or len(self.users_dir.encode()) > USERS_DIR_BYTES_MAX:
            most = f"of at most {USERS_DIR_BYTES_MAX} bytes: sockets are in it"
            raise ValueError(f"users_dir = {self.users_dir!r}: expected an absolute path {most}")
        if parse_seconds(self.keep_ended_for) <= 0 or self.keep_ended < 1:
            raise ValueError("keep_ended and keep_ended_for: expected at least one job, and a time over 0")
        if self.separate not in ("yes", "no"):
            raise ValueError(f"separate = {self.separate!r}: expected yes or no")


@runtime_checkable
class Sized(Protocol):
    """A disk that tells a file's size, and reads a part of it, without keeping it open: the real one."""

    async def size(self, name: str) -> int: ...
    async def peek(self, name: str, offset: int, size: int) -> bytes: ...


class OutputFiles(Protocol):
    """Where output of ranks is found again."""

    async def names(self, prefix: str) -> list[str]: ...
    async def read(self, name: str) -> bytes | None: ...
    async def delete(self, name: str) -> None: ...


class BothFiles:
    """The output of the agent's own jobs, and of other users': a name that is not here is there."""

    def __init__(self, own: OutputFiles, theirs: TheirFiles) -> None:
        self._own, self._theirs = own, theirs

    async def names(self, prefix: str) -> list[str]:
        return sorted({*await self._own.names(prefix), *await self._theirs.names(prefix)})

    async def read(self, name: str) -> bytes | None:
        return await self._own.read(name)

    async def size(self, name: str) -> int:
        if isinstance(self._own, Sized):
            with contextlib.suppress(FileNotFoundError):
                return await self._own.size(name)
        return await self._theirs.size(name)

    async def peek(self, name: str, offset: int, size: int) -> bytes:
        if isinstance(self._own, Sized):
            with contextlib.suppress(FileNotFoundError):
                return await self._own.peek(name, offset, size)
        return await self._theirs.peek(name, offset, size)

    async def delete(self, name: str) -> None:
        await self._own.delete(name)
        await self._theirs.delete(name)


def output_files(env: Env) -> OutputFiles:
    return BothFiles(env.disk, env.starter.files) if isinstance(env.starter, LooksAgain) else env.disk


async def read_log(disk: OutputFiles, name: str, offset: int, limit: int) -> LogRead:
    """Read at most `LOG_BYTES_MAX` bytes of output. A negative offset counts from the end."""
    parts = await _parts(disk, name)
    size = sum(parts[-1]) if parts else 0
    start = max(0, size + offset) if offset < 0 else min(offset, size)
    for first, length in parts:
        if start < first + length:
            start = max(start, first)
            wanted = max(0, min(limit, LOG_BYTES_MAX, first + length - start))
            try:
                return LogRead(await _peek(disk, _part(name, first), start - first, wanted), start, size)
            except FileNotFoundError:
                continue  # the ring dropped this part; a later one exists
    return LogRead(b"", start, size, kept=bool(parts))


async def read_since(disk: OutputFiles, name: str, wall_s: float, limit: int) -> LogRead:
    """Read output from the first byte on that may have been written at `wall_s` or later, by this host's wall clock.
    `timed` says whether all before it is known to be older."""
    try:
        text = await _peek(disk, f"{name}.times", 0, TIMES_BYTES_MAX)
    except OSError:
        text = b""
    size = (await read_log(disk, name, 0, 0)).size
    start = written_from(times_in(text), size, wall_s)
    read = await read_log(disk, name, start or 0, limit)
    return msgspec.structs.replace(read, timed=start is not None)


def times_in(text: bytes) -> list[tuple[int, float, float]]:
    """The lines of a file of times. It may be another user's: what is not right there is left out."""
    found: list[tuple[int, float, float]] = []
    for line in text.splitlines():
        if (matched := _TIME.match(line)) and (not found or int(matched[1]) >= found[-1][0]):
            found.append((int(matched[1]), float(matched[2]), float(matched[3])))
    return found


def written_from(times: Sequence[tuple[int, float, float]], size: int, wall_s: float) -> int | None:
    """The lowest offset of what may have been written at `wall_s` or later; None when that is not known. `times`: an
    offset, until when all before it was written, and since when the rest, ascending."""
    if not times:
        return None
    if times[-1][2] + TIMES_EVERY_S < wall_s:
        return size
    older = [offset for offset, until_s, _ in times if until_s < wall_s]
    if older:
        return min(older[-1], size)
    return None if times[0][0] else 0


def _part(name: str, first: int) -> str:
    return f"{name}.{first:015d}" if first else name


async def _parts(disk: OutputFiles, name: str) -> list[tuple[int, int]]:
    """The offset of the first byte, and the size, of each file of one rank's output, ascending."""
    found: list[tuple[int, int]] = []
    for other in await disk.names(name):
        digits = other[len(name) + 1 :]
        if other == name or (len(digits) == 15 and digits.isdigit()):
            found.append((int(digits or 0), await size_of(disk, other)))
    return sorted(found)


async def size_of(disk: OutputFiles, name: str) -> int:
    """Bytes of a file; 0 when there is no such file (any more)."""
    try:
        if isinstance(disk, Sized):
            return await disk.size(name)
        return len(await disk.read(name) or b"")
    except OSError:
        return 0


async def _peek(disk: OutputFiles, name: str, offset: int, size: int) -> bytes:
    if isinstance(disk, Sized):
        return await disk.peek(name, offset, size)
    return (await disk.read(name) or b"")[offset : offset + size]


# ---- how much of it is kept ----


class KeptOutput(msgspec.Struct, frozen=True):
    """The output of one job on this host."""

    job: JobId
    size_bytes: int
    ended_s: float | None
    """When the job ended, by the wall clock; None: it runs, or its end is not in the log yet."""


def rank_bytes_max(settings: JobsSettings, promised_bytes: int, ranks: int, room_bytes: int) -> int:
    """What each of `ranks` ranks that start now may keep, in bytes. Others that run here were promised
    `promised_bytes`, and `room_bytes` of the disk may be printed full: half of that is for these, so that ranks that
    start later keep something too."""
    left = min(parse_size(settings.output_host_max) - promised_bytes, room_bytes // 2)
    return max(RANK_BYTES_MIN, min(parse_size(settings.output_rank_max), left // max(1, ranks)))


def to_remove(settings: JobsSettings, kept: Sequence[KeptOutput], wall_s: float) -> list[JobId]:
    """Ended jobs whose output goes, the oldest first: too old, too many, or more than this host's budget together with
    what runs."""
    oldest_s = wall_s - parse_seconds(settings.keep_ended_for)
    ended = sorted((each for each in kept if each.ended_s is not None), key=lambda each: (each.ended_s, each.job))
    size, budget = sum(each.size_bytes for each in kept), parse_size(settings.output_host_max)
    gone: list[JobId] = []
    for number, each in enumerate(ended):
        assert each.ended_s is not None
        too_many = len(ended) - number > settings.keep_ended
        if each.ended_s >= oldest_s and not too_many and (size <= budget or not each.size_bytes):
            continue
        gone.append(each.job)
        size -= each.size_bytes
    return gone


async def output_of(disk: OutputFiles) -> dict[JobId, dict[str, int]]:
    """What ranks wrote here: job -> name -> bytes."""
    found: dict[JobId, dict[str, int]] = {}
    for name in await disk.names("jobs/"):
        if (matched := _LOG.match(name)) is not None:
            found.setdefault(JobId(matched[1]), {})[name] = await size_of(disk, name)
    return found
