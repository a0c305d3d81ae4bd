"""A memory limit for a PyTorch script on a GPU, by PyTorch's own allocator; `device_memory.py` has the decisions.

    between two mini-batches    prepare host memory --> put it into a pool --> empty the cache --> set the fraction
    within one                  memory that the device has no room for comes from the pool, and nothing fails

The fraction counts pools too, so it is (limit + pool) / device. Kernels use memory of the pool in place, over the bus.
None of this can be done while a graph is recorded; and where graphs were recorded, segments expand, or the allocator is
another one, memory cannot be given back on demand: the limit is not acknowledged, and `tell` says why.

Not counted here: the CUDA context, and memory that libraries take from the driver themselves. Streams other than the
script's own find nothing in the pool.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from covey.hooks.limits.cuda_calls import SpillMemory
from covey.hooks.limits.device_memory import (
    SEGMENT,
    Room,
    Used,
    Wanted,
    fraction,
    more_pool,
    on_device,
    pieces,
    pool_bytes,
    small_segments,
    to_prepare,
)
from covey.kernel.host_memory import available_bytes

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class LimitNotHeld(RuntimeError):
    """This rank cannot give memory back on demand; it becomes free when the rank ends, or is moved to another host."""


class CudaMemory:
    """The memory of the script's device, for its thread between two mini-batches. `cuda` is `torch.cuda`."""

    def __init__(
        self,
        cuda: Any,
        spill: SpillMemory | None,
        tell: Callable[[LimitNotHeld], None],
        graphs: Callable[[], bool] = lambda: False,
        settings: Callable[[], str] = lambda: "",
        host_bytes: Callable[[], int] = lambda: available_bytes(),
    ) -> None:
        """`graphs` returns whether the script has recorded any; `settings` returns the settings given to the
        allocator."""
        self._cuda, self._spill, self._tell = cuda, spill, tell
        self._graphs, self._settings, self._host_bytes = graphs, settings, host_bytes
        self._allocator: Any = None
        self._pools: list[Any] = []
        self._filled_bytes = 0
        """Bytes of these pools. The rest of older pools is not counted: it may be freed within a mini-batch, and then
        the same number of bytes would be taken from the device."""
        self._limit_bytes = self._wanted_bytes = 0
        self._last = Used(0, 0, 0, 0, 0)
        self._split_max = 0
        self.retries = 0
        """Number of allocations that failed at first, since the start."""

    @property
    def wanted_bytes(self) -> int:
        """Most bytes allocated in a mini-batch while there was no limit."""
        return self._wanted_bytes

    def ended(self) -> Used:
        """The figures of the mini-batch that ended."""
        stats = self._cuda.memory_stats_as_nested_dict()
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        self._last = Used(
            allocated["peak"], reserved["peak"], allocated["current"], reserved["current"], self._pool_bytes()
        )
        self._split_max = int(stats["max_split_size"])
        self.retries = int(stats["num_alloc_retries"]) + int(stats["num_ooms"])
        if not self._limit_bytes:
            self._wanted_bytes = max(self._last.allocated_peak, self._wanted_bytes * 7 // 8)
        if self._limit_bytes and not self._graphs():
            self._add(self._pieces(more_pool(self._last, self._limit_bytes, self._room())))
        self._cuda.reset_peak_memory_stats()
        return self._last

    def recording(self) -> bool:
        """Whether a graph is being recorded, while nothing else may be done."""
        return bool(self._cuda.is_current_stream_capturing())

    def ready(self, limit_bytes: int) -> bool:
        """Whether this limit could be kept now, and memory moved for it; 0 is no limit, which can always be kept."""
        if self.recording():
            return False
        if limit_bytes and (why := self._cannot()):
            self._tell(LimitNotHeld(why))
            return False
        return True

    def hold(self, limit_bytes: int, moved_bytes: int) -> bool:
        """Set the limit, which is `ready`. Whether no more than that is taken of the device from now on. `moved_bytes`:
        bytes that the caller moves out under this limit."""
        need_bytes = pool_bytes(Wanted(self._wanted_bytes, moved_bytes), limit_bytes, self._room())
        more_bytes = to_prepare(self._filled_bytes, need_bytes)
        if more_bytes is None:
            self._drop()
            more_bytes = need_bytes
        if not self._add(self._pieces(more_bytes)):
            self._tell(LimitNotHeld("this host has no memory for what does not fit on the device"))
            return False
        self._cuda.empty_cache()
        self._limit_bytes = limit_bytes
        self._allow(limit_bytes)
        self._cuda.reset_peak_memory_stats()  # without the peak of the moment with pool and full cache
        return self._on_device() <= limit_bytes

    def lift(self) -> None:
        """Remove the limit. What is in host memory stays there until the script frees it."""
        if self._limit_bytes:
            self._limit_bytes = 0
            self._allow(0)
            self._drop()

    def lies_in_host_memory(self, tensor: Any) -> bool:
        """Whether the allocator has placed this tensor in host memory."""
        return self._spill is not None and self._spill.holds(tensor.data_ptr())

    # ---- within ----

    def _cannot(self) -> str:
        backend = self._cuda.memory.get_allocator_backend()
        if self._spill is None:
            return "the native gate was not built for this PyTorch (python -m covey.hooks.gate.build)"
        if backend != "native":
            return f"PyTorch's allocator is {backend}"
        if expands(os.environ, self._settings()):
            return "its allocator uses expandable_segments"
        if self._graphs():
            return "it has recorded CUDA graphs, whose memory cannot move"
        return ""

    def _room(self) -> Room:
        return Room(self._total_bytes(), self._host_bytes())

    def _pieces(self, nbytes: int) -> tuple[int, ...]:
        return pieces(nbytes, max(0, self._split_max), "roundup_power2_divisions" in told(os.environ, self._settings()))

    def _total_bytes(self) -> int:
        return int(self._cuda.get_device_properties(self._cuda.current_device()).total_memory)

    def _pool_bytes(self) -> int:
        return 0 if self._spill is None else self._spill.used()[0]

    def _on_device(self) -> int:
        reserved = self._cuda.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"]
        return on_device(Used(0, 0, 0, reserved, self._pool_bytes()))

    def _allow(self, limit_bytes: int) -> None:
        total = self._total_bytes()
        share = fraction(limit_bytes, self._filled_bytes, total) if limit_bytes else 1.0
        self._cuda.set_per_process_memory_fraction(share, self._cuda.current_device())

    def _add(self, sizes: tuple[int, ...]) -> bool:
        """Add a pool of these pieces, and small ones. The limit in force would keep it from being filled, so there is
        none for that moment."""
        if not sizes:
            return True
        assert self._spill is not None
        sizes += (SEGMENT,) * small_segments(sum(sizes))
        if not all(self._spill.prepare(size) for size in sizes):
            self._spill.trim()
            return False
        self._allow(0)
        try:
            self._pools.append(self._filled(sizes))
            self._filled_bytes += sum(sizes)
        except RuntimeError:  # the allocator's own, OutOfMemoryError among them
            self._cuda.synchronize()
            self._spill.trim()
            return False
        finally:
            self._allow(self._limit_bytes)
        return True

    def _filled(self, sizes: tuple[int, ...]) -> Any:
        """A pool that holds such blocks, free, on the script's stream. Two small ones fill a segment."""
        assert self._spill is not None
        if self._allocator is None:
            pluggable = self._cuda.memory.CUDAPluggableAllocator
            self._allocator = pluggable(self._spill.path, "covey_spill_alloc", "covey_spill_free")
        pool = self._cuda.MemPool(self._allocator.allocator(), use_on_oom=True)
        taken: list[int] = []
        with self._cuda.use_mem_pool(pool):
            try:
                for size in sizes:
                    halves = (size // 2, size // 2) if size == SEGMENT else (size,)
                    for half in halves:
                        taken.append(self._cuda.caching_allocator_alloc(half))
            finally:
                for address in taken:
                    self._cuda.caching_allocator_delete(address)
        return pool

    def _drop(self) -> None:
        """Drop all pools, once kernels that are queued are done: they may still use free blocks of the pools."""
        self._cuda.synchronize()
        self._pools.clear()
        self._filled_bytes = 0
        self._cuda.empty_cache()
        if self._spill is not None:
            self._spill.trim()


def expands(environ: Mapping[str, str], settings: str) -> bool:
    """Whether segments of the allocator expand, by its newest settings and those at its start."""
    return "expandable_segments:true" in told(environ, settings)


def told(environ: Mapping[str, str], settings: str) -> str:
    """All settings that the allocator was told, in small letters without blanks."""
    return ",".join([settings, *(environ.get(name, "") for name in SETTINGS)]).lower().replace(" ", "")
