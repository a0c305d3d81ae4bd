"""`put`, `get` and `update` over rounds, by real processes that come and go."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import CoveyError
from covey.job.elastic_table import ElasticTable, code_row, unlike_ranks
from tests.covey.elastic_rig import ElasticProcesses
from tests.covey.plain_processes import PlainProcesses

SCRIPT = Path(__file__).with_name("elastic_table_script.py")
STEPS = 120
Jobs = Callable[..., ElasticProcesses]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made: list[ElasticProcesses] = []

    def make(*words: str) -> ElasticProcesses:
        options = str(STEPS), str(tmp_path / "go on"), *words
        made.append(ElasticProcesses(PlainProcesses(), tmp_path / "j", 4, 2, SCRIPT, *options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_each_element_is_delta_times_steps_times_blocks_whatever_changes(jobs: Jobs, tmp_path: Path) -> None:
    """Cruise's AddVector, while a process is added and another is killed for good. Reference: §3.3."""
    job = jobs()
    job.until(lambda: job.have_said("step 2\n"))
    (new,) = job.arrange([], 1)
    job.until(lambda: "step" in job.now[new].text())
    job.arrange([1], 0)
    (tmp_path / "go on").touch()
    assert job.digest() == str(3 * STEPS * 12)
    assert "moved=3" in job.now[new].text(), "the three Blocks of one rank came from the process before"


def test_unlike_code_in_two_processes_is_refused_before_it_computes(jobs: Jobs) -> None:
    job = jobs("unlike")
    assert {first: each.wait(60.0) for first, each in job.now.items()} == {0: 1, 1: 1}, job.text()
    for each in job.now.values():
        assert "step 1" not in each.text()
        assert "ranks 0 and 1 give functions of other code\nnext: run one" in each.text()


def test_rows_of_functions_that_are_known_are_compared() -> None:
    one, other, unknown = code_row({"v": "aa", "w": "bb"}), code_row({"v": "aa", "w": "cc"}), code_row({"v": ""})
    assert (one == code_row({"w": "bb", "v": "aa"})).all() and not unknown.any()
    assert unlike_ranks(np.stack([unknown, one, one])) is None
    assert unlike_ranks(np.stack([unknown, one, one, other])) == (1, 3)


class Entered:
    """Ranks of which one is entered."""

    def __init__(self, rank: int | None) -> None:
        self.entered, self.is_looping, self.pushed = rank, True, list[Any]()
        self.leaving: list[Any] = []

    def push(self, rank: int, key: str, delta: Any, **more: Any) -> Any:
        self.pushed.append((rank, key))
        return self

    def wait(self) -> Any:
        return np.full(3, 5.0)


def table(carried: Entered | None) -> ElasticTable:
    now: list[Any] = [None]
    made = ElasticTable(lambda: now[0])
    made.put("w", np.zeros(3))
    now[0] = carried
    return made


def refused(call: Any, word: str) -> None:
    with pytest.raises(CoveyError, match=word) as error:
        call()
    assert len(str(error.value).splitlines()) == 3


def test_updates_count_once_the_loop_over_the_ranks_is_over() -> None:
    ranks = Entered(1)
    made = table(ranks)
    made.update("w", lambda w, delta: w + delta, np.ones(3))
    made.update("w", lambda w, delta: w + delta, np.ones(3))
    assert (made.get("w") == 0).all()
    ranks.is_looping = False
    assert (made.get("w") == 5).all() and (made.arrays()["w"] == 5).all() and ranks.pushed == [(1, "w")] * 2


def test_what_is_no_update_is_refused_in_three_lines() -> None:
    f = lambda w, delta: w + delta  # noqa: E731
    refused(lambda: table(None).update("w", f, np.ones(3)), "no rank was entered")
    refused(lambda: table(Entered(None)).update("w", f, np.ones(3)), "no rank was entered")
    refused(lambda: table(Entered(0)).update("w", f, np.ones(4)), "shape")
    made = table(Entered(0))
    made.update("w", f, np.ones(3))
    refused(lambda: made.update("w", lambda w, delta: w - delta, np.ones(3)), "another function")
    refused(lambda: made.put("v", np.ones(3)), "state was begun")
    refused(lambda: table(None).put("w", np.ones(3)), "one already")


def moved(rate: float, w: Any, delta: Any) -> Any:
    return w - rate * delta


def test_each_rank_may_make_its_function_anew() -> None:
    """Two equal `functools.partial`s are unlike to Python, and have no code that could be compared."""
    ranks = Entered(0)
    made = table(ranks)
    for rank in (0, 1):
        ranks.entered = rank
        made.update("w", partial(moved, 0.1), np.ones(3))
    assert ranks.pushed == [(0, "w"), (1, "w")]
