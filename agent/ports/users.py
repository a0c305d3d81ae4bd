"""The users of this host from its name service (`/etc/passwd`, LDAP and the like).

A name service may be another machine that does not answer. It is asked on threads of its own, a few at a time, and an
answer that does not come in time is none: whoever asks is then not known.
"""

import asyncio
import grp
import os
import pwd
import threading
import time
from collections.abc import Callable

from covey.ports.users import User

WAIT_S = 3.0
"""Seconds for which the name service is waited for."""
KEPT_S = 10.0
"""Seconds for which an answer is used again: one user who looks at the page asks several times a second."""
KEPT_MAX = 1024
"""The most answers that are kept."""
UNDER_WAY_MAX = 8
"""The most questions under way: further ones find nobody, so that a dead name service does not fill the agent with
threads."""
Look = Callable[[], User | None]


class SystemUsers:
    """`covey.ports.users.Users` of this machine."""

    def __init__(self) -> None:
        self._kept: dict[int | str, tuple[float, User | None]] = {}
        self._under_way = 0

    @property
    def own_uid(self) -> int:
        return os.geteuid()

    async def numbered(self, uid: int) -> User | None:
        return await self._found(uid, lambda: _with_groups(pwd.getpwuid(uid)))

    async def named(self, name: str) -> User | None:
        if not name or "\0" in name:
            return None
        return await self._found(name, lambda: _with_groups(pwd.getpwnam(name)))

    async def _found(self, key: int | str, look: Look) -> User | None:
        now_s = time.monotonic()
        at_s, user = self._kept.get(key, (-KEPT_S, None))
        if now_s - at_s < KEPT_S:
            return user
        try:
            async with asyncio.timeout(WAIT_S):
                user = await self._asked(look)
        except TimeoutError:
            return None
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        self._kept[key] = (now_s, user)
        return user

    async def _asked(self, look: Look) -> User | None:
        """What the name service says. The thread is a daemon: an agent that ends does not wait for it."""
        if self._under_way >= UNDER_WAY_MAX:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[User | None] = loop.create_future()
        self._under_way += 1

        def told(user: User | None) -> None:
            self._under_way -= 1
            if not answer.done():
                answer.set_result(user)

        def run() -> None:
            try:
                user = look()
            except (KeyError, OverflowError, OSError, ValueError):
                user = None
            try:
                loop.call_soon_threadsafe(told, user)
            except RuntimeError:
                return  # the loop is closed: the agent has ended

        threading.Thread(target=run, name="users", daemon=True).start()
        return await answer


def _with_groups(found: pwd.struct_passwd) -> User:
    names = set[str]()
    for gid in os.getgrouplist(found.pw_name, found.pw_gid):
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return User(found.pw_name, found.pw_uid, frozenset(names))
