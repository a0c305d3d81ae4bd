"""The data Blocks that are in a process: all in memory."""

import threading
from collections.abc import Iterator

from covey.job.blocks.block_arrays import bytes_in_block
from covey.job.blocks.block_wire import BlockArrays


class BlockStore:
    """The Blocks of one set, by number. Any thread may call."""

    spills = False
    """Whether Blocks that have no room in memory lie elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._here: dict[int, BlockArrays] = {}
        self._here_bytes = 0
        """Bytes of the Blocks in `_here`."""

    def __contains__(self, block: int) -> bool:
        return block in self._here

    def __iter__(self) -> Iterator[int]:
        with self._lock:
            return iter(sorted(self._here))

    def get(self, block: int) -> BlockArrays | None:
        """The Block; None: it is not here."""
        return self._here.get(block)

    def used(self, block: int) -> BlockArrays | None:
        """The Block, which the script computes with now; None: it is not here."""
        return self.get(block)

    def put(self, block: int, arrays: BlockArrays) -> None:
        with self._lock:
            self.drop(block)
            self._here[block] = arrays
            self._here_bytes += bytes_in_block(arrays)

    def drop(self, block: int) -> None:
        with self._lock:
            if (arrays := self._here.pop(block, None)) is not None:
                self._here_bytes -= bytes_in_block(arrays)

    def stepped(self) -> None:
        """A step has ended."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of Blocks in memory."""
        return self._here_bytes

    @property
    def words(self) -> str:
        """What lies outside of memory, for people; empty: nothing."""
        return ""

    def close(self) -> None:
        """Give up what is not in memory."""

    def abandon(self) -> None:
        """Close this process's descriptors in a forked child, where a lock may be held for ever. The parent keeps what
        is not in memory."""
