"""Bytes at any offset on a volume that knows pages: requests cut at slabs and at the longest request, edges completed.

Whole pages, as file systems and swap use them, go to the volume as they are. A write that covers a page in part reads
it first, and such writes take turns: two of them to different bytes of one page would lose one another otherwise. A
write that covers such a page whole waits for its turn too: the page that was read does not have it.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from covey.ports.env import Env
from plugins.memory.datapath.doors import nbdwire
from plugins.memory.datapath.doors.nbdwire import Extents
from plugins.memory.datapath.volumes.members.mirror_volume import AnyVolume
from plugins.memory.datapath.volumes.paged_volume import Done, settle
from plugins.memory.policy.settings import REQUEST_PAGES_MAX

STATUS_PAGES_MAX = 1 << 19
"""Most pages looked at for one question about what is allocated: some 2 ms."""
_EMPTY = nbdwire.HOLE | nbdwire.ZERO


class NbdPages:
    """Reads and writes bytes of one volume, for all connections. `done` of every method is called once, with None or
    why not."""

    def __init__(self, env: Env, volume: AnyVolume) -> None:
        self._env, self._volume = env, volume
        self._page, self._slab_pages = volume.shape.page_bytes, volume.shape.slab_pages
        self._edges = asyncio.Lock()
        self._completing = range(0)
        """Pages of the partial write whose turn it is."""

    def read(self, offset: int, into: memoryview, done: Done) -> None:
        page = self._page
        if offset % page or len(into) % page:
            self._spawn(self._read_part(offset, into), done)
            return
        first, count = offset // page, len(into) // page
        if self._is_one(first, count):
            self._volume.submit_read(first, into, done)
            return
        parts = self._parts(first, count)
        all_done = _Together(len(parts), done)
        for start, run in parts:
            at = (start - first) * page
            self._volume.submit_read(start, into[at : at + run * page], all_done.one)

    def write(self, offset: int, data: memoryview, done: Done) -> None:
        page = self._page
        first, count = offset // page, len(data) // page
        if offset % page or len(data) % page or self._is_completing(first, count):
            self._spawn(self._write_part(offset, data), done)
            return
        if self._is_one(first, count):
            self._volume.submit_write(first, count, data, done)
            return
        parts = self._parts(first, count)
        all_done = _Together(len(parts), done)
        for start, run in parts:
            at = (start - first) * page
            self._volume.submit_write(start, run, data[at : at + run * page], all_done.one)

    def trim(self, offset: int, length: int, done: Done) -> None:
        """Discard whole pages. Pages covered in part are left as they are."""
        first, end = -(-offset // self._page), (offset + length) // self._page
        self._spawn(self._zero_pages(first, max(0, end - first)), done)

    def zero(self, offset: int, length: int, no_hole: bool, done: Done) -> None:
        """Write zeros. `no_hole`: they take the room that content would."""
        self._spawn(self._fill(offset, length) if no_hole else self._zero(offset, length), done)

    # ---- what is known at once ----

    def is_quick(self, offset: int, length: int) -> bool:
        """Are only whole pages to be zeroed? Then one record does for many of them."""
        return not offset % self._page and not length % self._page

    def is_zero(self, offset: int, length: int) -> bool:
        """Is it known, without asking the disk or a lender, that all of these bytes are zeros?"""
        first, end = offset // self._page, -(-(offset + length) // self._page)
        return self._volume.are_zeros(first, end - first)

    def status(self, offset: int, length: int, most: int) -> Extents:
        """Allocated and empty extents from `offset` on, at most `length` bytes and `most` extents, at least one."""
        page, extents = self._page, list[tuple[int, int]]()
        first, end = offset // page, -(-(offset + length) // page)
        at, upto = offset, min(offset + length, (first + STATUS_PAGES_MAX) * page)
        for start, count, zeros in self._volume.allocation(first, min(end - first, STATUS_PAGES_MAX), most):
            till = min(upto, (start + count) * page)
            extents.append((till - at, _EMPTY if zeros else 0))
            at = till
        return extents

    # ---- what takes several steps ----

    def _spawn(self, work: Coroutine[Any, Any, None], done: Done) -> None:
        self._env.spawn("bytes", settle(work, done))

    def _is_completing(self, first: int, count: int) -> bool:
        pages = self._completing
        return pages.start < first + count and first < pages.stop

    def _is_one(self, first: int, count: int) -> bool:
        """Do these pages make one request to the volume?"""
        return 0 < count <= REQUEST_PAGES_MAX and first % self._slab_pages + count <= self._slab_pages

    def _parts(self, first: int, count: int) -> list[tuple[int, int]]:
        """Pages cut at slab boundaries and at the longest request: first page, pages."""
        parts: list[tuple[int, int]] = []
        while count:
            run = min(count, REQUEST_PAGES_MAX, self._slab_pages - first % self._slab_pages)
            parts.append((first, run))
            first, count = first + run, count - run
        return parts

    async def _read_part(self, offset: int, into: memoryview) -> None:
        first, end = offset // self._page, -(-(offset + len(into)) // self._page)
        whole = memoryview(bytearray((end - first) * self._page))
        for start, run in self._parts(first, end - first):
            at = (start - first) * self._page
            await self._volume.read(start, whole[at : at + run * self._page])
        skip = offset - first * self._page
        into[:] = whole[skip : skip + len(into)]

    async def _write_part(self, offset: int, data: memoryview) -> None:
        page = self._page
        first, end = offset // page, -(-(offset + len(data)) // page)
        whole = memoryview(bytearray((end - first) * page))
        skip = offset - first * page
        async with self._edges:
            self._completing = range(first, end)
            try:
                if skip:
                    await self._volume.read(first, whole[:page])
                if (skip + len(data)) % page and (end - first > 1 or not skip):
                    await self._volume.read(end - 1, whole[-page:])
                whole[skip : skip + len(data)] = data
                for start, run in self._parts(first, end - first):
                    at = (start - first) * page
                    await self._volume.write(start, run, whole[at : at + run * page])
            finally:
                self._completing = range(0)

    async def _zero(self, offset: int, length: int) -> None:
        page = self._page
        first, end = -(-offset // page), (offset + length) // page
        if first >= end:
            await self._write_part(offset, memoryview(bytes(length)))
            return
        if offset < first * page:
            await self._write_part(offset, memoryview(bytes(first * page - offset)))
        await self._zero_pages(first, end - first)
        if end * page < offset + length:
            await self._write_part(end * page, memoryview(bytes(offset + length - end * page)))

    async def _fill(self, offset: int, length: int) -> None:
        most, end = REQUEST_PAGES_MAX * self._page, offset + length
        zeros = memoryview(bytes(min(length, most)))
        while offset < end:
            run = min(end - offset, most - offset % self._page)
            await self._write_part(offset, zeros[:run])
            offset += run

    async def _zero_pages(self, first: int, count: int) -> None:
        """Zero pages, except those that were never written, which are zeros."""
        for start, run in self._parts(first, count):
            async with self._edges:
                if await self._volume.ever_written(start, run):
                    await self._volume.write(start, run, None)


class _Together:
    """Calls `done` when the last of several parts is done, with the first error."""

    __slots__ = ("_done", "_error", "_left")

    def __init__(self, parts: int, done: Done) -> None:
        self._left, self._done = parts, done
        self._error: OSError | None = None

    def one(self, error: OSError | None) -> None:
        self._error = self._error or error
        self._left -= 1
        if not self._left:
            self._done(self._error)
