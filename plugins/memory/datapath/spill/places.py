"""The lenders that may hold pages that this host's disk does not have yet: file `places` of a volume.

A place is in it before the first page goes there, and until the last page of it is on disk; so a process that starts
after a crash knows which lenders to ask. Taking a place out never fails: one that stays too long only makes a later
process ask a lender more than it had to.
"""

import asyncio
import contextlib
from collections.abc import Iterable

import msgspec

from covey.ports.disk import Disk
from covey.ports.log import Logger
from covey.wire import checked
from plugins.memory.datapath.wire.control import OpenPlace

CATCH_UP_S = 1.0
"""Seconds to pause before a change that the disk refused is written again."""


class PlacesRecord(msgspec.Struct, frozen=True):
    places: tuple[OpenPlace, ...]
    clean: bool = False
    """The last process ended in good order: the disk has everything that these lenders hold."""
    whole: tuple[tuple[int, int], ...] = ()
    """For a volume without a disk: index and epoch of the places where every acknowledged write is."""
    lost: tuple[int, ...] = ()
    """Slabs of such a volume whose whole members were all lost at once: pages not written again since cannot be
    read."""


_record = msgspec.msgpack.Decoder(PlacesRecord)


class Places:
    """The places of one volume, by slab and epoch. Files start with `prefix`."""

    def __init__(self, disk: Disk, log: Logger, prefix: str) -> None:
        self.clean = False
        """The last process ended in good order, by the file."""
        self.late = False
        """The file lists a place that is not used any more, since the disk refused the change."""
        self.whole: set[tuple[int, int]] = set()
        self.lost: set[int] = set()
        self._disk, self._log, self._name = disk, log, f"{prefix}/places"
        self.volume = prefix.rpartition("/")[2]
        self._places: dict[tuple[int, int], OpenPlace] = {}
        self._of: dict[int, dict[int, OpenPlace]] = {}
        """Places by slab: index -> epoch -> place."""
        self._writing = asyncio.Lock()
        self._asked = self._written = 0

    def all(self) -> tuple[OpenPlace, ...]:
        return tuple(self._places.values())

    def after(self, index: int, epoch: int) -> tuple[OpenPlace, ...]:
        """The places after this slab and epoch, in order."""
        return tuple(place for key, place in sorted(self._places.items()) if key > (index, epoch))

    def of(self, index: int) -> Iterable[OpenPlace]:
        """The places of one slab."""
        return self._of.get(index, {}).values()

    def _put(self, place: OpenPlace) -> None:
        self._places[place.index, place.epoch] = place
        self._of.setdefault(place.index, {})[place.epoch] = place

    def _take(self, index: int, epoch: int) -> OpenPlace | None:
        self._of.get(index, {}).pop(epoch, None)
        return self._places.pop((index, epoch), None)

    async def load(self, slabs: int) -> None:
        """Load the places of slabs 0 to `slabs` - 1. Damaged when the file is: if it were taken for empty, pages that
        only lenders hold would be lost."""
        record = await checked.load(self._disk, self._name, _record)
        if record is None:
            return
        self.clean = record.clean
        self.whole, self.lost = set(record.whole), set(record.lost)
        for place in record.places:
            if place.index < slabs:
                self._put(place)

    def is_at(self, index: int, epoch: int, address: str) -> None:
        """Note where a place is reached now; the file has that from its next change on. Does nothing for a place that
        is not listed."""
        if (place := self._places.get((index, epoch))) is not None:
            self._put(msgspec.structs.replace(place, address=address))

    def now(self, place: OpenPlace) -> OpenPlace:
        """The place as it is listed now; as given, where it is not."""
        return self._places.get((place.index, place.epoch), place)

    def plan(self, place: OpenPlace) -> None:
        """List a place from now on; it will be recorded."""
        self._put(place)

    async def add(self, place: OpenPlace) -> None:
        """Record a place; durable on return. OSError: it is not, and no page may go there."""
        self._put(place)
        try:
            await self.write()
        except OSError:
            self._take(place.index, place.epoch)
            raise

    async def remove(self, index: int, epoch: int) -> None:
        if self._take(index, epoch) is None:
            return
        try:
            await self.write()
        except OSError as error:
            self.late = True
            self._log.warning("a place is not taken out of the file yet", slab=index, epoch=epoch, why=str(error))

    def forget(self, index: int, epoch: int) -> None:
        """Remove a place from memory; the file follows with the next `write`."""
        self._take(index, epoch)
        self.whole.discard((index, epoch))

    async def catch_up(self) -> None:
        """Wait until the file lists the places in use and no others, however often the disk refuses."""
        while self.late:
            await asyncio.sleep(CATCH_UP_S)
            with contextlib.suppress(OSError):
                await self.write()

    async def write(self, clean: bool = False) -> None:
        """Write the places in use, durable on return. OSError when the disk refuses. However many callers ask at once,
        two writes do."""
        self._asked += 1
        mine = self._asked
        async with self._writing:
            if self._written >= mine and not clean:
                return  # whoever wrote meanwhile wrote this change too
            mine = self._asked
            record = PlacesRecord(self.all(), clean, tuple(sorted(self.whole)), tuple(sorted(self.lost)))
            await checked.save(self._disk, self._name, record)
            self.late, self._written = False, mine

    async def delete(self) -> None:
        await self._disk.delete(self._name)
