"""Calls of CUDA's runtime for the native half (`device_queue.cpp`, `spill.cpp`): addresses in the libcudart that is
loaded with PyTorch, so that CUDA is not needed to build it. Imports no torch."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

QUEUE_CALLS = (
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaStreamIsCapturing",
    "cudaGetLastError",
    "cudaLaunchHostFunc",
)
SPILL_CALLS = ("cudaHostAlloc", "cudaFreeHost", "cudaGetLastError")


def runtime_path(maps: str, major: str) -> str | None:
    """Path of the loaded libcudart of this major version, by the text of `/proc/self/maps`; without one, the only
    libcudart that is loaded."""
    paths = [row[5].strip() for line in maps.splitlines() if len(row := line.split(maxsplit=5)) == 6]
    found = dict.fromkeys(path for path in paths if Path(path).name.startswith("libcudart.so"))
    wanted = [path for path in found if Path(path).name.startswith(f"libcudart.so.{major}")]
    if wanted:
        return wanted[0]
    return next(iter(found)) if len(found) == 1 else None


def loaded_runtime(major: str) -> ctypes.CDLL | None:
    """The CUDA runtime of this process; None where there is none."""
    try:
        path = runtime_path(Path("/proc/self/maps").read_text(), major)
        return None if path is None else ctypes.CDLL(path)
    except OSError:
        return None


def addresses(runtime: Any, names: Sequence[str]) -> "ctypes.Array[ctypes.c_void_p]":
    """Addresses of these functions. AttributeError when the runtime lacks one."""
    found = [ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in names]
    return (ctypes.c_void_p * len(found))(*found)


class QueueCounters(NamedTuple):
    """Counts since the library was loaded."""

    parts: int
    """Number of parts of the queue behind which an event was put."""
    waits: int
    """Number of looks that found the part before the newest one not done."""
    failures: int
    operators: int
    """Number of operators in a part, now."""
    queued_ns: int


class DeviceQueue:
    """The script's stream, for the gate and the flag. AttributeError when the library or the runtime is another one."""

    def __init__(self, library: Path, runtime: Any) -> None:
        self._library = ctypes.CDLL(str(library))
        self._numbers = (ctypes.c_int64 * 5)()
        self._library.covey_device_stream.argtypes = [ctypes.c_void_p]
        for name in ("device", "device_stream", "device_recording", "device_counters", "queue_works", "pass"):
            getattr(self._library, f"covey_{name}").restype = None
        self._library.covey_device(addresses(runtime, QUEUE_CALLS))

    def stream_is(self, stream: int) -> None:
        """Set the stream by its address, as in `torch.cuda.Stream.cuda_stream`; 0: the default stream."""
        self._library.covey_device_stream(stream)

    def recording(self, on: bool) -> None:
        """The script records a graph, or has ended that: no event is recorded or queried meanwhile."""
        self._library.covey_device_recording(int(on))

    def waits(self) -> bool:
        """The script begins to wait for input: the flag says idle from the end of its queue on. False: not known."""
        return bool(self._library.covey_queue_waits())

    def works(self) -> None:
        """The script has its input."""
        self._library.covey_queue_works()

    def passes(self) -> None:
        """Called before the script launches a recorded graph: returns when that is allowed."""
        self._library.covey_pass()

    def counters(self) -> QueueCounters:
        self._library.covey_device_counters(self._numbers)
        return QueueCounters(*self._numbers)


class SpillMemory:
    """Host memory that the device can use. AttributeError when the library or the runtime is another one."""

    def __init__(self, library: Path, runtime: Any) -> None:
        self.path = str(library)
        self._library = ctypes.CDLL(self.path)
        self._numbers = (ctypes.c_int64 * 2)()
        self._library.covey_spill_prepare.argtypes = [ctypes.c_size_t]
        self._library.covey_spill_holds.argtypes = [ctypes.c_void_p]
        for name in ("covey_spill_calls", "covey_spill_trim", "covey_spill_counters"):
            getattr(self._library, name).restype = None
        self._library.covey_spill_calls(addresses(runtime, SPILL_CALLS))

    def prepare(self, nbytes: int) -> bool:
        """Prepare one more piece. Whether it exists."""
        return bool(self._library.covey_spill_prepare(nbytes) == 0)

    def trim(self) -> None:
        """Give back unused pieces; the device must be done with them."""
        self._library.covey_spill_trim()

    def holds(self, address: int) -> bool:
        """Whether this address is in this memory."""
        return bool(self._library.covey_spill_holds(address))

    def used(self) -> tuple[int, int]:
        """Bytes that PyTorch's allocator has, and bytes that are free."""
        self._library.covey_spill_counters(self._numbers)
        taken, free = self._numbers
        return taken, free
