"""Slabs in the memory of a slab process. Each is a mapping of its own (`slab_memory`), so the kernel hands it out
zeroed and takes it back whole; no borrower ever sees what another wrote. It outlives this process where a keeper holds
it (`slab_keeper`)."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Protocol

from covey.ports.pages import Pages, SharedRing
from plugins.memory.datapath.wire import control
from plugins.memory.datapath.wire.control import HeldSlab
from plugins.memory.datapath.wire.slab_memory import SlabHead, SlabPages
from plugins.memory.datapath.wire.slabwire import LentRegion, SlabHello, Versions
from plugins.memory.policy.settings import PAGE_BYTES_MAX

Key = tuple[str, str, int]
"""Key of a slab: borrower, volume, index."""


class SlabUser(Protocol):
    """A connection over which a slab is used."""

    session: bytes

    def lose(self, slab: "HostedSlab") -> None:
        """The slab was freed, or another session attached it: nothing more is answered about it than that."""


class Registered(Protocol):
    """Memory that a device reaches by itself (`slab_verbs`)."""

    where: LentRegion
    left: asyncio.Event
    """Set when no device reaches the memory any more."""

    def let_go(self) -> None:
        """Give the memory back once nothing is under way, soon."""

    def close(self) -> None:
        """Give the memory back now."""


class HostedSlab:
    """The memory of one slab under one epoch."""

    def __init__(self, kept: SlabPages, on_touched: Callable[[int], None]) -> None:
        """`on_touched` is called with the bytes of pages that are written for the first time."""
        of = kept.record
        self.borrower, self.volume, self.index, self.epoch = of.borrower, of.volume, of.index, of.epoch
        self.secret, self.page_bytes, self.kept = of.secret, of.page_bytes, kept
        self.memory: memoryview = kept.pages
        self.versions: memoryview = kept.versions
        """Version of each page, u64. A page whose version is 0 now is being written."""
        self.users: list[SlabUser] = []
        """Connections that use the slab, all of one session."""
        self.touched = 0
        """Number of pages that have a version, or are in RAM in any case."""
        self.live = True
        self.registered: Registered | None = None
        self.mapped = False
        """Its borrower's process on this host maps it."""
        self.on_touched = on_touched

    @property
    def pages(self) -> int:
        return len(self.versions)

    def has(self, first: int, count: int) -> memoryview:
        """Bytes of a run of pages."""
        return self.memory[first * self.page_bytes : (first + count) * self.page_bytes]

    def attach(self, user: SlabUser) -> None:
        """Let this connection's session use the slab, and no other."""
        if self.users and self.users[0].session != user.session:
            for older in self.users:
                older.lose(self)
            self.users = []
        if user not in self.users:
            self.users.append(user)

    def put_one(self, page: int, version: int, content: memoryview) -> None:
        """`put` for a single page."""
        old = self.versions[page]
        if version <= old:
            return
        if not old:
            self._touch(1)
        at = page * self.page_bytes
        self.versions[page] = 0  # until it is whole
        self.memory[at : at + self.page_bytes] = content
        self.versions[page] = version

    def put(self, first: int, versions: Versions, pages: memoryview | None) -> None:
        """Keep every page that is newer than the one here; `pages` None: zeros."""
        size = self.page_bytes
        here = array("Q", self.versions[first : first + len(versions)].tobytes())
        if 0 in here:
            self._touch(sum(old == 0 < new for new, old in zip(versions, here, strict=True)))
        if pages is not None and all(new > old for new, old in zip(versions, here, strict=True)):
            self.versions[first : first + len(versions)] = array("Q", bytes(8 * len(versions)))  # until they are whole
            self.memory[first * size : (first + len(versions)) * size] = pages
            self.versions[first : first + len(versions)] = versions
            return
        for at, (new, old) in enumerate(zip(versions, here, strict=True)):
            if new > old:
                page = bytes(size) if pages is None else pages[at * size : (at + 1) * size]
                self.versions[first + at] = 0
                self.memory[(first + at) * size : (first + at + 1) * size] = page
                self.versions[first + at] = new

    def touch_all(self) -> None:
        """Count all pages as touched: the slab is in RAM as a whole, whatever was written."""
        self._touch(self.pages)

    def _touch(self, pages: int) -> None:
        pages = min(pages, self.pages - self.touched)
        self.touched += pages
        self.on_touched(pages * self.page_bytes)


class SlabStore:
    """Every slab of this process."""

    def __init__(self, lend_bytes: int, pages: Pages) -> None:
        self.slabs: dict[Key, HostedSlab] = {}
        self.refused = self.held_bytes = self.touched_bytes = 0
        self.on_kept: Callable[[SlabPages], None] = lambda slab: None
        """Called with each new slab's memory."""
        self.on_freed: Callable[[SlabPages], None] = lambda slab: None
        """Called when a slab does not count any more, before its memory is freed."""
        self._lend_bytes, self._pages = lend_bytes, pages
        self._leaving: list[Registered] = []

    def listed(self, after: Key, most: int) -> tuple[tuple[HeldSlab, ...], bool]:
        """At most `most` slabs after that key, and whether there are more."""
        keys = sorted(key for key in self.slabs if key > after) if most else []
        return tuple(_held(self.slabs[key]) for key in keys[:most]), len(keys) > most

    def register(self, asked: control.RegisterSlabFrame) -> None:
        """Make a slab. ValueError says why not. Sizes are checked before anything is allocated. A higher epoch replaces
        a lower."""
        key = (asked.borrower, asked.volume, asked.index)
        known = self.slabs.get(key)
        if known is not None and (known.epoch, known.secret) == (asked.epoch, asked.secret):
            return
        if known is not None and known.epoch >= asked.epoch:
            raise ValueError(f"epoch {asked.epoch} is not newer than {known.epoch}")
        page_bytes, slab_bytes = asked.page_bytes, asked.slab_bytes
        if not 512 <= page_bytes <= PAGE_BYTES_MAX or slab_bytes < 1 or slab_bytes % page_bytes:
            raise ValueError(f"a slab of {slab_bytes} bytes is not a whole number of pages of {page_bytes}")
        if known is not None:
            self.free(known.borrower, known.volume, known.index, known.epoch)
            if known.registered is not None:
                known.registered.close()
        if self.held_bytes + slab_bytes > self._lend_bytes:
            raise ValueError(f"{self.held_bytes} bytes are lent, and {self._lend_bytes} is the limit")
        record = SlabHead(*key, asked.epoch, asked.secret, page_bytes, slab_bytes)
        kept = SlabPages.make(self._pages, record)
        self._put(kept)
        self.on_kept(kept)

    def _put(self, kept: SlabPages) -> HostedSlab:
        of = kept.record
        slab = HostedSlab(kept, self._touched)
        self.slabs[of.borrower, of.volume, of.index] = slab
        self.held_bytes += of.slab_bytes
        return slab

    def take_up(self, shared: SharedRing) -> SlabPages | None:
        """Take up a slab that an earlier process of this host lent, unchanged; None: it does not count, or one of a
        newer epoch is here."""
        kept = SlabPages.take_up(shared)
        if kept is None:
            return None
        of = kept.record
        known = self.slabs.get((of.borrower, of.volume, of.index))
        if known is not None and known.epoch >= of.epoch:
            kept.free()
            return None
        if known is not None:
            self.free(known.borrower, known.volume, known.index, known.epoch)
        slab = self._put(kept)
        slab.touched = kept.touched()
        self.touched_bytes += slab.touched * slab.page_bytes
        return kept

    def _touched(self, touched_bytes: int) -> None:
        self.touched_bytes += touched_bytes

    def free(self, borrower: str, volume: str, index: int, epoch: int) -> None:
        """Give a slab's memory back to the kernel, and tell its borrower. Where a device reaches it, that takes a
        little while (`left`)."""
        slab = self.slabs.get((borrower, volume, index))
        if slab is None or slab.epoch != epoch:
            return
        del self.slabs[borrower, volume, index]
        slab.live = False
        self.held_bytes -= len(slab.memory)
        self.touched_bytes -= slab.touched * slab.page_bytes
        slab.on_touched = lambda bytes: None
        users, slab.users = slab.users, []
        for user in users:
            user.lose(slab)
        self.on_freed(slab.kept)
        if slab.registered is None:
            slab.kept.free(slab.mapped)
        else:
            slab.kept.end()
            slab.registered.let_go()
            self._leaving = [each for each in self._leaving if not each.left.is_set()]
            self._leaving.append(slab.registered)

    @property
    def unlocked_bytes(self) -> int:
        """Bytes of lent memory that may be swapped out."""
        return sum([len(slab.memory) for slab in self.slabs.values() if not slab.kept.shared.locked])

    async def left(self) -> None:
        """Wait until no device reaches what was freed before."""
        for each in list(self._leaving):
            await each.left.wait()

    def find(self, hello: SlabHello) -> HostedSlab | None:
        """The slab that a hello names; None if it is unknown or its epoch is stale."""
        return self.known(hello.borrower, hello.volume, hello.slab, hello.epoch)

    def known(self, borrower: str, volume: str, index: int, epoch: int) -> HostedSlab | None:
        slab = self.slabs.get((borrower, volume, index))
        return slab if slab is not None and slab.epoch == epoch else None


def _held(slab: HostedSlab) -> HeldSlab:
    touched = slab.touched * slab.page_bytes
    return HeldSlab(slab.borrower, slab.volume, slab.index, slab.epoch, len(slab.memory), slab.secret, touched)
