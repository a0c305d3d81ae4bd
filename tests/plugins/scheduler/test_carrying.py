"""Each rank of an elastic job is carried by exactly one process, whatever begins and ends."""

import random

import pytest

from plugins.scheduler.policy.carrying import Carried, carried_after, first_carried


def whole(carried: Carried, ranks: int, processes: int) -> None:
    each = sorted(rank for carries in carried.values() for rank in carries)
    assert each == list(range(ranks)) and len(carried) == processes
    assert all(carries[0] == process for process, carries in carried.items())
    sizes = [len(carries) for carries in carried.values()]
    assert max(sizes) - min(sizes) <= 1


def test_a_job_starts_with_its_ranks_dealt_out() -> None:
    assert first_carried(6, 4) == {0: (0, 4), 1: (1, 5), 2: (2,), 3: (3,)}


def test_what_a_process_carried_goes_to_those_that_are_left() -> None:
    before = first_carried(16, 4)
    assert carried_after(before, {3}, 0) == {0: (0, 4, 8, 12, 3, 7), 1: (1, 5, 9, 13, 11), 2: (2, 6, 10, 14, 15)}


def test_a_new_process_is_named_by_the_first_rank_that_it_takes() -> None:
    assert carried_after({0: (0, 1, 2, 3)}, (), 1) == {0: (0, 1), 2: (2, 3)}


def test_every_rank_is_carried_once_after_any_changes() -> None:
    draw = random.Random(7)
    for _ in range(300):
        ranks = draw.randint(2, 64)
        carried = first_carried(ranks, draw.randint(1, ranks))
        for _ in range(12):
            ends = draw.sample(sorted(carried), draw.randint(0, len(carried) - 1))
            begins = draw.randint(0, ranks - len(carried) + len(ends))
            after = carried_after(carried, ends, begins)
            whole(after, ranks, len(carried) - len(ends) + begins)
            carried = after


def test_a_change_moves_no_more_ranks_than_sizes_need() -> None:
    before = first_carried(16, 8)
    after = carried_after(before, (), 8)
    stayed = sum(len(set(before[each]) & set(after[each])) for each in before)
    assert stayed == 8


@pytest.mark.parametrize("ends, begins", [((0, 1), 0), ((), 3)])
def test_no_process_and_too_many_are_refused(ends: tuple[int, ...], begins: int) -> None:
    with pytest.raises(ValueError, match="processes cannot carry 4 ranks"):
        carried_after(first_carried(4, 2), ends, begins)
