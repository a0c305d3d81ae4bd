"""`gate.cpp` from Python: an address of each page, and a few calls of a microsecond. Pure of torch, which is loaded
already wherever a library is."""

import ctypes
import threading
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import numpy

Page = mmap | bytearray


@dataclass(frozen=True)
class GateCounters:
    """Since the library was loaded; ns of CLOCK_MONOTONIC."""

    idle_ns: int = 0
    gated_ns: int = 0
    stops: int = 0
    garbage: int = 0
    gated: bool = False
    """Whether the gate is in now."""


class NativeGate:
    """One for this process. Pages that it was given stay mapped as long as it is there: its thread reads them."""

    def __init__(self, library: Path) -> None:
        """OSError when it cannot be loaded."""
        self._library = ctypes.CDLL(str(library))
        for name in ("stop", "neighbour", "script", "look", "wait", "fetch", "meter", "counters"):
            getattr(self._library, f"covey_{name}").restype = None
        self._library.covey_start.restype = ctypes.c_int
        self._library.covey_await.restype = ctypes.c_uint32
        self._library.covey_await.argtypes = [ctypes.c_uint32, ctypes.c_int64]
        self._reads = 0
        self._library.covey_changes.restype = ctypes.POINTER(ctypes.c_uint32)
        self.changes: memoryview[int] = memoryview(self._library.covey_changes().contents).cast("B").cast("I")
        """One number: another after each change of the flag and each stop, odd while busy. What `counters` says of idle
        and stopped time stays as it was while this does, and is odd."""
        self._kept: list[object] = []
        self._numbers = (ctypes.c_int64 * 5)()

    def _address(self, page: Page) -> ctypes.c_void_p:
        whole = numpy.frombuffer(page, numpy.uint8)
        self._kept.append(whole)
        return ctypes.c_void_p(whole.ctypes.data)

    def start(self, limits: Page, flag: Page, meter: bool) -> bool:
        """Obey this page and keep this flag; called by the client's thread. Whether its thread runs."""
        script = threading.main_thread().native_id or 0
        return bool(self._library.covey_start(self._address(limits), self._address(flag), script, int(meter)))

    def meter(self, on: bool) -> None:
        """Keep the flag by what threads do, or leave it to `wait`."""
        self._library.covey_meter(int(on))

    def stop(self) -> None:
        """No gate, no thread; the flag says idle. Before the process ends: its thread must not outlive PyTorch."""
        self._library.covey_stop()

    def neighbour_is(self, page: Page | None) -> None:
        self._library.covey_neighbour(None if page is None else self._address(page))

    def script_is(self, native_id: int) -> None:
        """The thread whose sleep means that nothing is computed."""
        self._library.covey_script(native_id)

    def look(self) -> None:
        """Read the page of limits now; else it is read every 2 ms, every 50 ms where nothing is gated."""
        self._library.covey_look()

    def await_limits(self, seconds: float) -> None:
        """Until new limits were read, or so long, without the interpreter's lock. Of one thread."""
        self._reads = self._library.covey_await(self._reads, int(seconds * 1e9))

    def wait(self, begins: bool) -> None:
        """The script's thread begins, or ends, to wait for others. Each beginning has its end."""
        self._library.covey_wait(int(begins))

    def fetch(self, begins: bool) -> None:
        """The script's thread begins to fetch input by itself: does it sleep? Or it has it, and computes again."""
        self._library.covey_fetch(int(begins))

    def counters(self) -> GateCounters:
        self._library.covey_counters(self._numbers)
        idle, gated, stops, garbage, on = self._numbers
        return GateCounters(idle, gated, stops, garbage, bool(on))
