"""A volume as a block device: what clients ask and get, and what clients get that lie."""

import asyncio
import gc
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.wire.headers import WireError
from plugins.memory.datapath.doors import nbdwire
from plugins.memory.datapath.doors.exports import CLIENTS_MAX
from plugins.memory.datapath.doors.nbd_front import NbdWaiting
from plugins.memory.datapath.doors.nbdwire import FUA, LENGTH_MAX, NO_HOLE, NbdAnswer, NbdCommand, NbdError, NbdOption
from plugins.memory.datapath.volumes.volume import SubmittedWrite
from plugins.memory.datapath.wire.slabwire import SlabRequest
from tests.plugins.memory.nbd import SIZE, connected, exported
from tests.plugins.memory.ports import PAGE, asks_the_lender, page, replaces_a_method, soon
from tests.quiet import quiet

# ---- what is asked and answered --------------------------------------------------------------------------------------


async def test_many_requests_under_way_are_answered_each_with_its_cookie() -> None:
    async with exported() as (bench, volume, _):
        client = await connected(bench)
        sent = [await client.send(NbdCommand.WRITE, n * PAGE, PAGE, page(n + 1)) for n in range(32)]
        assert sorted([await client.reply() for _ in range(32)]) == [(0, cookie) for cookie in sent]
        await volume.flush()
        wanted = {await client.send(NbdCommand.READ, n * PAGE, PAGE): page(n + 1) for n in range(32)}
        for _ in range(32):
            error, cookie = await client.reply()
            assert error == 0 and await client.take(PAGE) == wanted.pop(cookie)


async def test_two_clients_write_to_different_bytes_of_one_page_and_neither_is_lost() -> None:
    async with exported() as (bench, volume, _):
        clients = [await connected(bench) for _ in range(4)]
        await clients[0].write(0, page(9))
        await volume.flush()  # from now on the page comes from its lender, which takes a moment
        await asyncio.gather(*(c.write(512 * n, bytes([n + 1]) * 512) for n, c in enumerate(clients)))
        assert await clients[0].read(0, 2048) == b"".join(bytes([n + 1]) * 512 for n in range(4))


@pytest.mark.parametrize("then", ["write", "zeroes", "no hole", "trim"])
async def test_a_page_written_whole_while_a_part_of_it_is_written_keeps_its_other_bytes(then: str) -> None:
    """This also holds when no client waits for the part any more: its connection ended, and the next one wrote the
    page."""
    replaces_a_method()
    async with exported() as (bench, volume, exports):
        first, second = [await connected(bench) for _ in range(2)]
        await first.write(0, page(9) * 2)
        may, asked, read = asyncio.Event(), asyncio.Event(), volume.read

        async def slowly(first: int, into: memoryview) -> None:
            await read(first, into)
            asked.set()
            await may.wait()

        volume.read = slowly  # type: ignore[method-assign]
        await first.send(NbdCommand.WRITE, 0, 512, b"x" * 512)
        await asked.wait()
        first.stream.close()
        volume.read = read  # type: ignore[method-assign]
        match then:
            case "write":
                await second.send(NbdCommand.WRITE, 0, PAGE, page(7))
            case "trim":
                await second.send(NbdCommand.TRIM, 0, PAGE)
            case _:
                await second.send(NbdCommand.WRITE_ZEROES, 0, PAGE, flags=NO_HOLE * (then == "no hole"))
        await second.send(NbdCommand.READ, PAGE, PAGE)
        answers = [await second.reply()]
        if answers[0][1] == 1:  # the change, before the part: then it must outlast that
            answers.append(await second.reply())
        assert await second.take(PAGE) == page(9), "a neighbour is not waited for"
        may.set()
        if len(answers) == 1:
            answers.append(await second.reply())
        assert sorted(answers) == [(0, 1), (0, 2)]
        parts = exports._pages._edges
        await soon(lambda: not parts.locked())
        assert (await second.read(512, PAGE - 512)) == (page(7) if then == "write" else bytes(PAGE))[512:]


@pytest.mark.parametrize("how", ["flush", "fua", "fua zeroes"])
async def test_what_flush_or_fua_promised_is_on_disk_and_synced(how: str) -> None:
    async with exported() as (bench, volume, _):
        client = await connected(bench)
        await client.write(PAGE, page(5))
        bench.disk.gate.clear()
        if how == "flush":
            await client.write(0, page(7))
            await client.send(NbdCommand.FLUSH, 0, 0)
        elif how == "fua":
            await client.send(NbdCommand.WRITE, 0, PAGE, page(7), FUA)
        else:
            await client.send(NbdCommand.WRITE_ZEROES, PAGE, PAGE, flags=FUA)
        answered = asyncio.ensure_future(client.reply())
        await quiet()
        assert not answered.done(), "answered before the disk has it"
        syncs = bench.disk.syncs
        bench.disk.gate.set()
        assert (await answered)[0] == 0
        assert bench.disk.syncs > syncs
        assert volume.spill.is_on_disk(1 if how == "fua zeroes" else 0)


async def test_a_write_whose_lender_dies_is_answered_when_the_disk_has_it() -> None:
    asks_the_lender()
    async with exported() as (bench, volume, _):
        client = await connected(bench)
        assert await client.write(0, page(1)) == 0
        await volume.flush()
        assert await client.write(0, page(3)) == 0, "only the first write of a region after a flush asks the disk"
        bench.ignore_requests()
        bench.disk.gate.clear()
        await client.send(NbdCommand.WRITE, 0, PAGE, page(2))
        answered = asyncio.ensure_future(client.reply())
        await quiet()
        bench.break_links()
        await quiet()
        assert not answered.done(), "neither a lender nor the disk has it"
        bench.disk.gate.set()
        assert (await answered)[0] == 0
        assert await client.read(0, PAGE) == page(2)


async def test_a_request_leaves_nothing_that_a_search_for_cycles_has_to_free() -> None:
    """Compiled, a nested function and the variables that it closes over hold one another: a search for 20,000 of them
    stopped a volume for 6 ms, twenty times a second. Such cycles would keep the memory of the request."""
    async with exported() as (bench, volume, _):
        client = await connected(bench)
        gc.collect()
        gc.disable()
        try:
            for number in range(200):
                assert await client.write(number % 16 * PAGE, page(number % 250 + 1)) == 0
            await volume.flush()
            for number in range(200):
                await client.read(number % 16 * PAGE, PAGE)
            left = sum(type(each) in (NbdWaiting, SlabRequest, SubmittedWrite) for each in gc.get_objects())
            assert left < 20
        finally:
            gc.enable()


async def test_trimming_what_was_never_written_writes_nothing() -> None:
    async with exported() as (bench, volume, _):
        client = await connected(bench)
        assert await client.ask(NbdCommand.TRIM, 0, SIZE) == 0
        assert await client.ask(NbdCommand.WRITE_ZEROES, 0, SIZE) == 0
        assert volume.counts(1).written_bytes == 0


async def test_options_are_answered_and_unknown_ones_refused() -> None:
    async with exported() as (bench, _, exports):
        client = await connected(bench, go=False)
        await client.greet()
        assert await client.option(NbdOption.LIST) == [(NbdAnswer.SERVER, b"\0\0\0\4data"), (NbdAnswer.ACK, b"")]
        for number, data, answer in (
            (99, b"what", NbdAnswer.ERR_UNSUP),
            (NbdOption.LIST, b"x", NbdAnswer.ERR_INVALID),
            (NbdOption.GO, b"\0\0\0\5other\0\0", NbdAnswer.ERR_UNKNOWN),
            (NbdOption.INFO, b"\0\0\1\0data\0\0", NbdAnswer.ERR_INVALID),
        ):
            assert await client.option(number, data) == [(answer, b"")]
        assert (await client.option(NbdOption.ABORT))[-1][0] == NbdAnswer.ACK
        with pytest.raises(ConnectionError):
            await client.take(1)
        older = await connected(bench, go=False)
        await older.greet(flags=1)
        await older.stream.write(b"IHAVEOPT" + struct.pack(">II", NbdOption.EXPORT_NAME, 4) + b"data")
        assert struct.unpack(">QH", await older.take(10)) == (SIZE, nbdwire.EXPORT_FLAGS)
        assert await older.take(124) == bytes(124)
        assert await older.write(0, page(1)) == 0
        assert exports.clients.refused == 0


# ---- what is wrong ---------------------------------------------------------------------------------------------------


async def test_what_lies_outside_is_refused_and_the_connection_goes_on() -> None:
    async with exported() as (bench, _, _):
        client = await connected(bench)
        for command, offset, length, error in (
            (NbdCommand.READ, SIZE - 1, 2, NbdError.EINVAL),
            (NbdCommand.READ, 1 << 63, PAGE, NbdError.EINVAL),
            (NbdCommand.READ, 0, 0, NbdError.EINVAL),
            (NbdCommand.READ, 0, LENGTH_MAX + 1, NbdError.EINVAL),
            (NbdCommand.TRIM, SIZE, PAGE, NbdError.EINVAL),
            (NbdCommand.WRITE_ZEROES, 0, (1 << 32) - 1, NbdError.EINVAL),
            (77, 0, PAGE, NbdError.EINVAL),
        ):
            assert await client.ask(command, offset, length) == error
        assert await client.write(SIZE - PAGE, bytes(2 * PAGE)) == NbdError.ENOSPC
        assert await client.write(0, page(4)) == 0 and await client.read(0, PAGE) == page(4)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (0).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + b"IHAVEOPT" + struct.pack(">II", 7, 1 << 30),
        (3).to_bytes(4, "big") + b"NO OPTION AT ALL",
        (3).to_bytes(4, "big") + b"IHAVEOPT" + struct.pack(">II", NbdOption.EXPORT_NAME, 5) + b"other",
    ],
)
async def test_a_client_that_breaks_the_protocol_is_cut_off_and_no_other(said: bytes) -> None:
    async with exported() as (bench, _, exports):
        other = await connected(bench)
        liar = await connected(bench, go=False)
        await liar.take(18)
        await liar.stream.write(said)
        with pytest.raises(ConnectionError):
            await liar.take(1)
        assert exports.clients.refused == 1
        assert await other.write(0, page(1)) == 0


async def test_a_client_that_lies_in_a_request_is_cut_off_and_half_a_write_is_none() -> None:
    async with exported() as (bench, _, exports):
        other, liar, half = [await connected(bench) for _ in range(3)]
        assert await other.write(0, page(1)) == 0
        await liar.stream.write(b"\0" * 28)
        with pytest.raises(ConnectionError):
            await liar.take(1)
        too_long = await connected(bench)
        await too_long.send(NbdCommand.WRITE, 0, LENGTH_MAX + 1)
        with pytest.raises(ConnectionError):
            await too_long.take(1)
        await half.send(NbdCommand.WRITE, 0, PAGE, page(9)[:100])
        half.stream.close()
        await soon(lambda: exports.clients.connections == 1)
        assert exports.clients.refused == 2
        assert await other.read(0, PAGE) == page(1)


async def test_connections_beyond_the_limit_are_closed_and_the_others_served() -> None:
    async with exported() as (bench, _, exports):
        many = [await connected(bench, go=False) for _ in range(CLIENTS_MAX + 5)]
        await soon(lambda: exports.clients.refused == 5)
        assert exports.clients.connections == CLIENTS_MAX
        await many[0].greet()
        await many[0].go()
        assert await many[0].write(0, page(2)) == 0
        for client in many:
            client.stream.close()
        await soon(lambda: exports.clients.connections == 0)


async def test_its_socket_is_one_for_bulk_bytes() -> None:
    """Otherwise long reads go at the pace of two processes that wake one another."""
    async with exported() as (bench, _, exports):
        client = await connected(bench)
        (listener,) = exports._open.values()
        (served,) = listener._tasks.values()  # type: ignore[attr-defined]
        ends = (served._transport, client.stream._transport)  # type: ignore[attr-defined]
        room = [end.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for end in ends]
        assert room[0] > 1.5 * room[1]


async def test_who_chooses_no_export_in_time_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.doors.nbd_front.GREETING_S", 0.05)
    async with exported() as (bench, _, exports):
        chosen = await connected(bench)
        silent = await connected(bench, go=False)
        await silent.take(18)
        with pytest.raises(ConnectionError):
            await silent.take(1)
        assert exports.clients.refused == 1
        assert await chosen.write(0, page(2)) == 0


async def test_a_client_that_does_not_read_its_answers_costs_a_bounded_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.memory.datapath.doors.nbd_front.UNDER_WAY_MAX", 8)
    async with exported() as (bench, volume, _):
        client = await connected(bench)
        other = await connected(bench)
        await other.write(0, page(2) * 32)

        async def ask() -> None:
            for _ in range(2000):
                await client.send(NbdCommand.READ, 0, 32 * PAGE)

        asking = asyncio.ensure_future(ask())
        await quiet()
        assert volume.counts(1).read_bytes < 200 * 32 * PAGE, "answers pile up for somebody who reads none"
        assert await other.read(0, PAGE) == page(2)
        for _ in range(2000):
            assert (await client.reply())[0] == 0
            assert await client.take(32 * PAGE) == page(2) * 32
        await asking


async def test_a_volume_that_cannot_be_written_says_so_to_the_client() -> None:
    async with exported(lent=False) as (bench, volume, _):
        client = await connected(bench)
        volume.read_only = "its disk is read-only in this test"
        assert await client.write(0, page(1)) == NbdError.EPERM
        assert await client.write(10, b"part of a page") == NbdError.EPERM
        assert await client.read(0, PAGE) == bytes(PAGE)


@given(st.binary(min_size=28, max_size=28))
def test_any_bytes_are_a_request_or_a_wire_error(data: bytes) -> None:
    for seed in (data, b"\x25\x60\x95\x13" + data[4:]):
        try:
            found = nbdwire.request(seed)
        except WireError:
            assert seed[:4] != b"\x25\x60\x95\x13"
        else:
            assert found.cookie == int.from_bytes(seed[8:16], "big")


@given(st.binary(max_size=40), st.binary(min_size=16, max_size=16))
def test_any_bytes_are_an_option_or_a_wire_error(data: bytes, head: bytes) -> None:
    name = nbdwire.wanted_export(data)
    assert name is None or name.encode() == data[4 : 4 + len(name.encode())]
    for seed in (head, b"IHAVEOPT" + head[8:]):
        try:
            assert nbdwire.option(seed)[1] <= nbdwire.OPTION_DATA_MAX
        except WireError:
            pass
    try:
        assert nbdwire.client_flags(head[:4]) & nbdwire.FIXED_NEWSTYLE
    except WireError:
        pass
