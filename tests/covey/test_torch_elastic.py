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
SCRIPT, STEPS = Path(__file__).with_name("torch_elastic_script.py"), 24
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


def taken(job: ElasticProcesses) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """For each step and rank, the samples that were taken for it, by whichever processes."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for each in [*job.now.values(), *job.ended]:
        for line in each.text().rpartition("\n")[0].splitlines():
            if line.startswith("takes "):
                step, rank, *samples = map(int, line.split()[1:])
                found.setdefault((step, rank), set()).add(tuple(samples))
    return found


@pytest.mark.parametrize("kind", ["cpu-unlike", "cpu-place"])
def test_all_that_is_a_ranks_own_moves_with_it(jobs: Jobs, kind: str) -> None:
    """The training has a GradScaler that skips steps, clipped gradients, a schedule, BatchNorm, dropout, draws of three
    generators, parameters without a gradient in some ranks or all, a place in the data; parameters differ at first."""
    words = kind, str(STEPS)
    job = jobs(1, SCRIPT, words)
    job.until(lambda: job.have_said("ends 1"))
    (new,) = job.arrange([], 1)
    job.until(lambda: "ends" in job.now[new].text())
    job.arrange([0], 2)
    assert job.digest() == fixed(jobs, SCRIPT, words)
    found = taken(job)
    assert set(found) == {(step, rank) for step in range(STEPS) for rank in range(RANKS)}
    assert all(len(each) == 1 for each in found.values()), "each rank has one set of samples, whoever computed"
