"""examples/elastic: four applications find what one process finds, and the same bits whatever happens to the job."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.covey.elastic_rig import ElasticProcesses
from tests.covey.plain_processes import ROOT, PlainProcesses

RANKS, BLOCKS = 4, 8
WORDS = ("--check", "--blocks", str(BLOCKS), "--steps", "40", "--step-seconds", "0.01")
SMALL = {
    "mlr": ("--rows", "40", "--features", "6", "--batches", "2"),
    "lasso": ("--rows", "40", "--features", "16"),
    "nmf": ("--rows", "20", "--columns", "12"),
    "lda": ("--documents", "3", "--words", "30"),
}
"""What makes an application small, by its name."""
Jobs = Callable[..., ElasticProcesses]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made: list[ElasticProcesses] = []

    def make(name: str, processes: int, *more: str) -> ElasticProcesses:
        script, folder = ROOT / "examples" / "elastic" / f"{name}.py", tmp_path / str(len(made))
        words = *WORDS, *SMALL[name], *more
        made.append(ElasticProcesses(PlainProcesses(), folder, RANKS, processes, script, *words))
        return made[-1]

    yield make
    for each in made:
        each.close()


def loaded_and_moved(job: ElasticProcesses) -> tuple[int, int]:
    """How many Blocks the processes that are left have loaded, and how many came to them from others."""
    each = [process.text().partition("loaded=")[2].split() for process in job.now.values()]
    return sum(int(words[0]) for words in each), sum(int(words[1].removeprefix("moved=")) for words in each)


@pytest.mark.parametrize("name", SMALL)
def test_an_application_finds_what_one_process_finds_whatever_changes(jobs: Jobs, name: str) -> None:
    """The applications of the papers. Reference: §3.4.1."""
    alone = jobs(name, 1)
    job = jobs(name, 2)
    (new,) = job.arrange([], 1)
    job.arrange([1], 1)
    assert job.digest() == alone.digest()
    assert "checked against one process" in job.now[0].text() and "checked against one process" in alone.text()
    assert loaded_and_moved(alone) == (BLOCKS, 0) and new in job.now


def test_blocks_on_a_disk_change_no_bit(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = jobs("mlr", 1, "--spill", "disk", "--resident", "2 KiB")
    assert job.digest() == jobs("mlr", 2).digest()
    assert f"of {BLOCKS} Blocks of 'data' in memory" in job.text() and str(tmp_path) in job.text()
