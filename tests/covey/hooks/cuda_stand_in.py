"""`torch.cuda` without a GPU: it does what PyTorch's CUDACachingAllocator (2.13) does with limits and pools, by its
source.

It models rounding, large and small segments, best fit by stream, splitting and merging, the allowed maximum (none at a
fraction of 1.0), pools with an allocator of their own, the order in which an allocation is tried (free block, device,
pools for want of memory, release of cached blocks, error), and what a graph that is being recorded forbids. Host memory
of pools comes from the compiled `spill.cpp`, over a played runtime.
"""

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import covey.hooks.gate
from covey.core.units import MIB

FOLDER = Path(covey.hooks.gate.__file__).parent
STUB = """
#include "device_queue.h"
extern "C" {
int queue_full(int64_t t) { return device_queue::full(t); }
bool goes_on;
void queue_drain(int go_on) { goes_on = go_on; device_queue::drain([] { return goes_on; }); }
int queue_empty(int64_t t) { return device_queue::empty(t); }
int64_t queue_worked(int64_t t) { return device_queue::worked(t); }
void queue_forget() { device_queue::forked(); }
long told[2];
void covey_wait(int begins) { told[begins]++; }
long told_of(int begins) { return told[begins]; }
void covey_pass() {}
}
"""
SMALL, SMALL_SEGMENT, LARGE, LARGE_SEGMENT, ROUND = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


@functools.cache
def native() -> Path | None:
    """The native half without PyTorch's part; None without a compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp())
    (folder / "stub.cpp").write_text(STUB)
    sources = [FOLDER / "device_queue.cpp", FOLDER / "spill.cpp", folder / "stub.cpp"]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{FOLDER}", *map(str, sources)]
    command += ["-o", str(folder / "native.so")]
    subprocess.run(command, check=True, timeout=120)
    return folder / "native.so"


class OutOfMemory(RuntimeError):
    """The counterpart of torch.OutOfMemoryError."""


@dataclass
class Block:
    address: int
    size: int
    taken: bool = False


@dataclass
class Segment:
    pool: Any
    small: bool
    stream: int
    size: int
    blocks: list[Block] = field(default_factory=list)
    native: bool = False


@dataclass(eq=False)
class PlayedPool:
    """A private pool of the allocator."""

    allocator: Any
    use_on_oom: bool


class PoolHandle:
    """The counterpart of torch.cuda.MemPool. It gives back its free blocks when it is collected."""

    def __init__(self, cuda: "PlayedCuda", pool: PlayedPool) -> None:
        self.cuda, self.pool = cuda, pool
        cuda.pools.append(pool)

    def __del__(self) -> None:
        self.cuda.pools.remove(self.pool)
        self.cuda.release()


@dataclass
class Runtime:
    """The functions of libcudart that `spill.cpp` calls. It allocates at most `most` bytes and frees none in use."""

    most: int = 1 << 50
    held: dict[int, Any] = field(default_factory=dict)
    queued: set[int] = field(default_factory=set)
    errors: int = 0

    def __post_init__(self) -> None:
        alloc = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint)
        self.cudaHostAlloc = alloc(self._alloc)
        self.cudaFreeHost = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._free)
        self.cudaGetLastError = ctypes.CFUNCTYPE(ctypes.c_int)(self._cleared)

    @property
    def bytes(self) -> int:
        return sum(self.held.values())

    def _alloc(self, into: Any, size: int, flags: int) -> int:
        if flags != 3 or self.bytes + size > self.most:
            self.errors += 1
            return 2
        address = max(self.held, default=1 << 40) + (1 << 36)  # never touched
        self.held[address], into[0] = size, address
        return 0

    def _free(self, address: int) -> int:
        assert not any(address <= used < address + self.held[address] for used in self.queued), (
            "kernels may still use it"
        )
        del self.held[address]
        return 0

    def _cleared(self) -> int:
        self.errors = 0
        return 0


class PlayedCuda:
    """The counterpart of `torch.cuda`, with one device and one thread."""

    def __init__(self, runtime: Runtime, total: int = 8192 * MIB, split_max: int = -1) -> None:
        self.runtime, self.total, self.split_max = runtime, total, split_max
        self.allowed: int | None = None
        self.segments: list[Segment] = []
        self.pools: list[PlayedPool] = []
        self.active: PlayedPool | None = None
        self.stream = 7
        self.recording = False
        self.backend = "native"
        self.calls: list[str] = []
        self.peaks = {"allocated": 0, "reserved": 0}
        self.retries = self.ooms = 0
        self.memory = SimpleNamespace(
            get_allocator_backend=lambda: self.backend, CUDAPluggableAllocator=self._pluggable
        )
        self._next = 1 << 30

    # ---- torch.cuda ----

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(total_memory=self.total)

    def is_current_stream_capturing(self) -> bool:
        return self.recording

    def synchronize(self, device: Any = None) -> None:
        self._not_recording("synchronize")
        self.runtime.queued.clear()

    def set_per_process_memory_fraction(self, share: float, device: int) -> None:
        assert type(share) is float
        assert 0 <= share <= 1 and device == 0
        self.calls.append("fraction")
        self.allowed = int(share * float(self.total)) if share < 1 else None

    def empty_cache(self) -> None:
        self._not_recording("empty_cache")
        self.release()

    def MemPool(self, allocator: Any, use_on_oom: bool = False) -> PoolHandle:
        assert isinstance(allocator, ctypes.CDLL)
        self.calls.append("pool")
        return PoolHandle(self, PlayedPool(allocator, use_on_oom))

    @contextlib.contextmanager
    def use_mem_pool(self, pool: PoolHandle) -> Iterator[None]:
        assert self.active is None, "beginAllocateToPool: already recording to mempool_id"
        self.active = pool.pool
        try:
            yield
        finally:
            self.active = None

    def caching_allocator_alloc(self, size: int) -> int:
        return self.malloc(size)

    def caching_allocator_delete(self, address: int) -> None:
        self.free(address)

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        now = {"allocated": self._allocated(), "reserved": self._reserved()}
        found: dict[str, Any] = {
            f"{name}_bytes": {"all": {"current": now[name], "peak": max(now[name], self.peaks[name])}} for name in now
        }
        return {**found, "num_alloc_retries": self.retries, "num_ooms": self.ooms, "max_split_size": self.split_max}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peaks = {"allocated": self._allocated(), "reserved": self._reserved()}

    # ---- CUDACachingAllocator ----

    def malloc(self, asked: int) -> int:
        """Do what DeviceCachingAllocator::malloc does."""
        size = max(512, -(-asked // 512) * 512)
        found = self._free_block(size, self.active) or self._from_device(size)
        if found is None and self.active is None:
            found = next(
                (fit for pool in self.pools if pool.use_on_oom and (fit := self._free_block(size, pool))), None
            )
        if found is None and not self.recording:
            self.release()
            self.retries += 1
            found = self._from_device(size)
        if found is None:
            self.ooms += 1
            raise OutOfMemory(f"CUDA out of memory. Tried to allocate {size}")
        segment, block = found
        self._split(segment, block, size)
        block.taken = True
        self.peaks["allocated"] = max(self.peaks["allocated"], self._allocated())
        self.runtime.queued.add(block.address)
        return block.address

    def free(self, address: int) -> None:
        segment, block = next((s, b) for s in self.segments for b in s.blocks if b.address == address)
        assert block.taken, "freed twice"
        block.taken = False
        merged: list[Block] = []
        for each in segment.blocks:
            if merged and not merged[-1].taken and not each.taken:
                merged[-1].size += each.size
            else:
                merged.append(each)
        segment.blocks = merged

    def host(self) -> int:
        """Bytes allocated from pools."""
        return sum(b.size for s in self.segments if s.pool is not None for b in s.blocks if b.taken)

    def device(self) -> int:
        """Bytes taken from the device."""
        return sum(s.size for s in self.segments if s.pool is None)

    def _free_block(self, size: int, pool: PlayedPool | None) -> "tuple[Segment, Block] | None":
        small = size <= SMALL
        fits = [
            (b.size, b.address, s, b)
            for s in self.segments
            if s.pool is pool and s.small == small and s.stream == self.stream
            for b in s.blocks
            if not b.taken and b.size >= size
        ]
        if not fits:
            return None
        _, _, segment, block = min(fits, key=lambda fit: fit[:2])
        if self.split_max > 0 and size < self.split_max <= block.size:
            return None
        return segment, block

    def _from_device(self, size: int) -> "tuple[Segment, Block] | None":
        small = size <= SMALL
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else -(-size // ROUND) * ROUND
        if self.allowed is not None and self._reserved() + whole > self.allowed:
            return None
        if self.active is not None:
            address = self.active.allocator.covey_spill_alloc(ctypes.c_ssize_t(whole), 0, None)
        else:
            if self.device() + whole > self.total:
                return None
            address, self._next = self._next, self._next + whole
        if not address:
            return None
        segment = Segment(self.active, small, self.stream, whole, [Block(address, whole)])
        self.segments.append(segment)
        self.peaks["reserved"] = max(self.peaks["reserved"], self._reserved())
        return segment, segment.blocks[0]

    def _split(self, segment: Segment, block: Block, size: int) -> None:
        left = block.size - size
        if left >= 512 if segment.small else left > SMALL:
            block.size = size
            at = segment.blocks.index(block)
            segment.blocks.insert(at + 1, Block(block.address + size, left))

    def release(self) -> None:
        """Do what release_cached_blocks does, for the default pool and pools that are gone."""
        for segment in list(self.segments):
            whole = len(segment.blocks) == 1 and not segment.blocks[0].taken
            if whole and (segment.pool is None or segment.pool not in self.pools):
                self.segments.remove(segment)
                if segment.pool is not None:
                    segment.pool.allocator.covey_spill_free(ctypes.c_void_p(segment.blocks[0].address), 0, 0, None)

    def _not_recording(self, call: str) -> None:
        assert not self.recording, f"{call} while a graph is recorded"
        self.calls.append(call)

    def _allocated(self) -> int:
        return sum(b.size for s in self.segments for b in s.blocks if b.taken)

    def _reserved(self) -> int:
        return sum(s.size for s in self.segments)

    def _pluggable(self, path: str, alloc: str, free: str) -> Any:
        library = ctypes.CDLL(path)
        library.covey_spill_alloc.restype = ctypes.c_void_p
        library.covey_spill_free.restype = None
        assert getattr(library, alloc) and getattr(library, free)
        return SimpleNamespace(allocator=lambda: library)
