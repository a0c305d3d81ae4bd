"""A volume without a disk over loopback sockets: its members are two slabs of one store, which listens at an address
for each of two lenders."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from plugins.memory.datapath.lending.slab_session import SlabSession
from plugins.memory.datapath.volumes.members import member_lenders, mirror_volume
from plugins.memory.datapath.wire.control import SlabCopiedFrame, SlabLost
from plugins.memory.machine.mirror import Filling, Out, Whole
from plugins.memory.policy import mirroring
from tests.quiet import quiet

from .members import Mirrored
from .ports import PAGE, a_bench, is_used_again, page, soon, submitted


@asynccontextmanager
async def mirrored(formed: bool = True, deadline_s: float = 5.0) -> AsyncIterator[Mirrored]:
    async with a_bench() as bench:
        made = Mirrored(bench)
        made.second = await bench.env.bytes.listen("127.0.0.1:0", bench.server.serve)
        await made.start(deadline_s)
        if formed:
            await made.form()
        try:
            yield made
        finally:
            await made.die()
            await made.second.close()


async def test_a_write_is_at_both_members_when_it_is_acknowledged() -> None:
    async with mirrored() as made:
        await made.write(3, 7, 8)
        assert [made.word(number, 3) for number in (0, 1)] == [7, 7]
        assert [made.word(number, 4) for number in (0, 1)] == [8, 8]
        assert await made.read(0, 6) == [0, 0, 0, 7, 8, 0]


async def test_a_write_waits_for_the_slower_member() -> None:
    async with mirrored(deadline_s=0.3) as made:
        made.ignore(1)
        writing = asyncio.create_task(made.write(3, 7))
        await soon(lambda: made.word(0, 3) == 7)
        await quiet()
        assert not writing.done()
        made.free(1)  # its lender says that it is gone: not waited for any more
        await writing
        assert made.whole() == [1]
        assert made.volume.places.whole == {(0, 1)}


async def test_nothing_is_written_before_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_lenders, "UNSURE_S", 0.2)
    async with mirrored(formed=False) as made:
        await made.volume.open_place(made.place(0, 1))
        assert await made.read(0, 2) == [0, 0]
        with pytest.raises(OSError, match="slab 0 waits for two hosts with room"):
            await made.write(0, 1)
        writing = asyncio.create_task(made.write(0, 2))
        await made.volume.open_place(made.place(1, 2))
        await writing
        assert [made.word(number, 0) for number in (0, 1)] == [2, 2]


async def test_a_second_member_on_the_same_host_is_refused() -> None:
    async with mirrored(formed=False) as made:
        await made.volume.open_place(made.place(0, 1))
        with pytest.raises(ValueError, match="h2 has a member of slab 0 already, under epoch 1"):
            await made.volume.open_place(made.place(1, 2, "h2"))


async def test_a_member_that_missed_a_write_is_not_asked_after_a_crash() -> None:
    async with mirrored() as made:
        await made.write(3, 7)
        old = made.at(0)
        made.free(0)
        await made.write(3, 8)
        await made.die()
        made.bench.store.slabs["h1", "data", 0] = old  # it is there again after all, with what it had
        old.live = True
        made.free(1)  # and the one that has everything is gone
        await made.start()
        assert [place.epoch for place in made.volume.places.all()] == [2]
        with pytest.raises(OSError, match="lost"):
            await made.volume.give_up(1, 2, "h3 no longer holds it")
            await made.read(3, 1)


async def test_after_a_crash_what_reached_one_member_is_brought_to_both_before_a_read() -> None:
    async with mirrored() as made:
        await made.write(3, 7)
        await made.die()
        newer = array("Q", (made.at(0).versions[3] + 1,))
        made.at(1).put(3, newer, memoryview(page(9)))
        await made.start()
        assert await made.read(3, 1) == [9]
        assert made.word(0, 3) == 9, "a read that finds it may not be taken back by the loss of one member"
        made.free(1)
        assert await made.read(3, 1) == [9]


async def test_a_member_that_does_not_answer_after_a_crash_is_out_once_the_other_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_lenders, "REOPEN_S", 0.3)
    async with mirrored() as made:
        await made.write(3, 7)
        await made.die()
        made.free(1)
        made.bench.told.clear()
        await made.start()
        assert await made.read(3, 1) == [7]
        assert made.volume.places.whole == {(0, 1)}
        assert [told.epoch for told in made.bench.told if isinstance(told, SlabLost)] == [2]


async def test_a_rebuilt_member_never_gets_older_content_than_was_written_meanwhile() -> None:
    async with mirrored() as made:
        await made.write(0, *range(1, 17))
        made.free(1)
        await soon(lambda: isinstance(made.volume.slab(0).mirror.of(2), Out))
        slow, fetch = asyncio.Event(), made.volume.lenders._fetch

        async def fetched(*what: Any) -> Any:
            found = await fetch(*what)
            await slow.wait()  # read, and not written to the new member yet
            return found

        made.volume.lenders._fetch = fetched
        await made.volume.open_place(made.place(1, 3, "h4"))
        await asyncio.sleep(0.05)
        await made.write(5, 99)
        assert isinstance(made.volume.slab(0).mirror.of(3), Filling)
        slow.set()
        await soon(lambda: made.whole() == [1, 3])
        assert [made.word(1, at) for at in range(16)] == [*range(1, 6), 99, *range(7, 17)]
        await soon(lambda: 3 in [told.epoch for told in made.bench.told if isinstance(told, SlabCopiedFrame)])
        made.free(0)
        assert await made.read(0, 16) == [*range(1, 6), 99, *range(7, 17)]


async def test_a_new_member_is_filled_no_faster_than_a_volume_may_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "REBUILD_BYTES_S", 16 * PAGE * 5)
    async with mirrored() as made:
        await made.write(0, *range(1, 17))
        made.free(1)
        await soon(lambda: isinstance(made.volume.slab(0).mirror.of(2), Out))
        await made.volume.open_place(made.place(1, 3, "h4"))
        began_s = asyncio.get_running_loop().time()
        await soon(lambda: made.whole() == [1, 3])
        assert asyncio.get_running_loop().time() - began_s > 0.15


async def test_a_link_that_breaks_is_filled_with_what_it_missed_alone() -> None:
    async with mirrored() as made:
        await made.write(0, *range(1, 17))
        made.bench.break_links()
        await made.write(5, 50)
        await soon(lambda: made.whole() == [1, 2])
        assert await made.read(0, 16) == [*range(1, 6), 50, *range(7, 17)]
        assert [made.word(number, 5) for number in (0, 1)] == [50, 50]
        assert made.volume.lenders.reopened > 0


async def test_the_last_member_is_not_closed_before_another_is_whole() -> None:
    async with mirrored() as made:
        await made.write(0, 1)
        await made.volume.close_place(0, 1)
        assert made.volume.places.whole == {(1, 2)}
        closing = asyncio.create_task(made.volume.close_place(1, 2))
        await quiet()
        assert not closing.done()
        await made.volume.open_place(made.place(0, 3, "h4"))
        await closing
        assert made.whole() == [3]
        assert await made.read(0, 1) == [1]


async def test_a_slab_that_nothing_was_written_to_lets_every_member_go() -> None:
    async with mirrored() as made:
        await made.volume.close_place(0, 1)
        await made.volume.close_place(1, 2)
        assert made.whole() == []
        assert await made.read(0, 1) == [0]


async def test_nothing_is_acknowledged_while_the_disk_cannot_say_who_missed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_volume, "WAIT_S", 0.3)
    async with mirrored() as made:
        await made.write(0, 1)
        made.bench.disk.replace_fail = True
        made.free(1)
        with pytest.raises(OSError, match="no whole member of slab 0 answered"):
            await made.write(0, 2)
        made.bench.disk.replace_fail = False
        await made.write(0, 3)
        assert made.volume.places.whole == {(0, 1)}


async def test_a_read_goes_to_the_other_member_when_the_first_is_silent() -> None:
    async with mirrored() as made:
        await made.write(3, 7)
        made.ignore(0)
        began_s = asyncio.get_running_loop().time()
        for _ in range(4):
            assert await made.read(3, 1) == [7]
        assert asyncio.get_running_loop().time() - began_s < 2.5


async def test_a_member_that_answers_older_than_it_acknowledged_is_not_believed() -> None:
    async with mirrored() as made:
        await made.write(3, 7)
        await made.write(3, 8)
        for number in (0, 1):
            slab = made.at(number)
            kept = (bytes(slab.has(3, 1)), slab.versions[3])
            slab.has(3, 1)[:] = page(7)
            slab.versions[3] -= 1
            for _ in range(2):
                assert await made.read(3, 1) == [8]
            slab.has(3, 1)[:], slab.versions[3] = kept
            await soon(lambda: made.whole() == [1, 2])


async def test_a_page_that_one_member_changed_is_read_from_the_other() -> None:
    """The volume is sealed: the member that changed the page is not asked again."""
    async with a_bench() as bench:
        bench.sealed = True
        made = Mirrored(bench)
        await made.start()
        await made.form()
        await made.write(3, 7)
        assert page(7)[:16] not in bytes(made.at(0).has(3, 1)) and page(7)[:16] not in bytes(made.at(1).has(3, 1))
        for number in (0, 1):
            made.at(number).has(3, 1)[5] ^= 1
            for _ in range(2):
                assert await made.read(3, 1) == [7]
            made.at(number).has(3, 1)[5] ^= 1
            await soon(lambda: made.whole() == [1, 2])
        assert made.volume.counts(1).pages_refused >= 1
        await made.die()


@pytest.mark.parametrize("count", [8, 12])  # by the connection for short requests, and by the other one
async def test_what_one_member_may_still_be_sent_is_not_used_again(count: int) -> None:
    """A buffer that one member may still be sent is not used again, though the write is acknowledged, since the other
    member has it."""
    async with mirrored() as made:
        assert await is_used_again(made.volume, *submitted(made.volume, 0, *[7] * count)), "all went well"
        made.ignore(1)
        data, done = submitted(made.volume, 0, *[8] * count)
        await soon(lambda: made.word(0, 0) == 8)
        version = made.at(0).versions[0]
        made.cut(1)
        assert not await is_used_again(made.volume, data, done)
        assert made.at(0).versions[0] == version, "it was sent once"


async def test_a_read_waits_for_a_write_of_its_page_that_is_under_way() -> None:
    async with mirrored(deadline_s=0.3) as made:
        await made.write(3, 7)
        made.ignore(1)
        writing = asyncio.create_task(made.write(3, 8))
        await soon(lambda: made.word(0, 3) == 8)
        reading = asyncio.create_task(made.read(3, 1))
        assert await made.read(4, 1) == [0]
        await quiet()
        assert not reading.done(), "one member has it, the other has not"
        made.free(1)
        await writing
        assert await reading == [8]


async def test_discarded_pages_are_zeros_at_both_members_and_after_a_crash() -> None:
    async with mirrored() as made:
        await made.write(3, 7, 8)
        await made.volume.write(3, 1, None)
        await made.die()
        await made.start()
        assert await made.read(3, 2) == [0, 8]
        assert not made.volume.never_written(3, 1)


async def test_requests_without_a_task_find_the_same_as_those_that_are_awaited() -> None:
    async with mirrored() as made:
        done: list[OSError | None] = []
        made.volume.submit_write(3, 1, memoryview(page(7)), done.append)
        await soon(lambda: len(done) == 1)
        into = bytearray(PAGE)
        made.volume.submit_read(3, memoryview(into), done.append)
        made.volume.submit_flush(done.append)
        await soon(lambda: len(done) == 3)
        assert into == page(7)
        assert done == [None] * 3
        assert all(isinstance(made.volume.slab(0).mirror.of(epoch), Whole) for epoch in (1, 2))
        assert isinstance(made.at(0).users[0], SlabSession)


async def test_giving_up_silent_members_keeps_one_that_has_answered() -> None:
    async with mirrored() as made:
        await made.write(3, 7)
        await made.die()
        await made.bench.mute_lender()
        await made.start(deadline_s=0.2)
        await soon(lambda: 2 in made.volume.slab(0).answers)
        given_up = await made.volume.lenders.give_up_all("given up by request")
        assert [place.lender for place in given_up] == ["h2"]
        assert await made.read(3, 1) == [7]


async def test_a_person_gives_up_both_members_and_is_told_what_that_costs() -> None:
    async with mirrored() as made:
        await made.write(3, 7)
        await made.die()
        await made.bench.mute_lender()
        await made.second.close()
        made.second = made.bench._listener
        await made.start(deadline_s=0.2)
        given_up = await made.volume.lenders.give_up_all("given up by request")
        assert [place.lender for place in given_up] == ["h2", "h3"]
        with pytest.raises(OSError, match="both members of slab 0 were lost"):
            await made.read(3, 1)
        with pytest.raises(OSError, match="write or discard"):
            await made.volume.flush()
        assert "both members of slab 0 were lost" in made.volume.trouble
