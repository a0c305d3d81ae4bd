"""Pure decisions about a volume's spill log: when it is synced, when it is compacted, and how long its parts are."""

from collections.abc import Iterable
from typing import NamedTuple

SEGMENTS = 64
"""Segments that a volume is cut into, so that a small one too is compacted in small steps."""
SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 256 << 10, 32 << 20
STRIDE = 2
"""How many times its length a segment may become: a batch that begins within the length is written as a whole."""
PLACES_MAX = (1 << 31) - 2
"""Blocks of a log that can be told apart, whether they are in use or not."""
BATCH_ROWS = 1024
"""Most records of one batch."""
COPY_ROWS = 256
"""Records that compaction copies in one step: new records wait for it."""
UNSEALED_MAX = 2
"""Most segments that are full and not sealed: an unsealed segment cannot be compacted, and costs a row of memory for
each record."""
GATHER_S = 0.01
"""Seconds for which records are gathered that nothing waits for."""
SYNC_BYTES = 64 << 20
"""Most bytes written without a sync; what is not synced is read and checked after a crash."""
SYNC_S = 1.0
"""Most seconds for which written bytes may stay unsynced."""
TAKES_MAX, TAKES_MOST = 1.3, 1.5
"""Most bytes of the log on disk as multiples of the living bytes, beside `SEGMENTS_SPARE` segments, those that wait to
be dropped, and those in reserve. Above the first every second step is one of compaction, above the second all are: a
writer that does not pause is held up."""
SEGMENTS_SPARE = 3
RESERVED = 3
"""Segments that are listed ahead: replacing the list takes a disk long, so it is done once for this many."""
DROP_TOGETHER = 2
"""Segments that are dropped together, for the same reason; fewer when there is nothing else to do."""
DEAD_MAX = 0.5
"""Share of a segment that may be dead; above it the segment is compacted although there is room."""


class Fill(NamedTuple):
    """Fill of one segment to which nothing is added any more."""

    slot: int
    used: int
    """Blocks that it takes on disk."""
    live: int
    """Blocks of it whose record is the newest of its page."""


def segment_blocks(size_bytes: int, page_bytes: int) -> int:
    """Blocks (pages) of a segment of a volume."""
    return max(16, min(SEGMENT_BYTES_MAX, max(SEGMENT_BYTES_MIN, size_bytes // SEGMENTS)) // page_bytes)


def sync_due(waited_for: bool, unsynced_bytes: int, age_s: float) -> bool:
    """Is a sync due? `age_s`: age of the oldest record that is written and not synced."""
    return unsynced_bytes > 0 and (waited_for or unsynced_bytes >= SYNC_BYTES or age_s >= SYNC_S)


def append_due(rows: int, waited_for: bool, age_s: float) -> bool:
    """Is it time to append `rows` waiting records, the oldest of which has waited for `age_s`?"""
    return rows > 0 and (waited_for or rows >= BATCH_ROWS or age_s >= GATHER_S - 1e-6)


def takes_too_much(used: int, live: int, segment: int, times: float = TAKES_MAX) -> bool:
    """Does the log take too much disk? `used`: blocks on disk; `live`: blocks that live; `segment`: blocks of a
    segment."""
    return used > times * live + SEGMENTS_SPARE * segment


def volume_bytes_most(page_bytes: int) -> int:
    """Bytes of the largest volume whose log can be rewritten again and again."""
    return int(PLACES_MAX / (STRIDE * TAKES_MOST)) * page_bytes


def to_compact(full: Iterable[Fill], used: int, live: int, segment: int) -> int | None:
    """Slot of the segment whose living records are to be copied so that it can be deleted: the one with most dead
    blocks, when the log takes too much or that segment is more than half dead; None when all is in order. `used`,
    `live`: blocks of the whole log."""
    worst = max(full, key=lambda fill: (fill.used - fill.live, -fill.slot), default=None)
    if worst is None or worst.live >= worst.used:
        return None
    dead = worst.used - worst.live
    gain = dead > worst.used // 8  # tables alone are no reason: the copy would have them too
    if dead > DEAD_MAX * worst.used or (gain and takes_too_much(used, live, segment)):
        return worst.slot
    return None
