"""Input waits of a script whose device still works on its queue: the flag says idle once the queue is done.

script  --begins to wait-->  mark the end of the queue  --done?, every 0.5 ms-->  flag: idle
script  --has its input-->   flag: busy, whatever was seen meanwhile
"""

import threading
import time
from collections.abc import Callable

from covey.hooks.limits.sharing import ShareControl

POLL_S = 0.0005
Done = Callable[[], bool]
"""Whether the device is done with what had been queued."""


class QueuedWaits:
    """Input waits, with the queue's end marked at their beginning. `mark()` is called in the script's thread when it
    begins to wait; None: nothing is known of this wait."""

    def __init__(self, share: ShareControl, mark: Callable[[], Done | None]) -> None:
        self._share, self._mark = share, mark
        self._lock = threading.Lock()
        self._waits = threading.Event()
        self._done: Done | None = None
        self._thread: threading.Thread | None = None

    def waits(self, begins: bool) -> None:
        """The script's thread begins, or ends, to wait, as in `ShareControl.waits`."""
        if not self._share.is_script():
            return
        done = self._mark() if begins else None
        with self._lock:
            self._done = done
            if done is None:
                self._waits.clear()
                self._share.idles(False)
                return
            self._waits.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="covey-queue", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while True:
            self._waits.wait()
            self._look()
            time.sleep(POLL_S)

    def _look(self) -> None:
        with self._lock:
            if self._done is not None and self._done():
                self._share.idles(True)
                self._done = None
                self._waits.clear()
