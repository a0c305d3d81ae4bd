"""`gate.cpp` from Python: it gets the address of each page, and a few calls that take a microsecond. Imports no torch,
which is loaded already wherever there is a library."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy

Page = mmap | bytearray


@dataclass(frozen=True)
class GateCounters:
    """Counts and times since the library was loaded; times in ns of CLOCK_MONOTONIC."""

    idle_ns: int = 0
    gated_ns: int = 0
    stops: int = 0
    garbage: int = 0
    gated: bool = False
    """Whether the gate is active now."""


class NativeGate:
    """The native gate of this process. Its thread reads the pages that it was given, so they stay mapped."""

    def __init__(self, library: Path) -> None:
        """Load the library. OSError when it cannot be loaded."""
        self._library = ctypes.CDLL(str(library))
        for name in ("stop", "neighbour", "script", "look", "wait", "fetch", "meter", "counters"):
            getattr(self._library, f"covey_{name}").restype = None
        self._library.covey_start.restype = ctypes.c_int
        self._library.covey_await.restype = ctypes.c_uint32
        self._library.covey_await.argtypes = [ctypes.c_uint32, ctypes.c_int64]
        self._library.covey_turns.restype = self._library.covey_turns_wait.restype = ctypes.c_int
        self._library.covey_turns.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        self._library.covey_turns_wait.argtypes = [ctypes.c_int64]
        self._reads = 0
        self._library.covey_changes.restype = ctypes.POINTER(ctypes.c_uint32)
        self.changes: memoryview[int] = memoryview(self._library.covey_changes().contents).cast("B").cast("I")
        """A number that changes with each change of the flag and each stop, and is odd while busy. While it is
        unchanged and odd, the idle and stopped times of `counters` have not changed."""
        self._pages: dict[int, tuple[Page, Any]] = {}
        self._asks: dict[Callable[[], None], Callable[[], None]] = {}
        """What the gate has the address of, each once."""
        self._numbers = (ctypes.c_int64 * 5)()

    def _address(self, page: Page) -> ctypes.c_void_p:
        _, whole = self._pages.setdefault(id(page), (page, numpy.frombuffer(page, numpy.uint8)))
        return ctypes.c_void_p(whole.ctypes.data)

    def start(self, limits: Page, flag: Page, meter: bool) -> bool:
        """Obey this page of limits and keep this flag; called by the client's thread. Whether its own thread runs."""
        script = threading.main_thread().native_id or 0
        return bool(self._library.covey_start(self._address(limits), self._address(flag), script, int(meter)))

    def meter(self, on: bool) -> None:
        """Set the flag by what threads do, or leave it to `wait`."""
        self._library.covey_meter(int(on))

    def stop(self) -> None:
        """Remove the gate and end its thread, which must not outlive PyTorch; the flag says idle."""
        self._library.covey_stop()

    def neighbour_is(self, page: Page | None) -> None:
        self._library.covey_neighbour(None if page is None else self._address(page))

    def script_is(self, native_id: int) -> None:
        """Set the thread whose sleep means that nothing is computed."""
        self._library.covey_script(native_id)

    def look(self) -> None:
        """Read the page of limits now; otherwise it is read every 2 ms, or every 50 ms where nothing is gated."""
        self._library.covey_look()

    def await_limits(self, seconds: float) -> None:
        """Wait for new limits, or so many seconds, without the interpreter's lock. For one thread only."""
        self._reads = self._library.covey_await(self._reads, int(seconds * 1e9))

    def wait(self, begins: bool) -> None:
        """The script's thread begins, or ends, to wait for others. Each beginning needs its end."""
        self._library.covey_wait(int(begins))

    def fetch(self, begins: bool) -> None:
        """The script's thread begins to fetch input, when only its sleep is idle time; or it has it and computes
        again."""
        self._library.covey_fetch(int(begins))

    def turns(self, page: Page, at: int, ask: Callable[[], None], script: int) -> bool:
        """Call `ask` before operators of the thread `script` (its native id) while the word at `at` of this page does
        not say that this process may compute. Whether that is possible."""
        ask = self._asks.setdefault(ask, ask)
        address = self._address(page)
        return bool(self._library.covey_turns((address.value or 0) + at, id(ask), script))

    def no_turns(self) -> None:
        """Ask for no turns any more: operators cost nothing."""
        self._library.covey_turns(None, None, 0)

    def await_rest(self, seconds: float) -> bool:
        """Wait until this process may compute and its script waits for something, or so many seconds. Whether it
        waits. For one thread only."""
        return bool(self._library.covey_turns_wait(int(seconds * 1e9)))

    def counters(self) -> GateCounters:
        self._library.covey_counters(self._numbers)
        idle, gated, stops, garbage, on = self._numbers
        return GateCounters(idle, gated, stops, garbage, bool(on))
