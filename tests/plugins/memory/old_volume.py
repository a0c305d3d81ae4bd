"""Files of a volume as they were before the spill log, for what reads and converts them."""

from array import array
from collections.abc import Iterable
from pathlib import Path

from covey.wire.checksum import crc32
from plugins.memory.datapath.spill import old_index
from plugins.memory.datapath.spill.old_index import BATCH_BITS, BLOCK_BYTES, ENTRY_BYTES, LEAF_PAGES, Marks

LIFE = 3


def checksum(version: int, page: int, data: bytes) -> int:
    return crc32(data, (version ^ version >> 32 ^ page * 2654435761) & 0xFFFFFFFF)


class OldVolume:
    """Files `PREFIX/pages` and `PREFIX/index` in a folder, of so many pages."""

    def __init__(self, folder: Path, pages: int, page_bytes: int = 4096) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.pages, self.page_bytes = pages, page_bytes
        self.data, self.index = open(folder / "pages", "w+b"), open(folder / "index", "w+b")  # noqa: SIM115
        self._leaves = bytearray(-(-pages // LEAF_PAGES))
        self._mark_at = -(-2 * pages * ENTRY_BYTES // BLOCK_BYTES) * BLOCK_BYTES

    def write(self, first: int, contents: Iterable[bytes], version: int, batch: int, place: int = 0) -> None:
        """A run of pages, of one batch of life `LIFE`."""
        contents = list(contents)
        numbers = range(first, first + len(contents))
        sums = array("I", [checksum(version, page, data) for page, data in zip(numbers, contents, strict=True)])
        self.data.seek((place * self.pages + first) * self.page_bytes)
        self.data.write(b"".join(contents))
        entries = old_index.packed_many(
            [version] * len(contents), LIFE << BATCH_BITS | batch, sums, numbers, [place] * len(contents)
        )
        self.index.seek((place * self.pages + first) * ENTRY_BYTES)
        self.index.write(entries)
        for page in numbers:
            self._leaves[page // LEAF_PAGES] = 1

    def end(self, durable: int) -> None:
        """Every batch up to this one was durable."""
        marks = Marks()
        marks.life, marks.of = LIFE, {LIFE: LIFE << BATCH_BITS | durable}
        self.index.seek(self._mark_at)
        mark = old_index.pack_mark(LIFE << BATCH_BITS | durable).ljust(BLOCK_BYTES, b"\0")
        self.index.write(mark + marks.packed() + bytes(BLOCK_BYTES) + bytes(self._leaves))
        self.data.close()
        self.index.close()
