"""How a JAX rank obeys the limits of a shared device: where it can be stopped, and when it has work there.

    a jitted call returns  -->  its result is not ready: the flag says busy
                           -->  limits hold: wait for the result, then stop until the rates allow more
    the newest result is ready (the script waited for it, or a thread here saw it)  -->  idle
        on cores: only while the script's thread sleeps, looked at until it runs again
    a jitted call returned, and jobs share this host in turns  -->  ask for the turn to compute

So one call at a time runs while limits hold, and the script can be stopped between calls but not within one. JAX takes
its memory when it starts, and keeps it: `StartMemory` says how much, and no smaller limit is obeyed.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src.array import ArrayImpl

from covey.hooks.limits.sharing import MemoryUsed, ShareControl
from covey.hooks.thread_state import ThreadState
from covey.hooks.turns.hooked import HookedTurns

RUNS_LOOK_S, SLEEPS_LOOK_S, LONG_LOOK_S = 0.0005, 0.0003, 0.005
"""Seconds between two looks at a script's thread: while it runs, while it sleeps, once it has slept for long. Each look
costs some 15 us of a core that has nothing else to do for the script, and delays what comes after it by one look at
most."""
LONG_S = 0.1
READY_LOOK_S = 0.001
"""Seconds between two looks whether the device is done, while the script does not wait for it itself."""


class JittedWork:
    """The work that jitted calls have given to the device. `wait` is JAX's own `block_until_ready` of an array."""

    def __init__(self, share: ShareControl, wait: Callable[[Any], Any], on_cores: Callable[[], bool]) -> None:
        self._share, self._wait, self._on_cores = share, wait, on_cores
        self._newest: Any = None
        """An array of the newest result, until it is ready."""
        self._waits = 0
        """Number of the script's threads that wait for the device."""
        self._lock = threading.Lock()
        self._look = threading.Event()
        self._state = ThreadState()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Reset in a forked child: no thread of the parent can release the lock there, and the pages are the
        parent's."""
        self._lock, self._newest, self._thread = threading.Lock(), None, None

    def called(self, result: Any) -> None:
        """A jitted call returned, in a thread of the script, and may have given work to the device."""
        if not (self._share.flagged or self._share.stops_now):
            return
        array = _one_of(result)
        with self._lock:
            if array is not None and not _is_ready(array):
                self._newest = array
                self._share.works(True)
            elif self._newest is not None and self._newest.is_deleted():
                self._newest = None
                self._share.works(False)
        self._wake()

    def stop(self) -> None:
        """Stop the script here after that call, while limits demand it, once the device is done with its work."""
        if not self._share.stops_now:
            return
        newest = self._newest
        if newest is not None and self._share.is_script() and _waited(self._wait, newest):
            self._done(newest)
        self._share.stop_if_limited()

    def waits(self, begins: bool) -> None:
        """A thread of the script begins, or ends, to wait for the device."""
        with self._lock:
            self._waits += 1 if begins else -1
            newest = self._newest
        if not begins and newest is not None:
            if _is_ready(newest):
                self._done(newest)
            self._wake()

    def _done(self, array: Any) -> None:
        with self._lock:
            if self._newest is array or self._newest is None:
                self._newest = None
                self._share.works(False)

    # ---- the flag, for neighbours ----

    def _wake(self) -> None:
        if not self._share.flagged:
            return
        if self._share.only_calls and self._newest is not None:
            self._share.idles(False)
        self._look.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="covey-calls", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        """Watch the device. Never blocks within JAX: a thread that returns from there while Python ends would crash."""
        while True:
            self._look.wait()
            self._look.clear()
            time.sleep(RUNS_LOOK_S)
            while (newest := self._newest) is not None and not self._waits:
                if _is_ready(newest):
                    self._done(newest)
                else:
                    time.sleep(READY_LOOK_S)
            if self._newest is None and self._share.only_calls:
                self._watch_script()

    def _watch_script(self) -> None:
        """Watch the script's thread until the device has work again: on cores the script's own work is work too."""
        ran_s = time.monotonic()
        while self._newest is None and self._share.flagged:
            sleeps = not self._on_cores() or not self._state.runs(self._share.script_native_id)
            with self._lock:
                if self._newest is None:
                    self._share.idles(sleeps)
            if not self._on_cores():
                return
            now_s = time.monotonic()
            ran_s = ran_s if sleeps else now_s
            slept_for_long = now_s - ran_s > LONG_S
            time.sleep(LONG_LOOK_S if slept_for_long else SLEEPS_LOOK_S if sleeps else RUNS_LOOK_S)
        if not self._share.flagged:
            self._share.idles(False)  # no rank reads it now; a later reader must not find an old value


class CallTurns:
    """The turns of a script on a host that jobs share, between its jitted calls: after a call it asks for the turn that
    it does not have. `wait` is JAX's own `block_until_ready` of an array."""

    def __init__(self, turns: HookedTurns, wait: Callable[[Any], Any]) -> None:
        self._turns, self._wait = turns, wait
        self._before: Callable[[], None] | None = None

    def put_in(self, before: Callable[[], None]) -> None:
        self._before = before

    def take_out(self) -> None:
        self._before = None

    def batch_ended(self, result: Any) -> None:
        """A mini-batch ended with the call that returned this."""
        if self._before is not None and (array := _one_of(result)) is not None:
            self._turns.batch_ended(lambda: _waited(self._wait, array))

    def ask(self) -> None:
        """A call returned: wait for the turn, if one is needed. What a signal's handler raises is the script's."""
        before = self._before
        if before is not None:
            before()


class StartMemory:
    """The memory of a process that uses JAX: what its allocator took when it started; on cores what was asked for the
    job, since nothing limits it there. `ran()`: whether a JAX function has run. Asked before that, JAX's devices would
    start before the script could choose them."""

    def __init__(self, ran: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> None:
        self._ran = ran
        self._cores: bool | None = None
        said = environ.get("COVEY_GPU_MEMORY", "")
        self._asked = int(said) if said.isdigit() else 0

    def took(self) -> int | None:
        if not self._ran():
            return None
        self.on_cores()  # asked here first: other threads use the answer
        return int(self._figures().get("bytes_limit", 0)) or self._asked

    def ended(self) -> MemoryUsed:
        if not self._ran():
            return MemoryUsed()
        figures = self._figures()
        return MemoryUsed(int(figures.get("peak_bytes_in_use", 0)), int(figures.get("bytes_in_use", 0)))

    def on_cores(self) -> bool:
        if self._cores is None and self._ran():
            self._cores = jax.default_backend() == "cpu"
        return bool(self._cores)

    def _figures(self) -> Mapping[str, Any]:
        return jax.local_devices()[0].memory_stats() or {}


def _one_of(result: Any) -> Any:
    """One array of the result, since all of them become ready at the same time: the smaller of the first and the last,
    as it is kept until then. None when there is no array."""
    leaves = jax.tree.leaves(result)
    first = next((leaf for leaf in leaves if isinstance(leaf, ArrayImpl)), None)
    last = next((leaf for leaf in reversed(leaves) if isinstance(leaf, ArrayImpl)), None)
    return first if last is None or first is None or first.size < last.size else last


def _is_ready(array: Any) -> bool:
    """Whether an array is ready; False when it was donated to another call."""
    try:
        return bool(array.is_ready())
    except RuntimeError:
        return False


def _waited(wait: Callable[[Any], Any], array: Any) -> bool:
    """Wait for the array. Whether it became ready; the script itself gets the error of a failed call."""
    try:
        wait(array)
    except RuntimeError:
        return False
    return True
