"""The protocol between a volume's process and the writer of its spill log, on a unix socket of the writer.

    volume -> writer   the token that the writer was started with; writer -> volume   one byte: the files are yours
    volume -> writer   SpillHello: the ring, and where the log goes on; writer -> volume   SpillReady
    volume -> writer   an order, and while that is an append perhaps the next; writer -> volume   SpillDone for each

Pages go through the ring. The listener on the socket owns the files of the log: a writer that is still at work
for a volume's process that died keeps the next one from them until it is done.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from plugins.memory.policy.log_records import ROW_BYTES

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Block = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TOKEN_BYTES = 16
Text = Annotated[str, Meta(max_length=400)]
PART_MAX = 960_000
"""Most bytes of rows, or of the list of segments, in one frame; longer data come in parts. It is a whole number of
rows."""
RowBytes = Annotated[bytes, Meta(max_length=PART_MAX)]
"""Rows of records (`log_records.ROW`)."""
assert PART_MAX % ROW_BYTES == 0
Slots = Annotated[tuple[Block, ...], Meta(max_length=1 << 16)]


class SpillFrame(msgspec.Struct, frozen=True, tag=True):
    """One frame; the tag is the class name."""


class LogEnd(msgspec.Struct, frozen=True):
    """Place of the next batch, and its first record."""

    segment: Number
    """Id of the segment; 0: nowhere yet."""
    slot: Block
    """Slot of the segment's file."""
    at: Block
    batch: Number
    start: Number
    """Number of the first record of that batch."""


class SpillHello(SpillFrame, frozen=True):
    ring: Annotated[str, Meta(max_length=64)]
    places: Annotated[int, Meta(ge=1, le=1 << 24)]
    page_bytes: Annotated[int, Meta(ge=512, le=1 << 16)]
    salt: Number
    end: LogEnd
    synced: Number
    """How many of the ring's records are in the log, durably."""


class SpillReady(SpillFrame, frozen=True):
    pass


class LogSync(msgspec.Struct, frozen=True):
    """Make the segments in these slots durable, then write the mark that everything up to this batch is."""

    slots: Slots
    batch: Number


class AppendRecords(SpillFrame, frozen=True):
    """Append records `end.start` to `stop` of the ring, as one batch."""

    end: LogEnd
    stop: Number
    synced: Number
    """Number of the batch up to which everything is durable."""
    follows: bool = False
    """Do this only if the order before, which is not answered yet, succeeds."""
    sync: LogSync | None = None
    """Sync to do once they are written."""


class CopyRecords(SpillFrame, frozen=True):
    """Read records of one segment, check them and write them to another as one batch. `SpillDone.wrong` says which are
    damaged, and `unreadable` which the disk cannot read now; then nothing is written."""

    source: Block
    """Slot of the segment."""
    rows: RowBytes
    end: LogEnd
    """Place of the batch; its `start` means nothing."""
    synced: Number
    lost: Annotated[tuple[Block, ...], Meta(max_length=1 << 16)] = ()
    """Positions of records that are known to be damaged: they are copied as they are, under the checksum that they had,
    so that reading them stays an error."""


class OrderPart(SpillFrame, frozen=True):
    """The beginning of the rows, or of the record, of the order that follows."""

    data: RowBytes


class SealSegment(SpillFrame, frozen=True):
    """Write a table of all rows of a segment behind its last batch."""

    segment: Number
    slot: Block
    at: Block
    batch: Number
    """Number of the last batch in it."""
    rows: RowBytes


class SyncLog(SpillFrame, frozen=True):
    sync: LogSync


class SaveSegments(SpillFrame, frozen=True):
    """Replace the list of segments; it is durable when this is done."""

    record: RowBytes
    end: LogEnd
    """Place of the next batch from then on."""


class DropSegment(SpillFrame, frozen=True):
    """Delete a file of which nothing is listed."""

    slot: Block


class SpillDone(SpillFrame, frozen=True):
    """Answer to an order. `why` is empty when it is done; else the disk refused it. `written`: the batch is written,
    and only its sync was refused."""

    written: bool = False
    errno: Number = 0
    why: Text = ""
    wrong: Annotated[tuple[Block, ...], Meta(max_length=1 << 16)] = ()
    unreadable: Annotated[tuple[Block, ...], Meta(max_length=1 << 16)] = ()


Order = AppendRecords | CopyRecords | OrderPart | SealSegment | SyncLog | SaveSegments | DropSegment
order_decoder: msgspec.msgpack.Decoder[SpillHello | Order] = msgspec.msgpack.Decoder(SpillHello | Order)
done_decoder: msgspec.msgpack.Decoder[SpillReady | SpillDone] = msgspec.msgpack.Decoder(SpillReady | SpillDone)
