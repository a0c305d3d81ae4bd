"""A PyTorch training whose ranks are carried by processes that come and go: the same bits, in real processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.covey.elastic_rig import ElasticProcesses
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH

pytestmark = NEEDS_TORCH
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "elastic_ddp.py"
WORDS = ("--epochs", "2", "--width", "32", "--batch", "32", "--step-seconds", "0.002")
RANKS = 4
Jobs = Callable[..., ElasticProcesses]
_fixed: dict[tuple[Path, tuple[str, ...]], str] = {}


@pytest.fixture
def jobs(forks: Forks, tmp_path: Path) -> Iterator[Jobs]:
    made: list[ElasticProcesses] = []

    def make(processes: int, script: Path = EXAMPLE, words: tuple[str, ...] = WORDS) -> ElasticProcesses:
        made.append(ElasticProcesses(forks, tmp_path / str(len(made)), RANKS, processes, script, *words))
        return made[-1]

    yield make
    for each in made:
        each.close()


def fixed(jobs: Jobs, script: Path = EXAMPLE, words: tuple[str, ...] = WORDS) -> str:
    """The digest of a job with one process for each rank."""
    if (script, words) not in _fixed:
        _fixed[script, words] = jobs(RANKS, script, words).digest()
    return _fixed[script, words]


@pytest.mark.parametrize("processes", [1, 2])
def test_few_processes_learn_what_many_learn(jobs: Jobs, processes: int) -> None:
    assert jobs(processes).digest() == fixed(jobs)


def test_processes_that_come_and_are_killed_leave_the_same_bits(jobs: Jobs) -> None:
    job = jobs(2)
    job.until(lambda: job.have_said("epoch 0"))
    job.arrange([], 1)
    job.arrange([1], 1)
    assert job.digest() == fixed(jobs)
