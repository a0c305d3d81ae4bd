"""A job keeps within its host's memory (`submit --mem`): Blocks have what is left, and the rest lie outside."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.covey.elastic_rig import ElasticProcesses
from tests.covey.plain_processes import PlainProcesses

SCRIPT = Path(__file__).with_name("spilling_script.py")
MIB = 1 << 20
STEPS, BLOCKS, BLOCK_MIB = 14, 64, 8
Jobs = Callable[..., ElasticProcesses]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Makes jobs whose Blocks are 512 MiB."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made: list[ElasticProcesses] = []

    def job(processes: int, *words: object, limit_mib: int = 0) -> ElasticProcesses:
        folder, of = tmp_path / f"j{len(made)}", map(str, (STEPS, BLOCKS, BLOCK_MIB, *words))
        limit = limit_mib * MIB
        made.append(ElasticProcesses(PlainProcesses(), folder, 4, processes, SCRIPT, *of, host_memory=limit))
        return made[-1]

    yield job
    for each in made:
        each.close()


def peaks_mib(job: ElasticProcesses) -> list[int]:
    """The most resident memory of each process, MiB."""
    return [int(each) for each in re.findall(r"peak_mib=(\d+)", job.text())]


def test_blocks_of_twice_the_limit_end_with_the_same_result_within_it(jobs: Jobs) -> None:
    free, limited = jobs(1, "none"), jobs(1, "disk", limit_mib=224)
    assert limited.digest() == free.digest()
    assert peaks_mib(free)[0] > 512
    assert peaks_mib(limited)[0] <= 224, limited.text()


def test_two_processes_that_come_to_need_more_keep_within_it_together(jobs: Jobs) -> None:
    """In each step each needs 6 MiB more, 84 MiB in the end, and has Blocks in memory: they go outside."""
    free, limited = jobs(1, "none"), jobs(2, "disk", 6, limit_mib=440)
    assert limited.digest() == free.digest()
    assert sum(peaks_mib(limited)) <= 440, limited.text()
    assert all("beside=14" in each.text() and "in memory" in each.text() for each in limited.now.values())


def test_blocks_that_cannot_fit_are_refused_before_any_is_loaded(jobs: Jobs) -> None:
    job = jobs(2, "none", limit_mib=256)
    assert {each.wait(60.0) for each in job.now.values()} == {1}
    for each in job.now.values():
        what, why, next = each.text().partition("CoveyError: ")[2].strip().splitlines()
        assert what == "data 'data' was not declared"
        assert "are 256 MiB, and --mem 256 MiB leaves " in why and "for this one of 2 processes" in why
        assert next.startswith('next: give spill="disk"')
