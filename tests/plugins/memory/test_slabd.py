"""The slab process: what it keeps, what it refuses, and what a borrower that dies in the middle of a write leaves."""

import asyncio
from array import array
from typing import Any, cast

import pytest

from agent.ports.memory.pages import MemfdPages
from covey.ports.streams import ByteStream
from covey.wire import handshake, headers
from covey.wire.handshake import CHALLENGE_BYTES, Challenge
from covey.wire.headers import Status
from plugins.memory.datapath.lending.slab_store import HostedSlab, SlabStore
from plugins.memory.datapath.links.lender_link import LenderLinks
from plugins.memory.datapath.links.remote_slab import RemoteSlab, SlabGone, SlabStale
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.control import OpenPlace, RegisterSlabFrame
from plugins.memory.datapath.wire.slabwire import SlabHello, SlabOp, SlabRequest, SlabStatus
from tests.plugins.memory.ports import PAGE, RDMA, SECRET, Bench, a_bench, asks_the_lender, borrowers_links, page, soon

SIZE = 16 * PAGE


def asked(epoch: int = 1, size: int = SIZE, page_bytes: int = PAGE, secret: bytes = SECRET) -> RegisterSlabFrame:
    return RegisterSlabFrame(1, "h1", "data", 0, epoch, size, page_bytes, secret)


def hosted(store: SlabStore) -> HostedSlab:
    return store.slabs["h1", "data", 0]


def versions(*numbers: int) -> "array[int]":
    return array("Q", numbers)


def a_volumes_links(bench: Bench) -> LenderLinks:
    return borrowers_links(bench.env)


async def link(bench: Bench, place: OpenPlace) -> RemoteSlab:
    """Open a link to the place as another process of the volume would."""
    return await a_volumes_links(bench).open(place)


def asks(op: SlabOp, page: int, pages: int, size: int = 0, version: int = 0, epoch: int = 1) -> bytes:
    """The bytes of a request about slab 0."""
    return slabwire.pack_request(SlabRequest(op, pages, 0, page, size, epoch, 1, version))


async def hears(stream: ByteStream) -> slabwire.SlabReply:
    data = bytearray(slabwire.REPLY_BYTES)
    await stream.read_into(memoryview(data))
    return slabwire.reply(data)


async def knocked(bench: Bench, place: OpenPlace, nonce: bytes = b"n" * 16) -> tuple[ByteStream, bytes, Challenge]:
    """Open a raw connection that has said hello and was challenged; return it and the challenge."""
    stream = await bench.env.bytes.connect(bench.address)
    hello = slabwire.pack_hello(SlabHello("h1", "data", place.index, place.epoch, b"session of tests", nonce))
    await stream.write(hello)
    data = bytearray(CHALLENGE_BYTES)
    await stream.read_into(memoryview(data))
    return stream, hello, handshake.parse_challenge(data)


async def welcome(stream: ByteStream, proof: bytes) -> Status:
    await stream.write(proof)
    data = bytearray(headers.WELCOME_BYTES)
    await stream.read_into(memoryview(data))
    return headers.welcome(data).status


async def greeted(bench: Bench, place: OpenPlace) -> ByteStream:
    """Open a raw connection that has proven whose it is."""
    stream, hello, challenge = await knocked(bench, place)
    assert await welcome(stream, handshake.proof_of_client(place.secret, hello, challenge.nonce)) is Status.OK
    return stream


# ---- keeping ---------------------------------------------------------------------------------------------------------


def test_a_slab_is_zeroed_before_another_mapping_gets_it() -> None:
    store = SlabStore(SIZE, MemfdPages())
    store.register(asked(epoch=1))
    hosted(store).put(0, versions(*[3] * 16), memoryview(page(77) * 16))
    store.register(asked(epoch=2))
    assert hosted(store).has(0, 16) == bytes(SIZE)
    assert list(hosted(store).versions).count(0) == 16


@pytest.mark.parametrize(
    "wrong",
    [asked(size=0), asked(size=PAGE + 1), asked(page_bytes=0), asked(page_bytes=1 << 20), asked(size=SIZE + PAGE)],
)
def test_sizes_are_checked_before_anything_is_allocated(wrong: RegisterSlabFrame) -> None:
    store = SlabStore(SIZE, MemfdPages())
    with pytest.raises(ValueError, match=r"whole number|is the limit"):
        store.register(wrong)
    assert store.held_bytes == 0


# ---- connections -----------------------------------------------------------------------------------------------------


async def test_a_stale_epoch_a_wrong_secret_and_an_unknown_slab_get_the_same_no() -> None:
    async with a_bench() as bench:
        place = bench.register(0, epoch=7)
        for wrong in (
            OpenPlace(0, 6, "h2", bench.address, SECRET),
            OpenPlace(0, 8, "h2", bench.address, SECRET),
            OpenPlace(0, 7, "h2", bench.address, b"x" * 16),
            OpenPlace(1, 7, "h2", bench.address, SECRET),
        ):
            with pytest.raises(SlabStale):
                await link(bench, wrong)
        assert bench.store.refused == 4
        assert (await link(bench, place)).usable


async def test_nothing_that_was_heard_on_the_wire_opens_another_connection() -> None:
    async with a_bench() as bench:
        place = bench.register(0)
        stream, hello, challenge = await knocked(bench, place)
        proof = handshake.proof_of_client(SECRET, hello, challenge.nonce)
        assert SECRET not in hello + challenge.nonce + challenge.proof + proof
        assert challenge.proof == handshake.proof_of_server(SECRET, hello, challenge.nonce), (
            "and the lender proves itself"
        )
        assert await welcome(stream, proof) is Status.OK
        for said in (proof, challenge.proof):
            again, _, other = await knocked(bench, place)
            assert other.nonce != challenge.nonce
            assert await welcome(again, said) is Status.REFUSED
        assert len(hosted(bench.store).users) == 1, "and the owner is not cut off"
        await stream.write(asks(SlabOp.READ, 0, 1))
        assert (await hears(stream)).status is SlabStatus.OK


async def test_a_volume_says_hello_without_the_secret_of_the_slab() -> None:
    async with a_bench() as bench:
        place = bench.register(0)
        await bench.cut_lender()
        heard = bytearray(slabwire.HELLO_BYTES)

        async def listens(stream: ByteStream) -> None:
            await stream.read_into(memoryview(heard))

        listener = await bench.env.bytes.listen(bench.address, listens)
        with pytest.raises(SlabGone):
            await link(bench, place)
        assert slabwire.hello(heard).volume == "data"
        assert SECRET not in heard
        await listener.close()


async def test_a_borrower_does_not_use_a_lender_that_cannot_prove_itself() -> None:
    async with a_bench() as bench:
        place = bench.register(0)
        await bench.cut_lender()

        async def impostor(stream: ByteStream) -> None:
            await stream.read_into(memoryview(bytearray(slabwire.HELLO_BYTES)))
            await stream.write(bytes(CHALLENGE_BYTES))
            await stream.read_into(memoryview(bytearray(handshake.PROOF_BYTES)))
            await stream.write(headers.pack_welcome(headers.Welcome(Status.OK, PAGE, SIZE)))

        listener = await bench.env.bytes.listen(bench.address, impostor)
        with pytest.raises(SlabGone, match="does not know the secret"):
            await link(bench, place)
        await listener.close()


async def test_a_volume_of_another_version_is_refused_in_words() -> None:
    async with a_bench() as bench:
        stream = await bench.env.bytes.connect(bench.address)
        hello = slabwire.pack_hello(SlabHello("h1", "data", 0, 1, SECRET, SECRET))
        await stream.write(b"coveysl2" + hello[8:])
        data = bytearray(headers.WELCOME_BYTES)
        await stream.read_into(memoryview(data))
        assert headers.welcome(data).status is Status.VERSION
        assert bench.store.refused == 1


async def test_silent_connections_are_few_cost_little_and_keep_nobody_out() -> None:
    async with a_bench() as bench:
        place = bench.register(0)
        owner = await link(bench, place)
        silent = [await bench.env.bytes.connect(bench.address) for _ in range(3 * handshake.PER_ADDRESS_MAX)]
        await soon(lambda: bench.store.refused >= 2 * handshake.PER_ADDRESS_MAX)
        assert len(bench.server.strangers) == handshake.PER_ADDRESS_MAX
        await owner.write(0, versions(1), memoryview(page(1)))
        bench.register(1)
        other = await link(bench, OpenPlace(1, 1, "h2", bench.address, SECRET))
        await other.write(0, versions(1), memoryview(page(1)))
        for stream in silent:
            stream.close()


async def test_a_connection_that_does_not_prove_itself_in_time_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.lending.slabd.HANDSHAKE_S", 0.05)
    async with a_bench() as bench:
        stream, _, _ = await knocked(bench, bench.register(0))
        with pytest.raises(ConnectionError):
            await stream.read_into(memoryview(bytearray(1)))
        assert len(bench.server.strangers) == 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        asks(SlabOp.READ, 15, 2),
        asks(SlabOp.WRITE, 0, 0),
        asks(SlabOp.WRITE, 0, 2, PAGE),
        asks(SlabOp.READ, 1 << 31, 1 << 31),
        asks(SlabOp.COPY, 0, 1, PAGE),
        asks(SlabOp.ATTACH, 0, 0, 31),
        asks(SlabOp.WRITE, 0, 1, 1 << 31, epoch=9),
        b"\xff" * slabwire.REQUEST_BYTES,
    ],
)
async def test_a_request_out_of_range_ends_that_connection_and_no_other(request_bytes: bytes) -> None:
    async with a_bench() as bench:
        bench.register(1)
        other = await link(bench, OpenPlace(1, 1, "h2", bench.address, SECRET))
        stream = await greeted(bench, bench.register(0))
        await stream.write(request_bytes)
        assert (await hears(stream)).status is SlabStatus.BAD
        with pytest.raises(ConnectionError):
            await stream.read_into(memoryview(bytearray(1)))
        await other.write(0, versions(1), memoryview(page(1)))
        assert bench.store.refused == 1


# ---- many slabs over two connections ---------------------------------------------------------------------------------


async def test_all_slabs_of_a_volume_at_a_lender_share_two_connections() -> None:
    async with a_bench() as bench:
        links = a_volumes_links(bench)
        remotes = await asyncio.gather(*(links.open(bench.register(index)) for index in range(40)))
        users = {id(user) for slab in bench.store.slabs.values() for user in slab.users}
        assert len(users) == 2 + RDMA, "and one that the queue pair depends on"
        for index, remote in enumerate(remotes):
            await remote.write(0, versions(1), memoryview(page(index)))
        words = [bytes(bench.store.slabs["h1", "data", index].has(0, 1)) for index in range(40)]
        assert words == [page(index) for index in range(40)]


async def test_a_slab_that_is_taken_back_is_no_other_slabs_trouble() -> None:
    async with a_bench() as bench:
        links = a_volumes_links(bench)
        one, other = [await links.open(bench.register(index)) for index in (0, 1)]
        told: list[str] = []
        one.ended = lambda slab: told.append(slab.why)
        bench.store.free("h1", "data", 0, 1)
        await soon(lambda: told == ["h2 no longer lends this slab under epoch 1"])
        await other.write(0, versions(1), memoryview(page(1)))
        with pytest.raises(SlabStale):
            await links.open(OpenPlace(0, 1, "h2", bench.address, SECRET))
        assert other.usable


async def test_a_further_slab_needs_its_own_secret() -> None:
    async with a_bench() as bench:
        links = a_volumes_links(bench)
        await links.open(bench.register(0))
        bench.register(1, secret=b"another secret..")
        for place in (OpenPlace(1, 1, "h2", bench.address, SECRET), OpenPlace(2, 1, "h2", bench.address, SECRET)):
            with pytest.raises(SlabStale):
                await links.open(place)
        assert bench.store.slabs["h1", "data", 1].users == []
        assert (await links.open(OpenPlace(1, 1, "h2", bench.address, b"another secret.."))).usable


async def test_what_an_earlier_process_left_under_way_cannot_land_any_more() -> None:
    """The lender was asked which pages it holds: a write from before that comes later would be there without anybody
    knowing."""
    async with a_bench() as bench:
        place = bench.register(0)
        old = await greeted(bench, place)
        await old.write(asks(SlabOp.WRITE, 0, 1, PAGE, version=5), page(5)[: PAGE // 2])
        await asyncio.sleep(0.02)
        new = await link(bench, place)
        assert list(await new.versions()) == [0] * 16
        await old.write(page(5)[PAGE // 2 :], asks(SlabOp.WRITE, 1, 1, PAGE, version=6), page(6))
        replies = [await hears(old) for _ in range(3)]
        assert [reply.status for reply in replies] == [SlabStatus.GONE] * 3
        assert [reply.tag for reply in replies] == [0, 1, 1], "told at once, and for each request"
        assert list(await new.versions()) == [0] * 16 and hosted(bench.store).has(0, 1) == bytes(PAGE)


async def test_a_slab_that_is_let_go_is_not_served_over_that_connection_any_more() -> None:
    async with a_bench() as bench:
        links = a_volumes_links(bench)
        one, other = [await links.open(bench.register(index)) for index in (0, 1)]
        await one.retire()
        await soon(lambda: bench.store.slabs["h1", "data", 0].users == [])
        await other.write(0, versions(1), memoryview(page(1)))
        again = await links.open(OpenPlace(0, 1, "h2", bench.address, SECRET))
        await again.write(0, versions(1), memoryview(page(1)))
        assert not one.usable and other.usable and again.usable


async def test_a_slab_given_up_with_requests_under_way_takes_its_link_along() -> None:
    """Bytes of those requests may be half way in either direction, and the client that asked uses the buffer for
    something else now."""
    asks_the_lender()
    async with a_bench() as bench:
        links = a_volumes_links(bench)
        one, other = [await links.open(bench.register(index)) for index in (0, 1)]
        bench.ignore_requests()
        reading = asyncio.ensure_future(one.read(0, memoryview(bytearray(PAGE))))
        await asyncio.sleep(0.02)
        one.fail("it lied")
        assert not other.usable
        with pytest.raises(SlabGone, match="it lied"):
            await reading
        assert (await links.open(OpenPlace(1, 1, "h2", bench.address, SECRET))).usable


async def test_a_lender_that_works_slowly_through_many_requests_is_not_given_up() -> None:
    async with a_bench() as bench:
        remote = await borrowers_links(bench.env, 0.2).open(bench.register(0))
        for user in hosted(bench.store).users:
            do = cast(Any, user)._do
            at = iter(range(1, 100))

            def later(asked: Any, slab: Any, do: Any = do, at: Any = at, user: Any = user) -> None:
                asyncio.get_running_loop().call_later(0.08 * next(at), lambda: (do(asked, slab), user.turn()))

            cast(Any, user)._do = later
        await asyncio.gather(*(remote.write(n, versions(1), None) for n in range(8)))
        assert remote.usable


async def test_a_link_that_no_slab_uses_is_closed() -> None:
    async with a_bench() as bench:
        remote = await link(bench, bench.register(0))
        await remote.retire()
        await soon(lambda: len(bench._listener._tasks) == 0)
        assert not remote.usable


async def test_a_connection_that_is_none_is_dropped_and_counted() -> None:
    async with a_bench() as bench:
        stream = await bench.env.bytes.connect(bench.address)
        await stream.write(b"GET / HTTP/1.1\r\n" * 20)
        with pytest.raises(ConnectionError):
            await stream.read_into(memoryview(bytearray(1)))
        assert bench.store.refused == 1
