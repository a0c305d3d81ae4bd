"""Calls of CUDA's runtime for the native half (`device_queue.cpp`, `spill.cpp`): addresses in the libcudart that is
loaded with PyTorch, so that nothing of CUDA is needed to build it. Pure of torch."""

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
    """Of `/proc/self/maps`: the libcudart of this major version that is loaded; with none of it, the only one."""
    paths = [row[5].strip() for line in maps.splitlines() if len(row := line.split(maxsplit=5)) == 6]
    found = dict.fromkeys(path for path in paths if Path(path).name.startswith("libcudart.so"))
    wanted = [path for path in found if Path(path).name.startswith(f"libcudart.so.{major}")]
    if wanted:
        return wanted[0]
    return next(iter(found)) if len(found) == 1 else None


def loaded_runtime(major: str) -> ctypes.CDLL | None:
    """The one of this process; None where there is none."""
    try:
        path = runtime_path(Path("/proc/self/maps").read_text(), major)
        return None if path is None else ctypes.CDLL(path)
    except OSError:
        return None


def addresses(runtime: Any, names: Sequence[str]) -> "ctypes.Array[ctypes.c_void_p]":
    """AttributeError when it lacks one."""
    found = [ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in names]
    return (ctypes.c_void_p * len(found))(*found)


class QueueCounters(NamedTuple):
    """Since the library was loaded."""

    parts: int
    """That events were put behind."""
    waits: int
    """Looks that found the part before the newest one not done."""
    failures: int
    operators: int
    """Of a part, now."""
    queued_ns: int


class DeviceQueue:
    """The script's stream, for the gate and the flag. AttributeError when the library or the runtime is another."""

    def __init__(self, library: Path, runtime: Any) -> None:
        self._library = ctypes.CDLL(str(library))
        self._numbers = (ctypes.c_int64 * 5)()
        self._library.covey_device_stream.argtypes = [ctypes.c_void_p]
        for name in ("device", "device_stream", "device_recording", "device_counters", "queue_works", "pass"):
            getattr(self._library, f"covey_{name}").restype = None
        self._library.covey_device(addresses(runtime, QUEUE_CALLS))

    def stream_is(self, stream: int) -> None:
        """Its address, as `torch.cuda.Stream.cuda_stream` has it; 0: the default one."""
        self._library.covey_device_stream(stream)

    def recording(self, on: bool) -> None:
        """The script records a graph: no event is put anywhere, and none is asked, until it has."""
        self._library.covey_device_recording(int(on))

    def waits(self) -> bool:
        """The script begins to wait for input: from the end of its queue on the flag says idle. False: not known."""
        return bool(self._library.covey_queue_waits())

    def works(self) -> None:
        """It has its input."""
        self._library.covey_queue_works()

    def passes(self) -> None:
        """The script is about to launch a recorded graph: returns when that may be."""
        self._library.covey_pass()

    def counters(self) -> QueueCounters:
        self._library.covey_device_counters(self._numbers)
        return QueueCounters(*self._numbers)


class SpillMemory:
    """Host memory that the device can use. AttributeError when the library or the runtime is another."""

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
        """One more piece; whether there is one."""
        return bool(self._library.covey_spill_prepare(nbytes) == 0)

    def trim(self) -> None:
        """Give back what nobody has; the device is done with it."""
        self._library.covey_spill_trim()

    def holds(self, address: int) -> bool:
        """Whether what lies there lies in this memory."""
        return bool(self._library.covey_spill_holds(address))

    def used(self) -> tuple[int, int]:
        """Bytes that PyTorch's allocator has, and that nobody has."""
        self._library.covey_spill_counters(self._numbers)
        taken, free = self._numbers
        return taken, free
