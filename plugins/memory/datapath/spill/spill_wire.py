"""What a volume's process and the writer of its spill log say to one another, on a unix socket of the writer.

    volume -> writer   the token that the writer was started with; writer -> volume   one byte: the files are yours
    volume -> writer   SpillHello: the ring, and where the log goes on; writer -> volume   SpillReady
    volume -> writer   an order, and while that is an append perhaps the next; writer -> volume   SpillDone for each

Pages go through the ring. Who listens on the socket owns the files of the log: a writer that is still at work for a
volume's process that died keeps the next one from them until it is done.
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
"""Bytes of rows, or of the list of segments, in one frame; what is longer comes in parts. A whole number of rows."""
RowBytes = Annotated[bytes, Meta(max_length=PART_MAX)]
"""Rows of records (`log_records.ROW`)."""
assert PART_MAX % ROW_BYTES == 0
Slots = Annotated[tuple[Block, ...], Meta(max_length=1 << 16)]


class SpillFrame(msgspec.Struct, frozen=True, tag=True):
    """One frame; the tag is the class name."""


class LogEnd(msgspec.Struct, frozen=True):
    """Where the next batch goes, and what is in it first."""

    segment: Number
    """0: nowhere yet."""
    slot: Block
    """Slot of the segment's file."""
    at: Block
    batch: Number
    start: Number
    """Number of its first record."""


class SpillHello(SpillFrame, frozen=True):
    ring: Annotated[str, Meta(max_length=64)]
    places: Annotated[int, Meta(ge=1, le=1 << 24)]
    page_bytes: Annotated[int, Meta(ge=512, le=1 << 16)]
    salt: Number
    stride: Block
    """Blocks that a segment may have, at most."""
    end: LogEnd


class SpillReady(SpillFrame, frozen=True):
    pass


class LogSync(msgspec.Struct, frozen=True):
    """Make the segments in these slots durable, then say so in the mark: everything up to this batch is."""

    slots: Slots
    batch: Number


class AppendRecords(SpillFrame, frozen=True):
    """Records `end.start` to `stop` of the ring, as one batch."""

    end: LogEnd
    stop: Number
    synced: Number
    """Every batch up to this one is durable."""
    follows: bool = False
    """Only if the order before, which is not answered yet, is done."""
    sync: LogSync | None = None
    """Once they are written."""


class CopyRecords(SpillFrame, frozen=True):
    """Records of one segment, read, checked and written to another as one batch. `SpillDone.wrong` says which are not
    what they were, and `unreadable` which the disk cannot read now; then nothing is written."""

    source: Block
    """Slot."""
    rows: RowBytes
    end: LogEnd
    """`start` means nothing."""
    synced: Number
    lost: Annotated[tuple[Block, ...], Meta(max_length=1 << 16)] = ()
    """Positions of those that are known to be wrong: they are copied as they are, under the checksum that they had, so
    that reading them stays an error."""


class OrderPart(SpillFrame, frozen=True):
    """The beginning of the rows, or of the record, of the order that follows."""

    data: RowBytes


class SealSegment(SpillFrame, frozen=True):
    """Write a table of all rows of a segment behind its last batch."""

    segment: Number
    slot: Block
    at: Block
    batch: Number
    """The last one in it."""
    rows: RowBytes


class SyncLog(SpillFrame, frozen=True):
    sync: LogSync


class SaveSegments(SpillFrame, frozen=True):
    """Replace the list of segments; durable when it is done."""

    record: RowBytes
    end: LogEnd
    """Where the next batch goes from then on."""


class DropSegment(SpillFrame, frozen=True):
    """Delete a file of which nothing is listed."""

    slot: Block


class SpillDone(SpillFrame, frozen=True):
    """`why` is empty when it is done; else the disk refused it. `written`: the batch is written, and only its sync was
    refused."""

    written: bool = False
    errno: Number = 0
    why: Text = ""
    wrong: Annotated[tuple[Block, ...], Meta(max_length=1 << 16)] = ()
    unreadable: Annotated[tuple[Block, ...], Meta(max_length=1 << 16)] = ()


Order = AppendRecords | CopyRecords | OrderPart | SealSegment | SyncLog | SaveSegments | DropSegment
order_decoder: msgspec.msgpack.Decoder[SpillHello | Order] = msgspec.msgpack.Decoder(SpillHello | Order)
done_decoder: msgspec.msgpack.Decoder[SpillReady | SpillDone] = msgspec.msgpack.Decoder(SpillReady | SpillDone)
