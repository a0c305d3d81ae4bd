"""A starter in this process, with users of the test's own, and a host whose agent asks it."""

import dataclasses
import os
import pwd
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.ports.network.unix_sockets import bind_unix
from agent.ports.starter.starter_link import StarterLink
from agent.ports.starter.starter_wire import SOCKET
from agent.starter.accounts import Lookup, Rules
from agent.starter.folders import JobFolders
from agent.starter.helper import Starter
from agent.starter.sessions import Sessions
from agent.starter.units import Launcher
from tests.agent.here import Here, here
from tests.covey.live_volume import ANYONES, python_of

ALICE, BOB = 64_101, 64_102
UIDS = {"alice": ALICE, "bob": BOB, "root": 0, "daemon": 1, "nobody": 65_534}


def lookup(name: str) -> pwd.struct_passwd:
    """The users of these tests, whom this machine does not know."""
    uid = UIDS[name]
    return pwd.struct_passwd((name, "x", uid, uid, "", f"/home/{name}", "/bin/sh"))


class StarterHere:
    """A starter that serves in threads of this process."""

    def __init__(
        self,
        folder: str,
        python: str,
        agent_uid: int | None = None,
        units: Launcher | None = None,
        find: Lookup = lookup,
    ) -> None:
        self.folder, self.said = folder, list[str]()
        uid = os.geteuid() if agent_uid is None else agent_uid
        self.folders = JobFolders(folder, uid)
        self.folders.set_up()
        self.starter = Starter(Rules(uid), self.folders, units or Sessions(python), self.said.append, find)
        self._listener: socket.socket | None = None
        self._uid = uid

    def start(self) -> None:
        self._listener = bind_unix(f"{self.folder}/{SOCKET}", uid=self._uid)
        self._listener.setblocking(True)
        threading.Thread(target=self.starter.serve, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            os.unlink(f"{self.folder}/{SOCKET}")
            self._listener = None


@asynccontextmanager
async def host_with_starter(
    directory: str, uid: int = ALICE, find: Lookup = lookup
) -> AsyncIterator[tuple[Here, StarterHere]]:
    """A host in `directory` whose agent may start jobs as other users. `uid`: the first of them; `find`: finds them."""
    python = python_of(uid)
    if python is None:
        pytest.skip("no Python here that other users can execute has msgspec and uvloop")
    for folder in (directory, f"{directory}/u"):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o755)
    starter = StarterHere(f"{directory}/u", python, find=find)
    starter.start()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = ANYONES["PYTHONPATH"]
    try:
        async with here(directory) as host:
            users = StarterLink(host.env.bytes, starter.folder, host.base)
            await users.look()
            yield Here(dataclasses.replace(host.env, starter=users), host.base, host.lines), starter
    finally:
        starter.stop()
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
