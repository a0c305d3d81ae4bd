"""The ring between a volume's process and the writer of its spill log: memory of both, so that a page is copied once.

    [records put so far, u64][records begun, u64][a row for each place (`log_records.ROW`)][a page for each place]

Records are numbered as they are put; number n is in place n modulo the size. The volume's process puts records and
says which the writer may take; the writer fills in their checksums. A place is used again once its record is on disk,
which the volume's process alone decides. The count is written after the record it counts, and the number of those begun
before: a writer that outlives the volume's process knows which records are whole, also of those that are on disk and
whose place is not used again yet.
"""

import struct
from typing import Final

import numpy as np

from covey.ports.pages import SharedRing
from plugins.memory.policy.log_records import ROW, ROW_BYTES, Rows

COUNT_BYTES: Final = 4096
_ROW: Final = struct.Struct("<QIIII")
_ROW_BYTES: Final = 24
assert _ROW.size == ROW_BYTES == _ROW_BYTES
Parts = list[memoryview]


def ring_bytes(places: int, page_bytes: int) -> int:
    return _data_at(places) + places * page_bytes


def _data_at(places: int) -> int:
    """Offset of the pages, at a page of the machine: they are written past the page cache."""
    return COUNT_BYTES + -(-places * ROW_BYTES // 4096) * 4096


class SpillRing:
    """A view of the ring. `places` and `page_bytes` are the same for both processes."""

    def __init__(self, shared: SharedRing, places: int, page_bytes: int) -> None:
        self.shared, self.places, self.page_bytes = shared, places, page_bytes
        self._count = shared.view[:16].cast("Q")
        self._row_bytes = shared.view[COUNT_BYTES : COUNT_BYTES + places * ROW_BYTES]
        self._rows: Rows = np.frombuffer(self._row_bytes, ROW)
        self._pages = shared.view[_data_at(places) : _data_at(places) + places * page_bytes]

    @property
    def count(self) -> int:
        """Number of records put so far."""
        return self._count[0]

    @property
    def first(self) -> int:
        """Number of the first record that is whole: the places of those before are being used again, or were."""
        return max(0, self._count[1] - self.places)

    # ---- the volume's process ----

    def put_page(self, number: int, version: int, page: int, content: memoryview | bytes) -> None:
        """Put one record, whose number is `count`. Its place is free."""
        place, size = number % self.places, self.page_bytes
        self._count[1] = number + 1
        self._pages[place * size : place * size + size] = content
        _ROW.pack_into(self._row_bytes, place * _ROW_BYTES, version, page, 0, 0, 0)
        self._count[0] = number + 1

    def put_zeros(self, number: int, version: int, page: int, pages: int) -> None:
        """Put one record for a run of pages of zeros."""
        self._count[1] = number + 1
        _ROW.pack_into(self._row_bytes, number % self.places * _ROW_BYTES, version, page, pages, 0, 0)
        self._count[0] = number + 1

    def put_run(self, number: int, version: int, first: int, pages: int, content: memoryview) -> None:
        """Put a record for each of a run of pages."""
        self._count[1] = number + pages
        done = 0
        for place, run in self._spans(number, number + pages):
            size = self.page_bytes
            self._pages[place * size : (place + run) * size] = content[done * size : (done + run) * size]
            rows = self._rows[place : place + run]
            rows["version"], rows["zeros"] = version, 0
            rows["page"] = np.arange(first + done, first + done + run)
            done += run
        self._count[0] = number + pages

    def content(self, place: int, pages: int = 1) -> memoryview:
        return self._pages[place * self.page_bytes : (place + pages) * self.page_bytes]

    # ---- both ----

    def rows(self, start: int, end: int) -> Rows:
        """Copy of the rows of records `start` to `end`, shape (end - start,)."""
        spans = self._spans(start, end)
        return np.concatenate([self._rows[place : place + run] for place, run in spans]) if spans else self._rows[:0]

    def fill_in(self, start: int, rows: Rows) -> None:
        """Write back rows of records from `start` on, with their checksums."""
        done = 0
        for place, run in self._spans(start, start + len(rows)):
            self._rows[place : place + run] = rows[done : done + run]
            done += run

    def pages(self, start: int, rows: Rows) -> Parts:
        """Content of those of these records that have some, in their order, in as few parts as possible."""
        with_content = np.flatnonzero(rows["zeros"] == 0)
        if not len(with_content):
            return []
        parts: Parts = []
        places = (start + with_content) % self.places
        cuts = np.flatnonzero(np.diff(places) != 1) + 1
        for run in np.split(places, cuts):
            parts.append(self.content(int(run[0]), len(run)))
        return parts

    def _spans(self, start: int, end: int) -> list[tuple[int, int]]:
        """First place and length of each run of places of these records."""
        if end <= start:
            return []
        place, count = start % self.places, end - start
        whole = min(count, self.places - place)
        return [(place, whole)] if whole == count else [(place, whole), (0, count - whole)]

    def close(self) -> None:
        self._count.release()
        self.shared.close()
