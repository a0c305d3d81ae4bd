"""What ranks, spares and Covey's programs inherit of an agent that is a bad parent: seen from inside of them."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.ports.processes.inheritance import NOT_INHERITED
from agent.ports.processes.procfs import descendants, environment, stat

LOOK = """
import json, os, sys
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
files = {}
for name in os.listdir("/proc/self/fd"):
    try:
        files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        pass  # the listing itself
print(json.dumps({
    "files": files, "environment": sorted(os.environ), "umask": status["Umask"],
    "blocked": int(status["SigBlk"], 16), "ignored": int(status["SigIgn"], 16), "ambient": int(status["CapAmb"], 16),
    "terminal": int(fields[4]), "session": os.getsid(0) == os.getpid() == os.getpgrp(), "cwd": os.getcwd(),
    "nice": os.nice(0), "policy": os.sched_getscheduler(0), "score": int(open("/proc/self/oom_score_adj").read()),
    "argv": [os.fsencode(word).hex() for word in sys.argv[1:]], "odd": os.environb.get(b"ODD", b"").hex(),
}), flush=True)
"""
BAD_PARENT = """
import asyncio, contextlib, ctypes, json, os, pty, signal, socket, struct, sys
from agent import program
from agent.jobs.supervision import RankStart, SupervisorConfig
from agent.ports.processes.forker import begin
from agent.ports.processes.processes import ProgramBase, RealProcesses
from covey.ports.processes import Command

folder, mode = sys.argv[1:3]
libc = ctypes.CDLL(None, use_errno=True)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT, 40})
held = [os.open("/dev/null", os.O_RDONLY), os.memfd_create("leak", 0), *os.pipe(), *pty.openpty()]
held += [file.detach() for file in socket.socketpair()]
for file in held:
    os.set_inheritable(file, True)
os.umask(0)
os.environ.update(SECRET="of the agent", NOTIFY_SOCKET="/x", CREDENTIALS_DIRECTORY="/y", INVOCATION_ID="z")
if os.geteuid() == 0:
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    with contextlib.suppress(PermissionError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("-900")
    head = struct.pack("<II", 0x20080522, 0)  # a capability that a program inherits: CAP_IPC_LOCK, as systemd gives it
    data = ctypes.create_string_buffer(24)
    if libc.capget(head, data) == 0:
        sets = list(struct.unpack("<6I", data.raw))
        sets[2] |= 1 << 14
        if libc.capset(head, struct.pack("<6I", *sets)) == 0:
            libc.prctl(47, 2, 14, 0, 0)

forker = begin(program.main) if mode == "forked" else None

async def main():
    port = RealProcesses(ProgramBase("h1", folder, folder, ""), forker)
    argv = (sys.executable, "-I", sys.argv[3], "caf\\x00e9", "", "a b\\n")
    env = {"ODD": "caf\\x00e9", "COVEY_TOKEN": "t"}
    command = Command(argv=argv, cwd=folder, env=env, output=f"{folder}/out", run=f"{folder}/r")
    if mode == "rank":
        assert await (await port.start(command)).wait() == 0
        return
    sleeps = {"argv": ("sleep", "600"), "cwd": "/", "env": {"PATH": "/bin:/usr/bin", "COVEY_TOKEN": "t"}}
    rank = Command(**sleeps, output=f"{folder}/out", run=f"{folder}/r0")
    spare = await port.start_waiting(Command(**sleeps, output=f"{folder}/out", run=f"{folder}/r1"))
    config = SupervisorConfig(
        job="j1", epoch=1, ranks=(RankStart(0, rank),), grace_s=0, state="s", preempt="p", socket=f"unix:{folder}/sup"
    )
    supervisor = await port.start_program("supervisor", "sup", config)
    while not os.path.exists(f"{folder}/r0.run"):
        await asyncio.sleep(0.01)
    began = open(f"{folder}/r0.run").read().split()[2]
    while open(f"/proc/{began}/comm").read() != "sleep\\n":
        await asyncio.sleep(0.01)
    leaked = [os.readlink(f"/proc/self/fd/{file}") for file in held if file != held[0]]
    print(json.dumps({"supervisor": supervisor.id.pid, "spare": spare.id.pid, "leaked": leaked}), flush=True)
    sys.stdin.readline()
    spare.end()
    supervisor.signal(signal.SIGTERM)
    await supervisor.wait()

asyncio.run(main())
"""


def seen(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out").read_text())
    return found


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "parent.py").write_text(BAD_PARENT)
    return tmp_path / "parent.py", tmp_path / "look.py"


def test_a_rank_inherits_what_is_listed_and_nothing_else(tmp_path: Path, scripts: tuple[Path, Path]) -> None:
    parent, look = scripts
    words = [sys.executable, "-c", parent.read_text(), str(tmp_path), "rank", str(look)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    found = seen(tmp_path)
    files = found.pop("files")
    assert files.pop("0") == "/dev/null" and files.pop("1") == files.pop("2") and not files
    assert [name for name in found.pop("environment") if name != "LC_CTYPE"] == ["COVEY_TOKEN", "ODD"]
    found["ignored"] &= ~(1 << 31 | 1 << 32)  # the C library's own two signals, which nobody else can set
    assert found == {
        "umask": "0077",
        "blocked": 0,
        # Python ignores these two itself.
        "ignored": 1 << 12 | 1 << 24,
        "ambient": 0,
        "terminal": 0,
        "session": True,
        "cwd": str(tmp_path),
        "nice": 0,
        "policy": os.SCHED_OTHER,
        "score": 0,
        "argv": ["636166e9", "", "6120620a"],
        "odd": "636166e9",
    }


@pytest.mark.parametrize("how", ["executed", "forked"])
def test_programs_shims_and_spares_hold_nothing_of_their_agent(
    how: str, tmp_path: Path, scripts: tuple[Path, Path]
) -> None:
    parent, look = scripts
    words = [sys.executable, "-c", parent.read_text(), str(tmp_path), how, str(look)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None and agent.stdin is not None
        told = json.loads(agent.stdout.readline())
        found = {process.pid: pictured(process.pid) for process in descendants(agent.pid)}
        agent.stdin.write("\n")
        agent.stdin.close()
    assert agent.returncode == 0
    if how == "forked":
        forker = found.pop(min(found))
        assert len(forker["files"]) == 6, "standard ones, the agent, the supervisor and its end"
    assert len(found) == 5, "a supervisor, its shim and rank, a spare and its shim"
    for each in found.values():
        assert not set(each["files"].values()) & set(told["leaked"]) and each["blocked"] == 0, each
        assert not {"/dev/ptmx", "/memfd:leak (deleted)"} & set(each["files"].values())
    supervisor, spare = found[told["supervisor"]], found[told["spare"]]
    assert not NOT_INHERITED & set(supervisor["environment"]) and "SECRET" in supervisor["environment"]
    assert len(spare["files"]) == 5 and spare["files"][0] == "/dev/null", "two pipes tell a spare what it is"
    assert sum(each["environment"] == ["COVEY_TOKEN"] for each in found.values()) == 2, "shims"
    assert not [pid for pid in found if is_there(pid)]


def pictured(pid: int) -> dict[str, Any]:
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "files": open_files(pid),
        "blocked": int(status.partition("SigBlk:")[2].split()[0], 16),
        "environment": sorted(environment(pid)),
    }


def open_files(pid: int) -> dict[int, str]:
    """What a process holds open, by number; a file that it closes meanwhile is left out."""
    found = {}
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[int(each.name)] = os.readlink(each)
    return found


def is_there(pid: int) -> bool:
    fields = stat(pid)
    return fields is not None and fields[0] != "Z"
