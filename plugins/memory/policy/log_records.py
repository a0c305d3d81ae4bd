"""The format of a record in a volume's spill log, and how it is recognised.

A log is a list of segments, a file each. A segment is a list of batches, each written at once:

    [table][pages, one block each][the same table again]        a block is as large as a page

A table has a head and a row for each record: which page, under which version, its checksum, in which block it is; or
that so many pages from this one on are zeros, which takes no block. It is written twice, so that one damaged block
costs a page and never the knowledge which page it was. A segment to which nothing is added any more gets one more table
with all its rows, from which it is loaded without reading the rest.

The head carries a number drawn for the log (`salt`), so that a page whose content looks like a table is not taken for
one.
"""

import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.wire.checksum import crc32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[Any]
    Versions = array[int]
else:
    Rows = Any
    Versions = array  # Python 3.11 cannot subscript it

MAGIC = b"coveylg1"
"""The last byte is the version of the format."""
ROW = np.dtype([("version", "<u8"), ("page", "<u4"), ("zeros", "<u4"), ("crc", "<u4"), ("block", "<u4")])
"""`zeros`: 0 for a page with content in `block`; else the number of pages from `page` on that are zeros."""
ROW_BYTES = ROW.itemsize
_HEAD = struct.Struct("<8sQQQQIIII")
HEAD_BYTES = 64
_CRC_AT = HEAD_BYTES - 4
BATCH_BITS = 40
"""Lower bits of a batch's number, which count batches; the bits above are the life of the process that wrote it."""


class TableKind(IntEnum):
    """Position of a table in its segment."""

    HEAD = 1
    TRAILER = 2
    ALL = 3
    """Table of all rows of a segment to which nothing is added any more."""


_KINDS = {kind.value: kind for kind in TableKind}


class RecordTable(NamedTuple):
    """Table of a batch of records, as it was read or is to be written."""

    kind: TableKind
    segment: int
    batch: int
    """Number of its batch; for `ALL` that of the last batch in the segment."""
    synced: int
    """Every batch up to this one of the same life was durable when this was written."""
    at: int
    """Block in which its batch begins."""
    blocks: int
    """Blocks of the batch: both tables and the pages between them."""
    rows: Rows


def table_blocks(rows: int, block_bytes: int) -> int:
    """Blocks that a table of this many rows takes."""
    return -(-(HEAD_BYTES + rows * ROW_BYTES) // block_bytes)


def batch_blocks(rows: int, pages: int, block_bytes: int) -> int:
    """Blocks that a batch takes of which `pages` rows have content."""
    return 2 * table_blocks(rows, block_bytes) + pages


def place_rows(rows: Rows, at: int, block_bytes: int) -> int:
    """Fill in `block` of the rows of a batch that begins in block `at`; return how many rows have content."""
    content = np.flatnonzero(rows["zeros"] == 0)
    rows["block"] = 0
    rows["block"][content] = at + table_blocks(len(rows), block_bytes) + np.arange(len(content), dtype=np.uint32)
    return len(content)


def pack_table(table: RecordTable, salt: int, into: memoryview) -> int:
    """Write the table into `into`, which is long enough, and zeros to the end of its last block; return the bytes
    written."""
    head = _HEAD.pack(
        MAGIC, salt, table.segment, table.batch, table.synced, table.at, table.blocks, len(table.rows), table.kind
    )
    body = table.rows.tobytes()
    start = head.ljust(_CRC_AT, b"\0")
    end = HEAD_BYTES + len(body)
    into[:HEAD_BYTES] = start + crc32(body, crc32(start)).to_bytes(4, "little")
    into[HEAD_BYTES:end] = body
    into[end:] = bytes(len(into) - end)
    return len(into)


def table(data: memoryview, salt: int, segment: int) -> RecordTable | None:
    """The table that begins here; None when there is none of this segment, or it is damaged. `data` may be any
    bytes."""
    if len(data) < HEAD_BYTES:
        return None
    magic, salted, of, batch, synced, at, blocks, count, kind = _HEAD.unpack_from(data)
    end = HEAD_BYTES + count * ROW_BYTES
    if (magic, salted, of) != (MAGIC, salt, segment) or kind not in _KINDS or end > len(data):
        return None
    wanted = int.from_bytes(data[_CRC_AT:HEAD_BYTES], "little")
    if crc32(data[HEAD_BYTES:end], crc32(data[:_CRC_AT])) != wanted:
        return None
    rows = np.frombuffer(data[HEAD_BYTES:end], ROW).copy()
    return RecordTable(_KINDS[kind], of, batch, synced, at, blocks, rows)


def table_size(data: memoryview) -> int:
    """Bytes of the table that begins here, as its head says; 0 when `data` does not begin with the head of a table."""
    if len(data) < HEAD_BYTES or bytes(data[:8]) != MAGIC:
        return 0
    return HEAD_BYTES + int(_HEAD.unpack_from(data)[7]) * ROW_BYTES


def tables_in(data: memoryview, salt: int, segment: int, block_bytes: int) -> list[RecordTable]:
    """One table for each batch of which one is whole, in the order of batches; the bytes between them, which may be
    damaged or torn, do not matter. `data`: a segment from its first block on."""
    found: dict[int, RecordTable] = {}
    blocks = len(data) // block_bytes
    if blocks:
        starts = np.frombuffer(data[: blocks * block_bytes], np.uint8).reshape(blocks, block_bytes)[:, : len(MAGIC)]
        for block in np.flatnonzero((starts == np.frombuffer(MAGIC, np.uint8)).all(axis=1)).tolist():
            known = table(data[block * block_bytes :], salt, segment)
            if known is not None and known.kind is not TableKind.ALL:
                found.setdefault(known.batch, known)
    return [found[batch] for batch in sorted(found)]


def checksum(version: int, page: int, data: memoryview | bytes) -> int:
    """Checksum of content, version and page number: content in the wrong place counts as damaged."""
    return crc32(data, (version ^ version >> 32 ^ page * 2654435761) & 0xFFFFFFFF)


def first_missing(batches: Sequence[int], first: int, last: int) -> int | None:
    """The first number from `first` to `last` that is not among these; None when all are. Numbers of one life."""
    known = set(batches)
    return next((batch for batch in range(first, last + 1) if batch not in known), None)


# ---- up to which batch everything is durable -------------------------------------------------------------------------

_MARK = struct.Struct("<8sQI")
MARK_BYTES = _MARK.size
_MARK_MAGIC = b"coveymk1"


def pack_mark(batch: int, salt: int) -> bytes:
    """Mark, `MARK_BYTES` long, that everything up to this batch is durable."""
    return _MARK.pack(_MARK_MAGIC, batch, crc32(salt.to_bytes(8, "little"), crc32(batch.to_bytes(8, "little"))))


def mark(data: bytes, salt: int) -> int:
    """The batch up to which everything is durable; 0 when `data` is no mark of this log."""
    if len(data) < MARK_BYTES:
        return 0
    _, batch, _ = _MARK.unpack_from(data)
    return batch if data[:MARK_BYTES] == pack_mark(batch, salt) else 0
