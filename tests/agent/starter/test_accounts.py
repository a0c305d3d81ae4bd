"""Whose jobs a starter starts."""

import pwd

import pytest

from agent.starter.accounts import Denied, Rules, account_of
from tests.agent.starter.starter_here import ALICE, lookup

AGENT = 995
RULES = Rules(AGENT)


def denied(name: str, uid: int, rules: Rules = RULES) -> str:
    with pytest.raises(Denied) as found:
        account_of(name, uid, rules, lookup)
    assert found.value.next
    return str(found.value)


def test_a_user_of_this_host_has_an_account() -> None:
    assert account_of("alice", ALICE, RULES, lookup) == ("alice", ALICE, ALICE, "/home/alice", "/bin/sh")


def test_a_name_that_stands_for_another_number_here_is_another_user() -> None:
    said = denied("alice", ALICE + 1)
    assert said == f"alice has uid {ALICE} on this host, and uid {ALICE + 1} where the job was submitted"


def test_an_unknown_name_has_no_account() -> None:
    assert denied("carol", 64_103) == "there is no user carol on this host"


def test_root_is_refused_whatever_is_allowed() -> None:
    assert denied("root", 0, Rules(AGENT, uid_min=0, allowed=frozenset({"root"}))) == "jobs never run as root"


def test_the_agents_own_user_is_refused() -> None:
    assert denied("alice", ALICE, Rules(ALICE)) == "alice is the agent's own user"


def test_a_system_user_is_refused_unless_it_is_named() -> None:
    assert "a system user" in denied("daemon", 1)
    assert account_of("daemon", 1, Rules(AGENT, allowed=frozenset({"daemon"})), lookup).uid == 1
    assert "a system user" in denied("daemon", 1, Rules(AGENT, allowed=frozenset({"alice"})))


def test_the_number_of_nobody_is_refused_though_it_is_a_high_one() -> None:
    """It stands for users without a number: several of them would be one."""
    assert "a system user" in denied("nobody", 65_534, Rules(AGENT, allowed=frozenset({"nobody"})))


def test_a_user_whose_group_is_roots_is_refused() -> None:
    def with_roots_group(name: str) -> object:
        found = list(lookup(name))
        found[3] = 0
        return type(lookup(name))(found)

    with pytest.raises(Denied, match="the group of alice is root's"):
        account_of("alice", ALICE, RULES, with_roots_group)  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "found"), [("1001", "1001"), ("Alice", "alice")])
def test_a_name_that_systemd_takes_for_another_user_is_refused(asked: str, found: str) -> None:
    """Digits are a number to it, whoever has them for a name."""

    def named(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((found, "x", ALICE, ALICE, "", "/home/a", "/bin/sh"))

    with pytest.raises(Denied, match="stands for more than one user"):
        account_of(asked, ALICE, RULES, named)
