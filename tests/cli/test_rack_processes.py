"""Which processes are a rack's, and that no others are touched."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.ports.processes.processes import ProgramBase, RealProcesses
from cli.rack import processes as rack_processes
from cli.rack.processes import Ours, end, find, kind_of, look, remove_leftovers, send, start_ticks
from covey.ports.processes import Command

SLEEP = "import time; time.sleep(60)"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts harmless processes; they are ended after the test."""
    made: list[subprocess.Popen[bytes]] = []

    def make(code: str = SLEEP, args: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[bytes]:
        env = {"PATH": os.environ["PATH"], **environ}
        made.append(
            subprocess.Popen([sys.executable, "-c", code, *args], env=env, stdout=subprocess.PIPE, cwd=tmp_path)
        )
        return made[-1]

    yield make
    for process in made:
        with process:
            process.kill()


def wait_for_exec(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process's command line is the new one."""
    until_s = time.monotonic() + 5
    while b"-c" not in Path(f"/proc/{process.pid}/cmdline").read_bytes() and time.monotonic() < until_s:
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("argv", "environ", "cwd", "kind"),
    [
        (["/v/bin/agentd", "--config", "/r/.rack/gpu1/agent.toml"], {"COVEY_RACK": "/r/.rack"}, "/", "agent"),
        (["python", "/v/bin/agentd", "--config", "/r/.rack/gpu1/agent.toml"], {}, "/", "agent"),
        (["python", "/v/bin/agentd", "--config=/r/.rack/gpu1/agent.toml"], {}, "/", "agent"),
        (["python", "-P", "-m", "agent.program", "slabd", "slabd"], {}, "/r/.rack/gpu1", "program"),
        (["python", "-P", "-m", "agent.program", "slabd", "slabd"], {"COVEY_RACK": "/r/.rack"}, "/", "program"),
        (["python", "train.py"], {"COVEY_TOKEN": "t", "COVEY_SOCKET": "/tmp/c/gpu1/jobs.sock"}, "/", "rank"),
        (["agentd", "--config", "/r/.rack2/gpu1/agent.toml"], {"COVEY_RACK": "/r/.rack2"}, "/", ""),
        (["python", "-P", "-m", "agent.program", "slabd", "slabd"], {}, "/r/.rack2", ""),
        (["tail", "-f", "/r/.rack/gpu1/agentd.log"], {}, "/r/.rack/gpu1", ""),
        (["vim", "/r/.rack/gpu1/agent.toml"], {"PWD": "/r/.rack"}, "/r/.rack", ""),
        (["bash"], {"COVEY_SOCKET": "/tmp/c/gpu1/jobs.sock"}, "/", ""),
        (["bash"], {"COVEY_AGENT": "unix:/tmp/c/gpu1/agent.sock"}, "/", ""),
        (["python", "train.py"], {"COVEY_TOKEN": "t", "COVEY_SOCKET": "/tmp/c2/gpu1/jobs.sock"}, "/", ""),
    ],
)
def test_a_process_is_told_by_what_only_ours_carry(
    argv: list[str], environ: dict[str, str], cwd: str, kind: str
) -> None:
    assert kind_of(argv, environ, cwd, "/r/.rack", [Path("/tmp/c")]) == kind


def test_ours_are_found_and_others_are_not(start: Start, tmp_path: Path) -> None:
    program = start(COVEY_RACK=str(tmp_path))
    rank = start(COVEY_TOKEN="t", COVEY_SOCKET=f"{tmp_path}/run/gpu1/jobs.sock")
    other = start(args=(f"{tmp_path}/gpu1/agent.toml",), COVEY_SOCKET=f"{tmp_path}/run/gpu1/jobs.sock")
    for process in (program, rank, other):
        wait_for_exec(process)
    found = find(tmp_path, [tmp_path / "run"])
    assert {(ours.pid, ours.kind) for ours in found} == {(program.pid, "program"), (rank.pid, "rank")}


async def test_a_shim_whose_rank_and_supervisor_are_gone_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that left a child behind keeps its shim, which has no socket of Covey's in its environment."""
    monkeypatch.setenv("COVEY_RACK", str(tmp_path))
    port = RealProcesses(ProgramBase("h1", str(tmp_path), str(tmp_path), "127.0.0.1"))
    env = {"COVEY_TOKEN": "t", "COVEY_RACK": "/elsewhere"}
    command = Command(
        argv=("/bin/sleep", "60"), cwd="/", env=env, output=str(tmp_path / "log"), run=str(tmp_path / "rank")
    )
    process = await port.start(command)
    try:
        (shim,) = find(tmp_path, [tmp_path / "run"])
        assert "shim.py" in shim.what and shim.kind == "program"
        assert shim.pid != process.id.pid
    finally:
        process.kill()
        await process.wait()


def test_whoever_looks_and_its_ancestors_are_spared(start: Start, tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from cli.rack.processes import find; "
        f"print(len(find(Path({str(tmp_path)!r}), [])))"
    )
    inside = start(code, COVEY_RACK=str(tmp_path), PYTHONPATH=os.getcwd())
    assert inside.communicate()[0].strip() == b"0"


def test_ending_kills_only_what_does_not_listen(start: Start) -> None:
    good = start()
    deaf_code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    deaf = start(deaf_code)
    assert deaf.stdout is not None
    assert deaf.stdout.readline() == b"deaf\n"
    wait_for_exec(good)
    ours = [Ours(p.pid, start_ticks(p.pid) or 0, "program", "") for p in (good, deaf)]
    assert end(ours, 0.3) == 1
    assert (good.wait(5), deaf.wait(5)) == (-signal.SIGTERM, -signal.SIGKILL)


def test_a_stopped_process_is_ended_too(start: Start) -> None:
    process = start()
    wait_for_exec(process)
    process.send_signal(signal.SIGSTOP)
    end([Ours(process.pid, start_ticks(process.pid) or 0, "program", "")], 5.0)
    assert process.wait(5) == -signal.SIGTERM


def test_a_pid_that_belongs_to_somebody_else_by_now_is_not_hit(start: Start) -> None:
    process = start()
    ticks = start_ticks(process.pid)
    assert ticks is not None
    assert not send(Ours(process.pid, ticks - 1, "program", ""), signal.SIGKILL)
    assert process.poll() is None
    assert end([Ours(process.pid, ticks - 1, "program", "")], 1.0) == 0


def test_a_zombie_is_gone(start: Start) -> None:
    process = start("pass")
    assert process.stdout is not None
    process.stdout.read()
    until_s = time.monotonic() + 5
    while start_ticks(process.pid) is not None and time.monotonic() < until_s:
        time.sleep(0.005)
    assert start_ticks(process.pid) is None
    assert look(process.pid, Path("/"), []) is None


def test_a_process_that_never_was_is_nothing() -> None:
    assert start_ticks(2**22 + 1) is None
    assert not send(Ours(2**22 + 1, 1, "program", ""), signal.SIGTERM)


def test_sockets_and_locks_go_and_a_persons_files_stay(tmp_path: Path) -> None:
    root, other, state = tmp_path / "root", tmp_path / "other", tmp_path / "state"
    for folder in (root / "gpu1", other, state):
        folder.mkdir(parents=True)
    for path in (root / "gpu1" / "agent.sock", other / "agent.sock"):
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(path))
    (root / "gpu1" / "stray").touch()
    (other / "notes.txt").touch()
    (state / "agent.lock").touch()
    (state / "identity").touch()
    assert remove_leftovers([root], [root / "gpu1", other], [state]) == 4
    assert not root.exists()
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    assert [path.name for path in state.iterdir()] == ["identity"]
    assert remove_leftovers([root], [root / "gpu1", other], [state]) == 0


def test_a_lock_that_nobody_holds_has_no_holder(tmp_path: Path) -> None:
    assert rack_processes.lock_holder(tmp_path) is None
    (tmp_path / "agent.lock").write_text("77\n")
    assert rack_processes.lock_holder(tmp_path) is None
