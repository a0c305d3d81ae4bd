"""How a PyTorch rank on a GPU obeys limits: by its stream for gate and flag, by its allocator for memory.

Nothing is done before the script has used a GPU itself. The script's stream is the one that is current in its thread at
the end of a mini-batch, and when it begins to wait for input.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from covey.hooks.limits.cuda_calls import DeviceQueue, SpillMemory, loaded_runtime
from covey.hooks.limits.cuda_memory import CudaMemory, LimitNotHeld
from covey.hooks.limits.cuda_peaks import ScriptPeaks
from covey.hooks.limits.sharing import ShareControl
from covey.hooks.waits import QueuedWaits


class TorchGpu:
    """The GPU of this process. `library`: the native half; None where it was not built."""

    def __init__(self, library: Path | None, tell: Callable[[LimitNotHeld], None]) -> None:
        self._library, self._tell = library, tell
        self._begun = False
        self._memory: CudaMemory | None = None
        self.queue: DeviceQueue | None = None
        self.graphs = RecordedGraphs(self)

    def on_cores(self) -> bool:
        """Whether the device of this process is a set of cores: it has not used a GPU."""
        if not torch.cuda.is_initialized():
            return True
        if not self._begun:
            self._begun = True
            self._begin()
        return False

    def memory(self) -> CudaMemory | None:
        """The GPU's memory, for the script's thread between two mini-batches; None on cores."""
        if self.on_cores():
            return None
        self.follow_stream()
        return self._memory

    def follow_stream(self) -> None:
        if self.queue is not None:
            self.queue.stream_is(torch.cuda.current_stream().cuda_stream)

    def _begin(self) -> None:
        runtime = loaded_runtime((torch.version.cuda or "").partition(".")[0])
        spill = None
        if self._library is not None and runtime is not None:
            try:
                self.queue, spill = DeviceQueue(self._library, runtime), SpillMemory(self._library, runtime)
                self.queue.recording(self.graphs.now > 0)
            except (OSError, AttributeError):  # a runtime that lacks a call
                self.queue = None
        peaks = ScriptPeaks(torch.cuda.memory, _index)
        peaks.install(torch.cuda.memory, torch.cuda)
        self._memory = CudaMemory(_Cuda(peaks), spill, self._tell, lambda: self.graphs.any, _settings)


class _Cuda:
    """`torch.cuda`, with the peaks of mini-batches."""

    def __init__(self, peaks: ScriptPeaks) -> None:
        self.memory_stats_as_nested_dict = peaks.memory_stats_as_nested_dict
        self.reset_peak_memory_stats = peaks.reset_peak_memory_stats

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _index(device: Any) -> int:
    return int(torch.cuda._utils._get_device_index(device, optional=True))


def _settings() -> str:
    """Settings of the allocator; empty where this PyTorch does not tell them."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return "" if ask is None else str(ask())


class RecordedGraphs:
    """The script's CUDA graphs. A replay shows no operators, so the script is stopped before it."""

    def __init__(self, gpu: TorchGpu) -> None:
        self._gpu = gpu
        self.any = False
        """Whether the script has begun to record a graph."""
        self.now = 0
        """How many graphs are being recorded."""
        self.before: Callable[[], None] = lambda: None
        """Called before the first graph is recorded; raises nothing."""

    def install(self) -> None:
        graph: Any = torch.cuda.CUDAGraph
        graph.capture_begin = self._recorded(graph.capture_begin)
        graph.capture_end = self._ended(graph.capture_end)
        graph.replay = self._replayed(graph.replay)

    def _recorded(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def recorded(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.any:
                self.any = True
                self.before()
            self._records(1)
            with contextlib.ExitStack() as failed:
                failed.callback(self._records, -1)
                begun = begin(graph, *args, **kwargs)
                failed.pop_all()
            return begun

        return recorded

    def _ended(self, end: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(end)
        def ended(graph: Any) -> Any:
            try:
                return end(graph)
            finally:
                self._records(-1)

        return ended

    def _records(self, more: int) -> None:
        self.now = max(0, self.now + more)
        if self._gpu.queue is not None:
            self._gpu.queue.recording(self.now > 0)

    def _replayed(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(replay)
        def replayed(graph: Any) -> Any:
            if self._gpu.queue is not None:
                self._gpu.queue.passes()
            return replay(graph)

        return replayed


class StreamWaits:
    """Input waits of a script on a GPU: the flag says idle once everything that it has queued is done. A host function
    at the end of its stream says so; where the native half is missing, a thread asks (`covey.hooks.waits`)."""

    def __init__(self, share: ShareControl, gpu: TorchGpu, asked: QueuedWaits) -> None:
        self._share, self._gpu, self._asked = share, gpu, asked

    def waits(self, begins: bool) -> None:
        """The script's thread begins, or ends, to wait, as in `ShareControl.waits`."""
        queue = self._gpu.queue
        if queue is None or not begins:
            self._asked.waits(begins)
        if queue is not None and self._share.is_script():
            self._mark(queue) if begins else queue.works()

    def _mark(self, queue: DeviceQueue) -> None:
        if not self._share.flagged:
            return
        self._gpu.follow_stream()
        if queue.waits():
            self._share.flag_is_kept()
