"""Programs as other users where systemd is not the first process, but control groups of version 2 are there: each epoch
has one of its own, with its limits, which its processes cannot leave.

    /sys/fs/cgroup/covey-jobs/JOB:EPOCH

Which device files are opened nothing limits here, and the starter must have been root's outside of a container.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agent.ports.starter import slices
from agent.ports.starter.starter_wire import EndAs, LimitAs, StartAs
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.sessions import Sessions
from agent.starter.units import END_S, LOOK_S
from covey.ports.starter import EpochLimits

ENTER = 'echo $$ > "$1" && shift && exec setpriv "$@"'
"""Enters the group as root, then becomes the user: a user's process may not enter one."""
PERIOD_US = 100_000
"""The period over which processor time is counted, in microseconds."""


class ControlGroups(Sessions):
    """A control group for each epoch. `root`: where version 2 is mounted."""

    def __init__(self, python: str = sys.executable, root: Path = slices.GROUPS) -> None:
        super().__init__(python)
        self._base = root / slices.OWN_GROUPS
        for folder in (root, self._base):
            folder.mkdir(exist_ok=True)
            for name in slices.CONTROLLERS:
                with contextlib.suppress(OSError):
                    (folder / "cgroup.subtree_control").write_text(f"+{name}")
        self.enforces = True
        self.lacks = (*slices.lacking(self._base, "cgroup.subtree_control"), "devices")

    def start(self, ask: StartAs, account: UnixAccount, folder: str, given: bytes) -> int:
        group, is_new = self._group(ask.job, ask.epoch), False
        try:
            group.mkdir()
            is_new = True
        except FileExistsError:
            pass
        if is_new or ask.program == "supervisor":  # the limits of ranks that run are theirs
            self._limit(group, slices.limits_of(ask))
        return super().start(ask, account, folder, given)

    def command(self, ask: StartAs, account: UnixAccount) -> tuple[tuple[str, ...], dict[str, Any]]:
        groups = ",".join(map(str, os.getgrouplist(account.name, account.gid)))
        became = ("--reuid", str(account.uid), "--regid", str(account.gid), "--groups", groups, "--")
        procs = str(self._group(ask.job, ask.epoch) / "cgroup.procs")
        argv, _ = super().command(ask, account)
        return ("sh", "-c", ENTER, "sh", procs, *became, *argv), {}

    def limit(self, ask: LimitAs) -> None:
        group = self._group(ask.job, ask.epoch)
        if self._pids(group):
            self._limit(group, ask.limits)

    def end(self, ask: EndAs, uid: int | None) -> None:
        group = self._group(ask.job, ask.epoch)
        until_s = time.monotonic() + END_S
        while pids := self._pids(group):
            with contextlib.suppress(OSError):  # Linux before 5.14 has no such file
                (group / "cgroup.kill").write_text("1")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            if time.monotonic() > until_s:
                raise Denied(f"processes of {ask.job} do not end: {pids[:9]}", f"kill -9 {pids[0]}")
            time.sleep(LOOK_S)
        while group.exists() and time.monotonic() < until_s:
            try:
                group.rmdir()
            except OSError:  # whoever started its last process has not taken note of the end
                time.sleep(LOOK_S)

    def forget(self, job: str) -> None:
        for group in self._base.glob(f"{job}:*"):
            with contextlib.suppress(OSError):  # something runs there
                group.rmdir()

    def _group(self, job: str, epoch: int) -> Path:
        return self._base / f"{job}:{epoch}"

    def _pids(self, group: Path) -> list[int]:
        try:
            return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        except FileNotFoundError:
            return []

    def _limit(self, group: Path, limits: EpochLimits) -> None:
        """Denied where a limit that can be set is not."""
        quota = str(limits.cpus * PERIOD_US) if limits.cpus else "max"
        values = {
            "memory.max": str(limits.memory_bytes or "max"),
            "cpu.max": f"{quota} {PERIOD_US}",
            "cpu.weight": str(limits.weight),
            "pids.max": str(slices.TASKS_MAX),
        }
        for name, value in values.items():
            if name.partition(".")[0] not in self.lacks:
                try:
                    (group / name).write_text(value)
                except OSError as error:
                    raise Denied(f"its limits cannot be set: {name}: {error.strerror}", f"ls {group}") from error


def usable(root: Path = slices.GROUPS) -> bool:
    """Whether there are control groups of version 2 here that this process may make, and `setpriv`."""
    try:
        subprocess.run(("setpriv", "--version"), capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return (root / "cgroup.controllers").exists() and os.access(root, os.W_OK)
