"""Requests that nobody awaits: those answered at once because their pages are at hand, and those that must not be."""

import asyncio
from array import array
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.memory.datapath.lending.slab_store import HostedSlab
from plugins.memory.datapath.links.asked_in_order import NO_VERSIONS, Answered
from plugins.memory.datapath.links.one_sided import OneSided, SlabAsk
from plugins.memory.datapath.links.remote_slab import PagesAtLender
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.control import SlabLost
from plugins.memory.datapath.wire.slabwire import WRITE, Versions
from tests.plugins.memory.ports import (
    PAGE,
    SHAPE,
    Bench,
    SentHere,
    a_bench,
    copied,
    page,
    placed,
    read,
    soon,
    submitted,
    write,
)


async def found(volume: Volume, first: int, count: int) -> bytes:
    """The pages that a client reads that does not wait."""
    into, answered = bytearray(count * PAGE), list[OSError | None]()
    volume.submit_read(first, memoryview(into), answered.append)
    await soon(lambda: answered)
    assert answered == [None]
    return bytes(into)


def lent(bench: Bench) -> HostedSlab:
    return bench.store.slabs["h1", "data", 0]


def lost(bench: Bench) -> list[str]:
    """The reasons for which slabs were given up."""
    return [told.why for told in bench.told if isinstance(told, SlabLost)]


# ---- what a lender holds ---------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_a_run_is_held_when_each_of_its_pages_is(held: list[bool], data: st.DataObject) -> None:
    pages = PagesAtLender(len(held))
    for at in (at for at, each in enumerate(held) if each):
        pages.add(at)
    first = data.draw(st.integers(0, len(held) - 1))
    count = data.draw(st.integers(1, len(held) - first))
    assert pages.has_all(first, count) is all(held[first : first + count])


@pytest.mark.parametrize("mapped", [False, True])
async def test_what_a_lender_does_not_have_yet_is_no_reason_to_give_it_up(mapped: bool) -> None:
    """Given up, it would have answered with content that is older than what it is said to hold."""
    async with a_bench() as bench:
        bench.mapped = mapped
        volume = await bench.volume()
        await write(volume, 5, 1, 2, 3)
        await volume.flush()
        fetch, may = volume.lenders._fetch, asyncio.Event()

        async def fetched(*what: Any) -> Any:
            await may.wait()  # nothing is copied yet
            return await fetch(*what)

        volume.lenders._fetch = fetched
        await placed(volume, bench.register(0))
        await write(volume, 6, 4)
        await volume.flush()
        link = volume.slabs[0].link
        assert link is not None and list(link.held.flags[5:8]) == [0, 1, 0]
        assert await found(volume, 5, 1) == page(1)
        assert await found(volume, 6, 2) == page(4) + page(3)
        assert await found(volume, 5, 3) == page(1) + page(4) + page(3)
        assert volume.slabs[0].link is link and link.usable and lost(bench) == []
        may.set()
        await soon(lambda: link.held.count == 3)


@pytest.mark.parametrize("count", [1, 2])
async def test_what_was_written_again_meanwhile_is_not_held_once_the_older_one_is(count: int) -> None:
    """The second write goes over the other connection, and its lender's process is slow."""
    async with a_bench() as bench:
        bench.mapped = False
        volume = await bench.volume(deadline_s=60.0)
        await placed(volume, bench.register(0))
        await copied(bench)
        link = volume.slabs[0].link
        assert link is not None
        for user in lent(bench).users:
            session = cast(Any, user)
            do = session._do
            session._do = lambda asked, slab, do=do: do(asked, slab) if asked.pages <= count else None
        _, older = submitted(volume, 5, *[1] * count)
        _, newer = submitted(volume, 4 + count, *[2] * 10)
        assert await older is None
        assert list(link.held.flags[5:7]) == [count - 1, 0] and not newer.done()
        await volume.flush()
        assert await found(volume, 5, count) == (page(1) + page(2))[-count * PAGE :]
        assert link.usable and lost(bench) == []
        bench.break_links()
        assert await newer is None


async def test_after_a_crash_while_moving_nothing_older_is_read_from_who_answered_first() -> None:
    async with a_bench() as bench:
        other = Bench(bench.env.run_dir)
        await other.lend()
        volume = await bench.volume()
        await placed(volume, bench.register(0))
        await write(volume, 5, 1)
        await volume.flush()
        await placed(volume, other.register(0, epoch=2))
        await copied(bench, epoch=2)
        bench.disk.gate.clear()
        await write(volume, 5, 2)
        await bench.die(volume)
        bench.disk.gate.set()
        await other.mute_lender()
        volume = await bench.volume()
        slab = volume.slab(0)
        await soon(lambda: slab.link is not None)
        assert slab.link is not None and slab.link.held.flags[5] == 1 and list(slab.unsure) == [2]
        into, answered = bytearray(PAGE), list[OSError | None]()
        volume.submit_read(5, memoryview(into), answered.append)
        await slab.link.read(5, memoryview(bytearray(PAGE)))  # what it was asked before is answered by now
        assert answered == []
        await other.wake_lender()
        await soon(lambda: answered, within_s=20.0)
        assert (answered, bytes(into)) == ([None], page(2))
        await other.close()


# ---- mapped ----------------------------------------------------------------------------------------------------------


async def test_a_sealed_page_that_is_mapped_is_opened_for_who_does_not_wait() -> None:
    async with a_bench() as bench:
        bench.mapped = bench.sealed = True
        volume = await bench.volume()
        await placed(volume, bench.register(0))
        await write(volume, 5, 1)
        await volume.flush()
        assert await found(volume, 5, 1) == page(1)
        counts = volume.counts(1)
        assert (counts.remote_read_bytes, counts.pages_refused, lost(bench)) == (PAGE, 0, [])


async def test_a_mapped_slab_that_was_taken_back_has_not_lied() -> None:
    """The news of it is on its way, and the pages of the slab read as zeros."""
    async with a_bench() as bench:
        bench.mapped = True
        volume = await bench.volume()
        await placed(volume, bench.register(0))
        await write(volume, 5, 1)
        await volume.flush()
        link, slab = volume.slabs[0].link, lent(bench)
        assert link is not None
        users, slab.users = slab.users, []  # nobody is told
        bench.store.free("h1", "data", 0, 1)
        slab.users = users
        assert await found(volume, 5, 1) == page(1)
        assert not link.usable and not link.lied and "no longer lends this slab" in link.why


class Unanswered:
    """A `PagesThere` where writes stay under way."""

    def __init__(self) -> None:
        self.writes: list[Answered] = []

    def write(self, first: int, versions: Versions, pages: memoryview, answered: Answered) -> None:
        self.writes.append(answered)

    def read(self, first: int, into: memoryview, answered: Answered) -> None:
        answered(True, array("Q", [1]))

    def close(self) -> None: ...


def test_a_page_is_free_when_nothing_about_it_is_under_way_or_waits() -> None:
    there, done = Unanswered(), list[bool]()
    slab = OneSided(there, 0, SHAPE.slab_pages, SentHere())

    def ask(first: int, count: int) -> None:
        pages = memoryview(page(1) * count)
        slab.ask(SlabAsk(WRITE, first, count, 1, (pages,), None, lambda did, _: done.append(did), there.writes.append))

    ask(5, 1)
    assert [slab.is_free(at, 1) for at in (4, 5, 6)] == [slab.may_write(at) for at in (4, 5, 6)] == [True, False, True]
    assert [slab.is_free(at, 2) for at in (3, 4, 5, 6)] == [True, False, False, True]
    ask(5, 2)
    assert not slab.is_free(9, 1) and not slab.may_write(9), "what waits is asked first"
    there.writes[0](True, NO_VERSIONS)
    assert [slab.is_free(at, 1) for at in (4, 5, 6, 7, 9)] == [True, False, False, True, True]
    there.writes[1](True, NO_VERSIONS)
    assert slab.is_free(0, SHAPE.slab_pages) and slab.may_write(5) and done == [True, True]


async def test_a_mapped_page_waits_for_what_its_lenders_process_was_asked_before() -> None:
    async with a_bench() as bench:
        bench.mapped, bench.sealed = True, False
        volume = await bench.volume(deadline_s=60.0)
        await placed(volume, bench.register(0))
        await copied(bench)
        bench.ignore_requests()
        bench.disk.gate.clear()
        _, first = submitted(volume, 5, 1)
        assert first.done(), "at once: it is mapped"
        _, second = submitted(volume, 5, 2)
        bench.disk.gate.set()
        await volume.flush()
        _, third = submitted(volume, 5, 3)
        assert lent(bench).has(5, 1) == page(1) and not second.done() and not third.done()
        bench.break_links()
        assert (await second, await third) == (None, None)
        assert await read(volume, 5, 1) == [3]
