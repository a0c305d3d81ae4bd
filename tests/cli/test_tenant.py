"""`agentctl tenant`, whose jobs a list shows, and what a user hears who is not let in."""

import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.client import Agent, AgentctlError
from cli.main import main
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import Job, Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run
from tests.covey.test_volume_users import as_user

ML = {"tenant": "ml", "users": ["ann", "bob"], "gpus": 16, "used": 4}


def test_tenants_are_listed_with_their_users_and_quotas(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/tenants"] = [ML, {"tenant": "red", "users": [], "gpus": None, "used": 0}]
    for words in (("tenant",), ("tenant", "list")):
        code, out, _ = run(*words)
        assert code == 0 and "ann bob" in out and "no limit" in out and "2 tenants" in out


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (("add", "ml", "--users", "ann, bob", "--quota", "16"), {"users": ["ann", "bob"], "is_new": True, "gpus": 16}),
        (("add", "ml", "--users", "ann"), {"users": ["ann"], "is_new": True}),
        (("set", "ml", "--add", "carol", "--remove", "bob"), {"add": ["carol"], "remove": ["bob"]}),
        (("set", "ml", "--users", ""), {"users": []}),
        (("set", "ml", "--quota", "none"), {"gpus": None}),
        (("remove", "ml"), {"users": []}),
    ],
)
def test_a_tenant_is_changed_as_typed(run: Run, agent: FakeAgent, words: tuple[str, ...], body: dict[str, Any]) -> None:
    agent.replies["POST /v1/tenants"] = ML
    code, out, _ = run("tenant", *words)
    assert agent.asked[-1] == ("POST /v1/tenants", {"tenant": "ml", **body})
    assert (code, out) == (0, "ml: ann, bob may submit for it, with a quota of 16 GPUs\n")


def test_what_cannot_be_meant_is_refused_before_it_is_asked(run: Run, agent: FakeAgent) -> None:
    for words in (("add", "ml"), ("set", "ml"), ("set", "ml", "--quota", "many"), ("drop", "ml"), ("remove",)):
        code, _, error = run("tenant", *words)
        assert code == 2 and len(error.strip().splitlines()) == 3, words
    assert not [path for path, _ in agent.asked if path.startswith("POST")]


def test_a_refusal_is_exit_4_and_three_lines(run: Run, agent: FakeAgent) -> None:
    agent.replies |= {"POST /v1/tenants": (4, 403), "POST /v1/jobs/j1/cancel": (4, 403), "GET /v1/jobs": []}
    for words in (("tenant", "add", "ml", "--users", "ann"), ("cancel", "j1")):
        code, _, error = run(*words)
        assert code == 4 and error.splitlines() == ["agentctl: no", "  why:  because", "  next: do this"]


def test_a_list_shows_whose_jobs_these_are_and_nothing_that_is_not_told(run: Run, agent: FakeAgent, job: Job) -> None:
    outline: dict[str, Any] = {"name": "", "argv": [], "cwd": "", "reason": "", "user": "ann"}
    outline |= {"state": "running", "over": False, "step": None}
    agent.replies |= {"GET /v1/jobs": [job(**outline), job(id="j2")], "GET /v1/jobs/j1": job(**outline)}
    code, out, _ = run("jobs")
    assert code == 0 and "USER" in out and "ann" in out
    code, out, _ = run("job", "j1")
    assert code == 0 and "user" in out and "command" not in out and "directory" not in out


@pytest.mark.parametrize("flags", [(), ("-f",), ("--rank", "0"), ("-f", "--json")])
def test_output_of_another_user_is_refused_at_once(
    run: Run, agent: FakeAgent, job: Job, flags: tuple[str, ...]
) -> None:
    agent.replies |= {"GET /v1/jobs/j1": job(argv=[], state="running"), "GET /v1/jobs/j1/logs": (4, 403)}
    code, out, error = run("logs", "j1", *flags)
    assert (code, out) == (4, "") and "because" in error and "rank" not in error


def test_nothing_that_agentctl_sends_says_who_it_is(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies |= {"POST /v1/jobs/j1/scale": job(), "POST /v1/jobs/j1/cancel": job(), "POST /v1/jobs": job()}
    agent.replies |= {"POST /v1/hosts/gpu1/drain": [], "POST /v1/jobs/j1/move": job(), "POST /v1/tenants": ML}
    run("scale", "j1", "3")
    run("cancel", "j1")
    run("hosts", "drain", "gpu1")
    run("move", "j1", "gpu1")
    run("submit", "--", "true")
    run("tenant", "set", "ml", "--add", "ann")
    bodies = [body for path, body in agent.asked if path.startswith("POST") and body]
    assert len(bodies) >= 5 and not [body for body in bodies if {"by", "user", "uid", "owner", "asker"} & body.keys()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("mode", "hint"), [(0o660, "it is for group"), (0o600, "sudo -u root agentctl")])
def test_who_may_not_connect_is_told_who_may(tmp_path: Path, mode: int, hint: str) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        os.chmod(path, mode)
        said = as_user(64_001, partial(refusal, path))
    assert said.startswith("5 no agent answers") and hint in said


def refusal(path: str) -> str:
    try:
        Agent([f"unix:{path}"]).get("hosts")
    except AgentctlError as error:
        return f"{error.code} {error.what}: {error.why}: {error.next}"
    return "it answered"


def test_help_of_each_tenant_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("list", "add", "set", "remove"):
        with pytest.raises(SystemExit):
            main(["tenant", verb, "--help"])
        assert "usage: agentctl tenant" in capsys.readouterr().out
