"""Programs as other users: transient units where systemd is the first process, sessions of their own elsewhere.

A unit is started by the first process, so it has nothing of the starter: no sandbox, no `no_new_privs`, a control group
of its own under covey-jobs.slice, the user's groups, and no capability. Its name has job, epoch and a number: what a
supervisor that died has left running keeps the former unit. What it reads from its standard input is a file that root
alone may read, and that is gone once it runs. Its output is the journal's: a file in the user's folder would be opened
by root.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agent.ports.processes.inheritance import make_ordinary
from agent.ports.processes.procfs import environment, live_ticks, pids, start_ticks, user_of, words
from agent.ports.starter.starter_wire import EndAs, StartAs
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.folders import PROGRAMS

BOOTED = Path("/run/systemd/system")
"""Where systemd is the first process, this folder exists (sd_booted(3))."""
SLICE = "covey-jobs.slice"
TASKS_MAX = 32_768
"""Most processes and threads of one epoch on a host: thousands of data loaders, and no fork bomb."""
FILES_MAX = 65_536
"""Open files, as the agent's own jobs may have."""
UMASK = 0o027
"""The umask of programs: an access list lets the agent read what a group may. A job says its own."""
START_S = 30.0
END_S, LOOK_S = 5.0, 0.02


class Launcher(Protocol):
    enforces: bool
    """Whether each epoch has limits."""

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        """Start the program, and return its pid. Denied, OSError."""

    def end(self, ask: EndAs, uid: int) -> None:
        """End all processes of the epoch, which run as `uid`."""


def launcher(run_dir: str, booted: Path = BOOTED) -> Launcher:
    """How this host starts programs. `run_dir`: a folder that root alone may read."""
    return Units(run_dir) if booted.is_dir() else Sessions()


def program(ask: StartAs, python: str = sys.executable) -> tuple[str, ...]:
    """The command: Covey's own program, of this installation. The last two are for people reading `ps`."""
    return (python, "-P", "-m", "agent.program", ask.program, f"{ask.program}-{ask.job}-{ask.epoch}")


class Units:
    """Transient units. `run`: runs one of systemd's commands."""

    enforces = True

    def __init__(
        self, run_dir: str, run: "Callable[[tuple[str, ...]], subprocess.CompletedProcess[str]] | None" = None
    ) -> None:
        self._run_dir, self._run = run_dir, run or _run

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        unit = f"covey-job:{ask.job}:{ask.epoch}:{ask.program}-{secrets.token_hex(4)}.service"
        path = os.path.join(self._run_dir, unit)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(file, "wb") as writer:
                writer.write(given)
            done = self._run((*unit_command(ask, account, folder, unit, path), "--", *program(ask)))
        finally:
            os.unlink(path)
        if done.returncode:
            why = done.stderr.strip()[:200] or f"systemd-run ended with {done.returncode}"
            raise Denied(f"its unit does not start: {why}", f"journalctl -u {unit}")
        pid = self._run(("systemctl", "show", "--property=MainPID", "--value", unit)).stdout.strip()
        if not pid.isdigit() or int(pid) == 0:
            raise Denied(f"its {ask.program} ended at once", f"journalctl -u {unit}")
        return int(pid)

    def end(self, ask: EndAs, uid: int) -> None:
        units = f"covey-job:{ask.job}:{ask.epoch}:*.service"
        done = self._run(("systemctl", "kill", "--signal=KILL", units))
        if done.returncode:
            raise Denied(f"its units are not ended: {done.stderr.strip()[:200]}", f"systemctl kill -s KILL '{units}'")


def unit_command(ask: StartAs, account: UnixAccount, folder: str, unit: str, given: str) -> tuple[str, ...]:
    """The beginning of the command that starts a unit. `given`: the file that the program reads."""
    memory = str(ask.memory_bytes) if ask.memory_bytes else "infinity"
    properties = {
        "UMask": f"{UMASK:04o}",
        "WorkingDirectory": folder,
        "StandardInput": f"file:{given}",
        "StandardOutput": "journal",
        "StandardError": "journal",
        "LimitNOFILE": str(FILES_MAX),
        "LimitMEMLOCK": "infinity",  # what RDMA registers is locked
        "MemoryMax": memory,
        "TasksMax": str(TASKS_MAX),
        "OOMPolicy": "continue",  # its supervisor tells which rank was killed
        "KillMode": "process",  # ranks outlive a supervisor that dies; the next one finds them
    }
    return (
        *("systemd-run", "--quiet", "--collect", "--no-ask-password", "--service-type=exec"),
        *(f"--unit={unit}", f"--slice={SLICE}", f"--uid={account.name}"),
        f"--description=Covey job {ask.job} of {account.name}",
        *(f"--property={name}={value}" for name, value in properties.items()),
    )


def _run(argv: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        argv,
        env={"PATH": PROGRAMS, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


class Sessions:
    """Sessions of their own. Without control groups nothing limits them, and a process that hides its origin, by
    another environment and another parent, is not found again."""

    enforces = False

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        handed = os.memfd_create("covey-starter", os.MFD_CLOEXEC)
        try:
            with open(os.dup(handed), "wb") as writer:
                writer.write(given)
            os.lseek(handed, 0, os.SEEK_SET)
            started = subprocess.Popen(
                program(ask, self._python),
                cwd=folder,
                env=login_environment(account),
                stdin=handed,
                stdout=sys.stderr,
                user=account.uid,
                group=account.gid,
                extra_groups=os.getgrouplist(account.name, account.gid),
                umask=UMASK,
                start_new_session=True,
                close_fds=True,
            )
        finally:
            os.close(handed)
        make_ordinary(started.pid, started.pid)
        threading.Thread(target=started.wait, daemon=True).start()
        return started.pid

    def end(self, ask: EndAs, uid: int) -> None:
        until_s = time.monotonic() + END_S
        while (found := _of_epoch(ask, uid)) and time.monotonic() < until_s:
            for pid, started in found:
                _kill(pid, started)
            time.sleep(LOOK_S)


def login_environment(account: UnixAccount) -> dict[str, str]:
    own = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    login = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **own, **login}


def _of_epoch(ask: EndAs, uid: int) -> list[tuple[int, int]]:
    """Processes of that user that have the marks of the epoch, or are its programs: pid and start time."""
    marks = {"COVEY_JOB_ID": ask.job, "COVEY_EPOCH": str(ask.epoch)}.items()
    programs = [f"{word}-{ask.job}-{ask.epoch}" for word in ("supervisor", "spares")]
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            started = live_ticks(pid)
            if started is None or user_of(pid) != uid:
                continue
            if marks <= environment(pid).items() or set(programs) & set(words(pid, "cmdline")):
                found.append((pid, started))
    return found


def _kill(pid: int, started: int) -> None:
    """Kill that very process: its pid may be another's by now."""
    with contextlib.suppress(OSError):
        file = os.pidfd_open(pid)
        try:
            if start_ticks(pid) == started:
                signal.pidfd_send_signal(file, signal.SIGKILL)
        finally:
            os.close(file)
