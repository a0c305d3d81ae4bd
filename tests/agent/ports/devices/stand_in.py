"""A driver without a GPU: it stands in the place of libnvidia-ml.so, beneath the real pynvml.

pynvml finds every function by `getattr(pynvml.nvmlLib, name)`, so an object in its place drives all of pynvml's own
code: its structs, its two calls for a list, its errors. What a driver says is a script: GPUs that are changed as the
test goes on, or by the steps of `RECORDED`, in the order in which they are played.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml

from covey.core.units import GIB

HIDDEN = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE, which a driver says instead of a process's memory."""
NEWER = frozenset(
    {
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetUnrepairableMemoryFlag_v1",
        "nvmlDeviceGetMemoryLimits_v1",
        "nvmlDeviceSetMemoryLimits_v1",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMigMode",
    }
)
"""The functions that an old driver does not have."""


@dataclass
class Part:
    """A MIG instance."""

    uuid: str
    instance: int
    memory: int
    used: int = 0
    processes: dict[int, int] = field(default_factory=dict)


@dataclass
class Board:
    """One GPU as its driver tells it."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int | None = 80 * GIB
    """Bytes of memory; None: the driver has no such figure, since the GPU uses the host's."""
    used: int = GIB
    busy: int = 0
    processes: dict[int, int] = field(default_factory=dict)
    """The memory of each process: pid -> bytes, or HIDDEN."""
    shares: dict[int, int] = field(default_factory=dict)
    """The time of each process: pid -> percent; absent: the driver has no sample of it."""
    ecc: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    unrepairable: bool = False
    recovery: int = 0
    lost: bool = False
    mig: bool = False
    parts: list[Part] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)


class Function:
    """One function of the library. pynvml may set its `restype`."""

    restype: Any = ctypes.c_int

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        return self._call(*arguments)


class StandIn:
    """The library. Function names are NVML's own."""

    def __init__(self, *boards: Board, without: frozenset[str] = frozenset(), limits: bool = False) -> None:
        self.boards = list(boards)
        self._without = without if limits else without | {"nvmlDeviceGetMemoryLimits_v1"}
        self.present, self.over = True, False
        self.calls: dict[str, int] = {}
        self.failing: dict[str, int] = {}
        """The functions that fail, each with the error with which it ends."""
        self.open = threading.Event()
        """Set while calls return; cleared: every call hangs until it is set again."""
        self.open.set()
        self.events: list[tuple[Board, int, int]] = []
        """The events that wait: (GPU, instance, XID)."""

    def __getattr__(self, name: str) -> Function:
        if name.startswith("nvml") and name not in self._without and hasattr(type(self), f"_{name}"):
            return Function(lambda *arguments: self._called(name, *arguments))
        raise AttributeError(name)

    def _called(self, name: str, *arguments: Any) -> int:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name != "nvmlEventSetWait_v2":
            self.open.wait(20)
        if self.over:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        if name in self.failing:
            return self.failing[name]
        if not self.present and name != "nvmlShutdown":
            return int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        try:
            getattr(self, f"_{name}")(*arguments)
        except pynvml.NVMLError as error:
            return int(error.value)
        return int(pynvml.NVML_SUCCESS)

    # ---- handles: (GPU + 1) * 100 + instance ----

    def _board(self, handle: Any) -> tuple[Board, Part | None]:
        number = ctypes.cast(handle, ctypes.c_void_p).value or 0
        board = self.boards[number // 100 - 1]
        if board.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        parts = [part for part in board.parts if part.instance == number % 100]
        return board, parts[0] if number % 100 else None

    def _whole(self, handle: Any) -> Board:
        """The GPU of a handle. NVMLError for a MIG instance: most figures are of the GPU alone."""
        board, part = self._board(handle)
        if part is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return board

    # ---- the library ----

    def _nvmlInitWithFlags(self, flags: int) -> None:
        """Nothing to do."""

    def _nvmlShutdown(self) -> None:
        """Nothing to do."""

    def _nvmlSystemGetDriverVersion(self, text: Any, length: Any) -> None:
        text.value = b"570.1"

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self.boards)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> None:
        if self.boards[index.value].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        _point(device._obj, (index.value + 1) * 100)

    def _nvmlDeviceGetUUID(self, handle: Any, text: Any, length: Any) -> None:
        board, part = self._board(handle)
        text.value = (board if part is None else part).uuid.encode()

    def _nvmlDeviceGetName(self, handle: Any, text: Any, length: Any) -> None:
        board, part = self._board(handle)
        text.value = board.name.encode() + (b"" if part is None else b" MIG")

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        board, part = self._board(handle)
        if part is None and board.memory is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        memory._obj.total = (board if part is None else part).memory
        memory._obj.used = (board if part is None else part).used

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> None:
        board = self._whole(handle)
        if board.mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        rates._obj.gpu = board.busy

    def _nvmlDeviceGetMigMode(self, handle: Any, now: Any, pending: Any) -> None:
        now._obj.value = pending._obj.value = int(self._whole(handle).mig)

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> None:
        count._obj.value = 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, device: Any) -> None:
        board = self._whole(handle)
        if index.value >= len(board.parts):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        _point(device._obj, (self.boards.index(board) + 1) * 100 + board.parts[index.value].instance)

    def _nvmlDeviceGetGpuInstanceId(self, handle: Any, number: Any) -> None:
        _, part = self._board(handle)
        number._obj.value = 0 if part is None else part.instance

    def _nvmlDeviceGetComputeInstanceId(self, handle: Any, number: Any) -> None:
        number._obj.value = 0

    def _nvmlDeviceGetMinorNumber(self, handle: Any, number: Any) -> None:
        number._obj.value = len(self.boards) - 1 - self.boards.index(self._whole(handle))  # by bus, not by index

    def _running(self, handle: Any, count: Any, processes: Any) -> None:
        board, part = self._board(handle)
        found = (board if part is None else part).processes
        if found and (processes is None or count._obj.value < len(found)):
            count._obj.value = len(found)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        count._obj.value = len(found)
        for place, (pid, used) in enumerate(found.items()):
            processes[place].pid, processes[place].usedGpuMemory = pid, used

    _nvmlDeviceGetComputeRunningProcesses_v3 = _running
    _nvmlDeviceGetComputeRunningProcesses_v2 = _running

    def _nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> None:
        count._obj.value = 0

    def _nvmlDeviceGetProcessUtilization(self, handle: Any, samples: Any, count: Any, since: Any) -> None:
        board = self._whole(handle)
        if not board.shares:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        if samples is None:
            count._obj.value = len(board.shares)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for place, (pid, percent) in enumerate(board.shares.items()):
            samples[place].pid, samples[place].smUtil = pid, percent & 0xFFFFFFFF
            samples[place].timeStamp = time.monotonic_ns() // 1000

    def _nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, count: Any) -> None:
        count._obj.value = self._whole(handle).ecc

    def _nvmlDeviceGetRemappedRows(self, handle: Any, corr: Any, unc: Any, pending: Any, failed: Any) -> None:
        board = self._whole(handle)
        pending._obj.value, failed._obj.value = board.remap_pending, board.remap_failed

    def _nvmlDeviceGetUnrepairableMemoryFlag_v1(self, handle: Any, status: Any) -> None:
        status._obj.unrepairableMemory = self._whole(handle).unrepairable

    def _nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> None:
        one = ctypes.cast(values, ctypes.POINTER(pynvml.c_nvmlFieldValue_t))[0]
        assert one.fieldId == pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        one.nvmlReturn, one.value.uiVal = pynvml.NVML_SUCCESS, self._whole(handle).recovery

    def _nvmlDeviceGetMemoryLimits_v1(self, handle: Any, limits: Any) -> None:
        self._whole(handle)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)  # of this cgroup there is none yet

    def _nvmlDeviceSetMemoryLimits_v1(self, handle: Any, limits: Any) -> None:
        self._whole(handle).limits[limits._obj.nameSpace] = limits._obj.hardLimit

    # ---- events ----

    def _nvmlEventSetCreate(self, events: Any) -> None:
        _point(events._obj, 1)

    def _nvmlEventSetFree(self, events: Any) -> None:
        """Nothing to do."""

    def _nvmlDeviceRegisterEvents(self, handle: Any, kinds: Any, events: Any) -> None:
        self._whole(handle)

    def _nvmlEventSetWait_v2(self, events: Any, event: Any, timeout_ms: Any) -> None:
        end_s = time.monotonic() + timeout_ms.value / 1000
        while not self.events:
            if self.over or time.monotonic() >= end_s:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
            time.sleep(0.005)
        board, instance, number = self.events.pop(0)
        told = event._obj
        told.eventType, told.eventData = pynvml.nvmlEventTypeXidCriticalError, number
        told.gpuInstanceId = instance
        _point_field(told, (self.boards.index(board) + 1) * 100)

    def xid(self, board: Board, number: int, instance: int = 0xFFFFFFFF) -> None:
        self.events.append((board, instance, number))


def _point(handle: Any, to: int) -> None:
    ctypes.cast(ctypes.byref(handle), ctypes.POINTER(ctypes.c_void_p))[0] = to


def _point_field(event: Any, to: int) -> None:
    """Point at an event's device, its first field."""
    _point(event, to)


@contextmanager
def beneath_pynvml(driver: StandIn) -> Iterator[StandIn]:
    """Let pynvml speak with this driver until the end."""
    before = pynvml.nvmlLib
    pynvml.nvmlLib = driver
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield driver
    finally:
        driver.over = True
        driver.open.set()
        for thread in threading.enumerate():
            if thread.name.startswith(("nvml:", "the driver:")):
                thread.join(10.0)
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()


def in_parts(uuid: str = "GPU-mig") -> Board:
    """An H100 with two instances of 20 GiB."""
    parts = [Part(f"MIG-{uuid}-{number}", number, 20 * GIB) for number in (3, 5)]
    return Board(uuid, mig=True, parts=parts)


Step = Callable[[StandIn, Board], None]
RECORDED: Mapping[str, tuple[tuple[Step, str], ...]] = {
    "XID 79": (
        (lambda driver, gpu: driver.xid(gpu, 31), "ok"),
        (lambda driver, gpu: driver.xid(gpu, 79), "lost"),
        (lambda driver, gpu: setattr(gpu, "lost", True), "lost"),
    ),
    "ECC that grows": (
        (lambda driver, gpu: setattr(gpu, "ecc", 1), "degraded"),
        (lambda driver, gpu: setattr(gpu, "ecc", 9), "degraded"),
        (lambda driver, gpu: setattr(gpu, "remap_pending", True), "degraded"),
        (lambda driver, gpu: setattr(gpu, "recovery", 4), "drain"),
        (lambda driver, gpu: setattr(gpu, "remap_failed", True), "drain"),
    ),
    "memory beyond repair": (
        (lambda driver, gpu: setattr(gpu, "unrepairable", True), "drain"),
        (lambda driver, gpu: setattr(gpu, "unrepairable", False), "ok"),
    ),
    "a reset": (
        (lambda driver, gpu: setattr(gpu, "recovery", 1), "drain"),
        (lambda driver, gpu: setattr(gpu, "recovery", 0), "ok"),
    ),
}
"""What happened to a GPU, step by step, and its condition after each."""
