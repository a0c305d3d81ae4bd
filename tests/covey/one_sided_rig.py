"""Real processes whose pages travel one-sided, over RDMA in the guest (`make rdma`) or mapped, and accidents that may
happen to them: a writer that knows every page it wrote checks at the end that each is as it must be."""

import signal
import time
from collections.abc import Callable

from covey.core.units import MIB
from plugins.memory.datapath.lending.slabd import SlabdConfig
from plugins.memory.datapath.wire.control import (
    CloseSlabFrame,
    CountPages,
    FreeSlabFrame,
    ListPlaces,
    ListSlabs,
    OpenSlabFrame,
    PageCounts,
    PlaceDead,
    PlaceList,
    RegisterSlabFrame,
    SlabList,
    Yes,
)
from tests.covey.live_volume import PAGE, SECRET, LiveVolume, heard, scripted, tell, until

SLABS, SLAB = 3, 2 * MIB
SLAB_SECRET = b"s" * 16
WORKER = """
import random
memory = RemoteMemory.at(PATH)
rng = random.Random(int(os.environ.get("SEED", "1")))
pages = memory.size // 4096
last, tried = {}, {}

def content(page, number):
    return (page << 32 | number).to_bytes(8, "little") * 512

def check(page):
    found = memory.read(page * 4096, 4096)
    allowed = {last.get(page, 0), *tried.get(page, ())}
    number = int.from_bytes(found[:4], "little")
    whole = found == (content(page, number) if number else bytes(4096))
    assert whole and number in allowed, (page, number, sorted(allowed), whole)

number = writes = 0
print("ready", flush=True)
sys.stdin.readline()
os.set_blocking(0, False)
while not sys.stdin.read(1):
    number += 1
    first = rng.randrange(48) if rng.random() < 0.4 else rng.randrange(pages - 16)
    run = range(first, first + rng.choice((1, 1, 1, 4, 16)))
    data = b"".join(content(page, number) for page in run)
    try:
        memory.write(first * 4096, data)
        for page in run:
            last[page] = number
            tried.pop(page, None)
        writes += 1
    except RemoteMemoryError:
        for page in run:
            tried.setdefault(page, set()).add(number)
    if number % 3 == 0 and last:
        check(rng.choice(list(last)))
for page in sorted(last):
    check(page)
print("well", writes, len(last), flush=True)
"""


class OneSidedVolume(LiveVolume):
    """A volume with three slabs at a lender, over RDMA or, when `maps`, mapped."""

    def __init__(self, maps: bool = False) -> None:
        super().__init__(size=SLABS * SLAB, slab=SLAB, maps=maps)
        self.epoch, self.maps = 1, maps

    def __enter__(self) -> "OneSidedVolume":
        super().__enter__()
        return self

    def counts(self) -> PageCounts:
        counts = self.ask("vold-data", CountPages(1))
        assert isinstance(counts, PageCounts), counts
        return counts

    def begin_anew(self) -> None:
        """Start the volume's process again, and tell it, as the lender's agent does, which places on its record the
        lender does not hold any more: a place is closed a moment before it is taken off the record."""
        self.start_vold()
        until(self.serves)
        places = self.ask("vold-data", ListPlaces(1))
        assert isinstance(places, PlaceList)
        held = {(slab.index, slab.epoch) for slab in self.held().slabs}
        for place in places.places:
            if (place.index, place.epoch) not in held:
                dead = PlaceDead(1, place.index, place.epoch, "its lender's agent says so")
                assert isinstance(self.ask("vold-data", dead), Yes)

    def one_sided(self, slabs: int = SLABS, within_s: float = 60.0) -> None:
        try:
            until(lambda: self.counted(lambda counts: self._are(counts) == slabs), within_s)
        except AssertionError:
            counts = self.counts()
            said = f"{self._are(counts)} of {slabs} slabs, places {counts.places}"
            raise AssertionError(f"{said}, {counts.rdma_failed} failed: {counts.rdma_why or counts.map_why}") from None

    def _are(self, counts: PageCounts) -> int:
        return counts.mapped_slabs if self.maps else counts.rdma_slabs

    def counted(self, what: Callable[[PageCounts], bool]) -> bool:
        try:
            return what(self.counts())
        except (OSError, AssertionError):
            return False

    def held(self) -> SlabList:
        """The slabs that the lender holds."""
        listed = self.ask("slabd", ListSlabs(1))
        assert isinstance(listed, SlabList)
        return listed

    def lends(self) -> bool:
        """Whether the slab process answers; the socket of a killed one stays for a while."""
        try:
            return isinstance(self.ask("slabd", ListSlabs(1)), SlabList)
        except OSError:
            return False

    def serves(self) -> bool:
        """Whether the volume's process knows its places."""
        return isinstance(self.ask("vold-data", ListPlaces(1)), PlaceList)

    def lend_again(self, index: int) -> None:
        """Lend the slab under the next epoch, as agents do once a place is lost."""
        self.epoch += 1
        lend = RegisterSlabFrame(1, "h1", "data", index, self.epoch, SLAB, PAGE, SLAB_SECRET)
        assert isinstance(self.ask("slabd", lend), Yes)
        address = self.held().address
        until(lambda: isinstance(self._open(index, address), Yes))

    def _open(self, index: int, address: str) -> object:
        return self.ask("vold-data", OpenSlabFrame(1, index, self.epoch, "h2", address, SLAB_SECRET))


def rig_works(volume: OneSidedVolume, harm: Callable[[OneSidedVolume], None], rounds: int, pause_s: float = 2.0) -> str:
    """The writer's last line: it found every page as it must be."""
    with scripted(volume, WORKER) as worker:
        assert heard(worker) == "ready"
        tell(worker)
        for _ in range(rounds):
            time.sleep(pause_s)
            harm(volume)
        time.sleep(pause_s)
        tell(worker, "x")
        return heard(worker)


def stands_still(volume: OneSidedVolume) -> None:
    """The lender's process takes no part in reads and writes. Reference: Infiniswap §2.4, one-sided operations"""
    volume.one_sided()
    said = volume.run(
        "m = RemoteMemory.at(PATH)\nfor at in range(64): m.write(at * 4096, bytes([at]) * 4096)\nm.flush()\nprint('ok')"
    )
    assert said.strip() == "ok"
    before = volume.counts().remote_read_bytes
    volume.processes["slabd"].send_signal(signal.SIGSTOP)
    try:
        said = volume.run(
            "m = RemoteMemory.at(PATH)\n"
            "assert all(m.read(at * 4096, 4096) == bytes([at]) * 4096 for at in range(64))\n"
            "for at in range(64, 96): m.write(at * 4096, bytes([at]) * 4096)\n"
            "m.write(0, b'new' + bytes(4093))\nassert m.read(0, 3) == b'new'\nprint('ok')"
        )
    finally:
        volume.processes["slabd"].send_signal(signal.SIGCONT)
    assert said.strip() == "ok"
    assert volume.counts().remote_read_bytes >= before + 64 * PAGE
    assert volume.counts().rdma_failed == 0


def kill_volume(volume: OneSidedVolume) -> None:
    volume.one_sided()
    volume.kill("vold")
    volume.begin_anew()


def kill_lender(volume: OneSidedVolume) -> None:
    volume.one_sided()
    volume.kill("slabd")
    volume.start("slabd", SlabdConfig(bind="127.0.0.1:0", secret=SECRET, lend_bytes=4 * volume.size))
    until(volume.lends)
    old = volume.epoch
    for index in range(SLABS):
        for epoch in range(old + 1):
            assert isinstance(volume.ask("vold-data", CloseSlabFrame(1, index, epoch)), Yes)
        volume.lend_again(index)


def take_back(volume: OneSidedVolume, index: int) -> None:
    """Take the slab back by force: the borrower was not asked."""
    volume.one_sided()
    for epoch in range(volume.epoch + 1):
        assert isinstance(volume.ask("slabd", FreeSlabFrame(1, "h1", "data", index, epoch)), Yes)
    for epoch in range(volume.epoch + 1):
        assert isinstance(volume.ask("vold-data", CloseSlabFrame(1, index, epoch)), Yes)
    volume.lend_again(index)


def take_back_and_kill(volume: OneSidedVolume) -> None:
    volume.one_sided()
    volume.processes["vold"].send_signal(signal.SIGSTOP)  # what it posted is under way
    for epoch in range(volume.epoch + 1):
        assert isinstance(volume.ask("slabd", FreeSlabFrame(1, "h1", "data", 1, epoch)), Yes)
    volume.processes["vold"].send_signal(signal.SIGCONT)
    for epoch in range(volume.epoch + 1):
        assert isinstance(volume.ask("vold-data", CloseSlabFrame(1, 1, epoch)), Yes)
    volume.kill("vold")
    volume.begin_anew()
    volume.lend_again(1)
