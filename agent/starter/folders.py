"""The folders of other users' jobs: one for each job, its user's to write, and the agent's to read.

    FOLDER            drwxr-x--x  root, the agent's group      starter.sock
    FOLDER/jobs       drwxr-x--x  root, the agent's group
    FOLDER/jobs/j7    drwxrws---  the job's user, the agent's group: what is made there has the agent's group

No other user gets into a job's folder. Root itself looks into none: what is in one is removed by a process of its user.
"""

import contextlib
import os
import stat
import subprocess

from agent.ports.starter.starter_wire import JOBS
from agent.starter.accounts import Denied, UnixAccount

PASSED, SHARED = 0o751, 0o2770
"""Modes of the folders that everybody passes through, and of a job's."""
CLEAR_S = 60.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PROGRAMS = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Where root's own commands are."""


class JobFolders:
    """The folders under `root`. `agent_gid`: the group of the agent."""

    def __init__(self, root: str, agent_gid: int) -> None:
        self.root, self._gid = root, agent_gid

    def set_up(self) -> None:
        """Make the folders that everybody passes through. OSError."""
        for path in (self.root, os.path.join(self.root, JOBS)):
            os.makedirs(path, mode=0o700, exist_ok=True)
            folder = os.open(path, _DIRECTORY)
            try:
                if os.fstat(folder).st_uid != os.geteuid():
                    raise OSError(f"{path} belongs to another user")
                os.fchown(folder, -1, self._gid)
                os.fchmod(folder, PASSED)
            finally:
                os.close(folder)

    def make(self, job: str, account: UnixAccount) -> str:
        """The path of the job's folder, which is there from now on. Denied when it is another user's."""
        path = os.path.join(self.root, JOBS, job)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        folder = os.open(path, _DIRECTORY)
        try:
            owner = os.fstat(folder).st_uid
            if owner not in (os.geteuid(), account.uid):
                why = f"{path} belongs to another user (uid {owner}): it is left of another rack's job"
                raise Denied(why, f"rm -r {path}")
            os.fchown(folder, account.uid, self._gid)
            os.fchmod(folder, SHARED)
        finally:
            os.close(folder)
        return path

    def owner(self, job: str) -> tuple[int, int] | None:
        """The user of the job's folder, and its group; None: there is no folder, or one that was never given away."""
        try:
            found = os.lstat(os.path.join(self.root, JOBS, job))
        except FileNotFoundError:
            return None
        is_a_users = stat.S_ISDIR(found.st_mode) and found.st_uid != os.geteuid()
        return (found.st_uid, found.st_gid) if is_a_users else None

    def forget(self, job: str) -> None:
        """Remove the job's folder. Denied says what is left there."""
        path, owner = os.path.join(self.root, JOBS, job), self.owner(job)
        if owner is not None:
            cleared = subprocess.run(
                ("find", ".", "-xdev", "-mindepth", "1", "-delete"),
                cwd=path,
                user=owner[0],
                group=owner[1],
                extra_groups=[],
                env={"PATH": PROGRAMS, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CLEAR_S,
                check=False,
            )
            if cleared.returncode:
                raise Denied(f"{path} cannot be removed: {cleared.stderr.strip()[:200]}", f"rm -r {path}")
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)
