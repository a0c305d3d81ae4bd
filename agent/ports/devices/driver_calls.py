"""Calls that may hang: each in a thread of its own, with a deadline, and no more of them while one is overdue.

A thread that hangs in a driver cannot be ended, so threads that pile up would be the agent's end. While one is overdue
every other call fails at once; when it comes back the next call is made.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
DEADLINE_S = 5.0
"""Seconds that a call may take: NVML answers within milliseconds; its first call on a machine without persistence mode
takes seconds, and has its own deadline, `FIRST_S`."""
FIRST_S = 60.0


class DriverCalls:
    """Calls of one driver, made from one event loop."""

    def __init__(self, driver: str, deadline_s: float = DEADLINE_S, first_s: float = FIRST_S) -> None:
        self._driver, self.deadline_s, self._first_s = driver, deadline_s, first_s
        self._running: dict[Future[object], tuple[float, str]] = {}
        self._answered = False
        self.counters = {"timeouts": 0}
        """Counts of calls that did not come back in time, or were not made since another hung."""

    @property
    def silence(self) -> str:
        """The driver's silence in words that do not change while it lasts; empty when calls are made."""
        return f"{self._driver} does not answer" if self.trouble else ""

    @property
    def trouble(self) -> str:
        """Why no call is made now; empty when calls are made."""
        self._running = {call: since for call, since in self._running.items() if not call.done()}
        now_s, most_s = time.monotonic(), self.deadline_s if self._answered else self._first_s
        for began_s, what in self._running.values():
            if now_s - began_s >= most_s:
                return f"{self._driver} has not answered for {now_s - began_s:.0f} s ({what})"
        return ""

    def begin(self, what: str, call: Callable[[], T]) -> "Future[T]":
        """Begin a call. TimeoutError while another call hangs. What the call raises the future raises."""
        if why := self.trouble:
            self.counters["timeouts"] += 1
            raise TimeoutError(why)
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # from now on a caller that stops waiting cannot cancel it
        self._running[done] = (time.monotonic(), what)  # type: ignore[index]

        def run() -> None:
            try:
                answer = call()
            except Exception as error:
                done.set_exception(error)
            else:
                self._answered = True
                done.set_result(answer)

        # A daemon: a driver that hangs must not keep the agent from ending.
        threading.Thread(target=run, name=f"{self._driver}: {what}", daemon=True).start()
        return done

    async def within(self, what: str, call: Callable[[], T]) -> T:
        """Call, and return the answer. TimeoutError once the deadline is over; the call continues by itself."""
        waited = asyncio.wrap_future(self.begin(what, call))
        waited.add_done_callback(_look)
        try:
            async with asyncio.timeout(self.deadline_s):
                return await asyncio.shield(waited)
        except TimeoutError:
            self.counters["timeouts"] += 1
            raise TimeoutError(f"{self._driver} did not answer within {self.deadline_s:g} s ({what})") from None


def _look(late: "asyncio.Future[T]") -> None:
    """Look at a late call's error, which has no other reader."""
    if not late.cancelled():
        late.exception()


class Newest(Generic[T]):
    """The newest answer of a call, at once; the call is made again in the background, at most once a period."""

    def __init__(self, calls: DriverCalls, what: str, call: Callable[[], T], first: T, period_s: float) -> None:
        self._calls, self._what, self._call = calls, what, call
        self._value, self._period_s = first, period_s
        self._reading: Future[T] | None = None
        self._again_s = 0.0
        self.failed = ""
        """Why the newest call gave no answer, in words; empty: it gave one, or is still being made."""

    def now(self) -> T:
        self._take()
        if self._reading is None and time.monotonic() >= self._again_s:
            self._again_s = time.monotonic() + self._period_s
            try:
                self._reading = self._calls.begin(self._what, self._call)
            except TimeoutError:
                return self._value
        return self._value

    async def first(self, timeout_s: float) -> T:
        """Wait for an answer of now, at most `timeout_s` seconds."""
        self.now()
        if self._reading is not None:
            waiting: Sequence[Future[T]] = (self._reading,)
            await asyncio.wait([asyncio.wrap_future(one) for one in waiting], timeout=timeout_s)
        return self.now()

    def _take(self) -> None:
        if self._reading is not None and self._reading.done():
            error = self._reading.exception()
            self.failed = "" if error is None else f"{self._what} could not be read: {error!r}"
            if error is None:
                self._value = self._reading.result()
            self._reading = None
