"""examples/elastic: four applications find what one process finds, and the same bits whatever happens to the job."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.covey.elastic_rig import ElasticProcesses
from tests.covey.plain_processes import ROOT, PlainProcesses
from tests.families import in_gate

RANKS, BLOCKS = 4, 8
WORDS = ("--check", "--blocks", str(BLOCKS), "--steps", "40", "--step-seconds", "0.01")
SMALL = {
    "mlr": ("--rows", "40", "--features", "6", "--batches", "2"),
    "lasso": ("--rows", "40", "--features", "16"),
    "nmf": ("--rows", "20", "--columns", "12"),
    "lda": ("--documents", "3", "--words", "30"),
}
"""What makes an application small, by its name."""
ELASTIC = ROOT / "examples" / "elastic.py"
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


@pytest.mark.parametrize("name", in_gate(2, SMALL))
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


@pytest.mark.parametrize(("ranks", "processes"), in_gate(1, [(4, 2), (1, 1)]))
def test_a_job_that_is_asked_to_end_continues_with_the_same_bits(tmp_path: Path, ranks: int, processes: int) -> None:
    """Each rank draws random numbers of its own; one rank has nobody else who could tell them."""
    words = "--steps", "80", "--step-seconds", "0.01", "--width", "64"
    jobs = [
        ElasticProcesses(PlainProcesses(), tmp_path / str(at), ranks, processes, ELASTIC, *words, saved=tmp_path / of)
        for at, of in enumerate(("calm", "stopped"))
    ]
    try:
        jobs[1].until(lambda: jobs[1].have_said("uses no memory") or jobs[1].have_said("has nobody"))
        time.sleep(0.2)
        jobs[1].stopped()
        step = json.loads(safe_open(tmp_path / "stopped" / "state.safetensors", "np").metadata()["step"])
        assert 0 < step < 80, "neither before it had begun, nor after its end"
        again = tmp_path / "again", ranks, ranks, ELASTIC
        jobs.append(ElasticProcesses(PlainProcesses(), *again, *words, saved=tmp_path / "stopped"))
        assert jobs[2].digest() == jobs[0].digest()
        assert f"goes on with step {step}, from " in jobs[2].text()
    finally:
        for each in jobs:
            each.close()
