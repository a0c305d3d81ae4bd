"""Slurm's names, on a fake agent: what `sacct` shows of the log and of the books, whose jobs `--me` means, and that
nothing of a job commands a terminal."""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.client import AgentctlError
from cli.slurm import books, names
from covey.hooks import SITE
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


def test_sinfo_shows_alike_hosts_in_a_line_and_what_is_not_known_as_that(by_name: By, agent: FakeAgent) -> None:
    def host(name: str, **said: Any) -> dict[str, Any]:
        return {"host": name, "state": "alive", "address": "10.0.0.1:7", "gpus_total": 8, "gpus_free": 8} | said

    agent.replies["GET /v1/hosts"] = [
        *(host("gpu1"), host("gpu2"), host("gpu3", gpus_free=3), host("gpu4", state="dead")),
        *(host("gpu5", drained_by="ann"), host("gpu6", cordoned_by="bob"), host("gpu7", gpus_total=None)),
    ]
    assert by_name("sinfo", "-h", "-o", "%t %D %N") == [
        "down 1 gpu4", "drain 2 gpu5,gpu6", "idle 2 gpu1,gpu2", "mix 1 gpu3", "unknown 1 gpu7",
    ]  # fmt: skip
    assert by_name("sinfo", "-h", "-o", "%P %D") == ["covey* 7"]
    assert by_name("sinfo", "-hN", "-t", "idle,drained", "-o", "%n %E") == [
        *("gpu1 none", "gpu2 none", "gpu5 drained by ann", "gpu6 cordoned by bob")
    ]
    assert "State=UNKNOWN" in "".join(by_name("scontrol", "show", "node", "gpu7"))
    assert "TotalNodes=7" in "".join(by_name("scontrol", "show", "partition"))
    with pytest.raises(AgentctlError, match="there is no host gpu9"):
        by_name("scontrol", "show", "node", "gpu9")
    with pytest.raises(AgentctlError, match="invalid --clusters=other"):
        by_name("sinfo", "-M", "other")


@pytest.mark.parametrize(
    ("text", "ago_s"), [("now", 0), ("now-2days", 172_800), ("now-90", 90), ("now-1hour", 3600), ("3h", 10_800)]
)
def test_sacct_reads_slurms_times(text: str, ago_s: float) -> None:
    found = books.moment(text)
    assert found is not None and abs(time.time() - ago_s - found) < 60


def test_srun_gives_a_command_its_step_also_where_nobody_left_slurms_variables() -> None:
    srun = Path(SITE).parent / "slurm/srun"
    given = {"COVEY_RANK": "1", "COVEY_WORLD_SIZE": "4", "COVEY_NODES": "a,b", "COVEY_JOB_ID": "j7", "LOCAL_RANK": "0"}
    given |= {"PATH": os.environ["PATH"], "TORCHELASTIC_RUN_ID": "j7"}
    shown = "echo $SLURM_JOB_ID $SLURM_PROCID $SLURM_NTASKS ${TORCHELASTIC_RUN_ID-none}"
    for tasks, said in (([], "7 1 4 none\n"), (["-n2"], "7 1 2 none\n"), (["-n1"], "")):
        found = subprocess.run([srun, *tasks, "sh", "-c", shown], env=given, capture_output=True, text=True, check=True)
        assert found.stdout == said


def test_sacctmgr_shows_whose_accounts_there_are_and_changes_nothing(by_name: By, agent: FakeAgent) -> None:
    agent.replies["GET /v1/tenants"] = [
        {"tenant": "ml", "gpus": 8, "used": 2, "users": ["ann", "bob"]},
        {"tenant": "red", "gpus": None, "used": 0, "users": ["ann"]},
    ]
    asked_by_snakemake = ("-n", "-s", "list", "user", "ann", "format=account%256")
    assert [line.strip() for line in by_name("sacctmgr", *asked_by_snakemake)] == ["ml", "red"]
    assert by_name("sacctmgr", "-nP", "show", "user", "nobody", "format=account") == []
    assert by_name("sacctmgr", "-P", "show", "accounts") == ["Account|GrpTRES", "ml|gres/gpu=8", "red|"]
    some = ("show", "assoc", "where", "user=bob,eve", "format=cluster,account,user")
    assert by_name("sacctmgr", "-np", *some) == ["covey|ml|bob|"]
    for words, what in (
        (("add", "user", "eve"), "sacctmgr has no add here"),
        ((), "sacctmgr has no command here"),
        (("show", "qos"), "sacctmgr shows no 'qos' here"),
        (("show", "user", "format=Fairshare"), "invalid field Fairshare"),
        (("show", "user", "qos=high"), "unknown condition qos=high"),
        (("show", "user", "cluster=other"), "there is no cluster other"),
    ):
        with pytest.raises(AgentctlError, match=re.escape(what)):
            by_name("sacctmgr", *words)
