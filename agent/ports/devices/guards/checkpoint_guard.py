"""The guard of ranks whose GPU memory is on the host: it moves them out by CUDA's checkpoint, and back when time is
over.

A process that was checkpointed stays out of its GPU until it is restored; so it is this guard that moves it out, a
process of its own that ends only when all are back. It alone loads the driver's library, never the agent. Lines on
standard input, each answered by one line:

    hold SECONDS PID:START,...    these are moved out, for so long at most; of those that are, the time begins anew
    drop PID:START,...            these are moved back
    able                          whether the driver can do this (570 and later)

`ok`, or `no` and why. When the time is over, or standard input ends, they are moved back; where the GPU has no room
for one yet it is tried again every half second. START is field 22 of /proc/PID/stat: a pid that is used again is left
alone. Run as a script of its own, without any of Covey's modules: python -I -S checkpoint_guard.py [LIBRARY]
"""

import ctypes
import os
import select
import signal
import sys
import time

LIBRARY = "libcuda.so.1"
LOCK_MS = 5000
"""Milliseconds to wait for kernels that run, and calls that are being made, to end."""
AGAIN_S = 0.5
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2


class LockArgs(ctypes.Structure):
    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7)]


class Driver:
    """Four calls of libcuda. OSError or AttributeError without them."""

    def __init__(self, library: str) -> None:
        cuda = ctypes.CDLL(library)
        self._state = cuda.cuCheckpointProcessGetState
        self._lock, self._unlock = cuda.cuCheckpointProcessLock, cuda.cuCheckpointProcessUnlock
        self._checkpoint, self._restore = cuda.cuCheckpointProcessCheckpoint, cuda.cuCheckpointProcessRestore
        if error := cuda.cuInit(0):
            raise OSError(f"cuInit failed with {error}")

    def state(self, pid: int) -> int:
        """The process's state; -1: it uses no GPU, or is gone."""
        found = ctypes.c_int(-1)
        return found.value if self._state(pid, ctypes.byref(found)) == 0 else -1

    def out(self, pid: int) -> str:
        """Move a process out of its GPU. Returns why it could not be; then it runs as it did. Empty: its memory is on
        the host."""
        if self.state(pid) == CHECKPOINTED:
            return ""
        if error := self._lock(pid, ctypes.byref(LockArgs(LOCK_MS))):
            return f"process {pid} was not locked (CUDA error {error})"
        if error := self._checkpoint(pid, None):
            self._unlock(pid, None)
            return f"process {pid} was not moved out (CUDA error {error})"
        return ""

    def back(self, pid: int) -> str:
        """Move a process back. Returns why it is not back yet. Empty: it works again, or needs nothing from here."""
        state = self.state(pid)
        if state == CHECKPOINTED and (error := self._restore(pid, None)):
            return f"process {pid} was not moved back (CUDA error {error})"
        if state in (CHECKPOINTED, LOCKED) and (error := self._unlock(pid, None)):
            return f"process {pid} was not unlocked (CUDA error {error})"
        return ""


def is_alive(one: "tuple[int, int]") -> bool:
    try:
        with open(f"/proc/{one[0]}/stat", "rb") as file:
            return int(file.read().decode(errors="replace").rpartition(")")[2].split()[19]) == one[1]
    except (OSError, IndexError):
        return False


def read(text: str) -> "list[tuple[int, int]]":
    pairs = (pair.partition(":") for pair in text.split(",") if pair)
    return [(int(pid), int(started)) for pid, _, started in pairs]


class Guard:
    """The processes that are out, and until when."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.held: dict[tuple[int, int], float] = {}

    def hold(self, seconds: float, processes: "list[tuple[int, int]]") -> str:
        """Move all these processes out, or none that was not out before."""
        new: list[tuple[int, int]] = []
        for one in processes:
            why = self.driver.out(one[0]) if is_alive(one) else f"process {one[0]} is gone"
            if why:
                self.drop(new)
                return why
            if one not in self.held:
                new.append(one)
            self.held[one] = time.monotonic() + seconds
        return ""

    def drop(self, processes: "list[tuple[int, int]]") -> str:
        """Move these processes back. One that does not come back is tried again."""
        told = ""
        for one in processes:
            why = self.driver.back(one[0]) if is_alive(one) else ""
            if why:
                self.held[one] = time.monotonic() + AGAIN_S
            else:
                self.held.pop(one, None)
            told = told or why
        return told

    def end(self, all_of_them: bool) -> None:
        """Move back the processes whose time is over, or all of them."""
        now_s = time.monotonic()
        self.drop([one for one, until_s in self.held.items() if all_of_them or until_s <= now_s])

    def answer(self, line: str) -> str:
        word, _, rest = line.partition(" ")
        if word == "able":
            return ""
        if word == "drop":
            return self.drop(read(rest))
        seconds, _, rest = rest.partition(" ")
        return self.hold(float(seconds), read(rest))


def serve(guard: "Guard | None", trouble: str) -> None:
    unread, open_ = b"", True
    while open_ or (guard is not None and guard.held):
        held = guard.held if guard is not None else {}
        soonest = min(held.values(), default=None)
        wait_s = None if soonest is None else max(0.0, soonest - time.monotonic())
        if not open_:
            time.sleep(min(wait_s or 0.0, AGAIN_S))
        elif select.select([0], [], [], wait_s)[0]:
            data = os.read(0, 65536)
            open_ = bool(data)
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                why = trouble if guard is None else guard.answer(line.decode())
                os.write(1, f"no {why}\n".encode() if why else b"ok\n")
            if not open_ and guard is not None:
                guard.end(all_of_them=True)
        if guard is not None:
            guard.end(all_of_them=False)


def main(library: str) -> None:
    try:
        guard, trouble = Guard(Driver(library)), ""
    except (OSError, AttributeError) as error:
        guard, trouble = None, str(error).replace("\n", " ")
    serve(guard, trouble)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its agent does
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else LIBRARY)
    except BrokenPipeError:
        sys.exit(0)
