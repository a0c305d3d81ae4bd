"""Messages and timers that come late, twice, or at the very end of a range, and what they must not do."""

import pytest

from covey.core.ids import HostId
from gossip.membership import messages as m
from gossip.membership.machine.events import AwayOver, ProbeDue, ProbeLate, SuspicionDue
from gossip.types import HostDown, HostUp, MemberAway, TableFull, identity
from tests.gossip.membership.test_machine import ME, Solo, alive, asked, gone, suspect, who

A, B = HostId("a"), HostId("b")


def test_a_timer_of_an_earlier_suspicion_buries_nobody() -> None:
    """The host refuted the suspicion, and is suspected again just before that timer fires."""
    me = Solo("a", "b")
    me.hear("b", suspect("a", 0))
    me.now_s += 20.0
    me.hear("a", alive("a", 1))
    me.hear("b", suspect("a", 1))
    me.machine._standing.stalls = []
    member = me.machine.members[A]
    assert member.suspicion is not None
    member.suspicion.start_s -= 100.0  # it is due by its own time; the timer is not its own
    me.dispatch(SuspicionDue(A, who("a").identity, 1, 0))
    assert me.state("a") == "suspect"
    me.dispatch(SuspicionDue(A, who("a").identity, 1, 1))
    assert me.state("a") == "gone"


def test_the_end_of_an_earlier_absence_is_not_the_end_of_this_one() -> None:
    me = Solo("a", "b")
    me.hear("a", m.Left(A, who("a").identity, 1, 0, 60))
    me.now_s += 30.0
    me.hear("a", alive("a", boot=2), boot=2)
    me.now_s += 20.0
    me.hear("a", m.Left(A, who("a").identity, 2, 0, 60), boot=2)
    me.clear()
    me.now_s += 10.0
    me.dispatch(AwayOver(A, who("a").identity, 1))
    assert me.facts == [] and me.machine.members[A].shown(me.now_s) == "away"
    me.now_s += 50.0
    me.dispatch(AwayOver(A, who("a").identity, 2))
    assert me.facts == [HostDown(A, left=False)]


def test_an_answer_to_an_earlier_probe_does_not_count() -> None:
    me = Solo("a")
    first = asked(me.dispatch(ProbeDue()))
    me.hear("a", m.Ack(first.seq))
    me.now_s += 1.0
    second = asked(me.dispatch(ProbeDue()))
    me.hear("a", m.Ack(first.seq))
    me.now_s += 1.0
    me.dispatch(ProbeDue())
    assert second.seq != first.seq and me.state("a") == "suspect"


def test_a_no_to_an_earlier_probe_says_nothing_of_this_ones_helpers() -> None:
    """Helpers that are not heard in this probe lower the local health, whatever they said in the last one."""
    me = Solo("a", "b", indirect_probes=1)
    for _ in range(20):
        probe = asked(me.dispatch(ProbeDue()))
        if probe.to == "a":
            break
        me.hear(probe.to, m.Ack(probe.seq))
        me.now_s += 1.0
    me.now_s += 0.5
    me.dispatch(ProbeLate(probe.seq))
    before = me.machine.health
    me.hear("b", m.Nack((probe.seq - 1) & 0xFFFFFFFF))
    me.now_s += 0.5
    me.dispatch(ProbeDue())
    assert me.machine.health == before + 1


@pytest.mark.parametrize("word", [suspect("a", 4), gone("a", 4)])
def test_an_accusation_of_the_incarnation_that_is_known_counts(word: m.Suspect | m.Gone) -> None:
    me = Solo("b")
    me.hear("a", alive("a", 4))
    me.hear("b", word)
    assert me.state("a") == "suspect"


def test_what_is_refuted_is_outbid_however_high_it_was() -> None:
    me = Solo("a")
    me.hear("a", m.Suspect(ME, who("me").identity, 1, 7, A))
    assert me.machine.incarnation == 8
    me.hear("a", m.Suspect(ME, who("me").identity, 1, 7, A))
    assert me.machine.incarnation == 8, "late: it is refuted already"


def test_an_earlier_life_of_ours_is_not_corrected() -> None:
    """A correction of each of its messages would bring another incarnation, told to all."""
    me = Solo("a")
    me.hear("a", m.Alive(ME, who("me").uuid, 0, 99, "elsewhere:1"))
    assert (me.machine.incarnation, me.facts) == (0, [])


def test_coming_back_in_the_same_moment_as_the_absence_is_no_loss() -> None:
    me = Solo("a", "b")
    me.hear("b", m.Left(A, who("a").identity, 1, 0, 60), alive("a", boot=2))
    assert me.facts == [MemberAway(A, 60.0), HostUp(A)]
    me.hear("b", m.Left(A, identity(A, who("a").uuid), 1, 0, 60))
    assert me.state("a") == "alive", "the goodbye of the last life, late"
    me.hear("b", suspect("a", 3, boot=1), gone("a", 3, boot=1))
    assert (me.state("a"), me.machine.members[A].boot) == ("alive", 2), "and what was said against that life"


def test_that_a_table_is_full_is_told_once_in_a_while_and_not_for_each_datagram() -> None:
    me = Solo("a", "b", hosts_max=3)
    me.hear("a", alive("d"))
    me.hear("a", alive("d"), alive("e"))
    assert me.facts == [TableFull(HostId("d"))]
    me.now_s += 30.0
    me.hear("a", alive("e"))
    assert me.facts[1:] == [TableFull(HostId("e"))], "again while it lasts"
