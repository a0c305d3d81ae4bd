"""`put`, `get` and `update` over rounds, by real processes that come and go."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import CoveyError
from covey.job.elastic_table import ElasticTable
from tests.covey.elastic_rig import ElasticProcesses
from tests.covey.plain_processes import PlainProcesses

SCRIPT = Path(__file__).with_name("elastic_table_script.py")
STEPS = 120


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ElasticProcesses]:
    made = ElasticProcesses(PlainProcesses(), tmp_path / "j", 4, 2, SCRIPT, str(STEPS), str(tmp_path / "go on"))
    yield made
    made.close()


def test_each_element_is_delta_times_steps_times_blocks_whatever_changes(job: ElasticProcesses, tmp_path: Path) -> None:
    """Cruise's AddVector, while a process is added and another is killed for good. Reference: §3.3."""
    job.until(lambda: job.have_said("step 2\n"))
    (new,) = job.arrange([], 1)
    job.until(lambda: "step" in job.now[new].text())
    job.arrange([1], 0)
    (tmp_path / "go on").touch()
    assert job.digest() == str(3 * STEPS * 12)
    assert "moved=3" in job.now[new].text(), "the three Blocks of one rank came from the process before"


class Entered:
    """Ranks of which one is entered."""

    def __init__(self, rank: int | None) -> None:
        self.entered, self.is_looping, self.pushed = rank, True, list[Any]()

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
