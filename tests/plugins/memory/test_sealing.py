"""Pages are sealed before they leave: what a lender sees, what it can change, and that no nonce is used twice."""

import os
import random
import shutil
import subprocess
import sysconfig
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.wire.checked import load, save
from plugins.memory.datapath.links import sealing
from plugins.memory.datapath.links.sealing import SALT_BYTES, PageCipher, PageSeal, PythonCipher
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.control import SlabLost
from plugins.memory.datapath.wire.shape import KEY_BYTES, VolumeRecord, record_decoder
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.policy.settings import SEAL_BYTES
from tests.plugins.memory.ports import PAGE, SHAPE, Bench, a_bench, asks_the_lender, page, read, soon, write

SEALED = PAGE + SEAL_BYTES
KEY = bytes(range(KEY_BYTES))
SLAB = SHAPE.slab_pages


Cipher = Callable[[bytes, bytes], PageCipher]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Cipher:
    """`page_cipher.c`, compiled for this Python."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no C compiler, or no headers of this Python")
    file = tmp_path_factory.mktemp("cipher") / f"page_cipher{EXTENSION_SUFFIXES[0]}"
    source = Path(sealing.__file__).with_name("page_cipher.c")
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}")
    subprocess.run([compiler, *flags, str(source), "-o", str(file), "-ldl"], check=True)
    spec = spec_from_file_location("page_cipher", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast(Cipher, module.PageCipher)


@pytest.fixture(params=["python", "compiled"])
def cipher(request: pytest.FixtureRequest) -> Cipher:
    return PythonCipher if request.param == "python" else cast(Cipher, request.getfixturevalue("compiled"))


def a_seal(seed: int = 1, key: bytes = KEY, cipher: Cipher = PythonCipher) -> PageSeal:
    return PageSeal(key, PAGE, random.Random(seed).randbytes, cipher)


def versions_of(*versions: int) -> Versions:
    return Versions("Q", versions)


def opened(seal: PageSeal, first: int, versions: list[int], data: bytes) -> tuple[bytes, list[int]]:
    into = bytearray(b"?" * (len(versions) * PAGE))
    wrong = seal.open(first, versions_of(*versions), memoryview(data), memoryview(into))
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


def test_what_was_sealed_is_opened_by_a_later_process_with_the_key(cipher: Cipher) -> None:
    later = a_seal(2, cipher=cipher)
    data = bytes(a_seal(1, cipher=cipher).seal(7, versions_of(3, 9), memoryview(page(5) + page(6))))
    assert len(data) == 2 * SEALED and page(5)[:64] not in data
    assert opened(later, 7, [3, 9], data) == (page(5) + page(6), [])
    assert opened(a_seal(1, bytes(KEY_BYTES), cipher), 7, [3, 9], data) == (bytes(2 * PAGE), [0, 1])
    zeros = bytes(a_seal(1, cipher=cipher).seal(0, versions_of(4), None))
    assert opened(later, 0, [4], zeros) == (bytes(PAGE), [])
    assert opened(later, 0, [4], bytes(SEALED))[1] == [0], "nothing but zeros is not what was sealed"


def test_neither_another_page_nor_another_version_is_taken_for_the_one_wanted(cipher: Cipher) -> None:
    data = bytes(a_seal(1).seal(7, versions_of(3, 9), memoryview(page(5) + page(6))))
    swapped = data[SEALED:] + data[:SEALED]
    assert opened(a_seal(2, cipher=cipher), 7, [9, 3], swapped) == (bytes(2 * PAGE), [0, 1])
    assert opened(a_seal(2, cipher=cipher), 8, [3, 9], data)[1] == [0, 1]
    seal = a_seal(2, cipher=cipher)
    assert opened(seal, 7, [3, 8], data) == (page(5) + bytes(PAGE), [1]) and seal.refused == 1


def test_any_bit_that_is_changed_is_noticed(cipher: Cipher) -> None:
    seal = a_seal(2, cipher=cipher)

    @given(st.integers(0, SEALED - 1), st.integers(1, 255))
    def noticed(at: int, flip: int) -> None:
        data = bytearray(a_seal(1).seal(7, versions_of(3), memoryview(page(5))))
        data[at] ^= flip
        assert opened(seal, 7, [3], bytes(data)) == (bytes(PAGE), [0])

    noticed()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, (1 << 64) - 1)), min_size=1, max_size=12))
def test_pages_of_several_processes_in_one_run_are_opened_alone_and_together(
    compiled: Cipher, sealed: list[tuple[int, int]]
) -> None:
    """A page is read by itself, or in another run than the one that wrote it; both ciphers write the same."""
    ciphers = (PythonCipher, compiled)
    for writes in ciphers:
        seals = {life: a_seal(life, cipher=writes) for life in range(1, 5)}
        data = b"".join(
            bytes(seals[life].seal(at, versions_of(version), memoryview(page(at + 1))))
            for at, (life, version) in enumerate(sealed)
        )
        pages = b"".join(page(at + 1) for at in range(len(sealed)))
        for reads in ciphers:
            seal = a_seal(9, cipher=reads)
            assert opened(seal, 0, [version for _, version in sealed], data) == (pages, [])
            for at, (_, version) in enumerate(sealed):
                alone = data[at * SEALED : at * SEALED + SEALED]
                assert opened(seal, at, [version], alone) == (page(at + 1), [])


def test_both_ciphers_seal_a_request_into_the_same_bytes(compiled: Cipher) -> None:
    versions, pages = versions_of(3, 9, (1 << 64) - 1), memoryview(page(5) + page(6) + page(7))
    for given_pages in (pages, None):
        found = [bytes(a_seal(1, cipher=each).seal(7, versions, given_pages)) for each in (PythonCipher, compiled)]
        assert found[0] == found[1]


def test_the_compiled_cipher_refuses_sizes_that_do_not_agree(compiled: Cipher) -> None:
    made = compiled(bytes(32), bytes(SALT_BYTES))
    zeros, room = bytes(PAGE), memoryview(bytearray(2 * SEALED))
    with pytest.raises(ValueError, match="2 versions for"):
        made.seal(0, 0, versions_of(1, 2), memoryview(bytes(PAGE)), zeros, room)
    with pytest.raises(ValueError, match="1 versions for"):
        made.seal(0, 0, versions_of(1), None, zeros, room)
    with pytest.raises(OverflowError):
        made.seal((1 << 32) - 1, 0, versions_of(1, 2), None, zeros, room)
    with pytest.raises(ValueError, match="2 versions for"):
        made.open(0, 0, versions_of(1, 2), room, memoryview(bytearray(PAGE)), [])
    with pytest.raises(ValueError, match="a key of 32 bytes"):
        compiled(bytes(16), bytes(SALT_BYTES))


def nonces(data: bytes) -> list[bytes]:
    """The salt and the number of each page: the key is derived from the one, the nonce from the other."""
    return [data[at + SEALED - 16 : at + SEALED] for at in range(0, len(data), SEALED)]


def test_no_nonce_is_used_twice_also_when_versions_are(monkeypatch: pytest.MonkeyPatch, cipher: Cipher) -> None:
    """Each process counts on its own, and one that counted far enough draws another salt."""
    monkeypatch.setattr(sealing, "NUMBERS_MAX", 5)
    found: list[bytes] = []
    for life in range(3):
        seal = a_seal(life, cipher=cipher)
        for _ in range(4):
            found += nonces(bytes(seal.seal(0, versions_of(1, 1, 1), memoryview(page(1) * 3))))
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
