"""The checker of clients' histories accepts what a single copy could have answered, and nothing else."""

import itertools
import math
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from chaos.checks.linearizable import Request, contradiction, fits
from chaos.crowds.log.books import FIRST, Asked, Count, Give, Look, Put, Take, perform

ASKED: list[Asked] = [Put(1), Put(2), Look(), Count(), Take("a"), Take("b"), Give("a"), Look()]
KEYS = ("quota/red", "jobs", "lease/7")


@st.composite
def sequential_runs(draw: st.DrawFn) -> list[Request]:
    """Histories made from one run: every request is performed at a moment of its own, which lies between its ends."""
    states: dict[str, Any] = dict.fromkeys(KEYS, FIRST)
    found = []
    for number in range(draw(st.integers(1, 24))):
        key, asked = draw(st.sampled_from(KEYS)), draw(st.sampled_from(ASKED))
        states[key], answer = perform(states[key], asked)
        early, late = draw(st.floats(0.0, 4.0)), draw(st.floats(0.0, 4.0))
        ended_s = number + late if draw(st.integers(0, 9)) else math.inf
        known = answer if ended_s < math.inf else None
        found.append(Request(f"c{number}", key, asked, number - early, ended_s, known))
    return draw(st.permutations(found))


def plain(requests: list[Request]) -> bool:
    """The definition: try every order of the answered requests with every choice of the others."""
    answered = [request for request in requests if request.is_answered]
    others = [request for request in requests if not request.is_answered]
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            if any(_explains(order) for order in itertools.permutations([*answered, *chosen])):
                return True
    return False


def _explains(order: tuple[Request, ...]) -> bool:
    state: Any = FIRST
    for at, request in enumerate(order):
        state, answer = perform(state, request.asked)
        if request.is_answered and answer != request.answer:
            return False
        if any(later.ended_s < request.began_s for later in order[at + 1 :]):
            return False
    return True


@given(sequential_runs())
def test_what_one_copy_answered_is_accepted_however_requests_overlap(history: list[Request]) -> None:
    assert contradiction(history, FIRST, perform) == ""


@given(sequential_runs(), st.data())
def test_a_short_history_is_judged_as_by_the_definition_also_with_wrong_answers(
    history: list[Request], data: st.DataObject
) -> None:
    of_one = [msgspec.structs.replace(request, key="x") for request in history[:5]]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(of_one) - 1))
        of_one[at] = msgspec.structs.replace(of_one[at], answer=data.draw(st.sampled_from([0, 1, 2, "", "a", True])))
    assert fits(of_one, FIRST, perform) == plain(of_one)


@given(sequential_runs(), st.integers(100, 109))
def test_a_stale_read_a_lost_write_and_a_number_given_twice_are_refused(history: list[Request], value: int) -> None:
    end_s = max([request.ended_s for request in history if request.is_answered], default=0.0)
    for key in KEYS:
        put = Request("w", key, Put(value), end_s + 1, end_s + 2, True)
        read = Request("r", key, Look(), end_s + 3, end_s + 4, value)
        assert contradiction([*history, put, read], FIRST, perform) == ""
        stale = msgspec.structs.replace(read, answer=value + 50)
        assert f"about {key}" in contradiction([*history, put, stale], FIRST, perform)
        lost = Request("w", key, Put(value + 1), end_s + 2.5, end_s + 2.75, True)
        assert contradiction([*history, put, lost, read], FIRST, perform)
        again = [Request(f"n{n}", key, Count(), end_s + 3 + n, end_s + 3.5 + n, value + 1) for n in range(2)]
        assert contradiction([*history, put, again[0]], FIRST, perform) == ""
        assert contradiction([*history, put, *again], FIRST, perform)


def test_an_unanswered_write_may_come_late_or_never_but_not_come_and_go() -> None:
    put = Request("w", "k", Put(5), 0.0)
    reads = [Request("r", "k", Look(), at, at + 0.5, value) for at, value in ((1, 0), (2, 5), (3, 5))]
    assert contradiction([put, *reads], FIRST, perform) == ""
    assert contradiction([put, *reads[:1]], FIRST, perform) == ""
    gone = Request("r", "k", Look(), 4.0, 4.5, 0)
    told = contradiction([put, *reads, gone], FIRST, perform)
    assert told.splitlines()[-1].startswith(("r k Look() 4.0", "w k Put"))
