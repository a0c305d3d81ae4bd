"""A host that a person says will never come back leaves the table, unless it lives."""

import pytest

from covey.core.ids import HostId
from gossip.membership.machine.events import Forget
from tests.gossip.membership.test_machine import Solo, alive, gone, known


@pytest.mark.parametrize(("state", "boot", "goes"), [(0, 1, False), (1, 1, False), (2, 1, True), (2, 0, False)])
def test_only_a_host_that_is_gone_is_forgotten_and_none_that_began_anew_since(
    state: int, boot: int, goes: bool
) -> None:
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
