"""Whether a thread of this process runs, as the kernel says."""

import os


class ThreadState:
    """The kernel's word on a thread of this process, usually the same thread each time."""

    def __init__(self) -> None:
        self._of, self._file = 0, -1

    def runs(self, native_id: int) -> bool:
        """Whether the thread runs, or would if it had a core; True also when not known."""
        try:
            if native_id != self._of:
                if self._file >= 0:
                    os.close(self._file)
                self._file, self._of = -1, 0
                self._file, self._of = os.open(f"/proc/self/task/{native_id}/stat", os.O_RDONLY), native_id
            return b") R " in os.pread(self._file, 128, 0)
        except OSError:
            return True
