"""A slab that looks for a place: which hosts are asked, taken and opened, and which messages come too late."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from covey.core.events import LogEvent, SetTimer, Undelivered
from covey.core.ids import HostId
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.borrower import ANSWER_S, OPEN_S
from plugins.memory.machine.borrowing.lender_search import names
from plugins.memory.messages import Done, FreeMem, Map, MrInfo, QueryMem, Renew
from tests.plugins.memory.tale import OTHERS, PAGE, SECRET, SLAB, Tale, noted, only, sent


class Search(Tale):
    """A search after slab 0 turned hot: it `asked` some hosts under `epoch`."""

    def __init__(self) -> None:
        super().__init__()
        self.actions = self.second(1000)
        self.queries = sent(self.actions, QueryMem)
        self.asked, self.epoch = [host for host, _ in self.queries], self.queries[0][1].epoch

    def offer(self, host: HostId, slabs: int, epoch: int | None = None) -> Sequence[Any]:
        return self.hear(host, FreeMem("v", 0, self.epoch if epoch is None else epoch, slabs))

    def over(self, step: str, epoch: int | None = None) -> Sequence[Any]:
        return self.tell(b.SearchOver("v", 0, self.epoch if epoch is None else epoch, step))

    def taken(self) -> HostId:
        """Let all hosts answer: the first is taken, the second has less room."""
        ((host, _),) = sent(self.offers(self.queries, 9, 5), Map)
        return host

    def granted(self) -> b.OpenSlab:
        found = only(self.hear(self.asked[0], MrInfo("v", 0, self.epoch, "10.0.0.2:7", SECRET)), b.OpenSlab)
        assert isinstance(found, b.OpenSlab)
        return found

    def opening(self) -> HostId:
        host = self.taken()
        self.granted()
        return host


def test_each_step_of_a_search_has_its_time() -> None:
    tale = Search()
    timer = only(tale.actions, SetTimer)
    assert timer.event == b.SearchOver("v", 0, tale.epoch, "answers") and timer.after_s == 1.5 * ANSWER_S == 3.0
    timer = only(tale.offers(tale.queries, 9, 5), SetTimer)
    assert timer.event.step == "map" and timer.after_s == 3.0
    timer = only(tale.hear(tale.asked[0], MrInfo("v", 0, tale.epoch, "10.0.0.2:7", SECRET)), SetTimer)
    assert timer.event.step == "open" and timer.after_s == OPEN_S


def test_an_offer_counts_once_and_only_from_who_was_asked_in_this_search() -> None:
    """Reference: §2.4.2."""
    tale = Search()
    last = tale.asked[-1]
    stranger = next(host for host in OTHERS if host not in tale.asked)
    assert tale.offer(stranger, 50) == []
    assert tale.offer(tale.asked[0], 9, tale.epoch - 1) == []
    assert tale.offer(tale.asked[0], 3) == []
    assert tale.offer(tale.asked[0], 90) == [], "told twice"
    tale.offers(tale.queries[1:-1])
    assert sent(tale.offer(last, 5), Map) == [(last, Map("v", 0, tale.epoch, SLAB, PAGE))]
    assert tale.offer(tale.asked[0], 90) == [], "one is taken already"
    assert tale.state() == "asking"


def test_an_offer_to_a_slab_that_seeks_nothing_is_not_taken() -> None:
    tale = Tale()
    _, epoch = tale.mapped()
    assert tale.hear(OTHERS[0], FreeMem("v", 0, epoch, 9)) == []
    assert tale.state() == "mapped" and tale.machine.volumes["v"].slabs[0].search is None


@pytest.mark.parametrize("step", ["answers", "map", "open"])
def test_a_timer_of_another_step_or_search_changes_nothing(step: str) -> None:
    tale = Search()
    steps: list[tuple[str, Callable[[], object]]] = [("answers", bool), ("map", tale.taken), ("open", tale.granted)]
    for name, forward in steps:
        forward()
        assert tale.over(step, tale.epoch - 1) == []
        if name != step:
            assert tale.over(step) == [], f"{step} while it waits for {name}"
    tale.tell(b.SlabOpened("v", 0, tale.epoch))
    assert tale.over(step) == [] and tale.state() == "mapped"


def test_who_does_not_answer_the_map_is_told_to_forget_it_and_the_other_is_taken() -> None:
    tale = Search()
    first = tale.taken()
    found = tale.over("map")
    assert sent(found, Done) == [(first, Done("v", 0, tale.epoch))]
    ((second, message),) = sent(found, Map)
    assert [first, second] == tale.asked[:2] and message.epoch > tale.epoch
    assert "did not answer" in next(each.reason for each in found if isinstance(each, LogEvent))


def test_a_map_that_cannot_be_delivered_is_a_refusal_at_once() -> None:
    tale = Search()
    first = tale.taken()
    found = tale.tell(Undelivered(first, Map("v", 0, tale.epoch, SLAB, PAGE)))
    assert sent(found, Done) == [(first, Done("v", 0, tale.epoch))] and len(sent(found, Map)) == 1
    assert tale.tell(Undelivered(first, Map("v", 0, tale.epoch, SLAB, PAGE))) == [], "told twice"


def test_a_slab_that_is_not_opened_in_time_is_closed_and_the_other_host_is_taken() -> None:
    tale = Search()
    first = tale.opening()
    found = tale.over("open")
    assert only(found, b.CloseSlab).epoch == tale.epoch
    assert sent(found, Done) == [] and len(sent(found, Map)) == 1
    assert only(tale.tell(b.SlabOpened("v", 0, tale.epoch)), b.CloseSlab).epoch == tale.epoch, "opened after all"
    assert sent(tale.tell(b.SlabClosed("v", 0, tale.epoch)), Done) == [(first, Done("v", 0, tale.epoch))]
    assert tale.tell(b.SlabNotOpened("v", 0, tale.epoch, "late")) == []
    assert tale.state() == "asking"


def test_a_slab_that_cannot_be_opened_is_given_back_with_the_reason() -> None:
    tale = Search()
    first = tale.opening()
    assert tale.tell(b.SlabNotOpened("v", 0, tale.epoch - 1, "late")) == []
    found = tale.tell(b.SlabNotOpened("v", 0, tale.epoch, "no route"))
    assert sent(tale.tell(b.SlabClosed("v", 0, tale.epoch)), Done) == [(first, Done("v", 0, tale.epoch))]
    assert f"{first}: no route" in [each.reason for each in found if isinstance(each, LogEvent)]


def test_a_slab_that_opens_without_being_looked_for_is_closed() -> None:
    tale = Tale()
    assert only(tale.tell(b.SlabOpened("v", 0, 7)), b.CloseSlab).epoch == 7
    tale = Search()
    tale.taken()
    assert only(tale.tell(b.SlabOpened("v", 0, tale.epoch)), b.CloseSlab).epoch == tale.epoch, "nobody granted it"
    assert tale.state() == "asking"


def test_when_nobody_has_room_the_slab_waits_longer_each_time() -> None:
    tale = Tale()
    pauses = []
    for _ in range(4):
        began_s = tale.now_s
        while not (asked := sent(tale.second(1000), QueryMem)):
            pass
        pauses.append(tale.now_s - began_s)
        assert noted(tale.offers(asked)) == ["no host has room"]
        assert tale.state() == "cold"
    assert pauses == [1, 2, 4, 8]


def test_with_nobody_to_ask_the_slab_stays_on_disk_and_says_when_it_tries_again() -> None:
    tale = Tale()
    found = tale.second(1000, peers=())
    assert noted(found) == ["no host asked"] and "stays on disk, next try in 2 s" in only(found, LogEvent).reason
    assert tale.state() == "cold"
    assert tale.second(1000) == []
    assert sent(tale.second(1000), QueryMem)


def test_the_story_names_the_hosts_without_a_slab_of_this_volume() -> None:
    """A search asks hosts first that hold no slab of the volume. Reference: §2.4.2."""
    tale = Search()
    assert only(tale.actions, LogEvent).reason.endswith(f"hosts without a slab of v: {names(tale.asked)}")
    other = Tale(slabs=2)
    lender, _ = other.mapped()
    found = other.second(1000, 1000)
    fresh = [host for host, _ in sent(found, QueryMem)]
    assert lender not in fresh
    assert only(found, LogEvent).reason.endswith(f"hosts without a slab of v: {names(fresh)}")


def test_counts_of_a_volume_that_was_detached_are_dropped() -> None:
    tale = Tale()
    assert tale.tell(b.BorrowerTick({"gone": [1000]}, ()), 1.0) == []


def test_a_lease_is_renewed_for_as_long_as_a_third_of_it() -> None:
    tale = Tale()
    tale.mapped()
    while not (found := [a for a in tale.second(1000) if not isinstance(a, (LogEvent, SetTimer))]):
        pass
    (renew,) = found
    assert isinstance(renew.message, Renew) and renew.deadline_s == 20.0
