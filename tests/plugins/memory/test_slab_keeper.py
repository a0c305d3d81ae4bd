"""Slabs outlive the process that serves them: nothing is lost, nothing old or torn is believed, nothing stays."""

import os
import random
import signal
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from agent.ports.memory.pages import MemfdPages, MemfdRing
from covey.ports.pages import SharedRing
from plugins.memory.datapath.lending.slab_store import HostedSlab, SlabStore
from plugins.memory.datapath.wire.control import RegisterSlabFrame
from plugins.memory.datapath.wire.slab_memory import SlabHead, SlabPages
from plugins.memory.service.metrics import SLAB_LINKS_REOPENED
from tests.plugins.memory.rack import MemoryRack, SimClient, pattern
from tests.plugins.memory.test_service import a_rack, keep_hot, read_all, until_done, write_all

PAGES, LONG = 8, 64 << 10


def lent(index: int = 0, epoch: int = 1, page_bytes: int = LONG) -> RegisterSlabFrame:
    return RegisterSlabFrame(1, "h1", "data", index, epoch, PAGES * page_bytes, page_bytes, b"secret")


def a_store() -> SlabStore:
    return SlabStore(1 << 30, MemfdPages())


def again(slab: SlabPages) -> SharedRing:
    """Open the slab's memory as another process does."""
    return MemfdPages().open_ring(slab.shared.name, slab.size, sparse=True)


def content(version: int) -> bytes:
    return bytes(LONG) if version % 5 == 0 else version.to_bytes(8, "little") * (LONG // 8)


# ---- a kill at any moment --------------------------------------------------------------------------------------------


def writes_for_ever(slab: HostedSlab, seed: int, begun: int) -> None:
    """Write to each page one version after the other, one at a time and in runs, each with its own content; `begun`
    (descriptor) hears of the first one."""
    rng = random.Random(seed)
    for version in range(1, 1 << 40):
        if version == 2:
            os.write(begun, b"x")
        page = rng.randrange(PAGES - 2)
        if version % 5 == 0:
            slab.put(page, array("Q", [version] * 2), None)
        elif version % 2:
            slab.put_one(page, version, memoryview(content(version)))
        else:
            slab.put(page, array("Q", [version] * 3), memoryview(content(version) * 3))


def test_of_a_process_killed_at_any_moment_no_torn_page_is_believed() -> None:
    rng, being_written = random.Random(7), 0
    reader, begun = os.pipe()
    for seed in range(1000):
        if seed >= 50 and being_written:
            break
        store = a_store()
        store.register(lent())
        (slab,) = store.slabs.values()
        child = os.fork()
        if not child:
            try:
                writes_for_ever(slab, seed, begun)
            finally:
                os._exit(1)
        assert os.read(reader, 1)
        time.sleep(rng.uniform(0.0, 0.002))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = a_store()
        assert found.take_up(again(slab.kept)) is not None
        (taken,) = found.slabs.values()
        for page, version in enumerate(taken.versions):
            data = bytes(taken.has(page, 1))
            assert not version or data == content(version), f"seed {seed}: page {page}, version {version}"
            being_written += not version and any(data)
        assert taken.touched == sum(map(bool, taken.versions))
    os.close(reader)
    os.close(begun)
    assert being_written, "some were hit in the middle of a page, and have no version"


# ---- what is taken up ------------------------------------------------------------------------------------------------


def test_a_slab_is_taken_up_as_it_was() -> None:
    store = a_store()
    store.register(lent(epoch=7))
    (slab,) = store.slabs.values()
    slab.put_one(3, 9, memoryview(content(9)))
    found = a_store()
    found.take_up(again(slab.kept))
    (taken,) = found.slabs.values()
    assert (taken.borrower, taken.volume, taken.index, taken.epoch, taken.secret) == ("h1", "data", 0, 7, b"secret")
    assert list(taken.versions) == [0, 0, 0, 9, 0, 0, 0, 0] and taken.has(3, 1) == content(9)
    assert (found.held_bytes, found.touched_bytes) == (PAGES * LONG, LONG)


def test_of_two_epochs_only_the_newer_one_is_taken_up_in_whatever_order() -> None:
    for order in ((1, 2), (2, 1)):
        slabs = {epoch: SlabPages.make(MemfdPages(), record(epoch)) for epoch in order}
        found = a_store()
        for epoch in order:
            found.take_up(again(slabs[epoch]))
        assert [slab.epoch for slab in found.slabs.values()] == [2]
        assert found.held_bytes == PAGES * LONG


def record(epoch: int) -> SlabHead:
    return SlabHead("h1", "data", 0, epoch, b"secret", LONG, PAGES * LONG)


def test_what_was_freed_or_is_damaged_is_not_taken_up() -> None:
    store = a_store()
    store.register(lent())
    (slab,) = store.slabs.values()
    shared = again(slab.kept)
    store.free("h1", "data", 0, 1)
    assert a_store().take_up(shared) is None, "a keeper that was not told yet still has it"
    store.register(lent(epoch=2))
    (slab,) = store.slabs.values()
    slab.kept.shared.view[30] ^= 1
    assert a_store().take_up(again(slab.kept)) is None
    assert a_store().take_up(MemfdPages().make_ring(1 << 16, sparse=True)) is None, "it is no slab"


def test_a_slab_takes_memory_for_what_is_written_and_one_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ring = MemfdRing.make(1 << 30, True)
    ring.view[1 << 29] = 1
    descriptor = int(ring.name.split(":")[1])
    assert os.fstat(descriptor).st_blocks * 512 <= 1 << 21
    assert len(os.listdir("/proc/self/fd")) == before + 1
    ring.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- a rack ----------------------------------------------------------------------------------------------------------


@contextmanager
def a_lent_volume(seed: int = 1) -> Iterator[MemoryRack]:
    """Attach two slabs of h1, lent by h2 and h3, idle, and held by their keepers."""
    with a_rack(3, seed) as rack:
        rack.attach("h1", "data", "128 KiB")
        keep_hot(rack, "h1", "data", slabs=2)
        until_done(rack, rack.client("h1", write_all, "data"))
        rack.run(3)
        assert kept(rack) == {"h2": 1, "h3": 1}
        yield rack


def kept(rack: MemoryRack) -> dict[str, int]:
    """The slabs in the keepers of hosts that have one."""
    found = {name: host.find("slab-keeper") for name, host in rack.world.hosts.items()}
    return {name: len(keepers[-1].rings) for name, keepers in found.items() if keepers}


def epochs(rack: MemoryRack) -> list[int]:
    return [slab.epoch for slab in rack.slabs("h1")]


def served(rack: MemoryRack) -> int:
    return rack.command("h1", "volumes")[0].remote_read_bytes  # type: ignore[no-any-return]


def test_slabs_of_a_killed_process_go_on_under_the_same_epoch_with_every_page() -> None:
    with a_lent_volume() as rack:
        before = epochs(rack)
        for host in ("h2", "h3"):
            rack.slabd(host).signal(9)
        rack.run(4)
        assert epochs(rack) == before and rack.mapped("h1", "data") == [0, 1]
        assert rack.agents["h1"].metrics()[SLAB_LINKS_REOPENED.of()] == 2
        assert [slab.pages_remote for slab in rack.slabs("h1")] == [16, 16]
        bytes_before = served(rack)
        until_done(rack, rack.client("h1", read_all, "data"))
        rack.run(2)
        assert served(rack) - bytes_before == 32 * 4096, "read from the lenders, not from the disk"


def test_pages_written_while_a_slab_process_is_away_are_never_read_older() -> None:
    with a_lent_volume() as rack:
        rack.slabd("h2").signal(9)
        rack.slabd("h3").signal(9)

        async def rewrite(client: SimClient) -> None:
            for page in range(0, 32, 2):
                await client.write(page, pattern(page, 2))

        until_done(rack, rack.client("h1", rewrite, "data"))
        rack.run(4)

        async def read(client: SimClient) -> None:
            for page in range(32):
                assert await client.read(page, 1) == pattern(page, 1 + (page % 2 == 0)), f"page {page}"

        assert rack.mapped("h1", "data") == [0, 1]
        until_done(rack, rack.client("h1", read, "data"))


def test_a_new_keeper_gets_what_the_killed_one_had() -> None:
    with a_lent_volume() as rack:
        before = epochs(rack)
        rack.host("h2").find("slab-keeper")[-1].signal(9)
        rack.run(4)
        assert kept(rack) == {"h2": 1, "h3": 1}
        rack.slabd("h2").signal(9)
        rack.run(4)
        assert epochs(rack) == before and rack.mapped("h1", "data") == [0, 1]


def test_slabs_are_found_again_by_an_agent_that_starts_without_a_slab_process() -> None:
    with a_lent_volume() as rack:
        before = epochs(rack)
        rack.processes["h2"].signal(9)
        rack.slabd("h2").signal(9)
        rack.run(1)
        rack.host("h2").start_agent()
        rack.run(4)
        assert epochs(rack) == before and rack.mapped("h1", "data") == [0, 1]
        assert len(rack.agents["h2"].lending.machine.lent) == 1


def test_memory_that_nobody_takes_up_is_free_a_minute_later() -> None:
    with a_lent_volume() as rack:
        rack.processes["h2"].signal(9)
        rack.slabd("h2").signal(9)
        rack.run(50)
        assert kept(rack)["h2"] == 1
        rack.run(15)
        assert "h2" not in kept(rack), "the keeper has ended, and its memory with it"


def test_a_keeper_drops_what_is_given_back_also_while_nobody_served() -> None:
    with a_lent_volume() as rack:
        rack.slabd("h2").signal(9)
        rack.command("h1", "remove", volume="data")
        rack.run(8)
        assert kept(rack) == {"h2": 0, "h3": 0}
        assert not rack.agents["h2"].lending.machine.lent and not rack.agents["h3"].lending.machine.lent
