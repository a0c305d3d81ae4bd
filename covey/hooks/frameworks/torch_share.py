"""How a PyTorch rank obeys the limits of a shared device: where it can be stopped, and its memory."""

import atexit
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from covey.hooks.frameworks.torch_cuda import TorchGpu
from covey.hooks.frameworks.torch_memory import TorchMemory
from covey.hooks.gate.build import TorchBuild, cache_folder, found
from covey.hooks.gate.native import NativeGate
from covey.hooks.limits.sharing import ShareControl, of_process
from covey.hooks.turns.gates import NativeTurns, PolledTurns, TurnGate
from covey.hooks.waits import Done


def share_control(memory: TorchMemory, gpu: TorchGpu) -> ShareControl:
    """The ShareControl of this process, with the gate that was built for this PyTorch, else without one."""
    native = gate_of_process()
    stops = None if native is not None else ModuleStops()
    share = of_process().gains(native, memory, stops, gpu.on_cores)
    share.graphs = lambda: gpu.graphs.any
    return share


def turn_gate() -> TurnGate:
    """Where this process asks for turns, on a host that jobs share: operators, else modules."""
    native = gate_of_process()
    return NativeTurns(native) if native is not None else PolledTurns(ModuleStops())


@functools.cache
def gate_of_process() -> NativeGate | None:
    """The one native gate of this process; it ends before PyTorch does."""
    native = native_gate(native_library())
    if native is not None:
        atexit.register(native.stop)
    return native


def native_library() -> Path | None:
    """Path of the native library; None where it was not built."""
    return found(TorchBuild.of(torch), cache_folder())


def native_gate(library: Path | None) -> NativeGate | None:
    """The gate of this library; None where there is none, or it cannot be loaded."""
    if library is None:
        return None
    try:
        return NativeGate(library)
    except (OSError, AttributeError):
        return None


def end_of_stream() -> Done | None:
    """Mark the end of the script's stream. Returns a function that says whether the GPU has reached it; None while a
    graph is recorded, in which nothing else may be recorded."""
    if torch.cuda.is_current_stream_capturing():
        return None
    end = torch.cuda.Event()
    end.record()
    return lambda: bool(end.query())


class ModuleStops:
    """Calls a function before the forward of every module. Compiled code has only its outermost module."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lock = threading.Lock()

    def put_in(self, before: Callable[[], None]) -> None:
        with self._lock:
            if self._handle is None:
                self._handle = register_module_forward_pre_hook(lambda _module, _inputs: before())

    def take_out(self) -> None:
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
