"""What people type and read of elastic jobs."""

from collections.abc import Callable
from typing import Any

import pytest

from cli.main import main
from tests.cli.conftest import FakeAgent

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs agentctl; returns exit code, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.mark.parametrize(
    ("said", "workers", "most"), [("4..16", 4, 16), ("4..4", 4, None), ("4", 4, None), ("16..4", 16, 4)]
)
def test_a_range_of_workers_is_given_as_two_fields(
    run: Run, agent: FakeAgent, said: str, workers: int, most: int | None
) -> None:
    run("submit", "--workers", said, "--", "true")
    body = agent.asked[-1][1]
    assert (body["workers"], body.get("workers_max")) == (workers, most)


@pytest.mark.parametrize("said", ["few", "4..", "..16", "4-16", "4..8..16", "1.5"])
def test_what_is_no_range_is_refused_in_three_lines(run: Run, said: str) -> None:
    code, out, err = run("submit", "--workers", said, "--", "true")
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 3)
    assert lines[0] == f"agentctl: invalid --workers '{said}'"
    assert lines[2] == "  next: --workers 4, or --workers 4..16"


ELASTIC = {
    "workers_max": 16,
    "processes": 3,
    "config": 2,
    "carried": {"0": [0, 4, 8], "1": [1, 5, 9], "12": [12, 13]},
    "wanted": 5,
    "wanted_by": "ann",
}


@pytest.fixture
def view(agent: FakeAgent, job: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What the agent answers of an elastic job of 2 to 16 workers."""
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "host": "gpu1", "state": "running", "pid": 9, "code": None, "gpus": []} for rank in (0, 12)
    ]
    found = job(workers=2, elastic=ELASTIC, ranks=ranks)
    agent.replies |= {"GET /v1/jobs": [found], "GET /v1/jobs/j1": found, "GET /v1/tensors": []}
    return found


def test_scale_says_how_many_there_are_now_and_why(run: Run, agent: FakeAgent, view: dict[str, Any]) -> None:
    agent.replies["POST /v1/jobs/j1/scale"] = view | {"reason": "ann: from 2 to 3 processes: 1 more on h3"}
    code, out, _ = run("scale", "j1", "5")
    path, body = agent.asked[-1]
    assert (code, path, body["workers"]) == (0, "POST /v1/jobs/j1/scale", 5) and body["by"]
    assert out == "j1 has 3 processes: ann: from 2 to 3 processes: 1 more on h3; next: agentctl job j1\n"


def test_jobs_and_job_show_the_range_the_number_now_and_what_is_carried(
    run: Run, agent: FakeAgent, view: dict[str, Any]
) -> None:
    assert "2..16, now 3" in run("jobs")[1]
    out = run("job", "j1")[1]
    assert "2..16, now 3" in out and "5 processes: ann" in out and "configuration 2" in out
    assert "CARRIES" in out and "ranks 0 4 8" in out and "ranks 12-13" in out


def test_job_shows_shares_and_the_hosts_that_are_to_own_tables(
    run: Run, agent: FakeAgent, view: dict[str, Any]
) -> None:
    assert not {"shares", "tables"} & {line.split()[0] for line in run("job", "j1")[1].splitlines() if line}
    said: dict[str, Any] = {
        "shares": {"h1": 11, "h2": 5},
        "equal": False,
        "tables": 4,
        "owners": ["h1", "h4", "h1", ""],
    }
    view["elastic"] = ELASTIC | said
    out = [" ".join(line.split()) for line in run("job", "j1")[1].splitlines()]
    assert "shares h1: 11 h2: 5 of 16 ranks, as somebody said" in out
    assert "tables 0 2 on h1, 1 on h4, 3 anywhere" in out
    view["elastic"] = ELASTIC | said | {"equal": True, "owners": []}
    out = [" ".join(line.split()) for line in run("job", "j1")[1].splitlines()]
    assert "shares h1: 11 h2: 5 of 16 ranks" in out and not any(line.startswith("tables") for line in out)


def test_a_rank_without_a_process_of_its_own_is_shown_where_it_writes(
    run: Run, agent: FakeAgent, view: dict[str, Any]
) -> None:
    code, _, err = run("logs", "j1", "--rank", "5")
    assert code == 3 and err.splitlines() == [
        "agentctl: rank 5 of j1 has no output of its own",
        "  why:  process 1 carries it now, and writes for all the ranks that it carries",
        "  next: agentctl logs j1 --rank 1",
    ]
    code, _, err = run("logs", "j1", "--rank", "16")
    assert code == 2 and "ranks 0 to 15" in err
