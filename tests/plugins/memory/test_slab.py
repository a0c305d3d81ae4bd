"""The facts that a borrower remembers of one slab and of one volume, and which of its states may follow which."""

from collections.abc import Callable

import pytest

from covey.core.ids import HostId
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.lender_search import Querying, names
from plugins.memory.machine.borrowing.place import SlabPlace
from plugins.memory.machine.borrowing.slab import BorrowedSlab, BorrowedVolume, Closing, Mapped, Migrating, counted
from plugins.memory.messages import Done, Evict, FreeMem, MrInfo, QueryMem
from tests.plugins.memory.tale import OTHERS, PAGE, SECRET, SLAB, Tale, noted, sent

A, B, C = HostId("a"), HostId("b"), HostId("c")


def place(lender: HostId, epoch: int = 1) -> SlabPlace:
    return SlabPlace(epoch, lender, "10.0.0.2:7", b"s" * 16)


def querying(epoch: int, *asked: HostId, **offers: int) -> Querying:
    return Querying(epoch=epoch, asked=asked, offers={HostId(host): slabs for host, slabs in offers.items()})


def held(*places: SlabPlace, index: int = 0) -> BorrowedSlab:
    slab = BorrowedSlab("v", index)
    slab.found(places)
    return slab


def searching(slab: BorrowedSlab, *asked: HostId) -> BorrowedSlab:
    slab.seek(querying(7, *asked))
    return slab


def test_the_story_of_a_search_says_what_each_offered_and_who_was_silent() -> None:
    assert querying(1, A, B, b=3, a=5).said == "a offers 5, b offers 3"
    assert querying(1, A, B, a=0).said == "a offers 0, b silent"
    assert querying(1, A, B).said == "a and b silent"
    assert (names([]), counted(1), counted(2)) == ("none", "1 slab", "2 slabs")


def test_a_volume_counts_as_its_slabs_change() -> None:
    slabs = [BorrowedSlab("v", index) for index in range(2)]
    volume = BorrowedVolume(64, 4, slabs, 20.0, None)
    slab = searching(slabs[0], A, B)
    assert (volume.by_host.chosen, volume.by_host.near) == ({}, {A: 1, B: 1})
    slab.search_on(querying(7, A, B, a=1).requesting(A))
    assert (volume.by_host.chosen, volume.by_host.near) == ({A: 1}, {A: 1, B: 1})
    slab.search_ended(0.0, late=False)
    assert (volume.by_host.chosen, volume.by_host.near) == ({}, {})
    slab.found([place(A)])
    slabs[1].found([place(A, 2), place(B, 3)])
    assert (volume.by_host.chosen, volume.by_host.near) == ({A: 2, B: 1}, {A: 2, B: 1})
    slabs[1].found([])
    slab.found([])
    assert (volume.by_host.chosen, volume.by_host.near) == ({}, {})
    volume.check()


def test_every_epoch_is_known_under_which_a_lender_may_hold_it() -> None:
    assert BorrowedSlab("v", 0).epochs == []
    slab = searching(held(place(A, 3)), B)
    slab.left = {2: C}
    assert slab.epochs == [3, 7, 2]
    assert held(place(A, 3), place(B, 4)).epochs == [3, 4]


@pytest.mark.parametrize(
    ("slab", "change", "says"),
    [
        (held(), lambda slab: slab.close(), "closes nothing"),
        (held(place(A), place(B, 2)), lambda slab: slab.close(), "closes nothing"),
        (held(), lambda slab: slab.evict(), "evicted from nowhere"),
        (held(place(A)), lambda slab: slab.next_gone(), "does not move"),
        (searching(held(place(A)), B), lambda slab: slab.seek(querying(8, C)), "searches twice"),
        (searching(held(), B), lambda slab: slab.seek(querying(8, C)), "searches twice"),
        (held(place(A), place(B, 2)), lambda slab: slab.seek(querying(8, C)), "searches twice"),
        (searching(held(), B), lambda slab: slab.opened(), "opens nothing"),
        (held(place(A)), lambda slab: slab.search_on(querying(8, C)), "does not search"),
    ],
)
def test_what_a_slab_cannot_do_is_refused(
    slab: BorrowedSlab, change: Callable[[BorrowedSlab], object], says: str
) -> None:
    before = slab.phase
    with pytest.raises(AssertionError, match=f"slab/v/0.*{says}"):
        change(slab)
    assert slab.phase == before


# ---- the volume's process was found, and its word counts -------------------------------------------------------------


def asked(tale: Tale) -> list[tuple[HostId, QueryMem]]:
    return sent(tale.second(1000), QueryMem)


def found(tale: Tale, *places: SlabPlace) -> list[str]:
    return noted(tale.tell(b.VolumeFound("v", 1, SLAB, PAGE, tuple((0, each) for each in places))))


def phase(tale: Tale) -> type:
    return type(tale.machine.volumes["v"].slabs[0].phase)


def test_a_place_found_while_others_are_asked_is_used_and_the_search_goes_on() -> None:
    """The place was closed, and the answer of the process is older than that."""
    tale = Tale()
    (first, query), *_ = asked(tale)
    assert found(tale, place(OTHERS[3], 5)) == ["found again"]
    assert phase(tale) is Migrating and tale.state() == "reopening"
    assert tale.hear(first, FreeMem("v", 0, query.epoch, 5)) == []
    assert found(tale) == ["lost"]
    assert tale.state() == "asking"


def test_nothing_comes_of_a_search_beside_a_place_and_the_place_stays() -> None:
    tale = Tale()
    hosts = asked(tale)
    found(tale, place(OTHERS[3], 5))
    assert noted(tale.offers(hosts)) == ["no host has room"]
    assert phase(tale) is Mapped
    assert found(tale) == ["lost"] and tale.state() == "cold"


def test_a_slab_evicted_while_a_search_is_under_way_begins_no_second_one() -> None:
    tale = Tale()
    hosts = asked(tale)
    found(tale, place(OTHERS[3], 5))
    actions = tale.hear(OTHERS[3], Evict("v", 0, 5, 10.0))
    assert sent(actions, QueryMem) == [] and noted(actions) == ["evicted"]
    assert tale.state() == "moving"
    assert noted(tale.offers(hosts)) == ["no host has room"]
    assert phase(tale) is Closing


def test_of_two_places_found_the_older_one_is_closed_and_no_third_is_searched_for() -> None:
    tale = Tale()
    hosts = asked(tale)
    old, new = place(OTHERS[2], 5), place(OTHERS[3], 6)
    assert found(tale, new, old) == ["found again"]
    assert phase(tale) is Closing and tale.machine.volumes["v"].slabs[0].search is None
    assert tale.offers(hosts, 5, 5) == [], "what they offer is not taken"
    late = tale.hear(hosts[0][0], MrInfo("v", 0, hosts[0][1].epoch, "10.0.0.3:7", SECRET))
    assert sent(late, Done) == [(hosts[0][0], Done("v", 0, hosts[0][1].epoch))]
    tale.tell(b.SlabClosed("v", 0, 5))
    assert tale.machine.volumes["v"].slabs[0].place == new
