"""Buffers of writes: which come back, and which never may."""

import pytest

from plugins.memory.datapath.links.write_buffers import (
    KEPT_BYTES_MAX,
    KEPT_MAX,
    KEPT_SHORT_MAX,
    LONG_BYTES,
    WriteBuffers,
)
from tests.plugins.memory.ports import PAGE, a_volume, asks_the_lender, copied, is_used_again, placed, soon, submitted


def test_a_buffer_comes_back_for_the_next_write_of_its_size() -> None:
    buffers = WriteBuffers(PAGE)
    for size in (PAGE, LONG_BYTES):
        taken = buffers.take(size)
        buffers.give(taken)
        assert buffers.take(2 * size).obj is not taken.obj
        assert buffers.take(size).obj is taken.obj
        assert buffers.take(size).obj is not taken.obj, "it is in use"


def test_short_ones_come_back_only_where_that_is_said() -> None:
    buffers = WriteBuffers()
    taken = buffers.take(PAGE)
    buffers.give(taken)
    assert buffers.take(PAGE).obj is not taken.obj


def test_what_somebody_may_still_send_does_not_come_back() -> None:
    """This holds also when only a part of the buffer is known to be spoiled."""
    for size in (PAGE, LONG_BYTES):
        buffers = WriteBuffers(PAGE)
        taken = buffers.take(size)
        buffers.spoil(taken[size // 2 :])
        buffers.give(taken)
        assert buffers.take(size).obj is not taken.obj
        buffers.give(taken)
        assert buffers.take(size).obj is not taken.obj, "nor later"


def test_no_more_are_kept_than_may_be_under_way() -> None:
    buffers = WriteBuffers(PAGE)
    for size, most in ((PAGE, KEPT_SHORT_MAX), (LONG_BYTES, KEPT_MAX)):
        taken = [buffers.take(size) for _ in range(most + 5)]
        for each in taken:
            buffers.give(each)
        again = {id(buffers.take(size).obj) for _ in range(most + 5)}
        assert len(again & {id(each.obj) for each in taken}) == most


def test_of_many_sizes_those_that_came_last_are_kept_and_pages() -> None:
    buffers = WriteBuffers(PAGE)
    taken = [buffers.take(size) for size in range(PAGE, PAGE * (KEPT_MAX + 10), PAGE)]
    for each in taken:
        buffers.give(each)
    again = [buffers.take(len(each)).obj is each.obj for each in taken]
    assert again == [True, *[False] * 9, *[True] * (KEPT_MAX - 1)]


def test_no_more_memory_is_kept_than_the_longest_request_takes() -> None:
    buffers = WriteBuffers(PAGE)
    long = KEPT_BYTES_MAX // 4
    taken = [buffers.take(long) for _ in range(6)]
    for _ in range(2):  # what was taken again is not counted any more
        for each in taken:
            buffers.give(each)
        taken = [buffers.take(long) for _ in range(6)]
    assert len({id(each.obj) for each in taken}) == 6
    buffers.give(taken[0])
    buffers.give(buffers.take(KEPT_BYTES_MAX))
    assert list(buffers._free) == [long]


def test_memory_of_somebody_else_is_neither_kept_nor_remembered() -> None:
    """A write of a job's connection is never given back, and may fail at its lender again and again."""
    buffers, theirs = WriteBuffers(PAGE), memoryview(bytearray(PAGE))
    buffers.spoil(theirs)
    buffers.give(theirs)
    assert not buffers._free


@pytest.mark.parametrize("first", [0, 12])
async def test_what_a_broken_connection_may_still_send_does_not_come_back(first: int) -> None:
    """A write that spans two slabs is tried too."""
    asks_the_lender()
    async with a_volume() as (bench, volume):
        for index in (0, 1):
            await placed(volume, bench.register(index))
            await copied(bench, index=index)
        assert await is_used_again(volume, *submitted(volume, first, *range(8))), "all went well"
        link = volume.slabs[0].link
        assert link is not None
        bench.ignore_requests()
        data, done = submitted(volume, first, *range(8))
        await soon(lambda: link._under_way)
        bench.break_links()
        assert not await is_used_again(volume, data, done)
