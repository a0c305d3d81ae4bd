"""Many slabs and large volumes: nothing is refused for its length, and parts that are not used cost nothing."""

import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from agent.ports.memory.pages import MemfdPages
from chaos.world.clock import SimLoopStalls
from covey.core.events import Heard, Send
from covey.core.ids import HostId
from covey.core.units import MIB, TIB
from covey.ports.probes import MemoryNow
from covey.wire import frames
from plugins.memory.datapath.doors.exports import Exports
from plugins.memory.datapath.doors.swap_door import SwapDoor
from plugins.memory.datapath.lending.slab_store import SlabStore
from plugins.memory.datapath.vold import VolumeControl
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire import control
from plugins.memory.datapath.wire.control import OpenPlace, PlaceList, RegisterSlabFrame, SlabList
from plugins.memory.datapath.wire.shape import Shape
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.place import SlabPlace
from plugins.memory.machine.lending.events import LenderTick
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.machine.loan import Batch, Lent
from plugins.memory.messages import REFS_MAX, Activity, CheckActivity, Messages, Renew, SlabRef
from plugins.memory.policy.settings import SLABS_MAX
from plugins.memory.service.open_volume import OpenVolume
from tests.plugins.memory.ports import PAGE, SECRET, Bench, a_bench, read, soon, write

ME, LENDER = HostId("h1"), HostId("h2")
HUGE = Shape("data", TIB, PAGE, 64 * MIB)
_messages: msgspec.msgpack.Decoder[Messages] = msgspec.msgpack.Decoder(Messages)


def heard(message: msgspec.Struct) -> Any:
    """The message as the other host decodes it; msgspec.ValidationError when it refuses."""
    return _messages.decode(msgspec.msgpack.encode(message))


def sent(actions: Any, kind: type) -> list[Any]:
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slabs", [1, REFS_MAX, REFS_MAX + 1, SLABS_MAX])
def test_however_many_slabs_one_lender_holds_all_are_renewed(slabs: int) -> None:
    borrower = Borrower(ME, random.Random(1), 1, 20.0, 60.0)
    places = tuple((index, SlabPlace(index + 1, LENDER, "10.0.0.2:7", SECRET)) for index in range(slabs))
    borrower.handle(b.VolumeFound("v", slabs, 64 * MIB, PAGE, places), 0.0)
    renewals = [heard(renewal) for renewal in sent(borrower.handle(b.BorrowerTick({}, ()), 1.0), Renew)]
    assert sorted(ref.index for renewal in renewals for ref in renewal.slabs) == list(range(slabs))


def test_a_lender_asks_a_borrower_of_more_slabs_than_one_message_holds_in_several() -> None:
    rng = random.Random(1)
    lender = Lender(rng, rng.randbytes, None, 1 << 40, 10.0, 60.0)
    lender.handle(LenderTick(MemoryNow(TIB, TIB // 2, 0.0), 0), 0.0)
    refs = [SlabRef("v", index, 1) for index in range(REFS_MAX + 5)]
    batch = lender._batch = Batch(7, 1, [(ME, ref.volume, ref.index) for ref in refs])
    for ref in refs:
        lender.lent[ME, ref.volume, ref.index] = Lent(ME, ref, 64 * MIB, SECRET, 1e9, "lent")
    questions = [heard(asked) for asked in sent(lender._ask_activity(batch), CheckActivity)]
    assert [len(asked.slabs) for asked in questions] == [REFS_MAX, 5]
    assert lender.handle(Heard(ME, Activity(7, ())), 0.0) == [], "the second answer is missing"
    assert lender.handle(Heard(ME, Activity(7, ())), 0.0) != []


def framed(answer: msgspec.Struct) -> Any:
    """The answer as the other end reads it; ValueError when it is too long for a frame."""
    return control.answer_decoder.decode(frames.pack(answer)[4:])


def test_a_lender_of_many_slabs_lists_all_of_them_in_frames_that_arrive() -> None:
    store = SlabStore(SLABS_MAX * PAGE, MemfdPages())
    for index in range(SLABS_MAX):
        store.register(RegisterSlabFrame(1, "h1" * 20, "v" * 60, index, 1, PAGE, PAGE, SECRET))
    found: list[Any] = []
    after, more = ("", "", 0), True
    while more:
        slabs, more = store.listed(after, control.SLABS_TOLD)
        found += framed(SlabList(1, "10.0.0.1:7", slabs, 0, 0, more)).slabs
        after = (found[-1].borrower, found[-1].volume, found[-1].index)
    assert [slab.index for slab in found] == list(range(SLABS_MAX))
    assert store.listed(("", "", 0), 0) == ((), False)


async def test_a_volume_of_many_places_lists_all_of_them_in_frames_that_arrive() -> None:
    async with a_bench() as bench:
        volume = await a_huge_volume(bench)
        for index in range(SLABS_MAX):
            volume.places._put(OpenPlace(index, index + 1, "h" * 60, "10.0.0.100:65000", SECRET))
        asked = VolumeControl(volume, Exports(bench.env, volume), SwapDoor(bench.env, volume, ""), "", SimLoopStalls())
        asked.opened.set()
        found: list[OpenPlace] = []
        more = True
        while more:
            after = (found[-1].index, found[-1].epoch) if found else (0, 0)
            answer = framed(await asked.answer(control.ListPlaces(1, *after)))
            assert isinstance(answer, PlaceList)
            found += answer.places
            more = answer.more
        assert [place.index for place in found] == list(range(SLABS_MAX))
        volume.places._places.clear()


# ---- volumes ---------------------------------------------------------------------------------------------------------


async def a_huge_volume(bench: Bench) -> Volume:
    volume = Volume(bench.env, HUGE, "memory/volumes/data", 512, 5.0, bench.told.append)
    await volume.open()
    return volume


async def test_a_volume_of_a_tebibyte_costs_what_is_used_of_it() -> None:
    async with a_bench() as bench:
        tracemalloc.start()
        try:
            volume = await a_huge_volume(bench)
            last = HUGE.pages - 1
            await write(volume, last, 7)
            await write(volume, 0, 5)
            assert await read(volume, last, 1) == [7] and await read(volume, last // 2, 1) == [0]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 * MIB, f"{peak} bytes for two pages"
        assert len(list(volume.slabs)) <= 3


async def test_opening_a_volume_reads_nothing_of_what_is_written() -> None:
    async with a_bench() as bench:
        volume = await a_huge_volume(bench)
        for slab in range(0, 40, 2):
            await write(volume, slab * HUGE.slab_pages, 7)
        await volume.flush()
        await bench.die(volume)
        read_at, asked = bench.disk.read_at, []

        async def counted(name: str, offset: int, size: int) -> bytes:
            asked.append(size)
            return await read_at(name, offset, size)

        bench.disk.read_at = counted  # type: ignore[method-assign]
        again = Volume(bench.env, HUGE, "memory/volumes/data", 512, 5.0, bench.told.append)
        await again.open()
        assert sum(asked) < 1 * MIB, "a few blocks"
        assert await read(again, 2 * HUGE.slab_pages, 2) == [7, 0]
        await soon(lambda: sum(slab.written for slab in again.slabs) == 20)


async def test_a_second_costs_the_slabs_that_changed() -> None:
    async with a_bench() as bench:
        volume = await a_huge_volume(bench)
        for slab in range(9):
            await write(volume, slab * HUGE.slab_pages, 7)
        first = volume.counts(1)
        assert [slab.index for slab in first.slabs] == list(range(9))
        assert volume.counts(2, first.life, first.upto).slabs == ()
        await write(volume, 3 * HUGE.slab_pages, 8, 9)
        await read(volume, 5 * HUGE.slab_pages, 1)
        second = volume.counts(3, first.life, first.upto)
        assert [(slab.index, slab.requests, slab.written) for slab in second.slabs] == [(3, 3, 2), (5, 2, 1)]
        assert volume.counts(4, first.life, first.upto).slabs == second.slabs, "an answer that was lost is told again"
        assert len(volume.counts(5, first.life + 1, second.upto).slabs) == 9, "another process asks from the beginning"


async def test_changes_that_do_not_fit_into_one_answer_come_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.volumes.paged_volume.SLABS_TOLD", 4)
    async with a_bench() as bench:
        volume = await a_huge_volume(bench)
        for slab in range(9):
            await write(volume, slab * HUGE.slab_pages, 7)
        known = OpenVolume(Known(), None)  # type: ignore[arg-type]
        requested: list[int] = [0] * HUGE.slabs
        for _ in range(4):
            await write(volume, 2 * HUGE.slab_pages, 8)
            new = known.take(volume.counts(1, *known.since()))
            requested = [a + b for a, b in zip(requested, new, strict=True)]
        assert requested[:9] == [1, 1, 5, 1, 1, 1, 1, 1, 1]


class Known:
    size_bytes, slab_bytes, members, slabs = HUGE.size_bytes, HUGE.slab_bytes, 1, HUGE.slabs
