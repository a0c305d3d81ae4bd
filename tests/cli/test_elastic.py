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
    "have": [0, 1],
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
    assert (code, path, body["workers"]) == (0, "POST /v1/jobs/j1/scale", 5) and "by" not in body
    assert out == "j1 has 3 processes: ann: from 2 to 3 processes: 1 more on h3; next: agentctl job j1\n"


def test_who_scales_a_job_may_say_why(run: Run, agent: FakeAgent, view: dict[str, Any]) -> None:
    agent.replies["POST /v1/jobs/j1/scale"] = view
    assert run("scale", "j1", "5")[0] == 0 and "why" not in agent.asked[-1][1]
    assert run("scale", "j1", "5", "--why", "the night is quiet")[0] == 0
    assert agent.asked[-1][1]["why"] == "the night is quiet"


def test_jobs_and_job_show_the_range_the_number_now_and_what_is_carried(
    run: Run, agent: FakeAgent, view: dict[str, Any]
) -> None:
    assert "2..16, now 3" in run("jobs")[1]
    out = run("job", "j1")[1]
    assert "2..16, now 3" in out and "5 processes: ann" in out and "configuration 2" in out
    assert "CARRIES" in out and "ranks 0 4 8\n" in out and "ranks 12-13, not begun yet\n" in out


def test_job_says_which_processes_are_yet_to_end(run: Run, view: dict[str, Any]) -> None:
    assert not [line for line in run("job", "j1")[1].splitlines() if line.startswith("to end")]
    view["elastic"] = ELASTIC | {"to_end": "its processes on gpu2 run until"}
    lines = [" ".join(line.split()) for line in run("job", "j1")[1].splitlines()]
    assert "to end its processes on gpu2 run until" in lines


def test_submit_and_job_say_that_a_range_goes_beyond_the_rack(run: Run, agent: FakeAgent, view: dict[str, Any]) -> None:
    assert "range" not in run("job", "j1")[1]
    view["elastic"] = ELASTIC | {"over_rack": "it never has more than 8 here"}
    agent.replies["POST /v1/jobs"] = view
    code, out, err = run("submit", "--workers", "2..64", "--", "true")
    assert code == 0 and err.splitlines()[0] == "note: it never has more than 8 here" and out.startswith("j1 ")
    lines = [" ".join(line.split()) for line in run("job", "j1")[1].splitlines()]
    assert "range it never has more than 8 here" in lines


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


TUNED = {
    "job": "j1",
    "coordinator": "gpu1",
    "asked": 9,
    "doing": "keeps the job as it is, and measures",
    "left_alone": False,
    "config": 2,
    "hosts": [
        {
            "host": "gpu1",
            "role": "both",
            "processes": 1,
            "ranks": 4,
            "tables": 2,
            "best_ranks": 5,
            "best_tables": 2,
            "pass_s": 0.0205,
            "card_bytes_per_s": 11.5e6,
        },
        {
            "host": "gpu2",
            "role": "server",
            "processes": 0,
            "ranks": 0,
            "tables": 1,
            "best_ranks": None,
            "best_tables": None,
            "pass_s": None,
            "card_bytes_per_s": None,
        },
    ],
    "model_bytes": 330_000,
    "step_s": 0.437,
    "best_step_s": 0.279,
    "predictions": [{"before_s": 0.435, "predicted_s": 0.279, "measured_s": 0.258}],
}


def test_tune_switches_the_tuner_on_and_shows_what_it_measured(
    run: Run, agent: FakeAgent, view: dict[str, Any]
) -> None:
    agent.replies |= {"POST /v1/jobs/j1/tune": view, "GET /v1/jobs/j1/tuner": TUNED}
    code, out, _ = run("tune", "j1")
    posted = [body for path, body in agent.asked if path == "POST /v1/jobs/j1/tune"]
    assert code == 0 and [body["on"] for body in posted] == [True] and "by" not in posted[0]
    assert "5 ranks, 2 tables" in out and "20.5 ms" in out and "-" in out
    assert "a step takes 437.0 ms, with the best division 279.0 ms" in out
    assert "predicted 279.0 ms a step, measured 258.0 ms, before 435.0 ms" in out


def test_tune_of_a_tuned_job_only_shows_unless_it_was_left_alone(
    run: Run, agent: FakeAgent, view: dict[str, Any]
) -> None:
    tuned = view | {"elastic": ELASTIC | {"tuned_by": "ann"}}
    agent.replies |= {"GET /v1/jobs/j1": tuned, "GET /v1/jobs/j1/tuner": TUNED, "POST /v1/jobs/j1/tune": tuned}
    assert run("tune", "j1")[0] == 0
    assert not [path for path, _ in agent.asked if path.startswith("POST")]
    looks = iter([TUNED | {"left_alone": True, "doing": "gave up"}] * 3)
    agent.replies["GET /v1/jobs/j1/tuner"] = lambda body: next(looks, TUNED | {"asked": 12, "doing": "began anew"})
    code, out, _ = run("tune", "j1")
    assert code == 0 and "began anew" in out and "gave up" not in out, "its coordinator hears of it a moment later"
    assert [path for path, _ in agent.asked if path.startswith("POST")] == ["POST /v1/jobs/j1/tune"]


def test_tune_off_says_that_the_division_stays(run: Run, agent: FakeAgent, view: dict[str, Any]) -> None:
    agent.replies["POST /v1/jobs/j1/tune"] = view
    code, out, _ = run("tune", "j1", "off")
    assert code == 0 and agent.asked[-1][1]["on"] is False and "its division stays as it is" in out
