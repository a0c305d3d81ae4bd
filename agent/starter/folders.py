"""The folders of other users' jobs: one for each job, its user's to write, and the agent's to read and to clear.

    FOLDER            drwx--x--x  root                               starter.sock
    FOLDER/jobs       drwxr-x--x  root; the agent may list it
    FOLDER/jobs/j7    drwxrwx---  the job's user; by an access list the agent, and what is made there has such a list

An access list names the agent's user, and no group: people may be in the agent's, to reach its socket. No other user
gets into a job's folder. Root itself looks into none: what is in one is removed by a process of its user.
"""

import contextlib
import os
import stat
from collections.abc import Callable

from agent.ports import access_lists
from agent.ports.access_lists import PASS, READ, WRITE
from agent.ports.starter.starter_wire import JOBS
from agent.starter.accounts import Denied, UnixAccount

PASSED = 0o711
"""Mode of the folders that everybody passes through."""
LOOK, ALL = READ | PASS, READ | WRITE | PASS
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class JobFolders:
    """The folders under `root`. `agent_uid`: the agent's user."""

    def __init__(self, root: str, agent_uid: int) -> None:
        self.root, self._agent_uid = root, agent_uid

    def set_up(self) -> None:
        """Make the folders that everybody passes through. OSError, also where the file system has no access lists."""
        jobs = os.path.join(self.root, JOBS)
        for path in (self.root, jobs):
            os.makedirs(path, mode=0o700, exist_ok=True)
            folder = os.open(path, _DIRECTORY)
            try:
                if os.fstat(folder).st_uid != os.geteuid():
                    raise OSError(f"{path} belongs to another user")
                os.fchmod(folder, PASSED)
                if path == jobs:
                    os.setxattr(folder, access_lists.ACCESS, access_lists.for_two(self._agent_uid, ALL, LOOK, PASS))
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
            may = access_lists.for_two(self._agent_uid, ALL, ALL)
            for attribute in (access_lists.ACCESS, access_lists.DEFAULT):
                os.setxattr(folder, attribute, may)
            os.fchown(folder, account.uid, account.gid)
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

    def forget(self, job: str, clear: Callable[[str, int, int], None]) -> None:
        """Remove the job's folder. `clear`: empties a folder as its user and group. Denied says what is left there."""
        path, owner = os.path.join(self.root, JOBS, job), self.owner(job)
        if owner is not None:
            clear(path, *owner)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)
