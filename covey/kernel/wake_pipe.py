"""How other threads wake the one that waits for sockets: a pipe, among the files that it polls."""

import contextlib
import os
import select


class WakePipe:
    """`wake` is for all threads, `wait` for the one that waits."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def closed(self) -> bool:
        return self._in == -1

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: the thread has ended
            os.write(self._in, b"\0")

    def wait(self, timeout_s: float | None, *wanted: tuple[int, int]) -> dict[int, int]:
        """Until it is woken, the time has passed (None: never), or one of these files is ready for its events: what
        is ready, by descriptor. poll, not select: a training script may have thousands of files open."""
        poll = select.poll()
        for file, events in ((self._out, select.POLLIN), *wanted):
            poll.register(file, events)
        ready = dict(poll.poll(None if timeout_s is None else timeout_s * 1000 + 1))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._out, 4096):
                pass
        return ready

    def close(self) -> None:
        """Idempotent; nobody waits any more."""
        ends, self._out, self._in = (self._out, self._in), -1, -1
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)
