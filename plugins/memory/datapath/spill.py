"""Pages on their way to the disk: a bounded queue and its one writer (Infiniswap §2.4.3, the disk dispatch queue).

A page rewritten while it waits is replaced in the queue, so a hot page costs one place and one disk write per round.
The queue is always the first place to look for a page: what is in it is newer than the disk. Full, it holds up writers.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from covey.ports import Env
from plugins.memory.datapath.backing import Backing, Page
from plugins.memory.datapath.slabwire import Versions

BATCH_PAGES = 256
"""Pages written at once."""
GATHER_S = 0.003
"""How long pages for which nobody waits are gathered."""
RETRY_S = 1.0
"""Pause after the disk refused a batch; the pages stay in the queue."""


class SpillEntry(NamedTuple):
    page: Page
    ticket: int
    """Order of arrival. A page replaced in the queue keeps its ticket."""


class SpillQueue:
    """At most `pages_max` pages between a writer and `backing`."""

    def __init__(self, env: Env, backing: Backing, pages_max: int) -> None:
        self._env, self._backing, self.pages_max = env, backing, pages_max
        self.refused = ""
        """Why the disk did not take the last batch; empty: it took it."""
        self._waiting: dict[int, SpillEntry] = {}
        self._writing: dict[int, SpillEntry] = {}
        self._ticket = 0
        self._work, self._hurry = asyncio.Event(), asyncio.Event()
        self._waited_for = 0
        """How many wait for the end of a round."""
        self._round: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._writing)

    def newest(self, page: int) -> Page | None:
        """What will be on disk, None when the disk has it already."""
        entry = self._waiting.get(page) or self._writing.get(page)
        return None if entry is None else entry.page

    def version(self, page: int) -> int:
        """Version of the newest content anywhere on this host; 0: never written. The page is `ready`."""
        newest = self.newest(page)
        return self._backing.version[page] if newest is None else newest.version

    async def ready(self, first: int, count: int) -> None:
        """Know the versions of these pages. OSError when the disk cannot be read."""
        await self._backing.ready(first, count)

    def versions(self, first: int, count: int) -> Versions:
        """`version` of a run of pages."""
        found = self._backing.versions(first, count)
        for entries in (self._writing, self._waiting):
            pages = entries if len(entries) < count else range(first, first + count)
            for page in pages:
                if first <= page < first + count and (entry := entries.get(page)) is not None:
                    found[page - first] = entry.page.version
        return found

    def fits(self, pages: int) -> bool:
        return len(self._waiting) + len(self._writing) + pages <= self.pages_max

    def has_any(self, first: int, count: int) -> bool:
        """Is the newest content of one of these pages in the queue?"""
        waiting, writing = self._waiting, self._writing
        if count == 1:
            return first in waiting or first in writing
        return any(page in waiting or page in writing for page in range(first, first + count))

    async def room(self, pages: int) -> None:
        """Wait until `pages` more fit. OSError when they do not and the disk refuses to take any."""
        while len(self) + pages > self.pages_max:
            await self._next_round()

    def put(self, page: int, content: Page) -> None:
        """Only after `room`, with no await between."""
        known = self._waiting.get(page)
        if known is None:
            self._ticket += 1
        self._waiting[page] = SpillEntry(content, self._ticket if known is None else known.ticket)
        self._work.set()

    def put_run(self, first: int, version: int, contents: Iterable[bytes]) -> None:
        """`put` of a run of pages under one version."""
        waiting, ticket = self._waiting, self._ticket
        for page, data in enumerate(contents, first):
            known = waiting.get(page)
            if known is None:
                ticket += 1
            waiting[page] = SpillEntry(Page(version, data), ticket if known is None else known.ticket)
        self._ticket = ticket
        self._work.set()

    async def written(self, first: int, count: int, version: int) -> None:
        """Wait until these pages are on disk under `version` or a newer one. OSError when the disk refused one."""
        while any(self._backing.version[page] < version for page in range(first, first + count)):
            await self._next_round()

    async def kept(self, first: int, count: int) -> None:
        """Wait until everything that is in the queue now of these pages survives a loss of power, however often the
        disk refuses: a lender that has them is about to forget them."""
        await self._drained(first, count)
        while True:
            try:
                return await self._backing.sync()
            except OSError:
                await asyncio.sleep(RETRY_S)

    async def _drained(self, first: int, count: int) -> None:
        queued = [*self._waiting, *self._writing]
        wanted = {page: self.version(page) for page in queued if first <= page < first + count}
        while any(self._backing.version[page] < version for page, version in wanted.items()):
            try:
                await self._next_round()
            except OSError:
                continue  # the writer tries again

    async def flush(self) -> None:
        """Everything put before is on disk and synced. OSError when it is not."""
        last = self._ticket
        while self._oldest_ticket() <= last:
            await self._next_round()
        await self._backing.sync()

    async def drop(self) -> None:
        """Forget what waits; returns when nothing is being written."""
        self._waiting.clear()
        while self._writing:
            with contextlib.suppress(OSError):
                await self._next_round()
            self._waiting.clear()

    async def run(self) -> None:
        """The writer; runs for as long as the volume is open."""
        while True:
            if not self._waiting:
                self._work.clear()
                await self._work.wait()
            await self._gather()
            self._writing = dict(islice(self._waiting.items(), BATCH_PAGES))
            for page in self._writing:
                del self._waiting[page]
            error = await self._write()
            self._writing = {}
            done, self._round = self._round, asyncio.get_running_loop().create_future()
            done.set_result(error)
            self.refused = "" if error is None else str(error)
            if error is not None:
                self._env.log.warning("the disk refused pages", pages=len(self), why=str(error))
                await asyncio.sleep(RETRY_S)

    async def _gather(self) -> None:
        """Give others a moment to come along: a batch of few pages costs the disk as much as one of many. Not while
        somebody waits for it."""
        if len(self._waiting) < BATCH_PAGES and not self._waited_for:
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._hurry.wait()

    async def _write(self) -> OSError | None:
        try:
            await self._backing.write({page: entry.page for page, entry in self._writing.items()})
        except OSError as error:
            self._put_back()
            return error
        return None

    def _put_back(self) -> None:
        """In front, in the old order; a page rewritten meanwhile keeps its new content and takes the older ticket,
        since somebody may have been promised the older content."""
        back = {
            page: SpillEntry(self._waiting.pop(page, entry).page, entry.ticket) for page, entry in self._writing.items()
        }
        self._waiting = back | self._waiting

    def _oldest_ticket(self) -> int:
        for entries in (self._writing, self._waiting):
            for entry in entries.values():
                return entry.ticket
        return self._ticket + 1

    async def _next_round(self) -> None:
        self._waited_for += 1
        self._hurry.set()
        try:
            error = await asyncio.shield(self._round)
        finally:
            self._waited_for -= 1
        if error is not None:
            raise OSError(error.errno, error.strerror or str(error))
