"""Memory of the process that sums: its limit, buffers that are used again, and arrays that are ready for a job.

The kernel gives a page of new memory when it is first written, which costs up to twenty times the addition
that it is for. So buffers are kept, and the memory of a job that another host summed until now is written before its
ranks come (`Arena`), and as many buffers as they may need: all pages of a model at once, in its first round here, would
be a pause. Pages are large where the kernel has large ones: 2 MB cost little more than 4 KB.
"""

import asyncio
import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from covey.ports.env import Env
from covey.tensors.numbers.blocks import Sizes
from covey.tensors.numbers.tensor_wire import Payload
from covey.wire.splicing import LEAST_BYTES

BUFFER_BYTES_MIN = 1 << 16
BUFFERS_BYTES_MAX = 128 << 20
"""Most bytes of part buffers kept for use again, together."""
READY_BUFFER_BYTES = Sizes().most_bytes
"""Bytes of part buffers that are prepared: as Blocks of large tensors have, or a little less, where a job has several
tables. (A job with one table is on one host and shares memory there, so mostly nothing comes here.)"""
RESTS, RESTS_LATER, LATER_S = 19.0, 9.0, 5.0
"""Multiples of its working time for which preparing memory rests: at first it takes a twentieth of a core, since rounds
are under way beside it; after `LATER_S` seconds a tenth."""
TOUCH_BYTES = 1 << 20
"""Bytes that are touched at a time: other work runs in between."""
ALIGNED = 64
SLAB_BYTES = 16 << 20
"""Bytes of one mapping from which buffers that lanes see too are cut."""

Source = Callable[[int], npt.NDArray[np.uint8]]
"""Function that gives memory: `mapped`, or one whose memory lanes see too. MemoryError."""


class Memory:
    """Counts the bytes of tensors that this process holds, and may hold."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max, self.used = bytes_max, 0

    @property
    def free(self) -> int:
        return max(0, self.bytes_max - self.used)

    def take(self, size: int) -> bool:
        if size > self.free:
            return False
        self.used += size
        return True


class Buffers:
    """Part buffers that are used again: new memory costs more than the addition that it is for. The size of a large one
    is a power of two, so that it fits other tensors."""

    def __init__(self, source: Source | None = None) -> None:
        """`source`: gives memory for large buffers."""
        self._free: dict[int, list[Payload]] = {}
        """Size, a power of two -> free buffers."""
        self._kept = 0
        """Bytes of all free buffers."""
        self._source, self._slab, self._cut = source, np.empty(0, np.uint8), 0

    def take(self, size: int) -> Payload:
        """A buffer of `size` bytes that may be written."""
        if size < BUFFER_BYTES_MIN:
            return bytearray(size)
        whole = 1 << (size - 1).bit_length()
        free = self._free.get(whole)
        if free:
            self._kept -= whole
            found = free.pop()
        else:
            found = self._new(whole)
        return found if size == whole else memoryview(found)[:size]

    def give(self, buffer: Payload) -> None:
        """Take back a buffer that was taken here and is not used any more; other buffers are left alone."""
        whole = buffer.obj if isinstance(buffer, memoryview) else buffer
        if self._source is not None and isinstance(whole, np.ndarray):
            self._keep(buffer if len(buffer) == len(whole) else whole.data)
        elif self._source is None and isinstance(whole, bytearray):
            self._keep(whole)

    def ready(self, size: int) -> Iterator[None]:
        """Prepare buffers until `size` bytes of them are free, as far as buffers are kept; one buffer at each step."""
        for _ in range((min(size, BUFFERS_BYTES_MAX) - self._kept) // READY_BUFFER_BYTES):
            made = self._new(READY_BUFFER_BYTES)
            np.frombuffer(made, np.uint8).fill(0)
            self._keep(made)
            yield

    def clear(self) -> None:
        self._free.clear()
        self._kept = 0
        self._slab, self._cut = np.empty(0, np.uint8), 0

    def _keep(self, whole: Payload) -> None:
        size = len(whole)
        if size >= BUFFER_BYTES_MIN and not size & (size - 1) and self._kept + size <= BUFFERS_BYTES_MAX:
            self._free.setdefault(size, []).append(whole)
            self._kept += size

    def _new(self, size: int) -> Payload:
        if self._source is None:
            return bytearray(size)
        if self._cut + size > len(self._slab):
            self._slab, self._cut = self._source(max(size, SLAB_BYTES)), 0
        first, self._cut = self._cut, self._cut + size
        return self._slab[first : first + size].data


class Arena:
    """Memory prepared for one job. Each byte is given once; what does not fit comes from elsewhere."""

    def __init__(self, size: int = 0, source: Source | None = None) -> None:
        self._source = source or mapped
        self._memory = np.empty(0, np.uint8)
        self._given = self._touched = 0
        self.grow(size)

    def grow(self, size: int) -> bool:
        """More memory is needed than was thought. False: it is large enough, some of it has been given, or there is no
        more."""
        if self._given or size <= len(self._memory):
            return False
        self._memory = np.empty(0, np.uint8)
        try:
            self._memory, self._touched = self._source(size), 0
        except MemoryError:
            return False  # each tensor then asks for its own
        return True

    def touch(self) -> Iterator[None]:
        """Write memory that is not given yet, a piece at a time: what is given may hold parameters already."""
        while (first := self._touched) < len(self._memory):
            self._touched += TOUCH_BYTES
            self._memory[max(first, self._given) : first + TOUCH_BYTES] = 0
            yield

    def take(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array of `count` elements with any content."""
        first = -(-self._given // ALIGNED) * ALIGNED
        end = first + count * dtype.itemsize
        if end > len(self._memory):
            return self._source(count * dtype.itemsize).view(dtype)
        self._given = end
        return self._memory[first:end].view(dtype)


def mapped(size: int) -> npt.NDArray[np.uint8]:
    """Memory that is used for nothing else once it is given back: its pages may be on their way to a rank, which reads
    them later (`covey.wire.page_pipe`). MemoryError."""
    if size < LEAST_BYTES:
        return np.empty(size, np.uint8)
    try:
        found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones have small pages alone
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without it
            found.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(found, np.uint8)


class MemoryInAdvance:
    """Writes memory before it is needed, one piece after the other and without haste: other work is more urgent."""

    def __init__(self, env: Env, name: str) -> None:
        self._env, self._name = env, name
        self._waiting: deque[Iterator[None]] = deque()
        self._running = self._stopped = False

    def add(self, pieces: Iterator[None]) -> None:
        self._waiting.append(pieces)
        if not self._running:
            self._running = True
            self._env.spawn(self._name, self._write())

    @property
    def is_over(self) -> bool:
        """Was all memory written?"""
        return not self._waiting

    def stop(self) -> None:
        self._stopped = True

    async def _write(self) -> None:
        began_s, later_s = self._env.clock.cpu_s(), self._env.clock.now_s() + LATER_S
        while self._waiting and not self._stopped:
            if next(self._waiting[0], self) is self:
                self._waiting.popleft()
            rests = RESTS if self._env.clock.now_s() < later_s else RESTS_LATER
            await asyncio.sleep(rests * (self._env.clock.cpu_s() - began_s))
            began_s = self._env.clock.cpu_s()
        self._running = False


def touched(array: npt.NDArray[Any]) -> Iterator[None]:
    """Write the whole array, `TOUCH_BYTES` at a time."""
    step = TOUCH_BYTES // array.itemsize
    for first in range(0, len(array), step):
        array[first : first + step] = 0
        yield
