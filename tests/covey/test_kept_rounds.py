"""Results that ranks keep for processes that take over: asked for over messages that are lost, doubled, or garbage."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.errors import EXIT_STATE_LOST, CoveyError
from covey.healing import kept_rounds
from covey.healing.kept_rounds import AboutKept, KeptRounds, array_of_kept, kept_of, piece_of_is
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.telling import Tell, ToldByRank

RANKS = 3


class Loud:
    """A tensor that all ranks have pushed: its result."""

    def __init__(self, result: Array) -> None:
        self._result = result

    def wait(self) -> Array:
        return self._result


class PlayedRanks:
    """Ranks whose messages reach one another at once, unless they are lost or come twice."""

    def __init__(self, seed: int) -> None:
        self._draws, self.full = random.Random(seed), list[str]()
        self.people: list[str] = []
        self.ranks = {rank: self.made(rank) for rank in range(RANKS)}

    def made(self, rank: int, incarnation: int = 0) -> KeptRounds:
        return KeptRounds(rank, RANKS, incarnation, self._way(rank), self.people.append, self.full.append)

    def _way(self, sender: int) -> Callable[[Tell], None]:
        def tell(said: Tell) -> None:
            for _ in range(self._draws.choice((0, 1, 1, 2))):
                here = self.ranks.get(said.rank)
                if here is not None:
                    here.told(ToldByRank(sender, said.about, said.step, said.data))

        return tell

    def rounds(self, results: dict[str, Array]) -> None:
        for rank in self.ranks.values():
            for of, result in results.items():
                rank.round(lambda name, array, result=result, **_: Loud(result), of, result, False, None)()


def never(name: str, array: Array, **_: Any) -> Loud:
    raise AssertionError(f"a successor pushed {name}")


RESULTS = {
    "broadcast uint8": np.arange(700_000, dtype=np.float32).reshape(2, -1),
    "all_reduce int64": np.array([3.0]),
    "all_gather bfloat16": np.arange(6, dtype=np.int16).reshape(3, 2),
}


@pytest.mark.parametrize("seed", range(3))
def test_a_successor_gets_what_the_others_got_and_pushes_nothing(seed: int) -> None:
    played = PlayedRanks(seed)
    played.rounds(RESULTS)
    for rank in (0, 2):
        played.ranks[rank].over()
    played.ranks[1] = late = played.made(1, 1)
    for of, wanted in RESULTS.items():
        found = late.round(never, of, wanted, False, None)()
        assert found.dtype == wanted.dtype and found.shape == wanted.shape and np.array_equal(found, wanted)
        found += 1  # it is the script's own
    late.check_heals()
    with pytest.raises(CoveyError, match="as collective 3 before its loop, and the others called 3 there"):
        late.round(never, "barrier", np.zeros(1), False, None)


def test_a_successor_of_another_script_names_both_calls() -> None:
    played = PlayedRanks(1)
    played.rounds(RESULTS)
    late = played.ranks[1] = played.made(1, 1)
    with pytest.raises(CoveyError, match=r"calls barrier as collective 0 .* the others called broadcast uint8 there"):
        late.round(never, "barrier", np.zeros(1), False, None)


def test_two_successors_ask_who_is_left_and_three_know_that_nobody_has_it() -> None:
    played = PlayedRanks(2)
    played.rounds(RESULTS)
    played.ranks |= {rank: played.made(rank, 1) for rank in (0, 1)}
    for rank in (0, 1):
        for of, wanted in RESULTS.items():
            assert np.array_equal(played.ranks[rank].round(never, of, wanted, False, None)(), wanted)
    played.ranks = {rank: played.made(rank, 2) for rank in range(RANKS)}
    with pytest.raises(SystemExit) as ended:
        played.ranks[2].round(never, "barrier", np.zeros(1), False, None)
    assert ended.value.code == EXIT_STATE_LOST and "all ranks of this job were lost" in played.people[0]


def test_more_than_is_kept_is_said_once_and_its_names_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rounds, "KEPT_BYTES_MAX", 300)
    played, names = PlayedRanks(3), set[str]()
    one = played.ranks[0]

    def push(name: str, array: Array, **_: Any) -> Loud:
        names.add(name)
        return Loud(array)

    for _ in range(200):
        assert one.round(push, "all_reduce", np.zeros(8), False, None)().size == 8
    assert len(played.full) == 1 and played.full[0].startswith("all_reduce, with which more than")
    assert len(names) <= 70
    one.restarts = played.full[0]
    late = played.ranks[1] = played.made(1, 1)
    del played.ranks[2]
    threading.Timer(0.2, lambda: played.ranks.update({2: played.made(2)})).start()
    with pytest.raises(SystemExit):
        late.check_heals()
    assert "not replaced any more: all_reduce, with which" in played.people[-1]


@given(st.binary(max_size=200), st.integers(0, 100))
def test_garbage_is_no_answer_and_no_result(data: bytes, at: int) -> None:
    known = kept_of("all_reduce", np.arange(4.0))
    for read in (piece_of_is, array_of_kept):
        for given_bytes in (data, known[:at] + data, known[:at] + data + known[at + len(data) :]):
            try:
                read(given_bytes)
            except ValueError:
                continue
    one = PlayedRanks(4).ranks[0]
    for about in (AboutKept.ASK, AboutKept.IS):
        assert one.told(ToldByRank(1, about, 0, data))
    assert not one.told(ToldByRank(1, 5, 0, data))
