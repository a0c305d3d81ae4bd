"""Slurm's names, on a fake agent: what `sacct` shows of the log and of the books, whose jobs `--me` means, and that
nothing of a job commands a terminal."""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cli.client import AgentctlError
from cli.slurm import names
from plugins.history_views import JobReportView
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import Job
from tests.cli.test_books import ROWS, WHOLE, row, told

By = Callable[..., list[str]]


@pytest.fixture
def by_name(capsys: pytest.CaptureFixture[str]) -> By:
    """A function that runs a command of Slurm and returns the lines that it prints, those of stderr last."""

    def typed(name: str, *words: str) -> list[str]:
        names.run(name, words)
        out = capsys.readouterr()
        return [*out.out.splitlines(), *out.err.splitlines()]

    return typed


def ended(job: Job, id: str, **said: Any) -> dict[str, Any]:
    times = {"submitted_wall_s": 1_790_000_100.0, "started_wall_s": 1_790_000_110.0, "ended_wall_s": 1_790_000_170.0}
    return job(**{"id": id, "state": "done", "ended_as": "done", "exit_code": 0, "times": times, "uid": 64001, **said})


def test_sacct_shows_the_log_and_what_the_log_has_forgotten(by_name: By, agent: FakeAgent, job: Job) -> None:
    agent.replies["GET /v1/jobs"] = [ended(job, "j3", state="failed", ended_as="timeout", exit_code=143), job(id="j9")]
    agent.replies["GET /v1/history"] = told(*ROWS)
    lines = by_name("sacct", "-nP", "-o", "JobID,User,State,ExitCode,NodeList,Elapsed")
    assert lines == [
        "1|ann|COMPLETED|0:0|gpu1,gpu2|0:25",
        "2|ann|COMPLETED|0:0|gpu1,gpu2|0:25",
        "3||TIMEOUT|0:15|gpu1|1:00",
        "4|ann|CANCELLED|0:15|gpu1,gpu2|0:00",
        "9||RUNNING|0:0|gpu1|1:00",
    ], "what both have is the log's"
    agent.replies["GET /v1/jobs"] = [job(id="j9")]
    assert by_name("sacct", "-nP", "-s", "CANCELLED", "--account", "ml,red", "-o", "JobID") == ["4", "9"]
    asked = [path for path, _ in agent.asked if path.startswith("GET /v1/history")]
    assert "limit=1000" in asked[0] and "tenant" not in asked[1]
    since = by_name("sacct", "-nP", "-S", "2026-09-21T13:00", "-o", "JobID")
    assert "9" in since and "since_wall_s=" in [path for path, _ in agent.asked][-1]
    assert by_name("sacct", "-nP", "-E", "2020-01-01", "-o", "JobID") == ["9"], "submitted in 1970"
    with pytest.raises(AgentctlError, match="invalid --starttime soon"):
        by_name("sacct", "-S", "soon")


def test_sacct_asks_for_records_of_named_jobs_and_says_what_it_cannot_read(
    by_name: By, agent: FakeAgent, job: Job
) -> None:
    agent.replies["GET /v1/jobs"] = [ended(job, "j30")]
    agent.replies["GET /v1/jobs/j3/report"] = msgspec.to_builtins(JobReportView(job=row(3), over=True))
    lines = by_name("sacct", "-nP", "-j", "3,30,4", "-o", "JobID,State")
    assert lines[:2] == ["3|COMPLETED", "30|COMPLETED"] and "no GET" not in lines[2] and "/v1/jobs/j4" in lines[2]
    agent.replies["GET /v1/history"] = (4, 403)
    lines = by_name("sacct", "-nP", "-o", "JobID")
    assert lines[0] == "30" and "without jobs that the log has forgotten" in lines[1]
    agent.replies["GET /v1/history"] = told(**{**WHOLE, "missing": 3})
    agent.unanswered = [{"host": "gpu2", "why": "it is gone", "age_s": None}]
    lines = by_name("sacct", "-nP", "-o", "JobID")
    assert "3 more jobs of which no record was found" in lines[1] and "gpu2 is missing" in lines[2]


def test_me_is_who_types_also_where_the_agent_shows_all(
    by_name: By, agent: FakeAgent, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root and the agent's own user are shown all jobs as theirs: `scancel --me` must not end everybody's."""
    monkeypatch.setattr(os, "geteuid", lambda: 64002)
    own, nobodys = job(id="j2", user="bob", uid=64002), job(id="j3", user="", uid=None)
    agent.replies["GET /v1/jobs"] = [job(id="j1", user="ann", uid=64001), own, nobodys]
    agent.replies |= {f"POST /v1/jobs/j{number}/cancel": job() for number in (1, 2, 3)}
    assert by_name("squeue", "-h", "--me", "-o", "%i") == ["2", "3"]
    assert [path for path, _ in agent.asked][-1] == "GET /v1/jobs?mine=1"
    by_name("scancel", "--me")
    assert [path.split("/")[3] for path, _ in agent.asked if path.startswith("POST")] == ["j2", "j3"]
    by_name("scancel", "-t", "PENDING")
    assert "GET /v1/jobs?mine=1&state=queued" in [path for path, _ in agent.asked], "a user's own ones"


def test_nothing_of_a_job_commands_a_terminal(by_name: By, agent: FakeAgent, job: Job) -> None:
    wild = job(cwd="/home/\x1b]0;x\x07", argv=["sh", "-c", "a\nb\x9b2J"], stdout="/\x1b[2J", uid=64001)
    agent.replies |= {"GET /v1/jobs": [wild], "GET /v1/jobs/j1": wild, "GET /v1/history": told()}
    for words in (("squeue", "-o", "%Z %o"), ("scontrol", "show", "job", "1"), ("sacct", "-o", "JobID,WorkDir")):
        for line in by_name(*words):
            assert line.isprintable(), (words, line)
