"""Pages are sealed before they leave: what a lender sees, what it can change, and that no nonce is used twice."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.wire.checked import load, save
from plugins.memory.datapath.links import sealing
from plugins.memory.datapath.links.sealing import SALT_BYTES, PageSeal
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.control import SlabLost
from plugins.memory.datapath.wire.shape import KEY_BYTES, VolumeRecord, record_decoder
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy.settings import SEAL_BYTES
from tests.plugins.memory.ports import PAGE, SHAPE, Bench, a_bench, asks_the_lender, page, read, soon, write

SEALED = PAGE + SEAL_BYTES
KEY = bytes(range(KEY_BYTES))
SLAB = SHAPE.slab_pages


def a_seal(seed: int = 1, key: bytes = KEY) -> PageSeal:
    return PageSeal(key, PAGE, random.Random(seed).randbytes)


def opened(seal: PageSeal, first: int, versions: list[int], data: bytes) -> tuple[bytes, list[int]]:
    into = bytearray(len(versions) * PAGE)
    wrong = seal.open(first, versions, memoryview(data), memoryview(into))
    return bytes(into), wrong


@asynccontextmanager
async def sealed_volume() -> AsyncIterator[tuple[Bench, Volume]]:
    """Open a volume with slab 0 at a lender and everything on disk as well."""
    async with a_bench() as bench:
        bench.sealed = True
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        yield bench, volume


def at_lender(bench: Bench, number: int) -> memoryview:
    """A page as slab 0's lender has it."""
    return bench.store.slabs["h1", "data", 0].has(number, 1)


# ---- the seal --------------------------------------------------------------------------------------------------------


def test_what_was_sealed_is_opened_by_a_later_process_with_the_key() -> None:
    data = bytes(a_seal(1).seal(7, [3, 9], memoryview(page(5) + page(6))))
    assert len(data) == 2 * SEALED and page(5)[:64] not in data
    assert opened(a_seal(2), 7, [3, 9], data) == (page(5) + page(6), [])
    assert opened(a_seal(1, bytes(KEY_BYTES)), 7, [3, 9], data) == (bytes(2 * PAGE), [0, 1])
    zeros = bytes(a_seal(1).seal(0, [4], None))
    assert opened(a_seal(2), 0, [4], zeros) == (bytes(PAGE), [])
    assert opened(a_seal(2), 0, [4], bytes(SEALED))[1] == [0], "nothing but zeros is not what was sealed"


def test_neither_another_page_nor_another_version_is_taken_for_the_one_wanted() -> None:
    data = bytes(a_seal(1).seal(7, [3, 9], memoryview(page(5) + page(6))))
    swapped = data[SEALED:] + data[:SEALED]
    assert opened(a_seal(2), 7, [9, 3], swapped) == (bytes(2 * PAGE), [0, 1])
    assert opened(a_seal(2), 8, [3, 9], data)[1] == [0, 1]
    seal = a_seal(2)
    assert opened(seal, 7, [3, 8], data) == (page(5) + bytes(PAGE), [1]) and seal.refused == 1


@given(st.integers(0, SEALED - 1), st.integers(1, 255))
def test_any_bit_that_is_changed_is_noticed(at: int, flip: int) -> None:
    data = bytearray(a_seal(1).seal(7, [3], memoryview(page(5))))
    data[at] ^= flip
    assert opened(a_seal(2), 7, [3], bytes(data)) == (bytes(PAGE), [0])


def nonces(data: bytes) -> list[bytes]:
    """The salt and the number of each page: the key is derived from the one, the nonce from the other."""
    return [data[at + SEALED - 16 : at + SEALED] for at in range(0, len(data), SEALED)]


def test_no_nonce_is_used_twice_also_when_versions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process counts on its own, and one that counted far enough draws another salt."""
    monkeypatch.setattr(sealing, "NUMBERS_MAX", 5)
    found: list[bytes] = []
    for life in range(3):
        seal = a_seal(life)
        for _ in range(4):
            found += nonces(bytes(seal.seal(0, [1, 1, 1], memoryview(page(1) * 3))))
    assert len(found) == len(set(found)) == 36
    assert len({each[:SALT_BYTES] for each in found}) >= 3 * 12 / 5


# ---- in a volume -----------------------------------------------------------------------------------------------------


async def test_a_lender_sees_nothing_of_a_page_and_every_page_is_read_back() -> None:
    async with sealed_volume() as (bench, volume):
        await write(volume, 0, *range(1, 9))
        await volume.write(4, 1, None)
        answered = list[OSError | None]()
        volume.submit_write(5, 1, None, answered.append)
        await soon(lambda: answered)
        await volume.flush()
        assert await read(volume, 0, 4) == [1, 2, 3, 4] and volume.counts(1).remote_read_bytes == 4 * PAGE
        assert await read(volume, 0, 8) == [1, 2, 3, 4, 0, 0, 7, 8]
        for number in range(8):
            said = bytes(at_lender(bench, number))
            assert page(number + 1)[:16] not in said and said[:PAGE] != bytes(PAGE)


async def test_a_page_that_a_lender_changed_is_read_from_the_disk_and_the_lender_named() -> None:
    async with sealed_volume() as (bench, volume):
        await write(volume, 0, 1, 2, 3)
        await volume.flush()
        at_lender(bench, 1)[10] ^= 1
        assert await read(volume, 0, 3) == [1, 2, 3]
        assert volume.counts(1).pages_refused == 1
        await soon(lambda: [told for told in bench.told if isinstance(told, SlabLost)])
        told = next(told for told in bench.told if isinstance(told, SlabLost))
        assert "h2 returned a page that was not sealed for it" in told.why
        assert volume.counts(1).slabs[0].remote == 0, "that lender is not asked again"


async def test_what_nobody_awaits_is_checked_too() -> None:
    async with sealed_volume() as (bench, volume):
        await write(volume, 0, 1, 2)
        await volume.flush()
        at_lender(bench, 0)[:] = bytes(at_lender(bench, 1))  # whole, sealed here, and another page
        into, answered = bytearray(PAGE), list[OSError | None]()
        volume.submit_read(0, memoryview(into), answered.append)
        await soon(lambda: answered)
        assert (answered, bytes(into)) == ([None], page(1))


async def test_a_later_process_reads_what_an_earlier_one_sealed_and_repeats_no_nonce() -> None:
    """This holds even if the file that counts its starts was restored from a copy, so that versions are used again."""
    async with sealed_volume() as (bench, volume):
        copy = await load(bench.disk, "memory/volumes/data/volume", record_decoder)
        assert copy is not None and len(copy.key) == KEY_BYTES
        await write(volume, 0, 1, 2)
        before = nonces(bytes(at_lender(bench, 0)) + bytes(at_lender(bench, 1)))
        await bench.die(volume)
        back = VolumeRecord(copy.size_bytes, copy.page_bytes, copy.slab_bytes, copy.generation - 1, copy.key)
        await save(bench.disk, "memory/volumes/data/volume", back)
        again = await bench.volume()
        await soon(lambda: again.slabs[0].link is not None)
        assert await read(again, 0, 2) == [1, 2]
        await write(again, 2, 8, 9)
        after = nonces(bytes(at_lender(bench, 2)) + bytes(at_lender(bench, 3)))
        assert not set(before) & set(after) and len(set(after)) == 2


async def test_after_a_crash_a_page_that_a_lender_made_up_is_not_taken() -> None:
    """The lender says that it holds a newer version, of zeros or of another page's content: this host's copy counts."""
    async with sealed_volume() as (bench, volume):
        await write(volume, 0, 1, 2, 3)
        await volume.flush()
        await write(volume, 2, 4)
        await bench.die(volume)
        slab = bench.store.slabs["h1", "data", 0]
        slab.versions[0] += 1 << 50
        at_lender(bench, 0)[:] = bytes(SEALED)
        slab.versions[1] += 5
        again = await bench.volume()
        await soon(lambda: again.slabs[0].sure.is_set())
        assert await read(again, 0, 2) == [1, 2]
        assert await read(again, 2, 1) == [4], "what it did not touch is taken"
        counts = again.counts(1)
        assert (counts.pages_refused, counts.unrecovered) == (2, 1)


async def test_sealed_pages_that_may_still_be_sent_are_not_overwritten_by_the_next() -> None:
    asks_the_lender()
    async with sealed_volume() as (bench, volume):
        await soon(lambda: volume.slabs[0].link is not None)
        link, seal, size = volume.slabs[0].link, volume._links.seal, SLAB * SEALED
        assert link is not None and seal is not None
        sent, found = seal.buffers.take(size), list[tuple[bool, bool]]()

        def answered(did: bool, versions: Versions) -> None:
            found.append((did, seal.buffers.take(size).obj is sent.obj))

        seal.buffers.give(sent)  # what is sealed next lies there
        link.send_write(0, SLAB, 1, None, answered)
        await soon(lambda: len(found) == 1)
        seal.buffers.give(sent)
        bench.ignore_requests()
        link.send_write(0, SLAB, 2, None, answered)
        bench.break_links()
        await soon(lambda: len(found) == 2)
        assert found == [(True, True), (False, False)]


async def test_a_volume_of_before_goes_on_as_it_is_and_another_kind_is_refused() -> None:
    async with a_bench() as bench:
        bench.sealed = False
        volume = await bench.volume()
        await volume.open_place(bench.register(0))
        await write(volume, 0, 5)
        assert bytes(at_lender(bench, 0)) == page(5)
        await bench.die(volume)
        bench.sealed = True
        with pytest.raises(ValueError, match="not sealed"):
            await bench.volume()
