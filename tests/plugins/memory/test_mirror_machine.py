"""Which of a slab's members may serve, and which must be called not whole first: the machine and what it decides by."""

import pytest

from plugins.memory.machine.mirror import Awaited, Behind, Filling, Mirror, Out, Unlinked, Whole
from plugins.memory.policy import mirroring


def a_mirror(*epochs: int) -> Mirror:
    """A machine with these whole members."""
    mirror = Mirror()
    for epoch in epochs:
        mirror.opened(epoch)
    for epoch in epochs:
        mirror.whole_now(mirror.filled(epoch))
    assert mirror.whole == list(epochs)
    return mirror


def test_a_member_whose_link_ended_is_behind_once_a_write_is_acknowledged_without_it() -> None:
    mirror = a_mirror(1, 2)
    assert mirror.written([1, 2]) == []
    assert mirror.link_ended(1) == []
    assert mirror.of(1) == Unlinked()
    assert mirror.on_record == [1, 2], "nothing was acknowledged without it"
    assert mirror.written([2]) == [1]
    assert (mirror.of(1), mirror.on_record) == (Behind(), [2])
    mirror.works_again(1)
    assert mirror.of(1) == Filling()
    assert mirror.written([1, 2]) == []
    assert mirror.filled(1) == [1]
    mirror.whole_now([1])
    assert mirror.whole == [1, 2]


def test_a_member_that_missed_nothing_is_whole_as_soon_as_its_link_works() -> None:
    mirror = a_mirror(1, 2)
    mirror.link_ended(1)
    mirror.works_again(1)
    assert mirror.of(1) == Whole()
    mirror.link_ended(1)
    mirror.falls_behind(1)
    mirror.works_again(1)
    assert mirror.of(1) == Filling()
    mirror.falls_behind(1)
    assert mirror.of(1) == Filling()


def test_when_all_links_end_those_on_record_are_asked_and_the_others_are_out() -> None:
    mirror = a_mirror(1, 2)
    mirror.opened(3)
    mirror.opened(4)
    mirror.link_ended(4)
    mirror.link_ended(1)
    assert mirror.link_ended(2) == [3, 4]
    assert mirror.asked == [1, 2]
    assert mirror.of(3) == Out()
    assert mirror.answered([2]) == [1]
    assert mirror.whole == [2]


def test_a_member_that_was_behind_is_never_asked() -> None:
    mirror = a_mirror(1, 2)
    mirror.link_ended(1)
    mirror.written([2])
    assert mirror.link_ended(2) == [1]
    assert mirror.asked == [2]
    assert mirror.of(1) == Out()


def test_after_a_crash_the_last_one_that_is_lost_takes_the_slab_with_it() -> None:
    mirror = Mirror()
    mirror.found(1)
    mirror.found(2)
    assert mirror.of(1) == Awaited()
    assert not mirror.may_leave(1, empty=False)
    assert not mirror.given_up(1)
    assert not mirror.lost
    assert mirror.given_up(2)
    assert mirror.lost
    assert not mirror.given_up(2), "once"
    mirror.opened(3)
    mirror.opened(4)
    mirror.filled(3)
    assert mirror.filled(4) == [3, 4], "it begins anew with two"


def test_the_last_whole_member_stays_until_another_is_whole() -> None:
    mirror = a_mirror(1, 2)
    assert mirror.may_leave(1, empty=False)
    mirror.leave(1)
    mirror.leave(1)
    assert not mirror.may_leave(2, empty=False)
    assert mirror.may_leave(2, empty=True)
    mirror.opened(3)
    assert mirror.may_leave(3, empty=False)
    assert not mirror.may_leave(2, empty=False), "it lacks pages"
    mirror.whole_now(mirror.filled(3))
    assert mirror.may_leave(2, empty=False)


def test_members_in_every_state_may_be_closed() -> None:
    mirror = a_mirror(1, 2)
    mirror.link_ended(1)
    mirror.leave(1)
    mirror.opened(3)
    mirror.leave(3)
    mirror.opened(4)
    mirror.link_ended(4)
    mirror.leave(4)
    assert mirror.whole == [2]
    assert mirror.filled(9) == []


def test_an_answer_that_came_before_the_end_of_its_link_puts_that_member_behind() -> None:
    mirror = a_mirror(1, 2)
    assert mirror.written([1]) == [2]
    assert mirror.of(2) == Behind()
    assert mirror.link_ended(2) == []


# ---- what it decides by ----


@pytest.mark.parametrize(
    ("whole", "has", "expected"),
    [([1, 2], [1, 2], []), ([1, 2], [2], [1]), ([1, 2], [], None), ([1], [2], None), ([1], [1, 2], [])],
)
def test_a_write_counts_when_a_whole_member_has_it_and_the_others_are_put_back(
    whole: list[int], has: list[int], expected: list[int] | None
) -> None:
    assert mirroring.acknowledged(whole, has) == expected


def test_the_soonest_is_read_from_and_now_and_then_the_other() -> None:
    paces = [(1, 0.002), (2, 0.0001)]
    assert mirroring.nearest(paces, 1) == [2, 1]
    assert mirroring.nearest([(1, 0.002), (2, None)], 1) == [2, 1], "nobody knows it yet"
    turns = [mirroring.nearest(paces, count)[0] for count in range(mirroring.LOOK_AGAIN)]
    assert turns.count(1) == 1
    assert mirroring.next_pace(None, 1.0) == 1.0
    assert mirroring.next_pace(1.0, 0.0) == pytest.approx(0.9)


def test_a_read_waits_a_few_times_the_usual_before_it_asks_the_other() -> None:
    assert mirroring.hedge_after_s(None) == 0.02
    assert mirroring.hedge_after_s(0.01) == pytest.approx(0.08)
    assert mirroring.hedge_after_s(10.0) == 0.5
    assert mirroring.rebuild_pause_s(64 << 20) == 1.0


# ---- with parity ----


def test_all_but_one_must_be_whole_to_serve() -> None:
    mirror = Mirror(needed=2, members=3)
    for epoch in (1, 2, 3):
        mirror.opened(epoch, epoch - 1)
        assert not mirror.serves
        ready = mirror.filled(epoch)
    assert ready == [1, 2, 3]
    mirror.whole_now(ready)
    assert mirror.link_ended(1) == []
    assert mirror.serves
    assert mirror.written([1, 2, 3]) == [], "it was to get nothing, so it missed nothing"
    assert mirror.written([2, 3]) == [1]
    assert mirror.of(1) == Behind()
    assert not mirror.may_leave(2, empty=False)
    assert mirror.link_ended(2) == [1]
    assert (mirror.of(2), mirror.of(3), mirror.serves) == (Awaited(), Awaited(), False)
    assert mirror.written([3]) is None
    assert mirror.given_up(2)
    assert mirror.lost
    assert mirror.answered([3]) == []
    assert (mirror.of(3), mirror.serves) == (Whole(), False)


def test_two_members_of_one_column_cannot_serve() -> None:
    """Column 0 moves: both its members are whole, and column 1 alone is missing with the parity."""
    mirror = Mirror(needed=2, members=3)
    for epoch, column in ((1, 0), (2, 1), (3, 2)):
        mirror.opened(epoch, column)
        ready = mirror.filled(epoch)
    mirror.whole_now(ready)
    mirror.opened(4, 0)
    mirror.whole_now(mirror.filled(4))
    assert mirror.link_ended(2) == []
    assert not mirror.may_leave(3, empty=False)
    mirror.link_ended(3)
    assert not mirror.serves
    assert mirror.asked == [1, 2, 3, 4]
