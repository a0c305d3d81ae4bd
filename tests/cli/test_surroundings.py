"""agentctl in hostile surroundings: a locale of ASCII, a reader that has gone, a full disk, a directory that was
deleted, no HOME, closed streams. None of it causes a traceback, or a message that blames Covey."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from tests.cli import rack_answers
from tests.cli.conftest import FakeAgent

Job = Callable[..., dict[str, Any]]
answers = rack_answers.answers
LOOKS = (
    "hosts", "gpus", "jobs -a", "job j1", "why j1", "slabs", "volume ls", "volume show demo", "memory", "tensors",
    "leader", "status", "quota", "voters", "interference", "groups", "version", "--help", "submit --help", "nonsense",
    "job j9", "doctor", "wait j1", "logs j1", "submit -- true",
)  # fmt: skip
ODD = "größe=数 😀 \udce9"


@pytest.fixture
def odd(agent: FakeAgent, job: Job, answers: None) -> FakeAgent:
    """An agent whose every answer has letters that ASCII lacks."""
    view = job(name=ODD, reason=ODD, argv=["python", ODD], cwd=f"/{ODD}", state="done", exit_code=0)
    log = {"data": "6Q==", "offset": 0, "end": True, "host": "gpu1", "size": 1}
    agent.replies |= {
        "GET /v1/jobs/j1": view,
        "GET /v1/jobs": [view],
        "POST /v1/jobs": view,
        "GET /v1/jobs/j1/logs": lambda _: log | {"data": ""},
        "GET /v1/why/j1": [rack_answers.STORY | {"reason": ODD}],
        "GET /v1/interference": [],
        "GET /v1/groups": [],
        "GET /v1/voters": {"rows": [], "under_way": "", "voters": []},
        "GET /v1/links": [],
    }
    return agent


def ran(words: str, stream: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Run a command with this as stdout; returns exit code, and what stderr got."""
    errors = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", errors)
        try:
            code = main(words.split())
        except SystemExit as ended:  # argparse, after its help
            code = int(ended.code or 0)
    assert isinstance(errors.buffer, io.BytesIO)
    return code, errors.buffer.getvalue().decode()


@pytest.mark.parametrize("words", LOOKS)
def test_no_letter_is_one_too_many_for_a_locale(odd: FakeAgent, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    code, errors = ran(words, out, monkeypatch)
    assert "agentctl failed" not in errors and "codec" not in errors
    assert code == {"nonsense": 2, "job j9": 3}.get(words, 0) or (words == "doctor" and code == 1), errors
    if words in ("job j1", "why j1", "jobs -a"):
        assert b"gr\\xf6\\xdfe=\\u6570" in raw.getvalue()


@pytest.mark.parametrize("words", LOOKS)
def test_a_directory_that_was_deleted_keeps_nobody_from_looking(
    odd: FakeAgent, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["agentctl"])
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    code, errors = ran(words, out, monkeypatch)
    assert "agentctl failed" not in errors
    if words.startswith("submit --") and words != "submit --help":
        assert code == 2 and "the current directory is gone" in errors and "--cwd" in errors
        assert ran("submit --cwd /usr -- true", out, monkeypatch)[0] == 0
        assert odd.asked[-1][1]["cwd"] == "/usr"


@pytest.mark.parametrize("words", ["hosts", "jobs", "logs j1", "version", "--help", "nonsense"])
@pytest.mark.parametrize("how", ["full", "closed", "no reader"])
def test_what_nobody_takes_is_no_traceback(odd: FakeAgent, words: str, how: str, tmp_path: Path) -> None:
    """Runs the command as a process, since the interpreter has its own word when it ends."""
    long = [rack_answers.HOSTS[0] | {"host": f"gpu{n}"} for n in range(2000)]
    odd.replies |= {"GET /v1/hosts": long}
    there = {"full": "/dev/full", "closed": "&-", "no reader": "/dev/null"}[how]
    script = f'exec "$0" -m cli {words} >{there}' if how != "no reader" else f'"$0" -m cli {words} | true'
    program = f"import sys; from cli.main import main; sys.argv[1:] = {words.split()!r}; sys.exit(main())"
    script = script.replace(f"-m cli {words}", '-c "$1"')
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
        env={"COVEY_AGENT": odd.address, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd="/",
    )
    for word in ("Traceback", "Exception ignored", "BrokenPipe"):
        assert word not in done.stderr, done.stderr
    if how == "full" and words != "nonsense" and words != "logs j1":
        assert done.returncode == 1 and "No space left on device" in done.stderr


def test_an_interrupt_ends_the_looking_without_a_traceback(odd: FakeAgent, job: Job) -> None:
    odd.replies |= {"GET /v1/jobs/j1": job()}
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # whatever started these tests
    program = f"import sys; {heeds}; from cli.main import main; sys.exit(main(['wait', 'j1']))"
    environment = {"COVEY_AGENT": odd.address, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, cwd="/") as waiting:
        while not any("/v1/jobs/j1" in asked for asked, _ in odd.asked):
            os.sched_yield()
        waiting.send_signal(signal.SIGINT)
        assert waiting.stderr is not None and waiting.stderr.read() == ""
    assert waiting.returncode == 130
