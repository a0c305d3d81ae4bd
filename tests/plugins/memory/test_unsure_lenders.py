"""Lenders that have not said what they hold since a volume began anew: asked, or given up by a person's word."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.core.ids import HostId
from plugins.facts import HostState, HostView
from plugins.memory.datapath.wire.control import PlaceDead
from plugins.memory.messages import SlabRef, SlabsAreHeld, SlabsHeld
from plugins.memory.service.unsure_lenders import HEARD_S, UnsureLenders

LENDER, EPOCH = HostId("gpu2"), 7


class Borrower:
    """A volume with one place at gpu2 that its process does not know yet."""

    def __init__(self) -> None:
        self.asked: list[HostId] = []
        self.told: list[str] = []
        self.views: list[HostView] = []
        self.holds, self.at = True, ""
        self.now_s = 0.0
        clock = SimpleNamespace(now_s=lambda: self.now_s)
        env = SimpleNamespace(clock=clock, spawn=lambda _name, work: asyncio.get_running_loop().create_task(work))
        host = SimpleNamespace(env=env, hosts=lambda: self.views, ask=self._ask)
        process = SimpleNamespace(ask=self._process)
        volume = SimpleNamespace(recovering=lambda: [SimpleNamespace(epoch=EPOCH)], process=process)
        slab = SimpleNamespace(
            places=[SimpleNamespace(epoch=EPOCH, lender=LENDER)], left={}, ref=lambda epoch: SlabRef("v", 0, epoch)
        )
        self.unsure = UnsureLenders(
            cast(Any, host), cast(Any, {"v": volume}), lambda _: cast(Any, [slab]), cast(Any, None)
        )

    async def _ask(self, plugin: str, lender: HostId, question: SlabsHeld, within_s: float) -> SlabsAreHeld:
        self.asked.append(lender)
        return SlabsAreHeld(True, question.slabs if self.holds else (), self.at)

    async def _process(self, order: Any, within_s: float) -> None:
        self.told.append(order(1).why if isinstance(order(1), PlaceDead) else order(1).address)

    async def second(self) -> None:
        self.unsure.ask()
        for _ in range(3):
            await asyncio.sleep(0)


def seen(state: HostState, boot: int) -> list[HostView]:
    return [HostView(host=LENDER, state=state, boot=boot)]


@pytest.mark.parametrize("views", [[], seen("gone", 5), seen("left", 4)], ids=["no list has it", "gone", "left"])
async def test_a_lender_that_never_comes_back_is_waited_for_no_longer(views: list[HostView]) -> None:
    """Whenever the process began anew: before the person's word, or long after it."""
    borrower = Borrower()
    borrower.views = views
    await borrower.second()
    assert (borrower.asked, borrower.told) == ([LENDER], []), "nobody said so yet"
    borrower.unsure.never_back[LENDER] = 5
    if not views:
        await borrower.second()
        assert borrower.asked.pop() == LENDER and borrower.told == [], "nobody may have spoken of it yet"
    borrower.now_s = HEARD_S
    await borrower.second()
    await borrower.second()
    assert borrower.asked == [LENDER] and borrower.told == ["gpu2 was forgotten: it will never come back"] * 2


@pytest.mark.parametrize("views", [seen("alive", 6), seen("alive", 5), seen("suspect", 5), seen("gone", 6)])
async def test_another_machine_of_that_name_is_asked_and_keeps_what_it_holds(views: list[HostView]) -> None:
    """The log is read again at each start, and says again that the one before it will never come back."""
    borrower = Borrower()
    borrower.unsure.never_back[LENDER] = 5
    borrower.views = views
    await borrower.second()
    assert (borrower.asked, borrower.told) == ([LENDER], [])
    borrower.holds = False
    await borrower.second()
    assert borrower.told == ["gpu2 no longer holds it"]


async def test_a_lender_says_where_it_serves_what_it_holds() -> None:
    borrower = Borrower()
    borrower.at = "10.0.0.2:7001"
    await borrower.second()
    assert borrower.told == ["10.0.0.2:7001"]
