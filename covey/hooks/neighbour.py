"""What a rank knows of another rank on its device."""

from covey.hooks.gate.native import Page
from covey.kernel.futex import SharedWord
from covey.kernel.pages import BUSY_AT, FlagReader


class Neighbour:
    """Another rank on the device, by its flag."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._flag, self._word = FlagReader(page), SharedWord(page, BUSY_AT)
        self._seen = 0

    def said(self) -> tuple[bool, int]:
        """Whether the neighbour is busy, and since when (ns); busy since 0 where its page says nothing."""
        self._seen, busy = self._word.value, self._flag.busy()
        return (True, 0) if busy is None else (busy, self._flag.since_ns())

    def sleep(self, length_ns: int) -> None:
        """Sleep until the flag differs from the last answer of `said`, at most `length_ns`."""
        self._word.sleep(self._seen, length_ns)
