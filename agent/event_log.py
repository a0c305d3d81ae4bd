"""Event logs: what happened to a job, a slab or a host, with time and reason, kept over restarts for `agentctl why`.

Events are appended in batches, about once a second; a crash loses at most the last batch. When the file has grown past
`FILE_BYTES_MAX` it is rewritten with the events still in memory. A torn or damaged line ends the reading: the rest of
the file is dropped, and new events follow the last whole line.
"""

import struct
import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from covey.core.ids import HostId
from covey.ports.clock import Clock
from covey.ports.disk import Disk
from plugins.views import EventLine

FILE = "events.log"
FILE_BYTES_MAX = 4 << 20
LINES_PER_SUBJECT_MAX = 200
SUBJECTS_MAX = 2000

_HEADER = struct.Struct("<II")
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(EventLine)


def frame(line: EventLine) -> bytes:
    body = _encode(line)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def lines(data: bytes) -> tuple[list[EventLine], int]:
    """The whole lines at the start of `data`, and how many bytes they take."""
    found: list[EventLine] = []
    at = 0
    while at + _HEADER.size <= len(data):
        size, checksum = _HEADER.unpack_from(data, at)
        body = data[at + _HEADER.size : at + _HEADER.size + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            break
        try:
            found.append(_decoder.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break
        at += _HEADER.size + size
    return found, at


class EventLog:
    """The event logs of this host. `note` adds an event in memory; `write` makes the new ones durable."""

    def __init__(self, host: HostId, clock: Clock, disk: Disk) -> None:
        self._host, self._clock, self._disk = host, clock, disk
        self._by_subject: OrderedDict[str, deque[EventLine]] = OrderedDict()
        self._keys: dict[str, set[str]] = {}
        self._unwritten: list[EventLine] = []
        self._file_bytes = 0

    async def load(self) -> None:
        data = await self._disk.read(FILE) or b""
        found, self._file_bytes = lines(data)
        for line in found:
            self._remember(line)
        if self._file_bytes < len(data):
            await self._disk.truncate(FILE, self._file_bytes)

    def note(self, subject: str, event: str, reason: str, key: str = "") -> None:
        """Add an event. A key that this subject already has is the same event told again (a log replayed): it is
        ignored."""
        if key and key in self._keys.get(subject, ()):
            return
        line = EventLine(self._clock.wall_s(), self._host, subject, event, reason, key)
        self._remember(line)
        self._unwritten.append(line)

    def _remember(self, line: EventLine) -> None:
        self._by_subject.setdefault(line.subject, deque(maxlen=LINES_PER_SUBJECT_MAX)).append(line)
        self._by_subject.move_to_end(line.subject)
        if line.key:
            self._keys.setdefault(line.subject, set()).add(line.key)
        if len(self._by_subject) > SUBJECTS_MAX:
            forgotten, _ = self._by_subject.popitem(last=False)
            self._keys.pop(forgotten, None)

    async def write(self) -> None:
        """Write the new events. OSError when the disk fails; what could not be written is tried again with the next
        batch."""
        if not self._unwritten:
            return
        batch, self._unwritten = self._unwritten, []
        data = b"".join(map(frame, batch))
        try:
            if self._file_bytes + len(data) > FILE_BYTES_MAX:
                kept = [line for each in self._by_subject.values() for line in each]
                data = b"".join(map(frame, sorted(kept, key=lambda line: line.wall_s)))
                await self._disk.replace(FILE, data)
                self._file_bytes = len(data)
            else:
                await self._disk.append(FILE, data)
                self._file_bytes += len(data)
        except OSError:
            self._unwritten = [*batch, *self._unwritten][-1:]  # the next write writes all that is remembered, since
            self._file_bytes = FILE_BYTES_MAX  # reading stops at half a line
            raise

    def after(self, wall_s: float, most: int) -> list[EventLine]:
        """The newest lines, at most so many, that are later than a time by the wall clock, oldest first."""
        found = [line for each in self._by_subject.values() for line in each if line.wall_s > wall_s]
        return sorted(found, key=lambda line: line.wall_s)[-most:]

    def lines_of(self, subjects: Sequence[str], prefix: str = "") -> list[EventLine]:
        """Lines of these subjects and of those that start with `prefix` (if any), oldest first."""
        names = [name for name in self._by_subject if name in subjects or (prefix and name.startswith(prefix))]
        return sorted((line for name in names for line in self._by_subject[name]), key=lambda line: line.wall_s)


def merged(logs: Sequence[Sequence[EventLine]]) -> list[EventLine]:
    """One event log from those of several hosts: an event noted by many (same key) is there once, with its earliest
    time."""
    seen: dict[tuple[str, str], EventLine] = {}
    alone: list[EventLine] = []
    for line in (line for log in logs for line in log):
        if not line.key:
            alone.append(line)
            continue
        known = seen.get((line.subject, line.key))
        if known is None or line.wall_s < known.wall_s:
            seen[line.subject, line.key] = line
    return sorted([*seen.values(), *alone], key=lambda line: (line.wall_s, line.host))
