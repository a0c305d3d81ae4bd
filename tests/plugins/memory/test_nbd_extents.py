"""The answers of a volume to a client of the block device about allocated ranges (`base:allocation`)."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from plugins.memory.datapath.doors import nbdwire
from plugins.memory.datapath.doors.nbdwire import (
    ALLOCATION,
    FAST_ZERO,
    FUA,
    NO_HOLE,
    REQ_ONE,
    NbdAnswer,
    NbdCommand,
    NbdError,
    NbdOption,
)
from tests.plugins.memory.nbd import SIZE, Client, connected, exported
from tests.plugins.memory.ports import PAGE, SHAPE, Bench, page

EMPTY = nbdwire.HOLE | nbdwire.ZERO
READ, WRITE, STATUS = NbdCommand.READ, NbdCommand.WRITE, NbdCommand.BLOCK_STATUS


def queries(*wanted: str, export: str = "") -> bytes:
    texts = [export.encode(), *(each.encode() for each in wanted)]
    packed = [len(text).to_bytes(4, "big") + text for text in texts]
    return packed[0] + len(wanted).to_bytes(4, "big") + b"".join(packed[1:])


async def agreed(bench: Bench, export: bytes = b"", context: str = ALLOCATION) -> Client:
    """Connect a client with structured replies that may ask which ranges are allocated."""
    client = await connected(bench, go=False)
    await client.greet()
    await client.option(NbdOption.STRUCTURED_REPLY)
    await client.option(NbdOption.SET_META_CONTEXT, queries(context))
    await client.go(export)
    return client


async def chunk(client: Client) -> tuple[int, bytes]:
    """The kind and the body of the only chunk of an answer."""
    magic, flags, kind, cookie, length = struct.unpack(">IHHQI", await client.take(20))
    assert (magic, flags, cookie) == (0x668E33EF, 1, client.cookie)
    return kind, await client.take(length)


async def done(client: Client, command: int, offset: int, length: int, data: bytes = b"", flags: int = 0) -> int:
    """The error of an answer, 0 for none."""
    await client.send(command, offset, length, data, flags)
    kind, body = await chunk(client)
    return int.from_bytes(body[:4], "big") if kind == 32769 else 0


async def extents(client: Client, offset: int = 0, length: int = SIZE, flags: int = 0) -> list[tuple[int, int]]:
    await client.send(STATUS, offset, length, flags=flags)
    kind, body = await chunk(client)
    assert kind == 5 and body[:4] == nbdwire.ALLOCATION_ID.to_bytes(4, "big")
    return list(struct.iter_unpack(">II", body[4:]))


async def test_a_page_that_a_lender_may_hold_newer_is_called_allocated() -> None:
    async with exported() as (bench, volume, _):
        client = await agreed(bench)
        place = volume.places.all()[-1]
        volume.slabs[place.index].doubt(place)
        half = SHAPE.slab_pages * PAGE
        assert await extents(client) == [(half, EMPTY), (half, 0)]
        volume.slabs[place.index].settle(place.epoch)
        assert await extents(client) == [(SIZE, EMPTY)]


async def test_zeros_are_read_as_a_hole_and_content_as_data() -> None:
    async with exported() as (bench, _, _):
        client = await agreed(bench)
        await client.send(READ, 100, 3 * PAGE)
        assert await chunk(client) == (2, (100).to_bytes(8, "big") + (3 * PAGE).to_bytes(4, "big"))
        assert await done(client, WRITE, 2 * PAGE, PAGE, page(3)) == 0
        await client.send(READ, 0, 3 * PAGE)
        assert await chunk(client) == (1, bytes(8) + bytes(2 * PAGE) + page(3))


async def test_who_did_not_ask_for_it_before_is_refused() -> None:
    async with exported() as (bench, _, _):
        plain = await connected(bench)
        assert await plain.ask(STATUS, 0, SIZE) == NbdError.EINVAL
        for client in (
            await agreed(bench, context="qemu:dirty-bitmap:x"),
            await agreed(bench, export=b"data"),  # it was agreed about the export of the empty name
        ):
            assert await done(client, STATUS, 0, SIZE) == NbdError.EINVAL
            assert await done(client, WRITE, 0, PAGE, page(1)) == 0


async def test_flags_that_do_not_belong_to_a_command_are_refused() -> None:
    async with exported() as (bench, _, _):
        client = await agreed(bench)
        for command, offset, length, data, flags, error in (
            (WRITE, 0, PAGE, page(1), REQ_ONE, NbdError.EINVAL),
            (READ, 0, PAGE, b"", NO_HOLE, NbdError.EINVAL),
            (STATUS, 0, PAGE, b"", 1 << 15, NbdError.EINVAL),
            (STATUS, SIZE, PAGE, b"", 0, NbdError.EINVAL),
            (STATUS, 0, 0, b"", 0, NbdError.EINVAL),
            (NbdCommand.WRITE_ZEROES, 1, PAGE, b"", FAST_ZERO, NbdError.ENOTSUP),
            (NbdCommand.WRITE_ZEROES, 0, PAGE, b"", FAST_ZERO | NO_HOLE, NbdError.ENOTSUP),
            (NbdCommand.WRITE_ZEROES, 0, PAGE, b"", FAST_ZERO | FUA, 0),
        ):
            assert await done(client, command, offset, length, data, flags) == error
        assert await extents(client) == [(SIZE, EMPTY)]


async def test_contexts_are_listed_and_malformed_questions_refused() -> None:
    async with exported() as (bench, _, exports):
        client = await connected(bench, go=False)
        await client.greet()
        LIST, SET = NbdOption.LIST_META_CONTEXT, NbdOption.SET_META_CONTEXT
        assert await client.option(SET, queries(ALLOCATION)) == [(NbdAnswer.ERR_INVALID, b"")]
        await client.option(NbdOption.STRUCTURED_REPLY)
        ack, name = (NbdAnswer.ACK, b""), ALLOCATION.encode()
        for number, said, answers in (
            (LIST, queries(), [(NbdAnswer.META_CONTEXT, bytes(4) + name), ack]),
            (LIST, queries("base:"), [(NbdAnswer.META_CONTEXT, bytes(4) + name), ack]),
            (LIST, queries("qemu:"), [ack]),
            (SET, queries("other:x", ALLOCATION), [(NbdAnswer.META_CONTEXT, b"\0\0\0\1" + name), ack]),
            (SET, queries(), [ack]),
            (SET, queries(ALLOCATION, export="other"), [(NbdAnswer.ERR_UNKNOWN, b"")]),
            (SET, queries(ALLOCATION)[:-1], [(NbdAnswer.ERR_INVALID, b"")]),
            (SET, queries(ALLOCATION) + b"x", [(NbdAnswer.ERR_INVALID, b"")]),
            (SET, b"", [(NbdAnswer.ERR_INVALID, b"")]),
            (SET, queries(*["x"] * (nbdwire.QUERIES_MAX + 1)), [(NbdAnswer.ERR_INVALID, b"")]),
        ):
            assert await client.option(number, said) == answers
        assert exports.clients.refused == 0


@given(st.binary(max_size=60), st.lists(st.text(max_size=6), max_size=4))
def test_any_bytes_are_queries_or_malformed(data: bytes, texts: list[str]) -> None:
    assert nbdwire.wanted_contexts(queries(*texts, export="data")) == ("data", texts)
    for seed in (data, queries(*texts) + data, queries(*texts)[: len(data)]):
        found = nbdwire.wanted_contexts(seed)
        assert found is None or queries(*found[1], export=found[0]) == seed
