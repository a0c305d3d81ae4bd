"""Tests that something does *not* happen: they look once everything that could still do it has been done.

A sleep before `assert not writing.done()` proves nothing on a busy machine: perhaps nothing ran in that time.
"""

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures.thread import _worker
from pathlib import Path

CALM_TURNS = 5
"""Turns of the loop in a row in which only the test was ready: what one socket of this process writes, another reads
in the next turn."""
TURNS_MAX = 100_000
PAUSE_S = 0.001
"""Seconds between two looks at executors that work."""
_WORKER = _worker.__code__
STILL_LOOKS = 10
"""Looks at a thread in a row that find it asleep in one place."""
BLOCKED_S = 20.0


async def quiet() -> None:
    """Return when the event loop has nothing left to do except wait for a timer: no callback is ready, no descriptor
    of its own is readable, and no executor of this process works (files are written in threads). What an executor runs
    must end by itself; for a thread that waits there is `until_blocked`. Other threads and other processes are not
    seen: wait for a sign of theirs first."""
    loop = asyncio.get_running_loop()
    ready = getattr(loop, "_ready", None)
    if ready is None:
        raise RuntimeError(f"{type(loop).__name__} does not tell what is ready; run this test on asyncio's own loop")
    calm = 0
    for _ in range(TURNS_MAX):
        working = _executors_work()
        await asyncio.sleep(PAUSE_S if working else 0)
        calm = 0 if ready or working else calm + 1
        if calm == CALM_TURNS:
            return
    raise AssertionError(f"something is ready in each of {TURNS_MAX} turns of the loop")


def _executors_work() -> bool:
    """Whether a thread of a ThreadPoolExecutor runs what it was given. One that waits for work is in `_worker`
    itself."""
    for frame in sys._current_frames().values():
        innermost = frame.f_code
        above = frame.f_back
        while above is not None and above.f_code is not _WORKER:
            above = above.f_back
        if above is not None and innermost is not _WORKER:
            return True
    return False


def until_blocked(thread: threading.Thread, within: Callable[..., object]) -> None:
    """Return when that thread of this process waits for something (a lock, a descriptor, a condition) in this
    function, or in what it calls. Raises AssertionError when the thread ends, or is not there within `BLOCKED_S`
    seconds."""
    code = inspect.unwrap(within).__code__
    end_s, still, before = time.monotonic() + BLOCKED_S, 0, None
    while still < STILL_LOOKS:
        assert thread.is_alive(), f"{thread.name} has ended, and does not wait in {within.__qualname__}"
        assert time.monotonic() < end_s, f"{thread.name} does not come to wait in {within.__qualname__}"
        now = _asleep_at(thread, code)
        still = still + 1 if now is not None and now == before else 0
        before = now
        time.sleep(0.002)  # it may run meanwhile


def _asleep_at(thread: threading.Thread, within: object) -> tuple[int, int] | None:
    """Frame and instruction in which the thread sleeps; None: it runs, or is not in that code."""
    innermost = frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not within:
        frame = frame.f_back
    if frame is None or innermost is None:
        return None
    state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0]
    return (id(innermost), innermost.f_lasti) if state == "S" else None
