"""A pipe by which other threads wake the thread that polls sockets: it is one of the polled files."""

import contextlib
import os
import select


class WakePipe:
    """A pipe whose `wake` is for all threads, and `wait` for the one thread that waits."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def closed(self) -> bool:
        return self._in == -1

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: the thread has ended
            os.write(self._in, b"\0")

    def wait(self, timeout_s: float | None, *wanted: tuple[int, int]) -> dict[int, int]:
        """Wait until it is woken, the time has passed (None: no limit), or one of these files is ready for its events.
        Returns what is ready, by descriptor. Uses poll, not select: a training script may have thousands of files
        open."""
        poll = select.poll()
        for file, events in ((self._out, select.POLLIN), *wanted):
            poll.register(file, events)
        ready = dict(poll.poll(None if timeout_s is None else timeout_s * 1000 + 1))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._out, 4096):
                pass
        return ready

    def close(self) -> None:
        """Close both ends; no thread may wait any more. Idempotent."""
        ends, self._out, self._in = (self._out, self._in), -1, -1
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)
