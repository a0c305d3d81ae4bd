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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from agent.ports.starter import slices
from agent.ports.starter.starter_wire import EndAs, LimitAs, StartAs
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.manager import EXISTS, Manager, ManagerError, OpenManager, system_manager

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
    """Transient units. `manager`: opens systemd's manager; `run`: runs a command."""

    enforces = True

    def __init__(
        self,
        run_dir: str,
        manager: OpenManager = system_manager,
        run: Run | None = None,
        groups: Path = slices.GROUPS,
    ) -> None:
        self._run_dir, self._manager, self._run, self._groups = run_dir, manager, run or _run, groups
        self._limiting = threading.Lock()

    @property
    def lacks(self) -> tuple[str, ...]:
        return slices.lacking(self._groups)

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        unit = f"covey-job:{ask.job}:{ask.epoch}:{ask.program}-{secrets.token_hex(4)}.service"
        path = os.path.join(self._run_dir, unit)
        with self._opened() as systemd:
            self._limit_first(systemd, ask)
            if ask.seconds:
                self._kill_later(systemd, ask)
            try:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as writer:
                    writer.write(given)
                properties = slices.unit_properties(ask, account.name, folder, path, program(ask))
                return self._started(systemd, ask, unit, properties)
            except (Denied, ManagerError, OSError):
                with contextlib.suppress(ManagerError):
                    systemd.kill(unit)  # what was refused does not run
                raise
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _started(self, systemd: Manager, ask: StartAs, unit: str, properties: slices.Properties) -> int:
        look = f"journalctl -u {unit}"
        try:
            became = systemd.start(unit, properties)
            pid = systemd.main_pid(unit) if became == "done" else 0
        except ManagerError as refused:
            raise Denied(f"its unit does not start: {refused}", look) from refused
        if became != "done":
            raise Denied(f"its unit does not start: {became}", look)
        if not pid:
            raise Denied(f"its {ask.program} ended at once", look)
        return pid

    def limit(self, ask: LimitAs) -> None:
        with self._opened() as systemd:
            if systemd.units(slices.units_of(ask.job, ask.epoch)):
                self._set(systemd, ask)

    def _limit_first(self, systemd: Manager, ask: StartAs) -> None:
        """Make the slice of the epoch, with its limits, before anything runs in it. Only a supervisor changes
        those that are there: they are those of ranks that run. Two programs of an epoch may begin at once."""
        own, limits = slices.slice_of(ask.job, ask.epoch), slices.limits_of(ask)
        with self._limiting:
            try:
                systemd.make(own, slices.limit_properties(limits))
            except ManagerError as refused:
                if refused.name != EXISTS:
                    why = f"its slice {own} cannot be made: {refused}"
                    raise Denied(why, "journalctl -u covey-starter") from refused
                if ask.program == "supervisor":
                    self._set(systemd, LimitAs(ask.job, ask.epoch, limits))

    def _kill_later(self, systemd: Manager, ask: StartAs) -> None:
        timer = slices.timer_of(ask.job, ask.epoch)
        properties, service = slices.kill_later(ask.job, ask.epoch, ask.seconds)
        try:
            systemd.make(timer, properties, [service])
        except ManagerError as refused:
            if refused.name != EXISTS:  # it may be there, from the epoch's first program
                why = f"nothing would end it at its time limit: {refused}"
                raise Denied(why, f"systemctl status {timer}") from refused

    def _set(self, systemd: Manager, ask: LimitAs) -> None:
        try:
            systemd.set(slices.slice_of(ask.job, ask.epoch), slices.limit_properties(ask.limits))
        except ManagerError as refused:
            raise Denied(f"its limits cannot be set: {refused}", "journalctl -u covey-starter") from refused

    def end(self, ask: EndAs, uid: int | None) -> None:
        """A unit is gone once no process is left in it. One whose supervisor has ended is inactive, and killed too."""
        until_s = time.monotonic() + END_S
        pattern = slices.units_of(ask.job, ask.epoch)
        with self._opened() as systemd:
            while left := systemd.units(pattern):
                for unit in left:
                    systemd.kill(unit)
                if time.monotonic() > until_s:
                    why = "its units are not ended: a process is left that does not end"
                    raise Denied(why, f"systemctl kill --all --signal=KILL '{pattern}'")
                time.sleep(LOOK_S)
            _stop_slice(systemd, ask.job, ask.epoch)

    def forget(self, job: str) -> None:
        """A host where processes only waited to become ranks has slices that nobody ended."""
        with self._opened() as systemd:
            for unit in systemd.units(slices.slices_of(job)):
                epoch = slices.epoch_of(job, unit)
                if epoch is not None and not systemd.units(slices.units_of(job, epoch)):
                    _stop_slice(systemd, job, epoch)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Manager]:
        """The manager. Denied where it refuses, or does not answer."""
        try:
            with self._manager() as systemd:
                yield systemd
        except ManagerError as refused:
            raise Denied(f"systemd does not do it: {refused}", "systemctl status dbus") from refused

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


def _stop_slice(systemd: Manager, job: str, epoch: int) -> None:
    for unit in (slices.timer_of(job, epoch), slices.slice_of(job, epoch)):
        systemd.stop(unit)


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
