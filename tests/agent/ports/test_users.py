"""Users by the name service of this machine, and a name service that does not answer."""

import asyncio
import grp
import os
import pwd
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from agent.ports import users
from agent.ports.users import SystemUsers
from covey.ports.users import FixedUsers, User
from tests.agent.here import until

NOBODY_UID = 3_999_999_999
ROOT = pwd.getpwuid(0)


async def test_users_of_this_machine_are_found_by_number_and_by_name() -> None:
    found = SystemUsers()
    root = await found.numbered(0)
    assert root == User(ROOT.pw_name, 0) == await found.named(ROOT.pw_name) and found.own_uid == os.geteuid()
    whole = await found.with_groups(root)
    assert (whole.name, whole.uid) == (root.name, 0) and grp.getgrgid(ROOT.pw_gid).gr_name in whole.groups
    assert await found.with_groups(User("no such user", 5)) == User("no such user", 5)


@pytest.mark.parametrize("uid", [NOBODY_UID, -1, -5, 1 << 32, 1 << 70])
async def test_a_number_that_nobody_has_is_nobody(uid: int) -> None:
    assert await SystemUsers().numbered(uid) is None


@pytest.mark.parametrize("name", ["", "no such user", "a\0b", "\ud800", "x" * 100_000, "0", "../root"])
async def test_a_name_that_nobody_has_is_nobody(name: str) -> None:
    assert await SystemUsers().named(name) is None


class Service:
    """A name service that can be held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.answers = 0, threading.Event()
        self.answers.set()
        monkeypatch.setattr(users, "pwd", SimpleNamespace(getpwuid=self.look, getpwnam=self.look))
        monkeypatch.setattr(users, "_user", lambda found: found)

    def look(self, key: Any) -> User:
        self.asked += 1
        self.answers.wait(20)
        return User("ann", key)


async def test_an_answer_is_used_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    service, found = Service(monkeypatch), SystemUsers()
    assert await found.numbered(5) == await found.numbered(5) == User("ann", 5) and service.asked == 1
    monkeypatch.setattr(users, "KEPT_S", 0.0)
    await found.numbered(5)
    assert service.asked == 2


async def test_a_name_service_that_does_not_answer_finds_nobody_and_takes_few_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(users, "WAIT_S", 0.05)
    monkeypatch.setattr(users, "WAITING_MAX", 50)
    service, found = Service(monkeypatch), SystemUsers()
    service.answers.clear()
    before = threading.active_count()
    assert await asyncio.gather(*(found.numbered(uid) for uid in range(100, 200))) == [None] * 100
    assert threading.active_count() - before <= users.UNDER_WAY_MAX and len(found._waiting) <= 50
    assert await found.numbered(7) is None, "nobody more is asked for"
    service.answers.set()
    await until(lambda: not found._under_way and not found._waiting)
    assert await found.numbered(7) == User("ann", 7), "a miss for want of an answer is not kept"


async def test_many_who_ask_at_once_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are threads; and those who ask the same thing take one thread together."""
    service, found = Service(monkeypatch), SystemUsers()
    service.answers.clear()
    asked = [asyncio.create_task(found.numbered(uid)) for uid in [*range(40), *[5] * 60]]
    await asyncio.sleep(0)
    service.answers.set()
    assert [user.uid for user in await asyncio.gather(*asked) if user] == [*range(40), *[5] * 60]
    assert service.asked == 40


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "KEPT_MAX", 3)
    Service(monkeypatch)
    found = SystemUsers()
    for uid in range(20):
        await found.numbered(uid)
    assert len(found._kept) <= 3


async def test_users_that_are_given_are_found_and_no_others() -> None:
    found = FixedUsers(User("ann", 5), own_uid=7)
    assert (await found.numbered(5), await found.named("ann"), found.own_uid) == (User("ann", 5), User("ann", 5), 7)
    assert await found.numbered(6) is None and await found.named("bob") is None
