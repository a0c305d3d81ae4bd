"""One slab of a lender on this host, whose memory this process maps: pages are copied to and from it directly.

The rules are those of the lender's own process (`slab_memory`). A page that is being written has no version until its
last byte is there. What is read is looked at afterwards: its versions say what it is, and one word in front of them
whether the slab counts at all. Its lender takes that word away before anything else when it takes the slab back, and
the memory with it, so a borrower that has not heard of that yet finds neither.
"""

from array import array
from collections.abc import Callable

from plugins.memory.datapath.links.asked_in_order import NO_VERSIONS, Answered
from plugins.memory.datapath.wire.slab_memory import LIVE, SlabPages
from plugins.memory.datapath.wire.slabwire import Versions


class MappedSlab:
    """The mapped memory of one slab (`one_sided.PagesThere`). `gone` is called when the slab does not count any more,
    before that is answered."""

    def __init__(self, kept: SlabPages, gone: Callable[[], None]) -> None:
        self._kept, self._gone = kept, gone
        self._page_bytes = kept.record.page_bytes
        self._memory: memoryview = kept.pages
        self._versions: memoryview = kept.versions
        self._live: memoryview = kept.live_word()
        self._closed = False

    def write_one(self, page: int, version: int, content: memoryview) -> bool:
        """Write one page. True: the slab still counts, so the page is there."""
        if self._closed:
            return False
        at = page * self._page_bytes
        self._versions[page] = 0  # until it is whole
        self._memory[at : at + self._page_bytes] = content
        self._versions[page] = version
        return self._counts()

    def write(self, first: int, versions: Versions, pages: memoryview, answered: Answered) -> None:
        if self._closed:
            answered(False, NO_VERSIONS)
            return
        size, count = self._page_bytes, len(versions)
        if count == 1:
            answered(self.write_one(first, versions[0], pages), NO_VERSIONS)
            return
        self._versions[first : first + count] = array("Q", bytes(8 * count))
        self._memory[first * size : (first + count) * size] = pages
        self._versions[first : first + count] = versions
        answered(self._counts(), NO_VERSIONS)

    def read(self, first: int, into: memoryview, answered: Answered) -> None:
        versions = self.read_now(first, into)
        answered(versions is not None, NO_VERSIONS if versions is None else versions)

    def read_one(self, page: int, into: memoryview) -> int:
        """Copy one page into `into` and return its version; -1: the slab does not count any more."""
        if self._closed:
            return -1
        at = page * self._page_bytes
        into[:] = self._memory[at : at + self._page_bytes]
        version = self._versions[page]
        return version if self._counts() else -1

    def read_now(self, first: int, into: memoryview) -> Versions | None:
        """Copy pages into `into` and return their versions; None: the slab no longer counts."""
        if self._closed:
            return None
        size = self._page_bytes
        count = len(into) // size
        into[:] = self._memory[first * size : (first + count) * size]
        versions = array("Q", self._versions[first : first + count].tobytes())
        return versions if self._counts() else None

    def close(self) -> None:
        """Release the mapping. Idempotent."""
        if not self._closed:
            self._closed = True
            self._live.release()
            self._kept.let_go()

    def _counts(self) -> bool:
        if self._live[0] == LIVE:
            return True
        self._gone()
        return False
