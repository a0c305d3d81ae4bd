"""Running jobs whose keys move: the kept order is the one that computing every key anew gives."""

import random

from hypothesis import given
from hypothesis import strategies as st

from plugins.scheduler.machine.leader.order_book import JOB_BITS
from sim.jobs.engine_moving import Evaluated, Paced

WIDTHS = st.lists(st.integers(1, 8), min_size=1, max_size=20)


def key_of(rank: int, job: int) -> int:
    return (rank << JOB_BITS | (job * 7) % 32) << JOB_BITS | job


@given(WIDTHS, st.sampled_from([1, -1]), st.booleans(), st.randoms(use_true_random=False))
def test_a_paced_order_is_the_one_that_sorting_anew_gives(
    widths: list[int], direction: int, by_width: bool, dice: random.Random
) -> None:
    paced = Paced(widths, direction, by_width)
    seconds = {job: dice.randrange(100, 140) for job in range(len(widths))}
    moves: dict[int, bool] = {}

    def key(job: int) -> int:
        return key_of(seconds[job] * (widths[job] if by_width else 1), job)

    for _ in range(60):
        job = dice.randrange(len(widths))
        if job not in moves:
            paced.hold(job, key(job))
            moves[job] = False
        elif not moves[job]:
            paced.go(job)
            moves[job] = True
        elif dice.random() < 0.4:
            paced.drop(job)
            del moves[job]
        passed = dice.randrange(2)
        paced.now += passed
        for each, going in moves.items():
            seconds[each] += direction * passed if going else 0
        asked = dice.choice([-1, key(job), key_of(dice.randrange(900), dice.randrange(20))])
        behind = sorted(key(each) for each in moves if key(each) > asked)
        assert paced.after(0, asked) == behind
        assert paced.behind(0, asked) == sum(widths[each & 0xFFFFFFFF] for each in behind)


def test_keys_that_are_computed_are_computed_once_an_instant() -> None:
    asked: list[int] = []

    def key(job: int) -> int:
        asked.append(job)
        return (10 - job) << JOB_BITS | job

    kept = Evaluated([1, 2, 4], 2, key)
    for job in range(3):
        kept.enter(job, job % 2)
    first = kept.after(0, -1)
    assert [each & 0xFFFFFFFF for each in first] == [2, 0] and kept.behind(0, first[0]) == 1
    assert sorted(asked) == [0, 2]
    kept.now = 5
    assert kept.after(0, -1) == first and len(asked) == 4
    kept.drop(2)
    assert kept.behind(0, -1) == 1 and kept.behind(1, -1) == 2
