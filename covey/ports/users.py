"""The users of this host, as its operating system knows them: names, numbers and groups."""

from typing import NamedTuple, Protocol


class User(NamedTuple):
    """One user of this host."""

    name: str
    uid: int
    groups: frozenset[str] = frozenset()
    """The names of the groups that the user is in, as far as they were asked for."""


class Users(Protocol):
    """Looks users up. An answer may take long, where users are kept on another machine; None: this host knows no such
    user, or did not find out in time. Groups are asked for by themselves, since they take longest."""

    @property
    def own_uid(self) -> int:
        """The number of the user as whom this process runs."""

    async def numbered(self, uid: int) -> User | None: ...
    async def named(self, name: str) -> User | None: ...
    async def with_groups(self, user: User) -> User: ...


class FixedUsers:
    """Users that are given once: those of a test or of a simulated host."""

    def __init__(self, *users: User, own_uid: int = 0) -> None:
        self._users, self.own_uid = users, own_uid

    async def numbered(self, uid: int) -> User | None:
        return next((user for user in self._users if user.uid == uid), None)

    async def named(self, name: str) -> User | None:
        return next((user for user in self._users if user.name == name), None)

    async def with_groups(self, user: User) -> User:
        return user


NOBODY_KNOWN: Users = FixedUsers()
"""A host, or a program, that knows no users."""
