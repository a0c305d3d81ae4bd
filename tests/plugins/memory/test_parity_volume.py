"""A volume with parity over loopback sockets."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from plugins.memory.datapath.volumes.members import member_lenders, parity_lenders, parity_volume
from plugins.memory.machine.mirror import Out
from plugins.memory.policy import mirroring
from tests.quiet import quiet

from .members import Striped
from .ports import PAGE, a_bench, replaces_a_method, soon

GIVEN_UP_S = 0.5


@pytest.fixture(autouse=True)
def soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a member that is silent after a crash be given up soon."""
    monkeypatch.setattr(member_lenders, "REOPEN_S", GIVEN_UP_S)


@asynccontextmanager
async def striped(data: int = 2, deadline_s: float = 5.0, sealed: bool | None = None) -> AsyncIterator[Striped]:
    async with a_bench() as bench:
        if sealed is not None:
            bench.sealed = sealed
        made = Striped(bench, data)
        await made.start(deadline_s)
        await made.form()
        try:
            yield made
        finally:
            await made.die()
            for each in made.listening:
                await each.close()


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("data", [2, 4])
async def test_whichever_member_is_lost_every_page_is_read(data: int, lost: int) -> None:
    async with striped(data) as made:
        words = list(range(1, 28))
        await made.write(1, *words)
        made.free(lost)
        assert await made.read(0, 29) == [0, *words, 0]


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_writes_go_on_without_a_member_and_another_is_filled(lost: int) -> None:
    async with striped() as made:
        words = list(range(1, 31))
        await made.write(0, *words)
        made.free(lost)
        for first in (0, 5, 11, 12, 20):
            words[first : first + 3] = [100 + first, 101 + first, 102 + first]
            await made.write(first, *words[first : first + 3])
        assert await made.read(0, 30) == words
        await soon(lambda: isinstance(made.volume.slab(0).mirror.of(lost + 1), Out))
        await made.open(lost, 9)
        writing = asyncio.create_task(made.write(2, 77))
        words[2] = 77
        await soon(lambda: 9 in made.whole() and not made.volume.slab(0).repairing)
        await writing
        await soon(lambda: not len(made.volume.slab(0).lacking()))
        for other in {0, 1, 2} - {lost}:  # and any other one may be lost now
            made.free(other)
            assert await made.read(0, 30) == words
            break


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
async def test_after_a_crash_every_page_is_what_it_was(lost: int | None) -> None:
    async with striped() as made:
        words = list(range(1, 31))
        await made.write(0, *words)
        await made.die()
        if lost is not None:
            made.free(lost)
        await made.start()
        assert await made.read(0, 30) == words


@pytest.mark.parametrize("step", ["_send_slots", "_send_pages"])
async def test_a_crash_while_a_member_is_missing_costs_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that is being written has a copy of the missing page before anything else in it changes."""
    async with striped() as made:
        await made.write(0, 1, 2, 3, 4)
        made.free(0)
        await made.write(1, 5)
        replaces_a_method()
        monkeypatch.setattr(made.volume, step, lambda *a: asyncio.Event().wait())
        writing = asyncio.create_task(made.write(3, 6))
        await quiet()
        assert not writing.done()
        await made.die()
        writing.cancel()
        await made.start()
        assert await made.read(0, 4) == [1, 5, 3, 4]


async def dies_in_a_row(made: Striped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process die when page 1 is at its member and the parity of its row is not: 1, 5, 3, 4 are there."""
    await made.write(0, 1, 2, 3, 4)
    replaces_a_method()
    monkeypatch.setattr(made.volume, "_send_slots", lambda *a: asyncio.Event().wait())
    writing = asyncio.create_task(made.write(1, 5))
    await asyncio.sleep(0.1)
    await made.die()
    writing.cancel()


async def test_the_write_hole_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is at its member and the parity is not: the process dies. The other page of that row is never made from
    the old parity; with all members there it gets a new one before anything is read."""
    for lost in (None, 0):
        async with striped() as made:
            await dies_in_a_row(made, monkeypatch)
            if lost is not None:
                made.free(lost)
            await made.start()
            if lost is None:
                assert await made.read(0, 4) == [1, 5, 3, 4]
                made.free(0)
                assert await made.read(0, 4) == [1, 5, 3, 4]
            else:
                with pytest.raises(OSError, match="two members of slab 0 were lost"):
                    await made.read(0, 1)
                assert await made.read(1, 3) == [5, 3, 4]
                assert "two members" in made.volume.trouble
                await made.write(0, 9)
                assert await made.read(0, 4) == [9, 5, 3, 4]


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_member_that_is_cut_off_is_waited_for_when_it_alone_has_a_page(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """The process dies while a row is written, and one more member cannot be reached when the next process begins. Once
    that member was given up four seconds later, and the page that it alone had was lost; its host came back a second
    after that."""
    monkeypatch.setattr(member_lenders, "TORN_S", 30.0 if comes_back else 2.0)
    monkeypatch.setattr(member_lenders, "UNSURE_S", 0.3)
    ask, asked_s = member_lenders.MemberLenders._ask, list[float]()

    async def noted(self: Any, slab: Any, epoch: int) -> bool:
        asked_s.append(time.monotonic())
        return await ask(self, slab, epoch)

    monkeypatch.setattr(member_lenders.MemberLenders, "_ask", noted)
    async with striped() as made:
        await dies_in_a_row(made, monkeypatch)
        address = made.listening[0].address
        await made.listening[0].close()
        await made.start()
        late_s = time.monotonic() + GIVEN_UP_S
        await soon(lambda: sum(at_s > late_s for at_s in asked_s) > 1)  # since one that is not missed would be given up
        assert made.volume.slab(0).mirror.asks
        with pytest.raises(OSError, match="slab 0 waits for its members: l1"):
            await made.read(0, 1)
        if comes_back:
            made.listening[0] = await made.bench.env.bytes.listen(address, made.bench.server.serve)
            await soon(lambda: not made.volume.slab(0).mirror.asks)
            assert await made.read(0, 4) == [1, 5, 3, 4]
        else:
            await soon(lambda: not made.volume.slab(0).mirror.asks)
            with pytest.raises(OSError, match="two members of slab 0 were lost"):
                await made.read(0, 1)
            assert await made.read(1, 3) == [5, 3, 4]


async def test_two_members_lost_at_once_read_as_an_error_and_never_as_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parity_volume, "WAIT_S", 0.3)
    monkeypatch.setattr(member_lenders, "UNSURE_S", 0.3)
    async with striped() as made:
        await made.write(0, 1, 2, 3, 4)
        made.free(0)
        made.free(2)
        await soon(lambda: made.volume.slab(0).mirror.asks)
        with pytest.raises(OSError, match="waits for its members"):
            await made.read(0, 1)
        await made.volume.give_up(0, 1, "gone")
        await made.volume.give_up(2, 3, "gone")
        await soon(lambda: not made.volume.slab(0).mirror.asks)
        with pytest.raises(OSError, match="two members of slab 0 were lost"):
            await made.read(0, 1)
        assert await made.read(1, 1) == [2]
        with pytest.raises(OSError, match="two members"):
            await made.volume.flush()
        await made.open(0, 11)
        await made.open(2, 12)
        await made.write(0, 8)
        await made.write(2, 9)
        assert await made.read(0, 4) == [8, 2, 9, 4]


async def test_a_write_waits_for_the_parity() -> None:
    async with striped(sealed=False) as made:
        made.ignore(2)
        writing = asyncio.create_task(made.write(0, 1))
        await soon(lambda: made.word(0, 0) == 1)
        await quiet()
        assert not writing.done()
        made.free(2)
        await writing
        assert made.whole() == [1, 2]
        assert made.volume.places.whole == {(0, 1), (1, 2)}


async def test_two_writes_to_one_row_have_an_order() -> None:
    async with striped() as made:
        await asyncio.gather(*(made.write(at % 4, at) for at in range(1, 60)))
        words = await made.read(0, 4)
        made.free(random.Random(3).choice([0, 1]))
        assert await made.read(0, 4) == words


async def test_zeros_are_written_and_read_with_a_member_less() -> None:
    async with striped() as made:
        await made.write(0, 1, 2, 3, 4)
        await made.volume.write(1, 2, None)
        made.free(1)
        assert await made.read(0, 4) == [1, 0, 0, 4]
        await made.volume.write(0, 2, None)
        assert await made.read(0, 4) == [0, 0, 0, 4]


async def test_a_member_whose_pages_no_slot_can_give_does_not_leave() -> None:
    async with striped() as made:
        await made.write(0, 1, 2, 3, 4)
        await made.volume.close_place(0, 1)
        assert await made.read(0, 4) == [1, 2, 3, 4]
        await made.write(1, 5)
        leaving = asyncio.create_task(made.volume.close_place(1, 2))
        await quiet()
        assert not leaving.done(), "its column would be the second one without a member"
        await made.open(0, 9)
        await leaving
        assert await made.read(0, 4) == [1, 5, 3, 4]


async def test_a_page_that_is_made_from_others_was_sealed_like_them() -> None:
    async with striped(sealed=True) as made:
        await made.write(0, 1, 2)
        made.free(0)
        assert await made.read(0, 2) == [1, 2]
        assert made.volume.counts(1).pages_refused == 0
        assert len(made.at(2).has(0, 1)) > PAGE, "slots are sealed as pages are"


async def test_a_member_that_missed_a_write_is_not_believed_after_a_crash() -> None:
    async with striped(deadline_s=0.3) as made:
        await made.write(0, 1, 2, 3, 4)
        made.ignore(0)
        await made.write(0, 9)
        assert made.volume.places.whole == {(1, 2), (2, 3)}
        await made.die()
        await made.start()
        assert await made.read(0, 4) == [9, 2, 3, 4]


async def test_rows_without_their_parity_get_it_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with striped() as made:
        await made.write(0, 1, 2, 3, 4)
        monkeypatch.setattr(made.volume, "_send_slots", lambda *a: asyncio.Event().wait())
        writing = asyncio.create_task(made.write(1, 5))
        await asyncio.sleep(0.1)
        await made.die()
        writing.cancel()
        monkeypatch.setattr(parity_lenders.ParityLenders, "_repair_soon", lambda self, slab: None)
        await made.start()
        assert await made.read(1, 1) == [5]
        await made.die()
        made.free(1)  # whoever read it finds it again
        await made.start()
        assert await made.read(0, 2) == [1, 5]


async def test_a_member_does_not_leave_while_a_row_has_a_copy_in_place_of_its_parity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with striped() as made:
        await made.write(0, 1, 2, 3, 4)
        made.free(0)
        await made.write(0, 5)
        with monkeypatch.context() as patch:
            patch.setattr(made.volume.lenders, "_repair_soon", lambda slab: None)
            await made.open(0, 9)
            await soon(lambda: made.whole() == [2, 3, 9])
            leaving = asyncio.create_task(made.volume.close_place(1, 2))
            await quiet()
            assert not leaving.done(), "nobody else could give its page of row 0"
        made.volume.lenders._repair_soon(made.volume.slab(0))
        await leaving
        assert await made.read(0, 4) == [5, 2, 3, 4]


async def test_what_is_lost_with_a_second_member_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second member dies while the slots are copies yet: the page that no slot gives is lost, and no other."""
    monkeypatch.setattr(member_lenders, "REOPEN_S", 0.2)
    async with striped() as made:
        await made.write(0, 1, 2, 3, 4)
        made.free(0)
        await made.write(0, 5)
        monkeypatch.setattr(made.volume.lenders, "_repair_soon", lambda slab: None)
        await made.open(0, 9)
        await soon(lambda: made.whole() == [2, 3, 9])
        made.free(1)
        await soon(lambda: made.volume.slab(0).mirror.lost)
        with pytest.raises(OSError, match="two members of slab 0 were lost"):
            await made.read(1, 1)
        with pytest.raises(OSError, match="two members of slab 0 were lost"):
            await made.volume.flush()
        assert await made.read(0, 1) + await made.read(2, 2) == [5, 3, 4]
        await made.die()
        await made.start()
        with pytest.raises(OSError, match="two members of slab 0 were lost"):
            await made.read(1, 1)


async def test_a_member_is_filled_no_faster_than_a_volume_may_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "REBUILD_BYTES_S", 64 * PAGE)
    async with striped() as made:
        await made.write(0, *range(1, 33))
        made.free(0)
        await made.write(0, 50)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await made.open(0, 9)
        await soon(lambda: 9 in made.whole())
        assert loop.time() - began_s >= 16 / 64 * 0.9
        assert await made.read(0, 2) == [50, 2]


async def test_a_read_does_not_wait_for_a_member_that_is_late() -> None:
    async with striped(deadline_s=3.0) as made:
        await made.write(0, *range(1, 9))
        for _ in range(3):
            assert await made.read(0, 8) == list(range(1, 9))
        made.ignore(0)
        began_s = asyncio.get_running_loop().time()
        assert await made.read(0, 8) == list(range(1, 9))
        assert asyncio.get_running_loop().time() - began_s < 1.0
        assert 1 in made.whole(), "it is late, and no more than that"


async def test_a_page_that_is_written_while_it_is_read_makes_no_liar_of_its_lender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a read without a lock was compared with the version that the page got meanwhile: its lender, which had
    answered the request rightly, was called a liar, and every slab that it lends was left."""
    monkeypatch.setattr(mirroring, "hedge_after_s", lambda pace_s: 60.0)
    async with striped() as made:
        await made.write(0, 1, 2)
        slab = made.volume.slab(0)
        links = list(slab.links.values())
        sessions = [cast(Any, user) for user in made.at(0).users]
        for session in sessions:
            session._stream.hold()
        reading = asyncio.create_task(made.read(0, 1))
        await soon(lambda: any(link._under_way for link in slab.links.values()))
        writing = asyncio.create_task(made.write(0, 7))
        await soon(lambda: slab.writes)
        for session in sessions:
            session._stream.go_on()
        assert await reading in ([1], [7])
        await writing
        assert [link.why for link in links] == [""] * 3 and made.whole() == [1, 2, 3]
        assert await made.read(0, 2) == [7, 2]
