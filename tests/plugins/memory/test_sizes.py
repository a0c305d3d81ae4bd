"""Many slabs and large volumes: nothing is refused for its length, and what is not used costs nothing."""

import random
import tracemalloc
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.ports.memory.pages import MemfdPages
from chaos.world.clock import SimLoopStalls
from covey.core import Heard, HostId, Send
from covey.core.units import MIB, TIB
from covey.ports import MemoryNow
from covey.wire import frames
from plugins.memory.datapath.doors.exports import Exports
from plugins.memory.datapath.doors.swap_door import SwapDoor
from plugins.memory.datapath.lending.slab_store import SlabStore
from plugins.memory.datapath.spill import old_index
from plugins.memory.datapath.spill.old_index import BLOCK_BYTES, ENTRY_BYTES, LEAF_PAGES, Marks, PageEntry
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
from tests.plugins.memory.ports import PAGE, SECRET, Bench, a_bench, page, read, soon, write

ME, LENDER = HostId("h1"), HostId("h2")
FILES = "memory/volumes/data"
HUGE = Shape("data", TIB, PAGE, 64 * MIB)
_messages: msgspec.msgpack.Decoder[Messages] = msgspec.msgpack.Decoder(Messages)


def heard(message: msgspec.Struct) -> Any:
    """As the other host decodes it; msgspec.ValidationError when it refuses."""
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
    """As it comes out at the other end; ValueError when it is too long for a frame."""
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


def test_a_process_of_before_that_tells_everything_each_time_is_understood() -> None:
    known = OpenVolume(Known(), None)  # type: ignore[arg-type]
    place = control.PlaceNow(3, 9, "open")
    for requests, new in ((5, 5), (7, 2)):
        told = control.PageCounts(1, (control.SlabCounts(1, requests, 1, 1),), 0, 0, 0, 0, 0, 0, (place,))
        assert known.take(told)[:2] == [0, new]
    assert known.places == {3: (place,)}


class Known:
    size_bytes, slab_bytes, members, slabs = HUGE.size_bytes, HUGE.slab_bytes, 1, HUGE.slabs


# ---- the index -------------------------------------------------------------------------------------------------------


async def test_a_volume_of_the_first_version_is_converted_into_a_log() -> None:
    """Its index had one mark, no lives, and no map of the leaves in use."""
    pages = 3 * LEAF_PAGES
    async with a_bench() as bench:
        mark_at = -(-2 * pages * ENTRY_BYTES // BLOCK_BYTES) * BLOCK_BYTES
        for number, batch in ((5, 1), (6, 1), (LEAF_PAGES + 5, 2)):
            data = memoryview(page(number))
            seed = (4 ^ number * 2654435761) & 0xFFFFFFFF
            entry = old_index.packed(PageEntry(4, batch, zlib.crc32(data, seed)), number, 0)
            await bench.disk.write_at(f"{FILES}/pages", number * PAGE, bytes(data))
            await bench.disk.write_at(f"{FILES}/index", number * ENTRY_BYTES, entry)
        await bench.disk.write_at(f"{FILES}/index", mark_at, old_index.pack_mark(1))
        await bench.disk.write_at(f"{FILES}/pages", (LEAF_PAGES + 5) * PAGE + 100, b"torn")
        shape = Shape("data", pages * PAGE, PAGE, 64 * MIB)
        for _ in range(2):
            volume = Volume(bench.env, shape, FILES, 512, 5.0, bench.told.append)
            await volume.open()
            assert await read(volume, 4, 4) == [0, 5, 6, 0] and await read(volume, LEAF_PAGES + 5, 1) == [0]
            assert list(volume.spill.versions(5, 2)) == [4, 4]
            assert volume.slabs[0].written == 2
            assert not [name for name in await bench.disk.names(FILES) if name.endswith(("/pages", "/index"))]
            await bench.die(volume)


async def test_a_damaged_page_of_the_first_version_is_not_converted() -> None:
    pages = LEAF_PAGES
    async with a_bench() as bench:
        mark_at = -(-2 * pages * ENTRY_BYTES // BLOCK_BYTES) * BLOCK_BYTES
        entry = old_index.packed(PageEntry(4, 1, 7), 5, 0)
        await bench.disk.write_at(f"{FILES}/pages", 5 * PAGE, page(5))
        await bench.disk.write_at(f"{FILES}/index", 5 * ENTRY_BYTES, entry)
        await bench.disk.write_at(f"{FILES}/index", mark_at, old_index.pack_mark(1))
        volume = Volume(bench.env, Shape("data", pages * PAGE, PAGE, MIB), FILES, 512, 5.0, bench.told.append)
        with pytest.raises(OSError, match=r"page 5 is damaged in .*pages; next: "):
            await volume.open()
        await volume.close()
        assert await bench.disk.names(f"{FILES}/index"), "nothing is deleted"


ENTRIES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans(), st.sampled_from([0, 1])), min_size=4, max_size=4
)


@given(first=st.integers(0, 1 << 40), one=ENTRIES, two=ENTRIES, marks=st.dictionaries(st.just(0), st.integers(0, 5)))
def test_a_leaf_is_loaded_as_each_of_its_entries_says(first: int, one: Any, two: Any, marks: dict[int, int]) -> None:
    """The arrays against one entry after another."""
    parts: list[bytes] = []
    for place, entries in enumerate((one, two)):
        packed = [bytearray(old_index.packed(PageEntry(v, n, v * 7), first + at, place)) for at, (v, n, _, _) in
                  enumerate(entries)]  # fmt: skip
        for data, (version, _, whole, _) in zip(packed, entries, strict=True):
            if not version:
                data[:] = bytes(ENTRY_BYTES)
            elif not whole:
                data[3] ^= 1
        parts.append(b"".join(packed))
    known = Marks()
    known.of = marks
    found = old_index.load(first, (parts[0], parts[1]), known)
    expected: list[tuple[int, int, int]] = []
    doubtful: list[int] = []
    for at in range(4):
        both = [old_index.parsed(part[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES], first + at, place)
                for place, part in enumerate(parts)]  # fmt: skip
        place = int((both[1].version, both[1].batch) > (both[0].version, both[0].batch))
        newest = both[place]
        expected.append((newest.version, newest.checksum, place if newest.version else 1))
        if newest.version and newest.batch > marks.get(0, 0):
            doubtful.append(at)
    if found is None:
        assert not any(version for version, _, _ in expected)
        return
    assert list(zip(found.leaf.version, found.leaf.checksum, found.leaf.place, strict=True)) == expected
    assert found.unmarked == doubtful


@given(rows=st.lists(st.binary(min_size=28, max_size=28), min_size=1, max_size=5))
def test_the_checksum_of_many_entries_is_that_of_each(rows: list[bytes]) -> None:
    matrix = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 28)
    assert old_index._crc32_of_rows(matrix).tolist() == [zlib.crc32(row) for row in rows]


@given(st.binary(max_size=BLOCK_BYTES), st.integers(0, BLOCK_BYTES - 1), st.integers(0, 255))
@settings(max_examples=200)
def test_blocks_of_marks_that_are_none_change_nothing(junk: bytes, at: int, value: int) -> None:
    marks = Marks()
    marks.life, marks.of = 5, {4: 4 << 40 | 9, 2: 2 << 40}
    block = bytearray(marks.packed())
    again = Marks()
    again.take(bytes(block))
    assert (again.life, again.of) == (5, marks.of)
    if block[at] != value and at < 20 + 32 + 4:
        block[at] = value
        other = Marks()
        other.take(bytes(block))
        assert (other.life, other.of) == (0, {})
    other = Marks()
    other.take(junk.ljust(BLOCK_BYTES, b"\0"))
    assert other.life == 0
