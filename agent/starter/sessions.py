"""Programs as other users where systemd is not the first process: sessions of their own.

Without control groups nothing limits them, and a process that hides its origin, by another environment and another
parent, is not found again.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from agent.ports.processes.inheritance import make_ordinary
from agent.ports.processes.procfs import environment, live_ticks, pids, start_ticks, user_of, words
from agent.ports.starter.slices import UMASK
from agent.ports.starter.starter_wire import EndAs, LimitAs, StartAs
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.units import CLEAR, CLEAR_S, END_S, LOOK_S, PROGRAMS, program


class Sessions:
    """Sessions of their own."""

    enforces: bool = False
    lacks: tuple[str, ...] = ()

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        handed = os.memfd_create("covey-starter", os.MFD_CLOEXEC)
        try:
            with open(os.dup(handed), "wb") as writer:
                writer.write(given)
            os.lseek(handed, 0, os.SEEK_SET)
            argv, user = self.command(ask, account)
            started = subprocess.Popen(
                argv,
                cwd=folder,
                env=login_environment(account),
                stdin=handed,
                stdout=sys.stderr,
                umask=UMASK,
                start_new_session=True,
                close_fds=True,
                **user,
            )
        finally:
            os.close(handed)
        make_ordinary(started.pid, started.pid)
        threading.Thread(target=started.wait, daemon=True).start()
        return started.pid

    def command(self, ask: StartAs, account: UnixAccount) -> tuple[tuple[str, ...], dict[str, Any]]:
        """The command, and as whom `subprocess` runs it."""
        groups = os.getgrouplist(account.name, account.gid)
        return program(ask, self._python), {"user": account.uid, "group": account.gid, "extra_groups": groups}

    def limit(self, ask: LimitAs) -> None:
        """Nothing is limited here."""

    def end(self, ask: EndAs, uid: int | None) -> None:
        """Twice in a row nothing was found: one look misses what a process started that has ended meanwhile."""
        until_s, looks = time.monotonic() + END_S, 0
        while uid is not None and looks < 2:
            found = _of_epoch(ask, uid)
            looks = 0 if found else looks + 1
            for pid, started in found:
                _kill(pid, started)
            if found and time.monotonic() > until_s:
                why = f"processes of {ask.job} do not end: {', '.join(str(pid) for pid, _ in found[:9])}"
                raise Denied(why, f"kill -9 {found[0][0]}")
            if found:
                time.sleep(LOOK_S)

    def forget(self, job: str) -> None:
        """Nothing stands for an epoch here."""

    def clear(self, folder: str, uid: int, gid: int) -> None:
        cleared = subprocess.run(
            ("sh", "-c", CLEAR),
            cwd=folder,
            user=uid,
            group=gid,
            extra_groups=[],
            env={"PATH": PROGRAMS, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLEAR_S,
            check=False,
        )
        if cleared.returncode:
            raise Denied(f"{folder} cannot be removed: {cleared.stderr.strip()[:200]}", f"rm -r {folder}")


def login_environment(account: UnixAccount) -> dict[str, str]:
    own = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    login = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **own, **login}


def _of_epoch(ask: EndAs, uid: int) -> list[tuple[int, int]]:
    """Processes of that user that have the marks of the epoch, or are its programs: pid and start time."""
    marks = {"COVEY_JOB_ID": ask.job, "COVEY_EPOCH": str(ask.epoch)}.items()
    programs = [f"{word}-{ask.job}-{ask.epoch}" for word in ("supervisor", "spares", "beside")]
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
