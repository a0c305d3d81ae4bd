"""The save that a person asked for (`agentctl checkpoint`), as one rank answers for it."""

import threading
from collections.abc import Callable
from pathlib import Path

from covey.core.errors import CoveyError
from covey.wire.job import SAVED_PATH_MAX, SaveIs

WORDS_MAX = 400
"""Most characters of each line of an error."""
NOT_HERE = "its script saves nothing by Covey"
HOW = "call job.tensors.save(), or job.state(.., checkpoint=True), in the script (docs/guides/jobs.md)"
BUSY = "another save that was asked for is under way"


class AskedSave:
    """The newest save that was asked for. Any thread may call."""

    def __init__(self) -> None:
        self.begin: Callable[[], None] | None = None
        """Begins a save, and later calls `saved` or `failed`; CoveyError when it cannot be. None: nothing saves."""
        self._lock = threading.Lock()
        self._now = SaveIs(0, "refused")

    @property
    def wanted(self) -> bool:
        """Whether a save was asked for, and is not over."""
        return self._now.state == "pending"

    def ask(self, number: int) -> SaveIs:
        """Begin the save of this number, unless that was done before. Returns how it is."""
        with self._lock:
            known, begin = self._now, self.begin
            if known.number == number:
                return known
            if known.state == "pending":
                return SaveIs(number, "refused", why=BUSY, next="ask again once it is over")
            if begin is None:
                return SaveIs(number, "refused", why=NOT_HERE, next=HOW)
            self._now = SaveIs(number, "pending")
        try:
            begin()
        except CoveyError as error:
            self.failed(error)
        return self._now

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""
        with self._lock:
            if self._now.state == "pending":
                self._now = SaveIs(self._now.number, "saved", step, str(path)[:SAVED_PATH_MAX])

    def failed(self, error: CoveyError) -> None:
        """The save that was asked for cannot be."""
        with self._lock:
            if self._now.state == "pending":
                lines = (line[:WORDS_MAX] for line in (f"{error.what}: {error.why}", error.next))
                self._now = SaveIs(self._now.number, "refused", 0, "", *lines)
