"""Each rank of an elastic job is carried by exactly one process, whatever begins and ends."""

import random
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId
from plugins.facts import Place
from plugins.scheduler.policy.carrying import (
    Carried,
    carried_after,
    carried_by_shares,
    first_carried,
    is_equal,
    shares_of,
)

A, B, C = HostId("a"), HostId("b"), HostId("c")


def is_whole(carried: Carried, ranks: int, processes: int) -> bool:
    """Whether so many processes carry each rank once, their own name first, and equally many, give or take one."""
    each = sorted(rank for carries in carried.values() for rank in carries)
    named = all(carries[0] == process for process, carries in carried.items())
    return each == list(range(ranks)) and len(carried) == processes and named and is_equal(carried)


def is_without_names(carried: Carried, ends: Collection[int], begins: int) -> bool:
    """Whether more processes begin than there are ranks that name neither one that stays nor one that ends."""
    return begins > sum(map(len, carried.values())) - len(carried)


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
            if is_without_names(carried, ends, begins):
                continue
            after = carried_after(carried, ends, begins)
            assert is_whole(after, ranks, len(carried) - len(ends) + begins)
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


# ---- shares of hosts -------------------------------------------------------------------------------------------------


def test_the_share_of_a_host_is_divided_equally_over_its_processes() -> None:
    after, names = carried_by_shares(first_carried(8, 2), (), [B], {0: A, 1: A}, {A: 5, B: 3})
    assert after == {0: (0, 2, 4), 1: (1, 3), 5: (5, 6, 7)} and names == [5]


def test_shares_that_nobody_said_are_equal() -> None:
    before = first_carried(8, 2)
    after, names = carried_by_shares(before, (), [B], {0: A, 1: A}, {})
    assert after == carried_after(before, (), 1) and names == [6]


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ({A: 5, B: 4}, "the shares of the hosts are 9 ranks together, and the job has 8"),
        ({A: 1, B: 7}, "a is to carry 1 rank with 2 processes, and each carries at least one"),
        ({A: 5, B: 2, C: 1}, "c is to carry 1 rank and has no process of the job"),
        ({A: 8}, "b has processes of the job and no share of its ranks"),
        ({A: 8, B: 0}, "b is to carry 0 ranks with 1 processes, and each carries at least one"),
    ],
)
def test_shares_that_cannot_be_are_refused_in_words(shares: dict[HostId, int], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        carried_by_shares(first_carried(8, 2), (), [B], {0: A, 1: A}, shares)


def test_a_process_that_begins_never_has_the_name_of_one_that_ends() -> None:
    """The log took it for that process, and refused for ever that one host has a process less, and another one more."""
    before = {0: (0, 2), 1: (1, 3), 4: (4,), 5: (5,)}
    after, names = carried_by_shares(before, [1, 4], [C, C], {0: A, 1: A, 4: B, 5: B}, {})
    assert not {1, 4} & set(names) and sorted(rank for each in after.values() for rank in each) == [*range(6)]
    after, names = carried_by_shares(before, [4], [C], {0: A, 1: A, 4: B, 5: B}, {A: 4, B: 1, C: 1})
    assert (after, names) == ({0: (0, 4), 1: (1, 3), 2: (2,), 5: (5,)}, [2])
    with pytest.raises(ValueError, match="for rank 1 there is no other; next: ask for fewer processes first"):
        carried_by_shares(first_carried(2, 2), [1], [B], {0: A, 1: A}, {})


@given(st.randoms(use_true_random=False))
def test_any_shares_are_carried_and_no_more_ranks_move_than_they_need(draw: random.Random) -> None:
    """Each rank is carried once; a process keeps its first rank, and as many of its ranks as it is to have; those of a
    host carry its share, equally many each."""
    hosts, ranks = [HostId(f"h{at}") for at in range(draw.randint(1, 5))], draw.randint(1, 40)
    carried = first_carried(ranks, draw.randint(1, ranks))
    where = {process: draw.choice(hosts) for process in carried}
    for _ in range(6):
        ends = draw.sample(sorted(carried), draw.randint(0, len(carried) - 1))
        begins = sorted(draw.choice(hosts) for _ in range(draw.randint(0, ranks - len(carried) + len(ends))))
        counts: dict[HostId, int] = {}
        for host in [*(where[process] for process in carried if process not in ends), *begins]:
            counts[host] = counts.get(host, 0) + 1
        shares = dict(counts)
        for _ in range(ranks - sum(counts.values())):
            shares[draw.choice(sorted(counts))] += 1
        if is_without_names(carried, ends, len(begins)):
            with pytest.raises(ValueError, match="ask for fewer processes first, and then for these"):
                carried_by_shares(carried, ends, begins, where, shares)
            continue
        after, names = carried_by_shares(carried, ends, begins, where, shares)
        assert not set(names) & set(ends)
        assert sorted(rank for each in after.values() for rank in each) == list(range(ranks))
        assert all(each[0] == process for process, each in after.items())
        stay = set(carried) - set(ends)
        assert set(after) == stay | set(names) and len(names) == len(begins)
        gone = {process: set(carried[process][: len(after[process])]) - set(after[process]) for process in stay}
        assert sum(map(len, gone.values())) <= (len(names) if ends else 0), "a process gives away what it may keep"
        where = {process: where[process] for process in carried if process not in ends} | dict(
            zip(names, begins, strict=True)
        )
        for host, share in shares.items():
            sizes = [len(after[process]) for process in after if where[process] == host]
            assert sum(sizes) == share and max(sizes) - min(sizes) <= 1
        places = [Place(host, tuple(p for p in after if where[p] == host), ()) for host in shares]
        assert shares_of(after, places) == shares
        carried = after
