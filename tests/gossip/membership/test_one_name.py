"""Two machines that claim one name: by another identity, and by a copy of one."""

from covey.core.ids import HostId
from gossip.membership import messages as m
from gossip.membership.machine.events import EarlierHeard
from gossip.types import NameConflict
from tests.gossip.membership.test_machine import Solo, alive, suspect, who


def test_a_name_is_kept_for_a_host_that_restarts_until_its_time_is_over() -> None:
    """Otherwise its twin would have the name, from the first planned restart on."""
    me = Solo("a", "b")
    twin = alive("a", uuid=b"2" * 16, address="z:1")
    me.hear("a", m.Left(HostId("a"), who("a").identity, 1, 0, 60))
    me.clear()
    me.hear("a", twin, uuid=b"2" * 16, source="z:1")
    assert (me.state("a"), me.facts) == ("left", [NameConflict(HostId("a"), "z:1")])
    assert m.NameTaken(HostId("a")) in me.words("z")
    me.hear("b", twin)
    assert me.state("a") == "left", "nor by way of others"
    me.now_s += 60.0
    me.hear("a", twin, uuid=b"2" * 16, source="z:1")
    assert me.state("a") == "alive" and me.machine.members[HostId("a")].address == "z:1"


def earlier(me: Solo, counter: int, boot: int = 1) -> None:
    me.dispatch(EarlierHeard(who("a", boot), "z:1", counter))


def test_a_copy_of_a_disk_elsewhere_is_reported_once_both_have_spoken_for_long() -> None:
    """Two machines have one identity file: the later boot counts, and the earlier machine keeps running."""
    me = Solo("a", "b")
    me.hear("a", alive("a", boot=5), boot=5)
    me.clear()
    earlier(me, 7)
    me.now_s += 9.9
    earlier(me, 8)
    assert me.facts == [] and not me.words("z"), "it may have been late"
    me.now_s += 0.1
    earlier(me, 8)
    assert me.facts == [], "a repeated datagram shows nothing"
    earlier(me, 9)
    assert me.facts == [NameConflict(HostId("a"), "z:1")] and m.NameTaken(HostId("a")) in me.words("z")


def test_a_machine_whose_identity_is_an_older_copy_is_not_called_two() -> None:
    """The machine's later boot is over, so it is suspected soon."""
    me = Solo("a", "b")
    me.hear("a", alive("a", boot=5), boot=5)
    earlier(me, 1)
    me.hear("b", suspect("a", boot=5))
    me.clear()
    me.now_s += 11.0
    earlier(me, 2)
    assert me.facts == []
    me.hear("a", alive("a", 1, boot=5), boot=5)
    me.clear()
    earlier(me, 3)
    me.now_s += 9.0
    earlier(me, 4)
    assert me.facts == [], "the time begins again"
