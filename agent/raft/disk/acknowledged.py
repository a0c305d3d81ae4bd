"""How far this host's log went when it last acknowledged entries: a second record, outside the log's folder.

    acknowledged   two slots of 512 bytes, written in turn, in place:   body | crc32 of the body

The log alone cannot tell a torn tail, which was not acknowledged, from a tail that was cut off, rotted, or replaced by
an older copy after it was acknowledged. So after each write that is durable, and before it is acknowledged, its
generation and length go here, in the same go as the log's own write. The record is not synced: it costs some
microseconds, it survives every death of a process, and when the power fails it is a little older than the log, never
newer. A log that is shorter than its record has lost entries that it acknowledged; one that is missing while the record
exists has voted before.

The record lies outside the log's folder, so it stays when an operator deletes or moves that folder.
"""

import struct
import zlib

import msgspec

from agent.raft.messages import NO_RACK, Count, Identity, Rack
from covey.ports.disk import Disk, UnsyncedWrite
from covey.wire.checked import OtherFormat, other_format

FILE = "acknowledged"
SLOT_BYTES = 512
"""Bytes of a slot, a sector: a torn write damages one slot, never both."""
SYNC_EVERY = 256
"""The number of writes between two syncs: the kernel would do it by itself within half a minute."""
VERSION = 1
_MAGIC = b"COVEYACK"
_HEAD = struct.Struct(">8sHH")
_CRC = struct.Struct(">I")


class AcknowledgedRecord(msgspec.Struct, frozen=True, array_like=True):
    """What the log held, durable, when this record was written."""

    number: Count
    """The record's number, which grows with every record."""
    rack: Rack
    identity: Identity
    generation: Count
    size: Count
    """Bytes of the generation's log file."""


_encode = msgspec.msgpack.Encoder().encode
_record = msgspec.msgpack.Decoder(AcknowledgedRecord)


class Acknowledged:
    """The record of one host. `load` first."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._number = 0
        self._unsynced = 0
        self._has_slots = False
        """Whether the file is there, whole: then a record takes no more room on the disk."""

    async def load(self) -> AcknowledgedRecord | None:
        """The newest record; None where there never was one. For a file that is damaged as a whole it is a record of
        nothing in particular (its identity is empty), since this host has voted before. OtherFormat."""
        data = await self._disk.read(FILE)
        if data is None:
            return None
        self._has_slots = len(data) == 2 * SLOT_BYTES
        name = self._disk.path(FILE)
        found = [record for at in (0, SLOT_BYTES) if (record := _read(data[at : at + SLOT_BYTES], name))]
        newest = max(found, key=lambda record: record.number, default=AcknowledgedRecord(0, NO_RACK, b"", 0, 0))
        self._number = newest.number
        return newest

    async def begin(self, rack: bytes, identity: bytes, generation: int, size: int) -> None:
        """Write the first record since the start or of a generation, durable on return."""
        if self._has_slots:
            await self._disk.write_at(*self.note(rack, identity, generation, size))
            self._number += 1
            await self._sync()
            return
        self._number += 1
        await self._disk.replace(FILE, _slot(AcknowledgedRecord(self._number, rack, identity, generation, size)) * 2)
        self._has_slots = True

    def note(self, rack: bytes, identity: bytes, generation: int, size: int) -> UnsyncedWrite:
        """The next record, to be written once what it says is durable; then comes `noted`."""
        number = self._number + 1
        slot = _slot(AcknowledgedRecord(number, rack, identity, generation, size))
        return UnsyncedWrite(FILE, number % 2 * SLOT_BYTES, slot)

    async def noted(self) -> None:
        """Count the record, which was written."""
        self._number += 1
        self._unsynced += 1
        if self._unsynced >= SYNC_EVERY:
            await self._sync()

    async def _sync(self) -> None:
        await self._disk.sync(FILE)
        self._unsynced = 0


def _slot(record: AcknowledgedRecord) -> bytes:
    payload = _encode(record)
    body = (_HEAD.pack(_MAGIC, VERSION, len(payload)) + payload).ljust(SLOT_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def _read(slot: bytes, name: str) -> AcknowledgedRecord | None:
    """The record in a slot of this file; None when it is torn or never was written. OtherFormat."""
    if len(slot) != SLOT_BYTES or _CRC.unpack(slot[-_CRC.size :])[0] != zlib.crc32(slot[: -_CRC.size]):
        return None
    magic, version, length = _HEAD.unpack_from(slot)
    if magic != _MAGIC:
        return None
    if version != VERSION:
        raise OtherFormat(*other_format(name, version, VERSION))
    try:
        return _record.decode(slot[_HEAD.size : _HEAD.size + length])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
