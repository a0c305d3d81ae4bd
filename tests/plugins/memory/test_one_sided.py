"""Pages by one-sided READ and WRITE: what the byte path makes of a device. The device is a stand-in (`stand_in_verbs`);
that real ones do the same is seen over SoftRoCE by `make rdma`."""

import asyncio
import os
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.ports.verbs import SWITCHED_OFF, PairPlace, VerbsFound
from covey.wire.headers import WireError
from plugins.memory.datapath.lending import slab_verbs
from plugins.memory.datapath.lending.slab_session import SlabSession
from plugins.memory.datapath.lending.slab_verbs import LenderVerbs
from plugins.memory.datapath.lending.slabd import SlabdConfig, run_slabd
from plugins.memory.datapath.links import volume_verbs
from plugins.memory.datapath.links.lender_pair import LenderPair, RingBytes
from plugins.memory.datapath.links.remote_slab import RemoteSlab
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.control import (
    FreeSlabFrame,
    ListSlabs,
    OpenPlace,
    PageCounts,
    RdmaLent,
    RegisterSlabFrame,
    SlabCopiedFrame,
    SlabList,
    Yes,
)
from plugins.memory.datapath.wire.control_ends import ControlClient
from plugins.memory.datapath.wire.slabwire import LentRegion, SlabOp
from plugins.memory.policy.settings import SEAL_BYTES
from plugins.memory.service import one_sided
from tests.plugins.memory.ports import (
    PAGE,
    SECRET,
    SHAPE,
    Bench,
    a_bench,
    borrowers_links,
    copied,
    page,
    placed,
    read,
    replaces_a_method,
    soon,
    write,
)
from tests.plugins.memory.stand_in_verbs import StandInNetwork, StandInVerbs
from tests.quiet import quiet


class OneSidedBench:
    """A bench whose machine has the stand-in, and a volume on it."""

    def __init__(self, bench: Bench, network: StandInNetwork, verbs: StandInVerbs, volume: Volume) -> None:
        self.bench, self.network, self.verbs, self.volume = bench, network, verbs, volume

    def asked(self) -> list[SlabOp]:
        return self.bench.asked()

    async def open(self, index: int = 0) -> None:
        """Wait until the slab is mapped, and all that it had is there."""
        await placed(self.volume, self.bench.register(index))
        await soon(lambda: any(isinstance(told, SlabCopiedFrame) and told.index == index for told in self.bench.told))

    def link(self, index: int = 0) -> RemoteSlab:
        link = self.volume.slabs[index].link
        assert link is not None
        return link

    def lent(self, index: int = 0) -> Any:
        return self.bench.store.slabs["h1", "data", index]


@asynccontextmanager
async def a_one_sided_bench(sealed: bool | None = None, deadline_s: float = 5.0) -> AsyncIterator[OneSidedBench]:
    network = StandInNetwork()
    verbs = StandInVerbs(network)
    async with a_bench(verbs) as bench:
        bench.one_sided = True
        bench.sealed = bench.sealed if sealed is None else sealed
        yield OneSidedBench(bench, network, verbs, await bench.volume(deadline_s))


@pytest.mark.parametrize("sealed", [False, True])
async def test_pages_go_one_sided_sealed_or_not(sealed: bool) -> None:
    """They are written and read without the lender's process."""
    async with a_one_sided_bench(sealed) as each:
        await each.open()
        asked = each.asked()
        await write(each.volume, 3, 7, 8)
        await each.volume.flush()
        assert (await read(each.volume, 3, 2), asked) == ([7, 8], [])
        lent = bytes(each.lent().has(3, 2))
        assert len(lent) == 2 * (PAGE + SEAL_BYTES * sealed) and (lent == page(7) + page(8)) == (not sealed)
        assert list(each.lent().versions[3:5]) == list(each.volume.spill.versions(3, 2))
        counts = each.volume.counts(1)
        assert (counts.rdma_slabs, counts.remote_read_bytes, counts.pages_refused) == (1, 2 * PAGE, 0)


async def test_what_is_not_durable_is_overwritten_by_the_lenders_process_alone() -> None:
    """The process overwrites a page whole or not at all; a WRITE that stops half way would leave the acknowledged page
    nowhere."""
    async with a_one_sided_bench() as each:
        await each.open()
        asked = each.asked()
        each.bench.disk.gate.clear()
        await write(each.volume, 3, 7)
        assert asked == []
        await write(each.volume, 3, 8)
        assert asked == [SlabOp.COPY] and bytes(each.lent().has(3, 1)) == page(8)
        each.bench.disk.gate.set()
        await each.volume.flush()
        await write(each.volume, 3, 9)
        assert asked == [SlabOp.COPY] and bytes(each.lent().has(3, 1)) == page(9)


async def test_a_page_written_before_it_was_mapped_is_durable_first_too() -> None:
    """A page that was copied in the background is at the lender, and may be in the ring alone."""
    async with a_one_sided_bench() as each:
        await write(each.volume, 3, 7)
        await each.open()
        await soon(lambda: each.link().held.count == 1)
        asked = each.asked()
        each.bench.disk.gate.clear()
        await write(each.volume, 4, 1)
        await write(each.volume, 4, 2)
        await write(each.volume, 5, 3)
        assert asked == [SlabOp.COPY], "page 4 the second time"
        each.bench.disk.gate.set()


async def test_a_write_that_stops_half_way_leaves_a_page_that_nobody_wrote() -> None:
    """A client that asks after a crash is not told of a page that is half there."""
    async with a_one_sided_bench() as each:
        await each.open()
        await write(each.volume, 3, 7)
        await each.volume.flush()
        each.network.steps_left = 2
        writing = asyncio.ensure_future(write(each.volume, 3, 8))
        await soon(lambda: each.network.steps_left == 0)
        assert bytes(each.lent().has(3, 1)) == page(8) and each.lent().versions[3] == 0
        writing.cancel()


@pytest.mark.parametrize("done", [0, 1, 2])
async def test_whatever_part_of_a_write_is_done_an_acknowledged_page_reads_back(done: int) -> None:
    async with a_one_sided_bench() as each:
        await each.open()
        await write(each.volume, 3, 7)
        await each.volume.flush()
        each.bench.disk.gate.clear()
        each.network.steps_left = done
        each.network.held = not done
        writing = asyncio.ensure_future(write(each.volume, 3, 8))
        await soon(lambda: each.network.steps_left == 0)
        await each.bench.die(each.volume)
        writing.cancel()
        each.network.steps_left, each.network.held = -1, False
        each.bench.disk.gate.set()
        again = await each.bench.volume()
        assert await read(again, 3, 1) == [7]


async def test_a_late_write_does_not_land_in_a_slab_that_was_taken_back() -> None:
    async with a_one_sided_bench() as each:
        await each.open()
        each.network.held = True
        writing = asyncio.ensure_future(write(each.volume, 3, 8))
        await asyncio.sleep(0.01)
        key = each.lent().registered.where.pages_key
        each.bench.store.free("h1", "data", 0, 1)
        assert key in each.network.regions, "it has time to arrive"
        await each.bench.store.left()
        assert key not in each.network.regions
        each.bench.register(0, epoch=2)
        each.network.go_on()
        await writing
        assert bytes(each.lent().has(0, 16)) == bytes(16 * PAGE) and not any(each.lent().versions)
        assert await read(each.volume, 3, 1) == [8]


async def test_memory_is_given_back_once_its_borrower_has_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction is no failure: the queue pair goes on with the slabs that stay."""
    monkeypatch.setattr(slab_verbs, "DRAIN_S", 3600.0)
    async with a_one_sided_bench() as each:
        for index in (0, 1):
            await each.open(index)
        other = each.link(1)
        each.network.held = True
        writing = asyncio.ensure_future(write(each.volume, 3, 8))
        await asyncio.sleep(0.01)
        registered = each.lent().registered
        each.bench.store.free("h1", "data", 0, 1)
        await quiet()
        assert not registered.left.is_set()
        each.network.go_on()
        await writing
        await soon(registered.left.is_set)
        await write(each.volume, 16, 1)
        assert other.usable and other.one_sided and bytes(each.lent(1).has(0, 1)) == page(1)
        assert each.volume.counts(1).rdma_failed == 0


async def test_an_agent_hears_that_a_slab_is_free_when_no_device_reaches_it() -> None:
    """Until then the slab's memory is locked, and nobody else's."""
    network = StandInNetwork()
    async with a_bench(StandInVerbs(network)) as bench:
        config = SlabdConfig(bind="127.0.0.1:0", secret=b"c", lend_bytes=1 << 20)
        program = asyncio.ensure_future(run_slabd(bench.env, config))
        await soon(lambda: os.path.exists(f"{bench.env.run_dir}/slabd.sock"))
        agent = await ControlClient.connect(bench.env, "slabd", b"c", lambda told: None)
        register = RegisterSlabFrame(agent.next_id, "h1", "data", 0, 1, SHAPE.slab_bytes, PAGE, SECRET)
        assert isinstance(await agent.ask(register, 5.0), Yes)
        listed = await agent.ask(ListSlabs(agent.next_id), 5.0)
        assert isinstance(listed, SlabList)
        place = OpenPlace(0, 1, "h2", listed.address, SECRET)
        remote = await borrowers_links(bench.env, always=True).open(place)
        network.held = True
        remote.send_write(3, 1, 5, memoryview(page(5)), lambda did, versions: None)
        said = await agent.ask(ListSlabs(agent.next_id), 5.0)
        assert isinstance(said, SlabList) and said.rdma == RdmaLent("stand-in", 1, "")
        assert isinstance(await agent.ask(FreeSlabFrame(agent.next_id, "h1", "data", 0, 1), 5.0), Yes)
        assert [region for region in network.regions.values() if region.remote] == []
        agent.close()
        program.cancel()
        await asyncio.wait([program])


async def test_what_a_lender_held_when_its_link_was_opened_again_is_durable_first() -> None:
    """Half done, a one-sided write would leave nowhere what the ring and the lender have alone."""
    async with a_one_sided_bench() as each:
        await each.open()
        each.bench.disk.gate.clear()
        await write(each.volume, 3, 7)
        first = each.link()
        each.bench.break_links()
        await soon(lambda: each.volume.slabs[0].link not in (None, first) and each.link().one_sided)
        assert each.link().held.flags[3] == 1
        asked = each.asked()
        await write(each.volume, 3, 8)
        assert asked == [SlabOp.COPY]
        each.bench.disk.gate.set()


async def test_what_a_dead_process_left_on_its_way_cannot_land_one_sided() -> None:
    """The successor of that process asked which pages are there, and would never know of one that came later."""
    async with a_one_sided_bench() as each:
        place = each.bench.register(0)
        links = borrowers_links(each.bench.env, always=True)
        old = await links.open(place)
        link = links._links[each.bench.address]
        assert link.paired is not None and link.paired.lane is not None
        for lane in (*link.lanes, link.paired.lane):
            lane._gone = lambda index, epoch: None  # it stands still, so it hears nothing
        each.network.held = True
        old.send_write(3, 1, 5, memoryview(page(5)), lambda did, versions: None)
        await asyncio.sleep(0)
        new = await borrowers_links(each.bench.env).open(place)
        found = await new.versions()
        each.network.go_on()
        await quiet()
        assert not any(found) and not any(each.lent().versions) and bytes(each.lent().has(3, 1)) == bytes(PAGE)
        assert each.network.steps and all(step.is_read for step in each.network.steps), "it was tried before"


async def test_a_queue_pair_ends_with_the_connection_that_asked_for_it() -> None:
    async with a_one_sided_bench() as each:
        await each.open()
        assert each.bench.server.verbs.pairs == 1
        for user in list(each.lent().users):
            if cast(SlabSession, user)._verbs.has_pair:
                cast(SlabSession, user)._stream.close()
        await soon(lambda: each.volume.counts(1).rdma_failed == 1)
        await soon(lambda: each.volume.counts(1).rdma_slabs == 1)
        assert each.bench.server.verbs.pairs == 1 and len(each.network.pairs) == 2


async def test_a_silent_lender_is_left_at_the_deadline_and_its_place_opened_again() -> None:
    """The peer says nothing, neither over its queue pair nor over its connections: no page is lost, and the pages of
    the next link go one-sided from the first on."""
    async with a_one_sided_bench(deadline_s=0.05) as each:
        await each.open()
        first = each.link()
        each.bench.ignore_requests()
        async with asyncio.timeout(5):
            await write(each.volume, 3, 7)
        assert "did not answer within" in first.why and each.volume.spill.is_on_disk(3)
        await soon(lambda: each.volume.slabs[0].link is not None)
        again = each.asked()
        assert each.link().one_sided and each.volume.lenders.reopened == 1
        counts = each.volume.counts(1)
        assert (counts.rdma_failed, counts.rdma_why, await read(each.volume, 3, 1)) == (1, "", [7])
        await write(each.volume, 4, 8)
        assert again == []


async def failed_twice(each: OneSidedBench) -> None:
    """Let a queue pair fail, and the one that was made at once after that. The link is open again."""
    await each.open()
    for failed in (1, 2):
        await soon(lambda: each.volume.counts(1).rdma_slabs == 1)
        for pair in each.network.pairs.values():
            pair.failed = "the peer does not answer"
        each.bench.told.clear()
        await write(each.volume, 4, 8)
        await each.volume.flush()
        await soon(lambda failed=failed: each.volume.counts(1).rdma_failed == failed)
        await copied(each.bench)
    assert each.volume._links.verbs._failures[each.bench.address][0] == 2


@pytest.mark.parametrize("pause_s", [3600.0, 0.05])
async def test_a_queue_pair_that_fails_again_and_again_is_tried_less_often(
    pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_verbs, "FAILED_S", pause_s)
    async with a_one_sided_bench() as each:
        await failed_twice(each)
        if pause_s < 1.0:
            await soon(lambda: each.volume.counts(1).rdma_slabs == 1)
            return
        asked = each.asked()
        await write(each.volume, 9, 1)
        assert asked == [SlabOp.COPY] and not each.link().one_sided, "over TCP meanwhile"


async def test_a_network_that_is_reached_after_a_while_is_used_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slabs of the link use it, after as many tries as it takes."""
    monkeypatch.setattr(volume_verbs, "AGAIN_S", 0.05)
    async with a_one_sided_bench() as each:
        lender = each.bench.server.verbs
        each.bench.server.verbs = LenderVerbs(replace(each.bench.env, verbs=SWITCHED_OFF))
        await each.open(0)
        await each.open(1)
        await quiet()
        assert each.volume.counts(1).rdma_slabs == 0
        each.bench.server.verbs = lender
        await soon(lambda: each.volume.counts(1).rdma_slabs == 2)
        assert each.volume.counts(1).rdma_why == ""


# ---- who has none ----------------------------------------------------------------------------------------------------


async def test_without_a_device_here_nothing_is_asked_and_pages_go_over_tcp() -> None:
    async with a_one_sided_bench() as each:
        each.verbs.refuses = "this host has no RDMA device"
        await each.open()
        asked = each.asked()
        await write(each.volume, 3, 7)
        assert asked == [SlabOp.COPY] and len(each.bench._listener._tasks) == 2
        assert each.volume.counts(1).rdma_why == "this host has no RDMA device"


async def test_without_a_device_at_the_lender_it_says_so_and_pages_go_over_tcp() -> None:
    async with a_one_sided_bench() as each:
        each.bench.server.verbs = LenderVerbs(replace(each.bench.env, verbs=SWITCHED_OFF))
        await each.open()
        asked = each.asked()
        await write(each.volume, 3, 7)
        assert asked == [SlabOp.COPY] and each.link().usable
        assert each.volume.counts(1).rdma_why == "h2: it is switched off ([memory] rdma)"
        assert each.bench.server.verbs.why == "it is switched off ([memory] rdma)"


async def test_a_lender_that_does_not_know_queue_pairs_is_used_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the connection that asks what it does not know, and no other one."""

    def unknown(session: SlabSession, asked: object) -> None:
        raise WireError("unknown operation 8")

    replaces_a_method()
    monkeypatch.setattr(SlabSession, "_pair", unknown)
    async with a_one_sided_bench() as each:
        await each.open()
        await write(each.volume, 3, 7)
        assert each.link().usable and not each.link().one_sided
        assert bytes(each.lent().has(3, 1)) == page(7) and len(each.network.pairs) == 0


async def test_memory_that_may_not_be_locked_leaves_that_slab_to_tcp() -> None:
    async with a_one_sided_bench() as each:
        await each.open()
        each.verbs.locks = "the device refuses to register 65536 bytes"
        await each.open(1)
        assert (each.link(0).one_sided, each.link(1).one_sided) == (True, False)
        await write(each.volume, 16, 7)
        assert bytes(each.lent(1).has(0, 1)) == page(7)
        assert each.volume.counts(1).rdma_why == "h2: the device refuses to register 65536 bytes"


async def test_a_network_that_the_device_does_not_reach_leaves_all_to_tcp() -> None:
    """The first READ shows it, before a page depends on it."""
    async with a_one_sided_bench() as each:
        each.network.unreachable = True
        links = borrowers_links(each.bench.env, 0.1)
        remote = await links.open(each.bench.register(0))
        await soon(lambda: links.verbs.why)
        assert links.verbs.why == "one-sided: did not answer within 0.1 s"
        await remote.write(3, array("Q", (7,)), memoryview(page(7)))
        assert remote.usable and not remote.one_sided and bytes(each.lent().has(3, 1)) == page(7)


# ---- order -----------------------------------------------------------------------------------------------------------


async def test_a_read_that_a_write_overtakes_is_not_answered_with_what_it_got() -> None:
    async with a_one_sided_bench() as each:
        await each.open()
        await write(each.volume, 3, 7)
        await each.volume.flush()
        each.network.held = True
        reading = asyncio.ensure_future(read(each.volume, 3, 1))
        await asyncio.sleep(0.01)
        writing = asyncio.ensure_future(write(each.volume, 3, 9))
        await asyncio.sleep(0.01)
        each.network.go_on()
        assert await reading == [9]
        await writing


async def test_what_is_about_a_page_being_written_waits_for_that_write() -> None:
    """The second request goes over TCP, which has no order with the first, and must not come before it."""
    async with a_one_sided_bench() as each:
        await each.open()
        asked = each.asked()
        each.network.held = True
        first = asyncio.ensure_future(write(each.volume, 3, 7))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(each.volume.write(3, 1, None))
        third = asyncio.ensure_future(write(each.volume, 2, 1, 5))
        elsewhere = asyncio.ensure_future(write(each.volume, 9, 4))
        await quiet()
        assert asked == []
        each.network.go_on()
        await asyncio.gather(first, second, third, elsewhere)
        assert await read(each.volume, 2, 2) == [1, 5]
        assert bytes(each.lent().has(2, 2)) == page(1) + page(5)
        assert SlabOp.DISCARD in asked


async def test_an_older_copy_does_not_overwrite_a_newer_page() -> None:
    async with a_one_sided_bench() as each:
        remote = await borrowers_links(each.bench.env, always=True).open(each.bench.register(0))
        await remote.write(0, array("Q", (5, 6)), memoryview(page(5) + page(6)))
        await remote.write(0, array("Q", (3, 7)), memoryview(page(3) + page(7)))
        assert bytes(each.lent().has(0, 2)) == page(5) + page(7) and list(each.lent().versions[:2]) == [5, 7]


async def test_requests_under_way_when_a_slab_goes_one_sided_keep_their_order() -> None:
    async with a_one_sided_bench() as each:
        links = borrowers_links(each.bench.env)
        remote = await links.open(each.bench.register(0))
        words: dict[int, int] = {}
        done: list[bool] = []
        for version in range(1, 400):
            at, data = version % 16, page(version)
            words[at] = version
            remote.send_write(at, 1, version, memoryview(data), lambda did, versions: done.append(did))
            if version % 20 == 0:
                await asyncio.sleep(0)
        await soon(lambda: len(done) == 399)
        await soon(lambda: remote.one_sided)
        assert all(done) and {at: bytes(each.lent().has(at, 1)) for at in words} == {
            at: page(word) for at, word in words.items()
        }


# ---- what one may reach ----------------------------------------------------------------------------------------------


async def test_a_key_of_another_volumes_slab_opens_nothing() -> None:
    async with a_one_sided_bench() as each:
        store, env = each.bench.store, each.bench.env
        store.register(RegisterSlabFrame(1, "h1", "other", 0, 1, SHAPE.slab_bytes, PAGE, b"o" * 16))
        others = store.slabs["h1", "other", 0]
        where = await each.bench.server.verbs.register(others)
        links = borrowers_links(env, always=True)
        remote = await links.open(each.bench.register(0))
        pair = cast(LenderPair, links._links[each.bench.address].paired.pair)  # type: ignore[union-attr]
        pair.write(where, 0, array("Q", (9,)), memoryview(page(9)), lambda did, versions: None)
        await soon(lambda: not remote.usable)
        assert "no longer allows" in remote.why and bytes(others.has(0, 1)) == bytes(PAGE)


async def test_a_second_queue_pair_for_one_connection_ends_it() -> None:
    async with a_one_sided_bench() as each:
        links = borrowers_links(each.bench.env, always=True)
        remote = await links.open(each.bench.register(0))
        paired = links._links[each.bench.address].paired
        assert paired is not None
        with pytest.raises(Exception, match="h2"):
            await paired.ask(remote.place, SlabOp.PAIR, slabwire.pack_paired(paired_place()), slabwire.PAIRED_BYTES)
        assert each.bench.store.refused == 1


def paired_place() -> PairPlace:
    return PairPlace(bytes(range(16)), 3, 77, 12345, 3)


async def test_registered_memory_counts_as_touched_whole_and_once() -> None:
    async with a_one_sided_bench() as each:
        await each.open()
        await write(each.volume, 3, 7)
        await each.volume.write(4, 1, None)
        assert each.bench.store.touched_bytes == SHAPE.slab_bytes
        each.bench.store.free("h1", "data", 0, 1)
        assert each.bench.store.touched_bytes == 0


def test_what_is_said_of_pairs_and_regions_comes_back() -> None:
    assert slabwire.paired(slabwire.pack_paired(paired_place())) == paired_place()
    assert slabwire.paired(slabwire.pack_paired(None, "no device")) == "no device"
    region = LentRegion(1, 2, 3 << 40, 4 << 40)
    assert slabwire.region(slabwire.pack_region(region)) == region
    assert slabwire.region(slabwire.pack_region(None, "no \x07memory")) == "no ?memory"


@given(st.binary(max_size=300) | st.binary(min_size=slabwire.PAIRED_BYTES, max_size=slabwire.PAIRED_BYTES))
def test_any_bytes_are_a_pair_or_a_wire_error(data: bytes) -> None:
    for read_it in (slabwire.paired, slabwire.region):
        try:
            found = read_it(data)
        except WireError:
            continue
        assert isinstance(found, PairPlace | LentRegion) or (found and found.isprintable())
        if isinstance(found, PairPlace):
            assert found.number < 1 << 24 and found.first_psn < 1 << 24 and 1 <= found.mtu <= 5


@given(sizes=st.lists(st.integers(1, 60), max_size=80), size=st.integers(60, 100), hold=st.integers(0, 6))
def test_places_in_a_ring_never_overlap(sizes: list[int], size: int, hold: int) -> None:
    ring = RingBytes(size)
    taken: list[tuple[int, int, int]] = []
    for wanted in sizes:
        at = ring.take(wanted)
        while at is None:
            assert taken, "nothing is taken, and it does not fit"
            ring.give_back(taken.pop(0)[2])
            at = ring.take(wanted)
        assert at + wanted <= size
        assert all(at + wanted <= other or other + long <= at for other, long, _ in taken)
        taken.append((at, wanted, ring.taken))
        while len(taken) > hold:
            ring.give_back(taken.pop(0)[2])


def test_the_line_of_agentctl_status() -> None:
    none = VerbsFound("", "this host has no RDMA device")
    assert one_sided.told(none, [], RdmaLent()) == "over TCP; no RDMA: this host has no RDMA device"
    counts = PageCounts(1, (), 0, 0, 0, 0, 0, 0, (), 0, 0, rdma_slabs=3, rdma_failed=1, rdma_why="h2: no device")
    lent = RdmaLent("rxe0", 2, "memory")
    assert one_sided.told(VerbsFound("rxe0", ""), [counts], lent) == (
        "over RDMA (rxe0): 3 borrowed slabs, 2 volumes of others; over TCP instead: h2: no device; "
        "refused to others: memory; 1 queue pairs failed"
    )
