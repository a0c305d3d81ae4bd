"""Every `--help` ends with examples, and each example runs: against a fake agent that answers what an agent would."""

import contextlib
import os
import pty
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.examples import EXAMPLES
from cli.main import NOUNS, VERBS, parse
from plugins.history_views import JobReportView, gpu_seconds
from tests.agent.ports.test_job_records import HELD
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import HOSTS, STORY, Job, Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run
from tests.cli.test_books import WHOLE, row
from tests.cli.test_doctor import STATUS
from tests.cli.test_elastic import TUNED
from tests.cli.test_joining import FakeMember
from tests.cli.test_joining import member as member
from tests.cli.test_login import certified
from tests.cli.test_reaching import a_ping
from tests.cli.test_voters import view as voters

COMMANDS = ["", *NOUNS, *(f"{noun} {verb}" for noun, verbs in VERBS.items() for verb in verbs)]
LINES = sorted({line for lines in EXAMPLES.values() for line in lines})
EXITS = {"agentctl doctor": 1, "agentctl top": 2}
"""Example -> its exit code, where that is not 0: this rack has a plugin that failed, and a host that is suspected; only
standard input is a terminal here (tests/cli/test_top.py presses the keys of top)."""
SESSION = {
    "job": "j1",
    "host": "gpu1",
    "epoch": 5,
    "session": "s",
    "at": 0,
    "taken": 0,
    "kept_s": 600.0,
    "again": False,
}
OVER = {"state": "done", "exit_code": 0, "reason": "all ranks ended well"}
CHECKPOINT = {"step": 7, "wall_s": 2e9, "path": "/saved", "host": "gpu1"}
ACCOUNT = {"gpu_s": 9.0, "records": 1, "since_wall_s": 1.0}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_ends_with_examples_of_that_command(
    run: Run, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with contextlib.suppress(SystemExit):  # as argparse ends after its help
        run(*command.split(), "--help")
    out = capsys.readouterr().out if command else run("--help")[1]
    end = out.rstrip().splitlines()[-len(EXAMPLES[command]) - 1 :]
    assert end == ["examples:" if len(end) > 2 else "example:", *(f"  {line}" for line in EXAMPLES[command])]
    for line in EXAMPLES[command]:
        assert parse(shlex.split(line)[1:]).noun.startswith(command), line


def test_there_are_no_examples_of_what_is_no_command() -> None:
    assert sorted(EXAMPLES) == sorted(COMMANDS)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.usefixtures("rack", "terminal")
def test_an_example_runs(run: Run, member: FakeMember, line: str) -> None:
    code, _, err = run(*(member.at if word == "gpu1:7946" else word for word in shlex.split(line)[1:]))
    assert code == EXITS.get(line, 0), err


def story(job: Job) -> Any:
    """The answers to questions about job j1, one after the other: it runs, and is over soon; queued again it goes on
    from its checkpoint."""
    asked: list[None] = []
    is_again = False

    def seen(_: Any) -> Any:
        asked.append(None)
        if is_again:
            return job(epoch=6, step=8, seen={"saved": CHECKPOINT})
        return job(seen={"saved": None}, **(OVER if len(asked) > 2 else {}))

    def again(_: Any) -> Any:
        nonlocal is_again
        is_again = True
        return job(state="queued", reason="stopped by ann")

    return {"GET /v1/jobs/j1": seen, "POST /v1/jobs/j1/requeue": again}


@pytest.fixture
def rack(agent: FakeAgent, job: Job, member: FakeMember, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    """A rack on which everything that the examples ask for is possible, asked from a folder with a token."""
    home = f'name = "gpu9"\nstate_dir = "{tmp_path}/state"\nrun_dir = "/tmp/covey-examples-{os.getpid()}"\n'
    (tmp_path / "agent.toml").write_text(home)
    token = member.token().text
    (tmp_path / "token.txt").write_text(token)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    tenant = {"tenant": "ml", "users": ["ann", "bob"], "gpus": 16, "used": 0}
    agent.replies |= {
        **{f"POST /v1/jobs/j1/{word}": job() for word in ("cancel", "hold", "release", "priority", "update", "scale")},
        **{f"POST /v1/jobs/j1/{word}": job() for word in ("move", "tune")},
        **story(job),
        "DELETE /v1/volumes/demo": {},
        "DELETE /v1/volumes/swap1": {},
        "GET /v1/gossip": [],
        "GET /v1/groups": [],
        "GET /v1/history": {"jobs": [], **WHOLE},
        "GET /v1/interference": [],
        "GET /v1/jobs/j1/curve": {"id": "j1", "points": [], "unanswered": []},
        "GET /v1/hosts": [HOSTS[0], HOSTS[1] | {"state": "alive", "drained_by": "ann", "slabs_lent": 0}],
        "GET /v1/jobs/j1/logs": {"data": "", "offset": 0, "end": True, "host": "gpu1", "size": 0, "timed": None},
        "GET /v1/jobs/j1/report": msgspec.to_builtins(JobReportView(job=row(1), over=True)),
        "GET /v1/hosts/gpu2/ping": a_ping(),
        "GET /v1/links": [],
        "GET /v1/status": {**STATUS, "http": {"bind": "127.0.0.1:8470", "read_open": False}},
        "GET /v1/jobs/j1/tuner": TUNED,
        "GET /v1/keys": [{"host": "gpu1", "ids": ["5eed"]}],
        "GET /v1/report": {
            "by": "user",
            "rows": [],
            "live": 0,
            "total": msgspec.to_builtins(gpu_seconds(HELD)),
            **WHOLE,
        },
        "GET /v1/tenants": [tenant],
        "GET /v1/voters": voters("gpu1", "gpu4"),
        "GET /v1/why/host/gpu2": [STORY],
        "POST /v1/hosts/gpu2/drain": [],
        "POST /v1/jobs": job(),
        "POST /v1/jobs/j1/checkpoint": {"state": "saved", "number": 1, **CHECKPOINT},
        "POST /v1/jobs/j1/sessions": SESSION,
        "POST /v1/jobs/j1/stacks": [{"rank": 0, "host": "gpu1", "why": "", "text": "main.py:7"}],
        "POST /v1/jobs/j1/turn": {"parts": [], "at": 0, "taken": 0, "code": 0},
        "POST /v1/keys/turn": {"step": "drop", "id": "5eed", "hosts": ["gpu1"], "done": True, "gone": []},
        "POST /v1/login": certified,
        "POST /v1/quotas": {},
        "POST /v1/tenants": tenant,
        "POST /v1/tensors/move": {},
        "POST /v1/tokens": {"at": member.at, "token": token},
        "POST /v1/voters": {"said": "gpu4 will replace gpu2"},
        "POST /v1/volumes": {},
        "POST /v1/volumes/demo/export": {},
        "POST /v1/volumes/demo/give-up": {"slabs": [], "lenders": []},
        "POST /v1/volumes/swap1/swap": {"swap": "off"},
    }
    return agent


@pytest.fixture
def terminal() -> Iterator[None]:
    """Standard input is a terminal, at which nobody types."""
    leader, follower = pty.openpty()
    before = os.dup(0)
    os.dup2(follower, 0)
    yield
    os.dup2(before, 0)
    for each in (leader, follower, before):
        os.close(each)
