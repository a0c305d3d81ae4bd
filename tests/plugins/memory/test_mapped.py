"""Slabs of a lender on the same host, mapped: how that comes about, when it does not, and what is true of a page at
each moment. `COVEY_TEST_MAPPED=1` runs all tests of a bench this way."""

import errno
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.ports.memory.pages import MemfdPages
from agent.ports.network.stream import is_same_host
from covey.ports.pages import SharedRing
from covey.ports.verbs import VerbsFound
from covey.wire.headers import WireError
from plugins.memory.datapath.lending.slab_store import HostedSlab, SlabStore
from plugins.memory.datapath.links.mapped_slab import MappedSlab
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.control import PageCounts, RdmaLent, RegisterSlabFrame, SlabCopiedFrame
from plugins.memory.datapath.wire.slab_memory import SlabPages
from plugins.memory.datapath.wire.slabwire import Versions
from plugins.memory.service import one_sided
from tests.plugins.memory.ports import (
    PAGE,
    SECRET,
    SHAPE,
    Bench,
    a_bench,
    borrowers_links,
    page,
    placed,
    read,
    replaces_a_method,
    soon,
    write,
)

ROOT = Path(__file__).resolve().parents[3]


@asynccontextmanager
async def a_mapped_bench(sealed: bool = False) -> AsyncIterator[tuple[Bench, Volume]]:
    async with a_bench() as bench:
        bench.mapped, bench.sealed = True, sealed
        yield bench, await bench.volume()


def test_all_that_is_true_of_a_volume_is_true_where_its_slabs_are_mapped() -> None:
    """The tests of `test_volume.py` are run once more with mapped slabs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/plugins/memory/test_volume.py"),
        env=environment | {"COVEY_TEST_MAPPED": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stdout[-4000:]


async def test_a_mapped_page_that_is_older_than_it_was_is_not_believed() -> None:
    async with a_mapped_bench() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 5, 1)
        await write(volume, 5, 2)
        await volume.flush()
        into, answered = bytearray(PAGE), list[OSError | None]()
        volume.submit_read(5, memoryview(into), answered.append)
        assert answered == [None] and into == page(2), "at once: it is mapped"
        lent(bench).versions[5] -= 1
        volume.submit_read(5, memoryview(into), answered.append)
        await soon(lambda: answered == [None, None])
        assert into == page(2) and "older content" in bench.told[-1].why  # type: ignore[union-attr]


def lent(bench: Bench, index: int = 0) -> HostedSlab:
    return bench.store.slabs["h1", "data", index]


async def filled(bench: Bench) -> None:
    """Wait until the slab has all that the volume had before it was mapped."""
    await soon(lambda: any(isinstance(told, SlabCopiedFrame) for told in bench.told))


@pytest.mark.parametrize("sealed", [False, True])
async def test_pages_are_written_and_read_where_they_lie(sealed: bool) -> None:
    async with a_mapped_bench(sealed) as (bench, volume):
        await placed(volume, bench.register(0))
        await filled(bench)
        replaces_a_method()
        found = bench.asked()
        await write(volume, 3, 7)
        await write(volume, 4, *range(1, 9))
        assert await read(volume, 3, 9) == [7, *range(1, 9)]
        assert found == []
        assert (lent(bench).memory[3 * PAGE : 4 * PAGE].tobytes() == page(7)) is not sealed
        counts = volume.counts(1)
        assert (counts.mapped_slabs, counts.rdma_slabs, counts.map_why) == (1, 0, "")


async def test_a_slab_counts_as_touched_whole_and_once_when_it_is_mapped() -> None:
    async with a_mapped_bench() as (bench, volume):
        await placed(volume, bench.register(0))
        await write(volume, 3, 7)
        assert bench.store.touched_bytes == SHAPE.slab_bytes
        bench.store.free("h1", "data", 0, 1)
        assert bench.store.touched_bytes == 0


async def test_a_slab_taken_back_neither_has_nor_takes_pages_before_that_is_known() -> None:
    """The news of it is on its way: pages come from the disk, and the lender has its memory."""
    async with a_mapped_bench() as (bench, volume):
        await placed(volume, bench.register(0))
        await filled(bench)
        await write(volume, 3, 7)
        await volume.flush()
        link, slab = volume.slabs[0].link, lent(bench)
        assert link is not None
        mapped = cast(Any, link)._one_sided._there._kept
        users, slab.users = slab.users, []  # nobody is told
        bench.store.free("h1", "data", 0, 1)
        slab.users = users
        assert not mapped.live_word()[0] and not any(mapped.versions), "the kernel has it"
        assert link.usable
        assert await read(volume, 3, 1) == [7]
        await write(volume, 3, 8)
        assert await read(volume, 3, 1) == [8]
        assert not link.usable and volume.counts(1).mapped_slabs == 0


def mappings(slab: HostedSlab) -> int:
    """The number of times this process, which is lender and borrower here, maps its memory."""
    inode = slab.kept.shared.name.rpartition(":")[2]
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


async def test_a_slab_that_is_left_is_unmapped_though_somebody_still_knows_its_link() -> None:
    async with a_mapped_bench() as (bench, volume):
        await placed(volume, bench.register(0))
        link, slab = volume.slabs[0].link, lent(bench)
        assert link is not None and mappings(slab) == 2
        await volume.close_place(0, 1)
        assert link.mapped is not None and mappings(slab) == 1


async def test_a_mapping_that_never_came_to_be_used_is_given_up() -> None:
    """The link ends while requests from before are still under way over the socket."""
    async with a_bench() as bench:
        links = borrowers_links(bench.env, always=False)
        links.may_map = True
        slab = await links.open(bench.register(0))
        slab._over_lanes += 1  # something is under way
        await soon(lambda: slab.mapped is not None)
        assert slab.mapped is not None and not slab.one_sided
        slab.fail("it ends")
        found: list[bool] = []
        slab.mapped.read(0, memoryview(bytearray(PAGE)), lambda did, versions: found.append(did))
        assert found == [False], "it is closed"


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOENT, errno.ENOMEM])
async def test_memory_that_cannot_be_mapped_is_asked_for(error: int) -> None:
    """The cases are another user's process, another namespace of processes, and no room for the mapping."""

    class Refusing(MemfdPages):
        def open_ring(self, name: str, size: int, sparse: bool = False) -> Any:
            if sparse:
                raise OSError(error, "refused")
            return super().open_ring(name, size, sparse)

    async with a_bench() as bench:
        bench.env = replace(bench.env, pages=Refusing())
        bench.mapped = True
        volume = await bench.volume()
        await placed(volume, bench.register(0))
        await write(volume, 3, 7)
        assert await read(volume, 3, 1) == [7]
        counts = volume.counts(1)
        assert counts.mapped_slabs == 0 and "refused" in counts.map_why


@pytest.mark.parametrize(("other", "why"), [(True, "is another slab"), (False, "is no slab")])
async def test_memory_that_is_not_that_slabs_is_not_used(other: bool, why: str) -> None:
    async with a_bench() as bench:
        stranger: SharedRing
        bench.register(1)
        if other:
            stranger = lent(bench, 1).kept.shared
        else:
            stranger = bench.env.pages.make_ring(lent(bench, 1).kept.size, sparse=True)

        class Mistaken(MemfdPages):
            def open_ring(self, name: str, size: int, sparse: bool = False) -> Any:
                return super().open_ring(stranger.name if sparse else name, size, sparse)

        bench.env = replace(bench.env, pages=Mistaken())
        bench.mapped = True
        volume = await bench.volume()
        await placed(volume, bench.register(0))
        await write(volume, 3, 7)
        assert await read(volume, 3, 1) == [7]
        assert volume.counts(1).map_why.endswith(why)
        assert not any(lent(bench, 1).versions)


def a_mapping() -> tuple[SlabPages, HostedSlab, list[str]]:
    """One slab, as its borrower has it, and as its lender has it."""
    store = SlabStore(1 << 30, MemfdPages())
    store.register(RegisterSlabFrame(1, "h1", "data", 0, 1, SHAPE.slab_bytes, PAGE, SECRET))
    slab = store.slabs["h1", "data", 0]
    kept = SlabPages.take_up(MemfdPages().open_ring(slab.kept.shared.name, slab.kept.size, sparse=True))
    assert kept is not None
    return kept, slab, []


class Torn(Exception):
    """The end of a process that is killed here."""


@pytest.mark.parametrize("count", [1, 3])
def test_a_page_that_is_cut_off_in_the_middle_has_no_version(count: int) -> None:
    replaces_a_method()
    kept, slab, said = a_mapping()
    mapped = MappedSlab(kept, lambda: said.append("gone"))
    mapped.write(0, array("Q", [5] * count), memoryview(page(1) * count), lambda did, versions: None)

    class Half:
        """A memory that takes pages up to the middle."""

        def __setitem__(self, where: slice, pages: Any) -> None:
            kept.pages[where.start : where.stop - PAGE // 2] = pages[: len(pages) - PAGE // 2]
            raise Torn

    cast(Any, mapped)._memory = Half()
    with pytest.raises(Torn):
        mapped.write(0, array("Q", [6] * count), memoryview(page(2) * count), lambda did, versions: None)
    assert list(slab.versions[:count]) == [0] * count, "nobody is told of a page that is half there"


def test_what_is_freed_while_it_is_read_or_written_is_not_answered_as_done() -> None:
    replaces_a_method()
    for asks in ("write", "read"):
        kept, slab, said = a_mapping()
        mapped = MappedSlab(kept, partial(said.append, "gone"))
        found: list[bool] = []

        def answered(did: bool, versions: Versions, found: list[bool] = found) -> None:
            found.append(did)

        class Frees:
            """A memory whose lender takes the slab back in the middle of a request."""

            def __init__(self, memory: memoryview, slab: HostedSlab) -> None:
                self.memory, self.slab = memory, slab

            def __getitem__(self, where: slice) -> Any:
                pages = self.memory[where]
                self.slab.kept.free(mapped=True)
                return pages

            def __setitem__(self, where: slice, pages: Any) -> None:
                self.slab.kept.free(mapped=True)
                self.memory[where] = pages

        cast(Any, mapped)._memory = Frees(kept.pages, slab)
        if asks == "write":
            mapped.write(0, array("Q", [5]), memoryview(page(1)), answered)
        else:
            mapped.read(0, memoryview(bytearray(PAGE)), answered)
        assert (found, said) == ([False], ["gone"])


def test_a_closed_mapping_answers_no() -> None:
    kept, _, said = a_mapping()
    mapped, found = MappedSlab(kept, lambda: said.append("gone")), list[bool]()
    mapped.close()
    mapped.close()
    mapped.write(0, array("Q", [5]), memoryview(page(1)), lambda did, versions: found.append(did))
    mapped.read(0, memoryview(bytearray(PAGE)), lambda did, versions: found.append(did))
    assert (found, said) == ([False, False], [])


def test_one_page_of_a_mapping_is_read_as_long_as_its_slab_counts() -> None:
    kept, slab, said = a_mapping()
    mapped, into = MappedSlab(kept, lambda: said.append("gone")), memoryview(bytearray(PAGE))
    assert mapped.write_one(3, 7, memoryview(page(1)))
    assert (mapped.read_one(3, into), bytes(into), said) == (7, page(1), [])
    slab.kept.free(mapped=True)
    assert (mapped.read_one(3, into), said) == (-1, ["gone"])
    mapped.close()
    assert (mapped.read_one(3, into), said) == (-1, ["gone"])


def test_what_is_said_of_lent_memory_comes_back() -> None:
    assert slabwire.lent_memory(slabwire.pack_lent_memory("12:7:345")) == ("12:7:345", "")
    assert slabwire.lent_memory(slabwire.pack_lent_memory("", "freed meanwhile")) == ("", "freed meanwhile")
    assert slabwire.lent_memory(bytes(slabwire.LENT_MEMORY_BYTES)) == ("", "it does not say why")


@given(st.binary(max_size=300) | st.binary(min_size=slabwire.LENT_MEMORY_BYTES, max_size=slabwire.LENT_MEMORY_BYTES))
def test_any_bytes_are_lent_memory_or_a_wire_error(data: bytes) -> None:
    try:
        name, why = slabwire.lent_memory(data)
    except WireError:
        return
    assert bool(name) != bool(why) and (name + why).isprintable()
    with pytest.raises(OSError):
        MemfdPages().open_ring(name, 1 << 20, sparse=True)


def test_the_memory_of_a_ring_that_is_emptied_is_gone_for_all_who_map_it() -> None:
    ring = MemfdPages().make_ring(1 << 20, sparse=True)
    other = MemfdPages().open_ring(ring.name, 1 << 20, sparse=True)
    ring.view[:] = b"x" * (1 << 20)
    assert other.view[4096] == ord("x")
    ring.empty()
    assert other.view.tobytes() == bytes(1 << 20)
    other.view[7] = 3
    assert ring.view[7] == 3, "they are still one"
    ring.close()
    other.close()


class AConnection:
    def __init__(self, near: str, far: str) -> None:
        self.near, self.far = near, far

    def getsockname(self) -> tuple[str, int]:
        return self.near, 1

    def getpeername(self) -> tuple[str, int]:
        if not self.far:
            raise OSError(errno.ENOTCONN, "gone")
        return self.far, 2


@pytest.mark.parametrize(
    ("near", "far", "same"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.9", True),
        ("::1", "::1", True),
        ("10.0.0.4", "10.0.0.4", True),
        ("10.0.0.4", "10.0.0.5", False),
        ("127.0.0.1", "10.0.0.5", False),
        ("127.0.0.1", "", False),
    ],
)
def test_both_ends_are_of_one_host_when_their_addresses_say_so(near: str, far: str, same: bool) -> None:
    assert is_same_host(AConnection(near, far)) is same


def test_two_sockets_of_this_host_say_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert is_same_host(client)


def test_the_line_of_agentctl_status_says_what_is_mapped() -> None:
    none = VerbsFound("", "this host has no RDMA device")
    counts = PageCounts(1, (), 0, 0, 0, 0, 0, 0, (), 0, 0, mapped_slabs=3, map_why="h2: it is another's")
    said = "3 slabs of this host are mapped; not mapped: h2: it is another's"
    assert one_sided.told(none, [counts], RdmaLent()) == f"over TCP; no RDMA: this host has no RDMA device; {said}"
    assert one_sided.told_without_rdma([counts]) == f"over TCP; RDMA is switched off ([memory] rdma); {said}"
