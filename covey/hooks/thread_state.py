"""Whether threads of this process run, as the kernel says."""

import os
import threading


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


def others_run() -> bool:
    """Whether any thread but the one that asks runs, or would if it had a core."""
    own = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", "rb") as state:
                if thread != own and b") R " in state.read(128):
                    return True
        except OSError:  # it has ended since
            continue
    return False
