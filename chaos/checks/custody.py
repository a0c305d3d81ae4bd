"""Which acknowledged pages may be read in an older version, because two failures took the newest one: no others.

An acknowledged page is in two places until the disk has it: at its lender, and in the queue of the volume's process.
So one failure loses nothing, and every older page that a read returns is an error. `Custody` forgives a page when,
after its acknowledgement and before the disk had it, *both* failed:

    its lender     its slab process or its host died, it was out of reach of the volume for long, mischief struck the
                   connection of the two a moment ago, or it took the slab back because no agent spoke for the volume
    its volume     its process died; or its host lost power and the disk what was not synced

What the disk has is asked of the real spill log, loaded from the files as a new process would find them. A page that
no lender was asked to hold is acknowledged by the disk alone, unsynced as with any disk: power alone may take it.
"""

from collections.abc import Collection, Coroutine
from typing import Any

from chaos.actors.pager import Oracle, version_of
from chaos.rack_seen import RackSeen
from chaos.world.disk import SimDisk
from chaos.world.host import SimHost, SimProcess
from chaos.world.world import World
from covey.ports.env import Env
from covey.wire.checked import Damaged
from plugins.memory.datapath.spill import spill_load
from plugins.memory.datapath.spill.page_table import LOG, PageTable
from plugins.memory.datapath.spill.spill_writer import segment_name
from plugins.memory.datapath.vold import VoldConfig, control_name, prefix, run_vold
from plugins.memory.datapath.volumes.members.mirror_volume import AnyVolume
from plugins.memory.datapath.volumes.volume import Volume as VolumeInside
from plugins.memory.machine.borrowing.slab import BorrowedSlab
from plugins.memory.policy import log_records, spilling

STRUCK_S = 10.0
"""Seconds for which a struck connection counts as lost: it is found silent (2 s), opened again (4 s), and filled."""
UNNOTICED_S = 3.0
"""Seconds within which an agent hears from the process of a volume that a link is gone: it counts once a second."""
APART_S = 5.0
"""Seconds out of reach of the volume's host after which a lender has failed (the user timeout of a connection)."""


class FrozenDisk:
    """The files of a simulated disk as they are now, for one reader who is done before anything else happens: its
    operations take no time."""

    def __init__(self, disk: SimDisk) -> None:
        self._files = disk.files

    async def read(self, name: str) -> bytes | None:
        found = self._files.get(name)
        return None if found is None else bytes(found.data)

    async def read_at(self, name: str, offset: int, size: int) -> bytes:
        file = self._files.get(name)
        found = b"" if file is None else bytes(file.data[offset : offset + size])
        return found + bytes(size - len(found))

    def path(self, name: str) -> str:
        return name


def _now(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("a frozen disk made somebody wait")


def on_disk(disk: SimDisk, oracle: Oracle, pages: Collection[int] | None = None) -> dict[int, int]:
    """For each page (None: every one that was acknowledged), the version that a new process of this volume would
    find."""
    found: dict[int, int] = {}
    size, volume = oracle.page_bytes, prefix(oracle.volume)
    frozen: Any = FrozenDisk(disk)

    async def look() -> None:
        listed = await spill_load.load_list(frozen, volume)
        if listed is None:
            return
        table = PageTable(oracle.size_bytes // size, spilling.STRIDE * listed.segment_blocks)
        await spill_load.load(frozen, volume, listed, table)
        left = await spill_load.load_left(frozen, volume, listed)
        for page in oracle.acknowledged if pages is None else pages:
            place = table.places[page]
            if place < LOG:
                content = bytes(size)
            else:
                slot, block = table.segment_of(place)
                content = await frozen.read_at(segment_name(volume, slot), block * size, size)
            if place < LOG or log_records.checksum(table.versions[page], page, content) == table.sums[page]:
                found[page] = version_of(oracle.volume, page, content) or 0
        for run in () if left is None else spill_load.newer(left, table):
            for page in range(run.first, run.first + run.pages):
                found[page] = version_of(oracle.volume, page, bytes(run.content or b"")) or 0

    try:
        _now(look())
    except (OSError, Damaged):
        return found  # what cannot be read is not there
    return found


class Held:
    """What is known about one acknowledged page."""

    __slots__ = ("lender_failed", "version", "volume_failed")

    def __init__(self, version: int, alone: bool = False) -> None:
        self.version = version
        self.lender_failed, self.volume_failed = alone, False


class Volume:
    """One volume and its pages. `lenders`: slab -> hosts that were asked to hold it lately."""

    def __init__(self, oracle: Oracle, host: SimHost) -> None:
        self.oracle, self.host = oracle, host
        self.held: dict[int, Held] = {}
        self.lenders: dict[int, frozenset[str]] = {}
        self.linked: dict[int, float] = {}
        """Slab -> when a link of it was last seen to work."""
        self.apart: dict[str, float] = {}
        """Lenders out of reach -> since when."""
        self.struck: dict[str, float] = {}
        """Lenders whose connection was struck -> until when they count as lost."""
        self.process = f"{host.name}/{control_name(oracle.volume)}"

    def acknowledged(self, page: int, version: int, alone: bool) -> None:
        """Note an acknowledged version of a page. `alone`: by the disk alone, since no lender could be asked."""
        known = self.held.get(page)
        if known is None or known.version < version:
            self.held[page] = Held(version, alone)

    def missing(self, pages: Collection[int] | None = None) -> list[tuple[int, Held]]:
        """Pages, of these (None: of all), whose acknowledged version the disk does not have now."""
        pages = self.held if pages is None else pages
        if not pages or not self.oracle.page_bytes:
            return []
        there = on_disk(self.host.disk, self.oracle, pages)
        return [(page, self.held[page]) for page in pages if there.get(page, 0) < self.held[page].version]


class Custody:
    """Watches failures; `forgives` says whether a page that was read older had lost both of its places."""

    name, every_s = "who holds which page", 0.5

    def __init__(self, rack: RackSeen, slab_bytes: int) -> None:
        self.rack, self.slab_bytes = rack, slab_bytes
        self.volumes: list[Volume] = []
        self._serving: dict[str, VolumeInside] = {}
        """Name of a volume's process -> the volume that it served last."""
        self.forgiven = 0
        """Reads of older pages that two failures explain."""
        rack.world.on_loss.append(self.lost)
        rack.world.mischief.on_link.append(self.struck)

    def add(self, oracle: Oracle, host: SimHost) -> None:
        volume = Volume(oracle, host)
        oracle.on_acknowledged = lambda page, version: volume.acknowledged(page, version, self._alone(volume, page))
        oracle.forgives = lambda page: self._forgives(volume, page)
        self.volumes.append(volume)

    def run_watched(self, env: Env, config: VoldConfig) -> Coroutine[Any, Any, None]:
        """Run the program `vold`, watched."""
        name = f"{env.host}/{control_name(config.volume)}"

        def watch(inside: AnyVolume) -> None:
            if isinstance(inside, VolumeInside):  # of one without a disk nothing is forgiven
                self._serving[name] = inside

        return run_vold(env, config, watch)

    def serves(self, borrower: str, slab: BorrowedSlab) -> bool:
        """Whether the process of this slab's volume has the slab's place open."""
        inside = self._serving.get(f"{borrower}/{control_name(slab.volume)}")
        if inside is None or slab.place is None:
            return False
        return any(link.usable and link.place.epoch == slab.place.epoch for link in inside.slabs[slab.index].links())

    def _forgives(self, volume: Volume, page: int) -> bool:
        held = volume.held.get(page)
        if held is None or not (held.lender_failed and held.volume_failed):
            return False
        self.forgiven += 1
        self.rack.world.mark("forgiven", volume.host.name, f"page {page} of {volume.oracle.volume}")
        del volume.held[page]
        return True

    # ---- what failed -------------------------------------------------------------------------------------------------

    def lost(self, host: SimHost, process: SimProcess | None) -> None:
        """Note that a process ended, or (None) a host lost its power, a moment ago."""
        for volume in self.volumes:
            if process is None:
                if host is volume.host:
                    self._volume_failed(volume, power=True)
                self._lender_failed(volume, host.name)
            elif process.name.endswith(("/slabd", "/slab-keeper")):
                if not _is_kept(host, process):
                    self._lender_failed(volume, host.name)
            elif process.name == volume.process:
                self._volume_failed(volume, power=False)

    def struck(self, one: str, other: str) -> None:
        """Note that a connection of these two processes breaks, or is slow."""
        for volume in self.volumes:
            if volume.process in (one, other):
                lender, _, program = (other if one == volume.process else one).partition("/")
                if program == "slabd":
                    volume.struck[lender] = self.rack.world.now + STRUCK_S

    def _volume_failed(self, volume: Volume, power: bool) -> None:
        for lender, until_s in volume.struck.items():
            if self.rack.world.now < until_s:
                self._lender_failed(volume, lender)
        for page, held in volume.missing():
            held.volume_failed = True
            if power and not self._lenders(volume, page) & self._used(volume, page):
                held.lender_failed = True

    def _lender_failed(self, volume: Volume, lender: str) -> None:
        slabs = {index for index, lenders in volume.lenders.items() if lender in lenders}
        if slabs:
            size, slab_bytes = volume.oracle.page_bytes, self.slab_bytes
            news = [page for page, held in volume.held.items() if not held.lender_failed]
            for _, held in volume.missing([page for page in news if page * size // slab_bytes in slabs]):
                held.lender_failed = True

    def _lenders(self, volume: Volume, page: int) -> frozenset[str]:
        return volume.lenders.get(page * volume.oracle.page_bytes // self.slab_bytes, frozenset())

    def _used(self, volume: Volume, page: int) -> frozenset[str]:
        """Lenders that the volume's process uses for the slab of this page: another may lend it and not know yet that
        its place was closed long ago."""
        inside = self._serving.get(volume.process)
        if inside is None:
            return self._lenders(volume, page)
        slab = inside.slabs[page * volume.oracle.page_bytes // self.slab_bytes]
        places = [*(link.place for link in slab.links()), *(unsure.place for unsure in slab.unsure.values())]
        return frozenset(place.lender for place in (*places, slab.reopening) if place is not None)

    # ---- who lends ---------------------------------------------------------------------------------------------------

    def check(self, world: World) -> None:
        for volume in self.volumes:
            self._look(world, volume)

    def _look(self, world: World, volume: Volume) -> None:
        """Note which lenders say that they hold slabs of this volume now, which took one back, which are out of
        reach."""
        now: dict[int, set[str]] = {}
        for name in self.rack.hosts:
            memory = self.rack.plugin(name, "memory")
            if memory is None:  # its slab process lives on without it
                for index, lenders in volume.lenders.items():
                    if name in lenders and self.rack.hosts[name].find("slabd") and self._counts_on(volume, index, name):
                        now.setdefault(index, set()).add(name)
                continue
            for lent in memory.lending.machine.lent.values():
                if (lent.borrower, lent.slab.volume) == (volume.host.name, volume.oracle.volume):
                    now.setdefault(lent.slab.index, set()).add(name)
        serves = any(p.name == volume.process and not p.loop.paused for p in volume.host.processes.values())
        speaks = serves and self.rack.plugin(volume.host.name, "memory") is not None
        for index, lenders in list(volume.lenders.items()):
            for lender in lenders - now.get(index, set()):
                if not speaks or lender in volume.apart:
                    self._lender_failed(volume, lender)
        volume.lenders = {index: frozenset(lenders) for index, lenders in now.items()}
        inside = self._serving.get(volume.process)
        for slab in inside.slabs if inside is not None else ():
            if any(link.usable for link in slab.links()):
                volume.linked[slab.index] = world.now
        self._reach(world, volume, {lender for lenders in now.values() for lender in lenders})

    def _alone(self, volume: Volume, page: int) -> bool:
        """Whether the slab of this page is without a link now, as the volume's own agent knows: closed, lost, or to be
        opened again. What is written there is on the disk alone, even while a lender has not heard yet that it may
        forget. The volume's process knows it first. After `UNNOTICED_S` that is no excuse: an agent that still counts
        on the link then has lost a slab silently, and nothing is forgiven."""
        memory = self.rack.plugin(volume.host.name, "memory")
        known = None if memory is None else memory.borrowing.machine.volumes.get(volume.oracle.volume)
        index = page * volume.oracle.page_bytes // self.slab_bytes
        if known is not None and known.slabs[index].next is None and not known.slabs[index].is_served:
            return True
        inside, now = self._serving.get(volume.process), self.rack.world.now
        if inside is None or any(link.usable for link in inside.slabs[index].links()):
            volume.linked[index] = now
            return False
        return known is None or now - volume.linked.get(index, now) < UNNOTICED_S

    def _counts_on(self, volume: Volume, index: int, lender: str) -> bool:
        """Whether the volume's own agent, if it runs, still holds on to this lender. Once it has closed a place, what
        is written there afterwards is on the disk alone."""
        memory = self.rack.plugin(volume.host.name, "memory")
        known = None if memory is None else memory.borrowing.machine.volumes.get(volume.oracle.volume)
        slab = None if known is None else known.slabs[index]
        return slab is None or lender in (*slab.hosts(), *slab.left.values())

    def _reach(self, world: World, volume: Volume, lenders: set[str]) -> None:
        here = volume.host.name
        away = {name for name in lenders if not world.network.both_ways(here, name)}
        volume.apart = {name: volume.apart.get(name, world.now) for name in sorted(away)}
        for name, since in volume.apart.items():
            if world.now - since >= APART_S:
                self._lender_failed(volume, name)


def _is_kept(host: SimHost, ended: SimProcess) -> bool:
    """Whether another process of the host has all the memory that the ended one had."""
    others = host.find("slab-keeper" if ended.name.endswith("/slabd") else "slabd")
    there = {id(memory) for process in others if process is not ended for memory in process.rings.values()}
    return all(id(memory) in there for memory in ended.rings.values())
