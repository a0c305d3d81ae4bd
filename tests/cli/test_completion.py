"""Completion of agentctl: what may come next, and that real shells offer it, with the names that an agent knows."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import Job, Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run

SHELLS = ("bash", "zsh", "fish")
CALL = f"import sys; sys.path[:0] = [{str(Path(__file__).parents[2])!r}]; from cli.main import main; sys.exit(main())"
PROGRAM = f'#!/bin/sh\nexec {sys.executable} -c "{CALL}" "$@"\n'


@pytest.fixture
def rack(agent: FakeAgent, job: Job) -> FakeAgent:
    agent.replies |= {
        "GET /v1/jobs": [job(), job(id="j12", name="ev:al", state="queued")],
        "GET /v1/tenants": [{"tenant": "ml", "users": ["ann"], "gpus": None, "used": 0}],
    }
    return agent


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ho", "hosts hold"),
        ("volume ex", "export"),
        ("volume --json unex", "unexport"),
        ("submit --cla", "--class"),
        ("submit --class ", "guaranteed auto opportunistic"),
        ("submit --class = o", "opportunistic"),
        ("submit --class=o", "--class=opportunistic"),
        ("--color a", "auto always"),
        ("hosts dr", "drain"),
        ("hosts drain g", "gpu1 gpu2"),
        ("jobs --tenant ", "ml"),
        ("cancel j1 j", "j1 j12"),
        ("why host/", "host/gpu1 host/gpu2"),
        ("why v", "volume/demo"),
        ("volume rm ", "demo"),
        ("volume create ", ""),
        ("tensors --move j12 gpu2", "gpu2"),
        ("tune j1 ", "off"),
        ("exec j1 -- ls ", ":files"),
        ("rack join gpu1:7946 --token-file t", ":files"),
        ("volume export demo --socket ", ":files"),
        ("jobs extra ", ""),
        ("frobnicate ", ""),
        ("submit --frob=", ""),
    ],
)
def test_what_may_come_next(run: Run, rack: FakeAgent, line: str, words: str) -> None:
    code, out, err = run("completion", "bash", "--", *line.split(" "))
    assert (code, out.split(), err) == (0, words.split(), "")


def test_what_a_word_is_stands_beside_it(run: Run, rack: FakeAgent) -> None:
    assert run("completion", "fish", "--", "wait", "j12")[1] == "j12\tqueued ev:al\n"
    assert run("completion", "zsh", "--", "wait", "j12")[1] == "j12:queued ev:al\n"
    assert run("completion", "zsh", "--", "why", "host/gpu1")[1] == "host/gpu1:alive\n"


@pytest.mark.parametrize("kind", ["job", "hosts drain", "volume rm", "jobs --tenant", "why"])
def test_an_agent_that_is_down_or_silent_or_odd_has_no_names_and_nothing_is_said(
    run: Run, rack: FakeAgent, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("completion", "bash", "--", *kind.split(), "")
    assert run("--agent", "unix:/nowhere", *words) == (0, "", "")
    asked, answered = threading.Event(), threading.Event()

    def waits(_: Any) -> Any:
        asked.set()
        answered.wait(60)
        return []

    rack.replies |= {f"GET /v1/{name}": waits for name in ("jobs", "hosts", "volumes", "tenants")}
    assert run(*words) == (0, "", "") and asked.is_set()
    answered.set()
    odds: tuple[Any, ...] = ({}, [{}], [None], (75, 503))
    for odd in odds:
        rack.replies |= {f"GET /v1/{name}": odd for name in ("jobs", "hosts", "volumes", "tenants")}
        assert run(*words) == (0, "", "")


class Shell:
    """A shell at a terminal, with agentctl's completion loaded as the documents say."""

    def __init__(self, argv: list[str], environ: dict[str, str]) -> None:
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.execvpe(argv[0], argv, environ)
        self._seen = ""

    def types(self, text: str, until: str, within_s: float = 60.0) -> str:
        """What appears once `text` is typed, up to `until`, a pattern."""
        self._seen = ""
        os.write(self._terminal, text.encode())
        end_s = time.monotonic() + within_s
        while not re.search(until, self._seen):
            assert time.monotonic() < end_s, self._seen
            if select.select([self._terminal], [], [], 1.0)[0]:
                self._seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x07|\r", "", os.read(self._terminal, 4096).decode())
        return self._seen

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._pid, 0)


@pytest.fixture
def environ(rack: FakeAgent, tmp_path: Path) -> dict[str, str]:
    """The environment of a person who has agentctl, and nothing of a shell's settings."""
    (tmp_path / "agentctl").write_text(PROGRAM)
    (tmp_path / "agentctl").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb", "COVEY_AGENT": rack.address, "PS1": "READY> "}


@pytest.fixture
def shell(environ: dict[str, str]) -> Iterator[Callable[[list[str]], Shell]]:
    made: list[Shell] = []

    def begin(argv: list[str]) -> Shell:
        made.append(Shell(argv, environ))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def there(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here; next: apt install {name}")


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_a_shell_at_a_terminal_completes_commands_options_and_names(
    name: str, shell: Callable[[list[str]], Shell]
) -> None:
    there(name)
    begun = shell(["bash", "--norc", "--noprofile"] if name == "bash" else ["zsh", "-f"])
    if name == "zsh":
        begun.types("PROMPT='READY> '; autoload -U compinit; compinit -u -D; echo BEG''UN\n", r"BEGUN\s+(#\s+)?READY> ")
    begun.types(f"source <(agentctl completion {name}); echo LOA''DED\n", r"LOADED\s+(#\s+)?READY> ")
    begun.types("agentctl lead\t", "agentctl leader ")
    begun.types("\x15agentctl submit --class opp\t", "--class opportunistic ")
    begun.types("\x15agentctl wait j12\t", "wait j12 ")
    begun.types("\x15agentctl logs j\t\t\t", r"(?s)j1 .*j12")
    begun.types("\x15agentctl exec j1 -- cat agentc\t", r"cat agentctl ")


def test_fish_completes_commands_options_and_names(environ: dict[str, str], tmp_path: Path) -> None:
    there("fish")

    def completed(line: str) -> list[str]:
        script = f"agentctl completion fish | source; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", script], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    assert completed("agentctl lead") == ["leader\tshow which host leads, and since when"]
    assert completed("agentctl submit --class=opp") == ["--class=opportunistic"]
    assert completed("agentctl wait j") == ["j1\trunning digits", "j12\tqueued ev:al"]
    assert completed("agentctl volume create ") == []
    assert "agentctl" in "".join(completed("agentctl exec j1 -- cat agentc"))


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_whole(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    there(shell)
    (tmp_path / "script").write_text(capsys.readouterr().out)
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
