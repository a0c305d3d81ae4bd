"""The durable log: one generation file of checksummed frames, and the snapshot before them.

    consensus/log-00000007        header | head frame | frames of the checkpoint | one frame per write ...
    consensus/snapshot-00000007   header | one frame            (absent before the first snapshot)

    header   "COVEYLOG" | version u16 | salt u32 | crc32 of the former
    frame    mark u32 | length u32 | crc32(length, payload; seeded by the salt) u32 | payload

A write is one frame, appended and durable before it is acknowledged. The next one begins only after that, so whatever
a crash does to the sectors of the last frame, no complete frame can follow a damaged one - unless acknowledged bytes
rotted. That is the difference between a *torn tail*, which is cut off, and a *corrupt middle*, which is refused: a
voter that loses entries it acknowledged could help to elect a leader without them. The salt is random, so that no
command can contain bytes that look like a frame.

A log that is shorter than `acknowledged` says, that is an older copy, or that is gone, is used as far as it goes, but
under a new identity and marked as `lost`: it does not vote until a leader has brought it up to date (`machine.raft`).

A snapshot begins a new generation: the snapshot file, then the log file with all that is left of the log, each
written whole or not at all; then the old generation is deleted. After a crash in between the newest log file wins.

What a disk without room refuses (`NO_ROOM`) may be tried again: nothing counts as written before it is, and an append
first cuts off what one that was refused may have left.
"""

import contextlib
import errno
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec

from agent.raft.disk.acknowledged import FILE as RECORD
from agent.raft.disk.acknowledged import Acknowledged, AcknowledgedRecord
from agent.raft.machine.types import HardState, Persist, Saved, SaveSnapshot, Snapshot
from agent.raft.messages import IDENTITY_BYTES, NO_RACK, Configuration, Count, Crc, Entry, configuration_of
from covey.ports.disk import Disk
from covey.wire.checked import StateRefused, other_format

FOLDER = "consensus"
VERSION = 1
LOG_MAGIC, SNAPSHOT_MAGIC = b"COVEYLOG", b"COVEYSNP"
WRITE_BYTES_MAX = 4 * 1024 * 1024
"""The most command bytes that one write joins (group commit), unless a single request is longer."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk, or of a quota on it, that is full."""

_HEADER = struct.Struct(">8sHI")
_FRAME = struct.Struct(">III")
_CRC = struct.Struct(">I")
_MARK = 0xC0BEF3A1
_MARK_BYTES = _MARK.to_bytes(4, "big")
_FRAME_BYTES_MAX = 1 << 30

S = TypeVar("S")


class DiskRefused(StateRefused):
    """The files of the log cannot be trusted."""


class Contradicted(StateRefused):
    """The leader's log and this host's hold different entries where this host's are committed."""

    status = 4


class Head(msgspec.Struct, frozen=True, array_like=True):
    base_index: Count
    base_term: Count
    image_index: Count
    """The index of the snapshot that belongs to this generation; 0: none."""
    frames: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    """The number of frames after this one that were written together with it and cannot be torn."""
    configuration: Configuration
    """The configuration after the base, with the rack; no voters while the log has not begun."""


class WrittenEntries(msgspec.Struct, frozen=True, array_like=True):
    """One request to write: the hard state, and entries from `first` on that replace those there."""

    hard: HardState
    first: Count
    entries: tuple[Entry, ...]


class SnapshotBody(msgspec.Struct, frozen=True, array_like=True):
    index: Count
    term: Count
    crc: Crc
    data: bytes
    configuration: Configuration


_encode = msgspec.msgpack.Encoder().encode
_blocks = msgspec.msgpack.Decoder(tuple[WrittenEntries, ...])


def write_length(requests: Sequence[Persist]) -> int:
    """The number of these requests that go into one write: at least one, about WRITE_BYTES_MAX of commands."""
    size = 0
    for count, request in enumerate(requests):
        size += sum(len(entry.command) for entry in request.entries)
        if count and size > WRITE_BYTES_MAX:
            return count
    return len(requests)


class Store:
    """The files of one host's log. `load` first; then `append` and `checkpoint`, one at a time."""

    def __init__(self, disk: Disk, entropy: Callable[[int], bytes]) -> None:
        self._disk, self._entropy = disk, entropy
        self._acknowledged = Acknowledged(disk)
        self._generation = 0
        self._salt = 0
        self._size = 0
        """Bytes of the log file that are durable."""
        self._torn = False
        """Whether the last append was refused, and may have left a part of itself behind what is durable."""
        self._hard = HardState()

    async def load(self, alone: bool = False) -> Saved:
        """Load what the last run left. DiskRefused when the files are damaged or of another version, and also when they
        hold less than was acknowledged and no other host votes: by the log, or, where it has not begun, by `alone`.
        OSError when the disk fails."""
        record = await self._acknowledged.load()
        names = await self._disk.names(f"{FOLDER}/")
        logs = sorted(int(found[1]) for name in names if (found := re.fullmatch(rf"{FOLDER}/log-(\d{{8}})", name)))
        if not logs:
            return await self._begin(names, record, alone)
        self._generation = logs[-1]
        name = self._name("log")
        data = await self._disk.read(name) or b""
        saved, head, size = self._recover(name, data)
        await self._write_anew(name, data, size)
        image = await self._load_image(head.image_index)
        await self._sweep(names)
        saved = msgspec.structs.replace(saved, image=image)
        self._size, self._hard = size, saved.hard
        if self._is_less(record):
            return await self._lose(saved, alone)
        await self._acknowledged.begin(self._hard.rack, self._hard.identity, self._generation, self._size)
        return saved

    async def _write_anew(self, name: str, data: bytes, size: int) -> None:
        """Write a file anew, also one that is whole: a frame whose sync failed can be read, and a later sync may not
        bring it to disk. A disk without room for a second copy keeps the first, and the host starts all the same."""
        try:
            await self._disk.replace(name, data[:size])
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if size < len(data):
                await self._disk.truncate(name, size)

    async def peek(self) -> Configuration:
        """The configuration according to the newest file, which stays as it is; no voters when no log has begun.
        DiskRefused, OSError."""
        logs = sorted(name for name in await self._disk.names(f"{FOLDER}/log-") if name[-8:].isdigit())
        if not logs:
            return Configuration()
        saved, _, _ = self._recover(logs[-1], await self._disk.read(logs[-1]) or b"")
        return _newest(saved)

    async def _begin(self, names: Sequence[str], record: AcknowledgedRecord | None, alone: bool) -> Saved:
        orphans = [name for name in names if name.startswith(f"{FOLDER}/snapshot-")]
        if orphans:
            raise self._refused(orphans[-1], "there is a snapshot, but the log that belongs to it is missing")
        self._generation = record.generation if record else 0
        lost = record is not None
        if lost and alone:
            raise self._nobody_else("is gone")
        hard = HardState(identity=self._entropy(IDENTITY_BYTES), lost=lost, rack=record.rack if record else NO_RACK)
        await self.checkpoint(SaveSnapshot(0, hard, Snapshot(0, 0, b"", 0), 0, 0, ()))
        return Saved(hard)

    def _is_less(self, record: AcknowledgedRecord | None) -> bool:
        """Whether the files hold less than this host acknowledged."""
        if record is None or not record.identity:
            return False
        if record.identity != self._hard.identity:
            return True
        return (self._generation, self._size) < (record.generation, record.size)

    def _nobody_else(self, what: str) -> DiskRefused:
        folder, record = self._disk.path(FOLDER), self._disk.path(RECORD)
        return DiskRefused(
            f"the log of this host, the only voter, {what}",
            f"{record} shows that it held more, and no other host has a copy",
            f"restore {folder}; if other hosts vote by now, name one of them in leader.voters and move {folder} away; "
            f"to continue with a part of the log, or with an empty one, delete {record} as well: what was submitted "
            "since then is lost",
        )

    async def _lose(self, saved: Saved, alone: bool) -> Saved:
        """The saved log under a new identity, durable before it is sent to other hosts."""
        if _alone(saved, alone):
            raise self._nobody_else("holds less than it acknowledged")
        hard = msgspec.structs.replace(saved.hard, identity=self._entropy(IDENTITY_BYTES), lost=True)
        base, image = (saved.base_index, saved.base_term), saved.image or Snapshot(0, 0, b"", 0)
        await self.checkpoint(SaveSnapshot(0, hard, image, *base, saved.entries, saved.configuration))
        return msgspec.structs.replace(saved, hard=hard)

    async def append(self, requests: Sequence[Persist]) -> None:
        """Append all of these requests as one frame, durable on return. OSError: none of them is."""
        blocks = [WrittenEntries(request.hard, request.first, request.entries) for request in requests]
        written = frame(_encode(blocks), self._salt)
        if self._torn:
            await self._disk.truncate(self._name("log"), self._size)
        self._torn = True
        size, hard = self._size + len(written), requests[-1].hard
        note = self._acknowledged.note(hard.rack, hard.identity, self._generation, size)
        await self._disk.append_noted(self._name("log"), written, note)
        self._torn = False
        self._size, self._hard = size, hard
        await self._acknowledged.noted()

    async def checkpoint(self, request: SaveSnapshot) -> None:
        """Write the snapshot and what is left of the log as a new generation, durable on return. OSError: the earlier
        generation still counts, or both hold the log."""
        old = await self._disk.names(f"{FOLDER}/") if self._generation else []
        image, generation = request.image, self._generation + 1
        salt = int.from_bytes(self._entropy(4), "big")
        head = Head(request.base_index, request.base_term, image.index, 1, request.configuration)
        block = WrittenEntries(request.hard, request.base_index + 1, request.entries)
        whole = header(LOG_MAGIC, salt) + frame(_encode(head), salt) + frame(_encode([block]), salt)
        try:
            await self._write_image(generation, image)
            await self._disk.replace(_name_of("log", generation), whole)
        except OSError:
            await self._drop_image(generation)
            raise
        self._generation, self._salt, self._torn = generation, salt, False
        self._size, self._hard = len(whole), request.hard
        await self._acknowledged.begin(self._hard.rack, self._hard.identity, self._generation, self._size)
        await self._sweep(old)

    async def _write_image(self, generation: int, image: Snapshot) -> None:
        if image.index:
            body = SnapshotBody(image.index, image.term, image.crc, image.data, image.configuration)
            salt = int.from_bytes(self._entropy(4), "big")
            whole = header(SNAPSHOT_MAGIC, salt) + frame(_encode(body), salt)
            await self._disk.replace(_name_of("snapshot", generation), whole)

    async def _drop_image(self, generation: int) -> None:
        """Give an image's room back, unless the log that needs it has its name already."""
        with contextlib.suppress(OSError):
            if not await self._disk.names(_name_of("log", generation)):
                await self._disk.delete(_name_of("snapshot", generation))

    async def _sweep(self, names: Sequence[str]) -> None:
        """Delete files of older generations."""
        for name in names:
            if name not in (self._name("log"), self._name("snapshot")):
                await self._disk.delete(name)

    def _name(self, kind: str) -> str:
        return _name_of(kind, self._generation)

    def _refused(self, name: str, why: str) -> DiskRefused:
        folder = self._disk.path(FOLDER)
        return DiskRefused(
            f"{name} cannot be used",
            why,
            f"restore the file from a copy; or, while a majority of the voters is healthy, move {folder} away "
            "and start again: this host fetches the log from the leader",
        )

    def contradicted(self, leader: str, why: str) -> Contradicted:
        folder = self._disk.path(FOLDER)
        return Contradicted(
            f"the log of this host contradicts the log of the leader {leader}",
            f"{why}: a majority of the voters lost entries that it had acknowledged",
            f"stop this host, keep a copy of {folder}: it holds entries that no other host has; to follow {leader} "
            f"without it, move {folder} away and start again",
        )

    # ---- reading back ----

    def _recover(self, name: str, data: bytes) -> tuple[Saved, Head, int]:
        """The content of the file, and how many of its bytes are valid."""
        self._salt = self._checked_header(name, data, LOG_MAGIC)
        frames, size = read_frames(data, _HEADER.size + _CRC.size, self._salt)
        damaged = next_frame(data, size, self._salt)
        if damaged is not None:
            raise self._refused(name, f"it is damaged at byte {size}, and what follows at byte {damaged} is not")
        if not frames:
            raise self._refused(name, "its first frame is damaged")
        head = self._decoded(name, msgspec.msgpack.Decoder(Head), frames[0])
        if len(frames) <= head.frames:
            raise self._refused(name, "its checkpoint is not complete")
        return self._replay(name, head, frames[1:]), head, size

    def _checked_header(self, name: str, data: bytes, magic: bytes) -> int:
        """Check the header of a file, and return its salt."""
        body = data[: _HEADER.size]
        rest = data[_HEADER.size : _HEADER.size + _CRC.size]
        if len(rest) < _CRC.size or _CRC.unpack(rest)[0] != zlib.crc32(body):
            raise self._refused(name, "its header is damaged")
        found, version, salt = _HEADER.unpack(body)
        if found != magic:
            raise self._refused(name, f"it is not a {magic.decode()} file")
        if version != VERSION:
            raise DiskRefused(*other_format(self._disk.path(name), version, VERSION))
        return int(salt)

    def _replay(self, name: str, head: Head, frames: Sequence[bytes]) -> Saved:
        hard, entries = HardState(), list[Entry]()
        for payload in frames:
            for block in self._decoded(name, _blocks, payload):
                at = block.first - head.base_index - 1
                if not 0 <= at <= len(entries) or block.hard.term < hard.term:
                    raise self._refused(name, f"entry {block.first} does not follow the entries before it")
                hard = block.hard
                if block.entries:
                    entries[at:] = block.entries
        if entries and entries[-1].term > hard.term:
            raise self._refused(name, "it holds an entry of a term after its own")
        if head.image_index > head.base_index + len(entries) or head.image_index < head.base_index:
            raise self._refused(name, "its snapshot does not meet its entries")
        return Saved(hard, None, head.base_index, head.base_term, tuple(entries), head.configuration)

    async def _load_image(self, index: int) -> Snapshot | None:
        if not index:
            return None
        name = self._name("snapshot")
        data = await self._disk.read(name)
        if data is None:
            raise self._refused(name, "it is missing")
        salt = self._checked_header(name, data, SNAPSHOT_MAGIC)
        frames, size = read_frames(data, _HEADER.size + _CRC.size, salt)
        if len(frames) != 1 or size != len(data):
            raise self._refused(name, "it is damaged")
        body = self._decoded(name, msgspec.msgpack.Decoder(SnapshotBody), frames[0])
        if body.index != index:
            raise self._refused(name, f"it ends at entry {body.index}, the log expects {index}")
        return Snapshot(body.index, body.term, body.data, body.crc, body.configuration)

    def _decoded(self, name: str, decoder: "msgspec.msgpack.Decoder[S]", payload: bytes) -> S:
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise self._refused(name, f"a frame cannot be read: {error}") from error


def _alone(saved: Saved, alone: bool) -> bool:
    """Whether no other host votes according to the log."""
    newest = _newest(saved)
    if not newest.voters:
        return alone
    return [voter.identity for voter in newest.voters] == [saved.hard.identity]


def _newest(saved: Saved) -> Configuration:
    found = [each for entry in saved.entries if (each := configuration_of(entry))]
    return found[-1] if found else saved.configuration


def _name_of(kind: str, generation: int) -> str:
    return f"{FOLDER}/{kind}-{generation:08d}"


def header(magic: bytes, salt: int) -> bytes:
    """The first bytes of a file."""
    body = _HEADER.pack(magic, VERSION, salt)
    return body + _CRC.pack(zlib.crc32(body))


def frame(payload: bytes, salt: int) -> bytes:
    """One write as bytes of the file."""
    return _FRAME.pack(_MARK, len(payload), _frame_crc(payload, salt)) + payload


def _frame_crc(payload: bytes | memoryview, salt: int) -> int:
    return zlib.crc32(payload, zlib.crc32(_CRC.pack(len(payload)), salt))


def read_frames(data: bytes, at: int, salt: int) -> tuple[list[bytes], int]:
    """The payloads of the good frames from `at` on, and where they end."""
    found: list[bytes] = []
    while (payload := _frame_at(data, at, salt)) is not None:
        found.append(bytes(payload))
        at += _FRAME.size + len(payload)
    return found, at


def next_frame(data: bytes, after: int, salt: int) -> int | None:
    """The position where a good frame begins behind the damage at `after`; None when there is none, as after a torn
    write."""
    at = data.find(_MARK_BYTES, after + 1)
    while at >= 0:
        if _frame_at(data, at, salt) is not None:
            return at
        at = data.find(_MARK_BYTES, at + 1)
    return None


def _frame_at(data: bytes, at: int, salt: int) -> memoryview | None:
    if at + _FRAME.size > len(data):
        return None
    mark, length, crc = _FRAME.unpack_from(data, at)
    start = at + _FRAME.size
    if mark != _MARK or length > _FRAME_BYTES_MAX or start + length > len(data):
        return None
    payload = memoryview(data)[start : start + length]
    return payload if _frame_crc(payload, salt) == crc else None
