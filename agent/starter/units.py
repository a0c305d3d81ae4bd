"""Programs as other users: transient units where systemd is the first process (`agent.ports.starter.slices`).

A unit is started by the first process, so it has nothing of the starter: no sandbox, no `no_new_privs`, the user's
groups, and no capability. What it reads from its standard input is a file that root alone may read, and that is gone
once it runs. Its output is the journal's: a file in the user's folder would be opened by root.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agent.ports.starter import slices
from agent.ports.starter.starter_wire import EndAs, LimitAs, StartAs
from agent.starter.accounts import Denied, UnixAccount

PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Where root's own commands are."""
START_S = 30.0
END_S, LOOK_S = 5.0, 0.05
"""Most seconds until the processes of an epoch that were killed are gone, and between two looks."""
Done = subprocess.CompletedProcess[str]
Run = Callable[[tuple[str, ...]], Done]


class Launcher(Protocol):
    enforces: bool
    """Whether each epoch has limits."""

    @property
    def lacks(self) -> tuple[str, ...]:
        """Limits that the kernel does not keep here."""

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        """Start the program, and return its pid. Denied, OSError."""

    def limit(self, ask: LimitAs) -> None:
        """Give an epoch other limits. Denied, OSError."""

    def end(self, ask: EndAs, uid: int | None) -> None:
        """End all processes of the epoch, which run as `uid`; None: nobody knows. Denied when some are left."""

    def clear(self, folder: str, uid: int, gid: int) -> None:
        """Remove all that a user's folder holds, as the user. Denied when something is left."""

    def forget(self, job: str) -> None:
        """Let go what stands for epochs of the job of which nothing runs. Denied."""


def program(ask: StartAs, python: str = sys.executable) -> tuple[str, ...]:
    """The command: Covey's own program, of this installation. The last two are for people reading `ps`."""
    return (python, "-P", "-m", "agent.program", ask.program, f"{ask.program}-{ask.job}-{ask.epoch}")


class Units:
    """Transient units. `run`: runs one of systemd's commands."""

    enforces = True

    def __init__(self, run_dir: str, run: Run | None = None, groups: Path = slices.GROUPS) -> None:
        self._run_dir, self._run, self._groups = run_dir, run or _run, groups
        self._limiting = threading.Lock()

    @property
    def lacks(self) -> tuple[str, ...]:
        return slices.lacking(self._groups)

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        unit = f"covey-job:{ask.job}:{ask.epoch}:{ask.program}-{secrets.token_hex(4)}.service"
        path = os.path.join(self._run_dir, unit)
        self._limit_first(ask)
        if ask.seconds:
            self._kill_later(ask)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as writer:
                writer.write(given)
            done = self._run((*slices.unit_command(ask, account.name, folder, unit, path), "--", *program(ask)))
            if done.returncode:
                why = done.stderr.strip()[:200] or f"systemd-run ended with {done.returncode}"
                raise Denied(f"its unit does not start: {why}", f"journalctl -u {unit}")
            pid = self._run(("systemctl", "show", "--property=MainPID", "--value", unit)).stdout.strip()
            if not pid.isdigit() or int(pid) == 0:
                raise Denied(f"its {ask.program} ended at once", f"journalctl -u {unit}")
        except (Denied, OSError, subprocess.SubprocessError):
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                self._run((*KILL, unit))  # what was refused does not run
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return int(pid)

    def limit(self, ask: LimitAs) -> None:
        if self._units(ask.job, ask.epoch):
            self._set(ask)

    def _limit_first(self, ask: StartAs) -> None:
        """Make the slice of the epoch, with its limits, before anything runs in it. Spares change none that are there:
        they are those of ranks that run. Two programs of an epoch may begin at once."""
        own = slices.slice_of(ask.job, ask.epoch)
        with self._limiting:
            made = self._run(slices.make_slice(ask.job, ask.epoch))
            if made.returncode and ask.program == "spares":
                if not self._is_there(own):
                    why = f"its slice {own} cannot be made: {made.stderr.strip()[:200]}"
                    raise Denied(why, "journalctl -u covey-starter")
                return
            try:
                self._set(LimitAs(ask.job, ask.epoch, slices.limits_of(ask)))
            except (Denied, OSError, subprocess.SubprocessError):
                if not made.returncode:
                    self._run(("systemctl", "stop", own))  # else the next spares would have no limits
                raise

    def _kill_later(self, ask: StartAs) -> None:
        timer = slices.timer_of(ask.job, ask.epoch)
        done = self._run(slices.kill_later(ask.job, ask.epoch, ask.seconds))
        if done.returncode and not self._is_there(timer):  # it may be there, from the epoch's first program
            why = f"nothing would end it at its time limit: {done.stderr.strip()[:200]}"
            raise Denied(why, f"systemctl status {timer}")

    def _is_there(self, unit: str) -> bool:
        return self._run(("systemctl", "is-active", "--quiet", unit)).returncode == 0

    def _set(self, ask: LimitAs) -> None:
        done = self._run(slices.set_limits(ask))
        if done.returncode:
            raise Denied(f"its limits cannot be set: {done.stderr.strip()[:200]}", "journalctl -u covey-starter")

    def end(self, ask: EndAs, uid: int | None) -> None:
        """A unit is gone once no process is left in it. One whose supervisor has ended is inactive: systemctl kills
        what is left in it only with `--all`."""
        until_s = time.monotonic() + END_S
        pattern = slices.units_of(ask.job, ask.epoch)
        while self._units(ask.job, ask.epoch):
            done = self._run((*KILL, pattern))
            if time.monotonic() > until_s:
                why = done.stderr.strip()[:200] or "a process is left that does not end"
                raise Denied(f"its units are not ended: {why}", " ".join(KILL) + f" '{pattern}'")
            time.sleep(LOOK_S)
        self._run(("systemctl", "stop", slices.timer_of(ask.job, ask.epoch), slices.slice_of(ask.job, ask.epoch)))

    def forget(self, job: str) -> None:
        """A host where processes only waited to become ranks has slices that nobody ended."""
        for line in self._listed(slices.slices_of(job)):
            epoch = slices.epoch_of(job, line.split()[0])
            if epoch is not None and not self._units(job, epoch):
                self._run(("systemctl", "stop", slices.timer_of(job, epoch), slices.slice_of(job, epoch)))

    def _units(self, job: str, epoch: int) -> list[str]:
        return self._listed(slices.units_of(job, epoch))

    def _listed(self, pattern: str) -> list[str]:
        done = self._run(("systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", pattern))
        if done.returncode:
            raise Denied(f"systemd does not say what runs: {done.stderr.strip()[:200]}", "systemctl status")
        return done.stdout.split("\n")[:-1]

    def clear(self, folder: str, uid: int, gid: int) -> None:
        """In a unit of its own: a process of the user's can be stopped and changed by the user, who would otherwise
        have it in the starter's control group and sandbox."""
        done = self._run(
            (
                *("systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--no-ask-password"),
                *(f"--slice={slices.SLICE}", f"--uid={uid}", f"--gid={gid}", f"--working-directory={folder}"),
                *(f"--property={name}={value}" for name, value in CLEARING.items()),
                *("--", "sh", "-c", CLEAR),
            )
        )
        if done.returncode:
            raise Denied(f"{folder} cannot be removed: {done.stderr.strip()[:200]}", f"rm -r {folder}")


KILL = ("systemctl", "kill", "--all", "--signal=KILL")
CLEAR = """
chmod -R u+rwX . 2> /dev/null
find . -xdev -mindepth 1 -delete 2>&1 | { head -c 400 >&2; cat > /dev/null; }
test -z "$(ls -A | head -c 1)"
"""
"""Empties the folder it runs in, and says the first of what it could not remove: there may be a million such files."""
CLEAR_S = 20
CLEARING = {"MemoryMax": "256M", "TasksMax": "16", "RuntimeMaxSec": str(CLEAR_S), "NoNewPrivileges": "yes"}
"""Limits of a process that empties a folder, which may be very full."""


def _run(argv: tuple[str, ...]) -> Done:
    return subprocess.run(
        argv,
        env={"PATH": PROGRAMS, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
