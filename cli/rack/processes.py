"""The processes of a rack on this machine: found again by what only they carry, and ended; no others are touched.

Agents die of `kill -9` and leave programs behind: supervisors, job ranks, byte processes. Ours can be recognised:

- what covey-rack starts, and what that starts, has COVEY_RACK=FOLDER in its environment;
- a rank and its children have COVEY_TOKEN, and a COVEY_SOCKET in this rack's socket folder;
- an agent that a person started by hand is `agentd --config` with a file of this folder; its programs are
  `-m agent.program` and work in this folder.

That a path of the rack stands somewhere in a command line is not enough: an editor or `tail -f` may have it too. A
process is signalled through a pidfd that was opened before it was looked at, so a recycled pid is never hit.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.ports.processes import procfs

POLL_S = 0.05


@dataclass(frozen=True)
class Ours:
    """One process of the rack."""

    pid: int
    started: int
    """Clock ticks since boot, field 22 of /proc/PID/stat: the same pid started later is another process."""
    kind: str
    """`agent`, `program` or `rank`."""
    what: str
    """Its command line, for people."""


def find(directory: Path, run_dirs: Sequence[Path]) -> list[Ours]:
    """Every process of the rack in `directory` whose sockets are in `run_dirs` or below, by pid. Never this one or its
    ancestors."""
    spared = set(ancestors(os.getpid()))
    found = [look(pid, directory, run_dirs) for pid in procfs.pids() if pid not in spared]
    return [ours for ours in found if ours is not None]


def look(pid: int, directory: Path, run_dirs: Sequence[Path]) -> Ours | None:
    """That process, if it is one of the rack's and alive."""
    try:
        started = start_ticks(pid)
        if started is None or not procfs.is_ours(pid):
            return None
        argv, environ = procfs.words(pid, "cmdline"), procfs.environment(pid)
        cwd = os.readlink(f"/proc/{pid}/cwd")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    kind = kind_of(argv, environ, cwd, str(directory), run_dirs)
    return Ours(pid, started, kind, " ".join(argv)[:200]) if kind else None


def kind_of(argv: Sequence[str], environ: Mapping[str, str], cwd: str, directory: str, run_dirs: Sequence[Path]) -> str:
    """`agent`, `program`, `rank`, or empty when this is none of the rack's."""
    socket = environ.get("COVEY_SOCKET", "")
    if "COVEY_TOKEN" in environ and any(socket.startswith(f"{run_dir}/") for run_dir in run_dirs):
        return "rank"
    names = {os.path.basename(word) for word in argv[:3]}
    is_agent = "agentd" in names and any(word.removeprefix("--config=").startswith(directory + "/") for word in argv)
    is_program = "agent.program" in argv[:5] and (cwd + "/").startswith(directory + "/")
    if environ.get("COVEY_RACK") == directory:
        return "agent" if "agentd" in names else "program"
    return "agent" if is_agent else "program" if is_program else ""


def start_ticks(pid: int) -> int | None:
    """When that process started; None when there is none, or only its zombie."""
    return procfs.live_ticks(pid)


def ancestors(pid: int) -> Iterator[int]:
    """`pid`, its parent, and so on."""
    while pid > 0:
        yield pid
        pid = procfs.parent(pid) or 0


def lock_holder(state_dir: Path) -> int | None:
    """The pid of the agent that uses this state directory, however it was started; None when none does."""
    try:
        file = os.open(state_dir / "agent.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(file, 32).strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(file)
    return None


def send(process: Ours, number: int) -> bool:
    """False when it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if start_ticks(process.pid) != process.started:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def end(processes: Sequence[Ours], grace_s: float) -> int:
    """SIGTERM, and SIGKILL to what is left after `grace_s`: how many had to be killed. All are gone on return, or have
    been sent SIGKILL for a second."""
    for process in processes:
        if send(process, signal.SIGTERM):
            send(process, signal.SIGCONT)
    left = wait_gone(processes, grace_s)
    for process in left:
        send(process, signal.SIGKILL)
    wait_gone(left, 1.0)
    return len(left)


def wait_gone(processes: Sequence[Ours], timeout_s: float) -> list[Ours]:
    """Those that are still there after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    left = list(processes)
    while True:
        left = [process for process in left if start_ticks(process.pid) == process.started]
        if not left or time.monotonic() >= until_s:
            return left
        time.sleep(POLL_S)


def remove_leftovers(roots: Sequence[Path], run_dirs: Sequence[Path], state_dirs: Sequence[Path]) -> int:
    """Sockets, their folders and lock files of processes that are gone: how many sockets and locks there were. Under
    `roots`, which are this rack's alone, everything; in another of `run_dirs` only sockets."""
    doomed = [path for root in roots for path in sorted(root.rglob("*")) if not path.is_dir() or path.is_symlink()]
    doomed += [path for folder in run_dirs for path in sorted(folder.glob("*")) if path.is_socket()]
    doomed += [path for folder in state_dirs for path in sorted(folder.glob("*.lock"))]
    count = len(set(doomed))
    for path in doomed:
        path.unlink(missing_ok=True)
    folders = [path for root in roots for path in sorted(root.rglob("*"), reverse=True)]
    for folder in [*folders, *run_dirs, *roots]:
        with contextlib.suppress(OSError):  # gone already, or a person keeps something there
            folder.rmdir()
    return count
