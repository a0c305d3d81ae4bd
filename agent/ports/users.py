"""The users of this host from its name service (`/etc/passwd`, LDAP and the like).

A name service may be another machine that does not answer. It is asked on threads of its own, a few at a time, and an
answer that does not come in time is none: whoever asks is then not known.
"""

import asyncio
import contextlib
import grp
import os
import pwd
import threading
import time
from collections import deque
from collections.abc import Callable

from covey.ports.users import User

WAIT_S = 3.0
"""Seconds for which the name service is waited for."""
KEPT_S = 10.0
"""Seconds for which an answer is used again: one user who looks at the page asks several times a second."""
KEPT_MAX = 1024
"""The most answers that are kept."""
UNDER_WAY_MAX = 8
"""The most questions under way, a thread each; further ones wait for one of these to end, so that a dead name service
does not fill the agent with threads."""
WAITING_MAX = 1024
"""The most questions that wait; a further one finds nobody."""
Look = Callable[[], User | None]
Key = int | str | tuple[str, int]
"""What a user is looked up by: number, name, or both, for the groups."""


class SystemUsers:
    """`covey.ports.users.Users` of this machine."""

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[float, User | None]] = {}
        self._asked: dict[Key, asyncio.Future[User | None]] = {}
        """Questions without an answer yet: whoever asks the same waits for the same answer."""
        self._waiting: deque[tuple[Key, Look]] = deque()
        self._under_way = 0

    @property
    def own_uid(self) -> int:
        return os.geteuid()

    async def numbered(self, uid: int) -> User | None:
        return await self._found(uid, lambda: _user(pwd.getpwuid(uid)))

    async def named(self, name: str) -> User | None:
        if not name or "\0" in name:
            return None
        return await self._found(name, lambda: _user(pwd.getpwnam(name)))

    async def with_groups(self, user: User) -> User:
        return await self._found((user.name, user.uid), lambda: _with_groups(user)) or user

    async def _found(self, key: Key, look: Look) -> User | None:
        now_s = time.monotonic()
        at_s, user = self._kept.get(key, (-KEPT_S, None))
        if now_s - at_s < KEPT_S:
            return user
        if key not in self._asked:
            if len(self._waiting) >= WAITING_MAX:
                return None
            self._asked[key] = asyncio.get_running_loop().create_future()
            self._waiting.append((key, look))
            self._begin()
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(self._asked[key])
        except TimeoutError:
            return None

    def _begin(self) -> None:
        """Ask what waits, as far as there may be threads for it. They are daemons: an agent that ends does not wait for
        a name service."""
        loop = asyncio.get_running_loop()
        while self._waiting and self._under_way < UNDER_WAY_MAX:
            self._under_way += 1
            threading.Thread(target=self._ask, args=(loop, *self._waiting.popleft()), name="users", daemon=True).start()

    def _ask(self, loop: asyncio.AbstractEventLoop, key: Key, look: Look) -> None:
        try:
            user = look()
        except (KeyError, OverflowError, OSError, ValueError):
            user = None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
            loop.call_soon_threadsafe(self._told, key, user)

    def _told(self, key: Key, user: User | None) -> None:
        self._under_way -= 1
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        self._kept[key] = (time.monotonic(), user)
        self._asked.pop(key).set_result(user)
        self._begin()


def _user(found: pwd.struct_passwd) -> User:
    return User(found.pw_name, found.pw_uid)


def _with_groups(user: User) -> User:
    names = set[str]()
    for gid in os.getgrouplist(user.name, pwd.getpwnam(user.name).pw_gid):
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return user._replace(groups=frozenset(names))
