"""A block device against a model of its bytes: requests begin and end anywhere, most of them beside a page's end."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plugins.memory.datapath.doors.nbdwire import FUA, NO_HOLE, REQ_ONE, NbdCommand
from tests.families import examples
from tests.plugins.memory.nbd import SIZE, Client, exported
from tests.plugins.memory.ports import PAGE, SHAPE
from tests.plugins.memory.test_nbd_extents import EMPTY, STATUS, agreed, chunk, done, extents

READ, WRITE, TRIM, ZEROES = NbdCommand.READ, NbdCommand.WRITE, NbdCommand.TRIM, NbdCommand.WRITE_ZEROES
DATA, HOLE = 1, 2
"""The kinds of an answer to a read."""


class Model:
    """The content of the device: its bytes, and which pages take room."""

    def __init__(self) -> None:
        self.content, self.room = bytearray(SIZE), [False] * SHAPE.pages

    def change(self, command: NbdCommand, start: int, end: int, flags: int, data: bytes) -> None:
        inner, inner_end = -(-start // PAGE), end // PAGE
        """The pages that are covered in full."""
        if command is TRIM:
            if inner < inner_end:
                self.content[inner * PAGE : inner_end * PAGE] = bytes((inner_end - inner) * PAGE)
                self.room[inner:inner_end] = [False] * (inner_end - inner)
            return
        self.content[start:end] = data if command is WRITE else bytes(end - start)
        for page in range(start // PAGE, -(-end // PAGE)):
            is_hole = command is ZEROES and not flags & NO_HOLE and inner <= page < inner_end
            self.room[page] = not is_hole


async def zeros_told(client: Client, start: int, end: int, flags: int = 0) -> list[bool]:
    """Whether each byte is said to be zero, and to take no room. At least one of them is told about."""
    told = await extents(client, start, end - start, flags)
    assert told and all(length > 0 and state in (0, EMPTY) for length, state in told)
    assert all(one[1] != two[1] for one, two in pairwise(told)), "runs are cut needlessly"
    found = [state == EMPTY for length, state in told for _ in range(length)]
    assert len(found) == end - start or (flags & REQ_ONE and 0 < len(found) < end - start)
    return found


async def content_read(client: Client, start: int, end: int) -> bytes:
    await client.send(READ, start, end - start)
    kind, body = await chunk(client)
    assert body[:8] == start.to_bytes(8, "big")
    if kind == HOLE:
        assert body[8:] == (end - start).to_bytes(4, "big")
        return bytes(end - start)
    assert kind == DATA
    return body[8:]


async def hold_alike(client: Client, model: Model, start: int, end: int) -> None:
    assert await content_read(client, start, end) == model.content[start:end], f"bytes {start} to {end}"
    told = await zeros_told(client, start, end)
    assert told == [not model.room[at // PAGE] for at in range(start, end)], f"bytes {start} to {end}"
    assert told[: len(one := await zeros_told(client, start, end, REQ_ONE))] == one


EDGES = st.builds(
    lambda page, beside: min(SIZE, max(0, page * PAGE + beside)),
    st.integers(0, SHAPE.pages),
    st.sampled_from((0, 0, 1, -1, 512, -512, 1024, 2048, 4000)),
)
SPANS = st.lists(EDGES, min_size=2, max_size=2, unique=True).map(sorted)
CHANGES = st.tuples(
    st.sampled_from((WRITE, WRITE, TRIM, ZEROES)), SPANS, st.sampled_from((0, FUA, NO_HOLE)), st.integers(1, 255)
)
Change = tuple[NbdCommand, list[int], int, int]


@pytest.mark.parametrize("lent", [True, False], ids=["at lenders", "on the disk"])
def test_what_ends_within_a_page_is_read_and_told_as_it_was_written(lent: bool) -> None:
    """A read that begins among zeros and ends in the first bytes of a page with content is no hole."""

    async def play(client: Client, changes: list[Change], looks: list[list[int]]) -> None:
        assert await done(client, ZEROES, 0, SIZE) == 0
        model = Model()
        for command, (start, end), flags, fill in changes:
            flags &= NO_HOLE | FUA if command is ZEROES else FUA
            data = bytes([fill]) * (end - start) if command is WRITE else b""
            assert await done(client, command, start, end - start, data, flags) == 0
            model.change(command, start, end, flags, data)
            for first, last in ((max(0, start - 700), min(SIZE, start + 1)), (max(0, end - 1), min(SIZE, end + 700))):
                await hold_alike(client, model, first, last)
        for start, end in looks:
            await hold_alike(client, model, start, end)
        await hold_alike(client, model, 0, SIZE)

    with asyncio.Runner() as runner:
        opened = exported(lent)
        bench, _, _ = runner.run(opened.__aenter__())
        client = runner.run(agreed(bench))

        @given(st.lists(CHANGES, max_size=6), st.lists(SPANS, max_size=4))
        @example([(WRITE, [8 * PAGE, 9 * PAGE], 0, 5)], [[7 * PAGE, 8 * PAGE + 1], [9 * PAGE - 1, 10 * PAGE]])
        @example([(WRITE, [0, SIZE], 0, 5), (TRIM, [PAGE - 1, 2 * PAGE + 1], 0, 1)], [[PAGE - 2, 2 * PAGE + 2]])
        @example([(WRITE, [0, PAGE], 0, 5), (ZEROES, [512, 1024], 0, 1)], [[0, 512], [512, PAGE]])
        @settings(max_examples=examples(40))
        def holds(changes: list[Change], looks: list[list[int]]) -> None:
            runner.run(play(client, changes, looks))

        holds()
        runner.run(opened.__aexit__(None, None, None))


async def test_a_question_may_begin_and_end_within_one_page() -> None:
    async with exported() as (bench, _, _):
        client = await agreed(bench)
        assert await done(client, WRITE, 3 * PAGE + 100, 1, b"x") == 0
        for start, end, zeros in ((3 * PAGE, 3 * PAGE + 1, False), (3 * PAGE - 1, 3 * PAGE, True)):
            assert await zeros_told(client, start, end) == [zeros]
            assert await content_read(client, start, end) == b"\0"
        assert await client.send(STATUS, 3 * PAGE - 1, 2) and (await chunk(client))[1][4:] == bytes.fromhex(
            "00000001 00000003 00000001 00000000"
        )
