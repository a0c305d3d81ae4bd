"""A host that a person says will never come back leaves the table, unless it lives."""

import pytest

from covey.core.ids import HostId
from gossip.membership import messages as m
from gossip.membership.machine.events import Forget
from tests.gossip.membership.test_machine import Solo, alive, gone, known


@pytest.mark.parametrize(("state", "boot", "goes"), [(0, 1, False), (1, 1, True), (2, 1, True), (2, 0, False)])
def test_only_a_host_that_is_gone_is_forgotten_and_none_that_began_anew_since(
    state: int, boot: int, goes: bool
) -> None:
    """A host that is only remembered from before a restart (1) was heard of by nobody here: it may go, too."""
    me = Solo(remembered=[known("a", state)])
    if state == 0:
        me.hear("a", alive("a", incarnation=3))
    me.dispatch(Forget(HostId("a"), boot))
    assert (me.state("a") is None) == goes
    if goes:
        me.hear("b", gone("a", incarnation=3))
        assert me.state("a") is None, "what others still say of it brings it not back"
        me.hear("a", alive("a", incarnation=4))
        assert me.state("a") == "alive"


def test_of_a_host_that_is_only_remembered_others_are_told_nothing() -> None:
    """It may have been forgotten while this agent was off; who is there says so itself."""
    me = Solo("b", remembered=[known("a", 1)])
    me.hear("b", m.SyncPull())
    told = [message for said in me.said for message in said.messages if isinstance(message, m.MemberRecord)]
    assert {record.host for record in told} == {"me", "b"}
    assert {record.host for record in me.machine.records()} == {"me", "a", "b"}, "it is remembered for the next start"
    me.clear()
    me.hear("a", alive("a", incarnation=3))
    me.clear()
    me.hear("b", m.SyncPull())
    told = [message for said in me.said for message in said.messages if isinstance(message, m.MemberRecord)]
    assert {record.host for record in told} == {"me", "a", "b"}
