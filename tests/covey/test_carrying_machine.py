"""Which ranks a process of an elastic job carries: what its machine decides, for threads and for the simulator."""

import pytest

from covey.core.errors import CoveyError
from covey.job.carrying_machine import CarryingMachine, still_needed
from covey.wire.job import Carries


def machine(*here: int) -> CarryingMachine:
    """A process that is named by rank 0 and carries these ranks, in configuration 3."""
    made = CarryingMachine(0, 5, None)
    made.told(Carries(3, {0: (0, *here), 1: (1,)}))
    assert made.to_adopt([]) == [0, *here]
    return made


def test_an_older_configuration_changes_nothing() -> None:
    """Another agent may say again what it said before."""
    process = machine(2)
    assert process.told(Carries(2, {0: (0, 1, 2)})) is None
    assert process.told(Carries(3, {0: (0, 1, 2)})) is None
    assert list(process.ours) == [0, 2] and not process.others_now


def test_a_newer_configuration_says_which_ranks_have_moved() -> None:
    process = machine(2)
    assert process.told(Carries(4, {0: (0, 1), 2: (2,)}, {1: 4, 2: 4})) == {1: 4 << 16, 2: 4 << 16}
    assert process.others_now
    assert process.to_adopt([0, 2]) == [1] and not process.others_now
    assert process.to_adopt([0, 2]) == [], "a configuration is put in force once"


def test_ranks_that_moved_in_configurations_that_were_not_heard_have_moved() -> None:
    """Their processes ask in the incarnation of the configuration in which they came, not in that of the newest."""
    process = machine(2)
    assert process.told(Carries(9, {0: (0, 2), 1: (1,), 3: (3,)}, {1: 3, 2: 8, 3: 6})) == {2: 8 << 16, 3: 6 << 16}
    assert CarryingMachine(1, 0, None).told(Carries(1, {0: (0,), 1: (1,)}, {1: 1})) == {1: 1 << 16}


def test_a_rank_comes_in_the_incarnation_of_its_configuration() -> None:
    assert machine().incarnation(4) == 4 << 16 | 5


def test_a_process_that_takes_over_joins_anew_as_a_rank_that_was_anothers_in_between() -> None:
    """Owners hear the newer process of a rank: who had joined in the configuration before answered nobody as that."""
    process = CarryingMachine(0, 5, None)
    assert process.to_join([0], {}) == ([], []), "nothing was said yet"
    process.told(Carries(3, {0: (0, 2, 3), 1: (1,)}, {2: 2, 3: 3}))
    assert process.to_join([0], {}) == ([], [2, 3])
    process.told(Carries(5, {0: (0, 2, 3), 1: (1,)}, {2: 2, 3: 5}))
    assert process.to_join([0], {2: 3, 3: 3}) == ([3], [3])
    assert process.to_join([0], {2: 3, 3: 5}) == ([], [])
    process.told(Carries(6, {0: (0, 2), 1: (1, 3)}, {2: 2, 3: 6}))
    assert process.to_join([0], {2: 3, 3: 5}) == ([3], [])


def test_a_rank_that_went_and_came_back_is_adopted_anew() -> None:
    process = machine(2)
    process.told(Carries(4, {0: (0,), 2: (2,), 1: (1,)}))
    process.to_adopt([0, 2])
    process.told(Carries(5, {0: (0, 2), 1: (1,)}))
    assert process.to_adopt([0, 2]) == [], "it has not gone yet"
    assert process.lets_go({2: 3})
    assert process.others_now and process.to_adopt([0]) == [2]


def test_a_rank_that_another_process_carries_by_now_just_goes() -> None:
    process = machine(2)
    process.told(Carries(4, {0: (0,), 2: (2,), 1: (1,)}))
    process.to_adopt([0, 2])
    assert not process.lets_go({2: 3}) and not process.others_now


def test_what_is_a_ranks_own_is_kept_until_it_is_entered_again() -> None:
    draws = iter(range(10))
    process = CarryingMachine(0, 0, lambda: next(draws))
    assert process.enter(0) is None
    process.exit(0, well=True)
    assert process.enter(1) is None
    with pytest.raises(CoveyError, match="of rank 1 is not over"):
        process.enter(0)
    process.exit(1, well=False)
    assert process.enter(0) == 0
    process.own_is(1, b"")
    assert process.own_of(1) is None


def test_all_ranks_of_a_process_wait_on_while_one_is_needed() -> None:
    class Rank:
        def __init__(self, *free: bool) -> None:
            self.free, self.waiting = [*free], 1

        def waits(self) -> None:
            self.waiting += 1

        def is_free(self, within_s: float) -> bool:
            now = self.free.pop(0)
            self.waiting -= now
            return now

    one, other = Rank(True, True), Rank(False, True)
    assert still_needed([one, other]) and (one.waiting, other.waiting) == (1, 1)
    assert not still_needed([one, other]) and (one.waiting, other.waiting) == (0, 0)
