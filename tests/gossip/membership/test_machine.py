"""Stories of one host: what it hears, what it says, which hosts it believes."""

import itertools
import random
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import Fact, Message, Publish, SetTimer
from covey.core.ids import HostId
from gossip.membership import messages as m
from gossip.membership import policy
from gossip.membership.machine import Membership
from gossip.membership.machine.events import (
    Action,
    AwayOver,
    CallDue,
    Event,
    ForgetMember,
    GossipDue,
    Leaving,
    LoopStalled,
    MembershipStarted,
    PacketHeard,
    ProbeDue,
    ProbeLate,
    RelayLate,
    SuspicionDue,
    SyncDue,
)
from gossip.settings import GossipSettings
from gossip.types import (
    U32_MAX,
    HostDown,
    HostUp,
    LaterBootKnown,
    MemberAway,
    MemberSuspected,
    NameConflict,
    SendDatagram,
    Sender,
    State,
    TableFull,
    identity,
)
from tests.families import examples

ME = HostId("me")


def who(name: str, boot: int = 1, uuid: bytes = b"") -> Sender:
    return Sender(HostId(name), uuid or name.encode().ljust(16, b"."), boot)


def alive(name: str, incarnation: int = 0, boot: int = 1, uuid: bytes = b"", address: str = "") -> m.Alive:
    sender = who(name, boot, uuid)
    return m.Alive(sender.host, sender.uuid, boot, incarnation, address or f"{name}:1")


def suspect(name: str, incarnation: int = 0, by: str = "x", boot: int = 1) -> m.Suspect:
    return m.Suspect(HostId(name), who(name).identity, boot, incarnation, HostId(by))


def gone(name: str, incarnation: int = 0, by: str = "x", boot: int = 1) -> m.Gone:
    return m.Gone(HostId(name), who(name).identity, boot, incarnation, HostId(by))


def left(name: str, incarnation: int = 0, boot: int = 1) -> m.Left:
    return m.Left(HostId(name), who(name).identity, boot, incarnation)


class Asked(NamedTuple):
    """A ping that was sent."""

    seq: int
    to: str
    ping: m.Ping


def asked(actions: Iterable[Action]) -> Asked:
    says = [action for action in actions if isinstance(action, SendDatagram)]
    found = [(say.to, one) for say in says for one in say.messages if isinstance(one, m.Ping)]
    ((to, ping),) = found
    name = to.removesuffix(":1")
    assert ping.to == who(name).identity
    return Asked(ping.seq, name, ping)


class Solo:
    """One machine, and methods that move its clock and carry its datagrams."""

    def __init__(
        self, *names: str, remembered: Iterable[m.MemberRecord] = (), address: str = "me:1", **more: object
    ) -> None:
        self.now_s = 100.0
        options = GossipSettings(**more)  # type: ignore[arg-type]
        self.machine = Membership(who("me"), options, 1000, random.Random(7))
        self.said: list[SendDatagram] = []
        self.facts: list[Fact] = []
        self.timers: list[tuple[float, Event]] = []
        self.dispatch(MembershipStarted(address, tuple(remembered), options.seeds))
        for name in names:
            self.hear(name, alive(name))
        self.clear()

    def clear(self) -> None:
        self.said, self.facts = [], []

    def dispatch(self, event: Event) -> list[Action]:
        actions = list(self.machine.handle(event, self.now_s))
        for action in actions:
            match action:
                case SendDatagram():
                    self.said.append(action)
                case SetTimer():
                    self.timers.append((self.now_s + action.after_s, action.event))
                case Publish():
                    self.facts.append(action.fact)
                case ForgetMember():
                    pass
        self.machine.check()
        return actions

    def hear(self, sender: str, *messages: Message, boot: int = 1, uuid: bytes = b"", source: str = "") -> None:
        about = tuple(messages)
        self.dispatch(PacketHeard(who(sender, boot, uuid), source or f"{sender}:1", about))  # type: ignore[arg-type]

    def run(self, for_s: float, *kinds: type) -> None:
        """Fire timers of these kinds (all of them, if none is named) in order."""
        end_s = self.now_s + for_s
        while True:
            due = [one for one in self.timers if one[0] <= end_s and (not kinds or isinstance(one[1], kinds))]
            if not due:
                break
            first = min(due, key=lambda one: one[0])
            self.timers.remove(first)
            self.now_s = max(self.now_s, first[0])
            self.dispatch(first[1])
        self.now_s = end_s

    def probe(self) -> "Asked":
        """Begin a probe; returns the ping."""
        self.run(0, ProbeDue)
        self.clear()
        return asked(self.dispatch(ProbeDue()))

    def words(self, to: str = "") -> list[Message]:
        return [message for say in self.said if say.to.startswith(to) for message in say.messages]

    def rumours(self) -> list[Message]:
        """Messages that it passes on now."""
        self.clear()
        self.dispatch(GossipDue())
        return self.words()

    def state(self, name: str) -> State | None:
        member = self.machine.members.get(HostId(name))
        return member.state if member is not None else None


# ---- joining -----------------------------------------------------------------------------------------------------


def test_a_new_host_is_told_to_the_agent_and_to_others() -> None:
    me = Solo("a")
    me.hear("a", alive("b"))
    assert me.state("b") == "alive" and me.facts == [HostUp(HostId("b"))]
    assert alive("b") in me.rumours()


def test_hearing_the_same_twice_changes_nothing() -> None:
    """memberlist: AliveNode_Idempotent."""
    me = Solo("a")
    me.hear("a", alive("a"), alive("a"))
    assert me.facts == []


def test_a_host_that_knows_only_its_port_is_told_where_it_was_seen() -> None:
    me = Solo()
    me.hear("a", m.Alive(HostId("a"), who("a").uuid, 1, 0, ""), source="10.0.0.7:7946")
    assert me.machine.members[HostId("a")].address == "10.0.0.7:7946"
    assert m.SeenAt("10.0.0.7:7946") in me.words("10.0.0.7")


def test_a_host_bound_to_all_addresses_learns_its_own_from_the_first_peer() -> None:
    me = Solo("a", address="")
    me.hear("a", m.SeenAt("10.0.0.1:1"), m.SeenAt("10.9.9.9:1"))
    assert me.machine.address == "10.0.0.1:1"


def test_an_address_left_open_by_somebody_else_is_no_news() -> None:
    me = Solo("a")
    me.hear("a", m.Alive(HostId("b"), who("b").uuid, 1, 0, ""))
    assert me.state("b") is None


def test_a_stranger_is_asked_who_it_is() -> None:
    me = Solo()
    me.hear("a", m.Ping(1, who("me").identity))
    assert me.words("a") == [m.Ack(1), m.WhoAreYou()]
    me.clear()
    me.hear("a", m.WhoAreYou())
    assert alive("me") in me.words("a")


def test_two_hosts_that_cannot_agree_do_not_answer_each_other_forever() -> None:
    me = Solo()
    for _ in range(100):
        me.hear("a", m.WhoAreYou())
    assert me.words("a").count(m.WhoAreYou()) == 1


def test_a_host_calls_its_seeds_until_one_answers() -> None:
    me = Solo(seeds=("s1:1", "s2:1"))
    me.run(60, CallDue)
    calls = [say.to for say in me.said]
    assert calls.count("s1:1") == calls.count("s2:1") >= 5


def test_a_table_that_differs_is_exchanged_and_an_equal_one_is_not() -> None:
    me = Solo("a", "b")
    me.hear("a", m.SyncAsk(policy.checksum(me.machine.records())))
    assert m.SyncSame() in me.words("a") and m.SyncPull() not in me.words("a")
    me.clear()
    me.hear("a", m.SyncAsk(1))
    names = [message.host for message in me.words("a") if isinstance(message, m.MemberRecord)]
    assert names == ["a", "b", "me"] and m.SyncPull() in me.words("a")


def test_a_large_table_is_cut_to_datagrams() -> None:
    me = Solo(*(f"host-{number}" for number in range(200)))
    me.hear("host-1", m.SyncPull())
    records = [message for message in me.words() if isinstance(message, m.MemberRecord)]
    assert len(records) == 201 and len(me.said) > 5


def test_the_table_is_bounded_and_the_longest_dead_makes_room() -> None:
    me = Solo("a", "b", "c", hosts_max=4)
    me.hear("a", alive("d"))
    assert me.state("d") is None and me.machine.counts["full"] == 1 and me.facts == [TableFull(HostId("d"))]
    me.hear("b", left("b"))
    me.hear("a", alive("d"))
    assert me.state("d") == "alive" and me.state("b") is None


# ---- probing -----------------------------------------------------------------------------------------------------


def test_every_host_is_probed_once_per_round_in_shuffled_order() -> None:
    names = [f"h{number}" for number in range(10)]
    me = Solo(*names)
    rounds = []
    for _ in range(3):
        targets = []
        for _ in names:
            ping = me.probe()
            targets.append(ping.to)
            me.hear(ping.to, m.Ack(ping.seq))
        rounds.append(targets)
    assert all(sorted(one) == sorted(names) for one in rounds[1:])
    assert rounds[1] != rounds[2] and rounds[1] != sorted(names)


def test_a_host_that_answers_is_not_suspected() -> None:
    me = Solo("a")
    ping = me.probe()
    me.hear("a", m.Ack(ping.seq))
    me.dispatch(ProbeDue())
    assert me.state("a") == "alive" and me.machine.counts["probes_failed"] == 0


def test_an_answer_from_somebody_who_was_not_asked_does_not_count() -> None:
    me = Solo("a", "b")
    ping = me.probe()
    bystander = "b" if ping.to == "a" else "a"
    me.hear(bystander, m.Ack(ping.seq))
    me.dispatch(ProbeDue())
    assert me.state(ping.to) == "suspect"


def test_without_an_answer_three_others_are_asked_and_the_target_once_more() -> None:
    me = Solo("a", "b", "c", "d", "e")
    ping = me.probe()
    me.clear()
    me.dispatch(ProbeLate(ping.seq))
    requests = [say.to for say in me.said if m.PingReq(ping.seq, HostId(ping.to), ping.ping.to) in say.messages]
    assert len(set(requests)) == 3 and f"{ping.to}:1" not in requests
    assert ping.ping in me.words(ping.to)


def test_an_answer_through_others_counts() -> None:
    me = Solo("a", "b")
    ping = me.probe()
    me.dispatch(ProbeLate(ping.seq))
    helper = "b" if ping.to == "a" else "a"
    me.hear(helper, m.Ack(ping.seq))
    me.dispatch(ProbeDue())
    assert me.state(ping.to) == "alive"


def test_a_helper_pings_for_the_asker_and_passes_the_answer_on() -> None:
    me = Solo("a", "b")
    me.hear("a", m.PingReq(77, HostId("b"), who("b").identity))
    ping = next(message for message in me.words("b") if isinstance(message, m.Ping))
    me.clear()
    me.hear("b", m.Ack(ping.seq))
    assert m.Ack(77) in me.words("a")
    me.clear()
    me.dispatch(RelayLate(ping.seq))
    assert me.said == []


def test_a_helper_without_an_answer_says_so() -> None:
    me = Solo("a", "b")
    me.hear("a", m.PingReq(77, HostId("b"), who("b").identity))
    me.run(0.4, RelayLate)
    assert m.Nack(77) in me.words("a")


def test_a_helper_that_does_not_know_the_target_says_no_at_once() -> None:
    me = Solo("a")
    me.hear("a", m.PingReq(77, HostId("z"), who("z").identity))
    assert m.Nack(77) in me.words("a")


def test_a_ping_for_another_host_is_not_answered() -> None:
    me = Solo("a")
    me.hear("a", m.Ping(1, who("b").identity))
    assert me.words() == []


def test_a_ping_for_the_machine_that_had_our_name_before_is_not_answered() -> None:
    """Otherwise hosts that have not heard of the change would take the old machine for alive forever."""
    me = Solo("a")
    me.hear("a", m.Ping(1, who("me", uuid=b"2" * 16).identity))
    assert me.words() == []


def test_a_helper_does_not_vouch_for_another_machine_of_the_same_name() -> None:
    me = Solo("a", "b")
    me.hear("a", m.PingReq(77, HostId("b"), who("b", uuid=b"2" * 16).identity))
    assert m.Nack(77) in me.words("a") and not any(isinstance(one, m.Ping) for one in me.words())


# ---- local health ----------------------------------------------------------------------------------------------------


def test_helpers_that_are_not_heard_either_lower_the_local_health() -> None:
    """memberlist: ProbeNode_Awareness_MissedNack."""
    me = Solo("a", "b", "c", "d")
    ping = me.probe()
    me.dispatch(ProbeLate(ping.seq))
    helpers = [say.to[0] for say in me.said if any(isinstance(one, m.PingReq) for one in say.messages)]
    me.hear(helpers[0], m.Nack(ping.seq))
    me.dispatch(ProbeDue())
    assert me.machine.health == 2


def test_helpers_that_say_no_leave_the_local_health_alone() -> None:
    """memberlist: ProbeNode_Awareness_Degraded, all nacks received."""
    me = Solo("a", "b", "c", "d")
    ping = me.probe()
    me.dispatch(ProbeLate(ping.seq))
    for name in sorted({"a", "b", "c", "d"} - {ping.to}):
        me.hear(name, m.Nack(ping.seq))
    me.dispatch(ProbeDue())
    assert me.machine.health == 0 and me.state(ping.to) == "suspect"


def test_a_host_in_bad_health_probes_more_slowly_and_recovers_by_answers() -> None:
    """memberlist: ProbeNode_Awareness_Improved."""
    me = Solo("a", "b", "c", "d")
    ping = me.probe()
    me.dispatch(ProbeLate(ping.seq))
    actions = me.dispatch(ProbeDue())
    pause = next(one.after_s for one in actions if isinstance(one, SetTimer) and isinstance(one.event, ProbeDue))
    assert me.machine.health == 3 and pause == 4.0
    again = asked(actions)
    me.hear(again.to, m.Ack(again.seq))
    assert me.machine.health == 2


def test_a_probe_during_which_our_own_loop_stood_still_is_void() -> None:
    me = Solo("a", "b")
    ping = me.probe()
    start_s, me.now_s = me.now_s, me.now_s + 1.5
    me.dispatch(LoopStalled(start_s + 0.1, me.now_s))
    me.clear()
    me.dispatch(ProbeDue())
    assert me.state(ping.to) == "alive" and me.machine.counts["probes_void"] == 1 and me.machine.health == 1
    assert any(isinstance(one, m.Ping) for one in me.words(ping.to)), "the same host is probed again at once"


def test_a_stall_before_the_probe_or_a_short_one_does_not_void_it() -> None:
    me = Solo("a")
    me.dispatch(LoopStalled(me.now_s - 5, me.now_s))
    ping = me.probe()
    me.dispatch(LoopStalled(me.now_s, me.now_s + 0.2))
    me.now_s += 1
    me.dispatch(ProbeDue())
    assert me.state(ping.to) == "suspect"


def test_a_suspicion_does_not_run_while_we_could_not_listen() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a", by="b"))
    me.dispatch(LoopStalled(me.now_s + 1, me.now_s + 4))
    me.dispatch(LoopStalled(me.now_s + 2, me.now_s + 4))
    me.run(6.5, SuspicionDue)
    assert me.state("a") == "suspect"
    me.run(1, SuspicionDue)
    assert me.state("a") == "gone"


# ---- suspicion -------------------------------------------------------------------------------------------------------


def test_a_suspect_is_told_about_and_who_suspected_it_is_remembered() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a", by="b"))
    assert me.facts == [MemberSuspected(HostId("a"), HostId("b"))]
    assert me.machine.members[HostId("a")].suspected_by == "b"
    assert suspect("a", by="b") in me.rumours()
    me.run(60, SuspicionDue)
    assert me.state("a") == "gone" and me.machine.members[HostId("a")].suspected_by == "b"


def test_an_old_suspicion_is_ignored() -> None:
    """memberlist: SuspectNode_OldSuspect."""
    me = Solo("b")
    me.hear("a", alive("a", incarnation=5))
    me.hear("b", suspect("a", incarnation=4))
    assert me.state("a") == "alive"


def test_the_same_suspicion_twice_is_no_confirmation() -> None:
    """memberlist: SuspectNode_DoubleSuspect."""
    me = Solo("a", "b", "c", "d")
    for _ in range(5):
        me.hear("b", suspect("a", by="b"))
    me.run(10, SuspicionDue)
    assert me.state("a") == "suspect"


def test_independent_confirmations_shorten_a_suspicion() -> None:
    """memberlist: ProbeNode_Suspect_Dogpile."""
    lasted = []
    for confirmations in (0, 1, 2, 3):
        me = Solo("a", "b", "c", "d", "e", "f")
        me.hear("b", suspect("a", by="b"))
        for by in "cdef"[:confirmations]:
            me.hear(by, suspect("a", by=by))
        start_s = me.now_s
        while me.state("a") == "suspect":
            me.run(0.1, SuspicionDue)
        lasted.append(me.now_s - start_s)
    assert lasted[0] > 20 > lasted[1] > 8 > lasted[2] >= 4 and lasted[2] == lasted[3]


def test_our_own_failed_probe_confirms_what_others_suspect() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a", by="b"))
    while me.probe().to != "a":
        pass
    me.dispatch(ProbeDue())
    suspicion = me.machine.members[HostId("a")].suspicion
    assert suspicion is not None and suspicion.by == ["b", "me"]


def test_a_suspect_that_refutes_is_alive_again() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a"))
    me.clear()
    me.hear("a", alive("a", incarnation=1))
    me.run(60, SuspicionDue)
    assert me.state("a") == "alive" and me.facts == [HostUp(HostId("a"))]


def test_a_ping_to_a_suspect_carries_the_suspicion() -> None:
    """memberlist: ProbeNode_Buddy."""
    me = Solo("a")
    me.hear("x", suspect("a"))
    me.probe()
    assert suspect("a") in me.words("a")


def test_a_suspect_that_speaks_is_told_that_it_is_one() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a"))
    me.clear()
    me.hear("a", m.Ping(9, who("me").identity))
    assert me.words("a")[:2] == [m.Ack(9), suspect("a")]


@pytest.mark.parametrize("accusation", [suspect("me", 3), gone("me", 3), left("me", 3)])
def test_what_is_said_against_us_is_refuted_with_a_higher_incarnation(accusation: Message) -> None:
    """memberlist: SuspectNode_Refute, DeadNode_Refute."""
    me = Solo("a")
    me.hear("a", accusation)
    assert me.machine.incarnation == 4 and me.machine.health == 1 and me.facts == []
    assert alive("me", incarnation=4) in me.rumours()


def test_an_accusation_of_an_earlier_life_or_incarnation_is_not_refuted() -> None:
    me = Solo("a")
    me.hear("a", suspect("me", 3))
    me.hear("a", suspect("me", 3), suspect("me", 9, boot=0))
    assert me.machine.incarnation == 4


def test_incarnations_end_at_32_bits() -> None:
    me = Solo("a")
    me.hear("a", suspect("me", U32_MAX))
    assert me.machine.incarnation == U32_MAX


def test_a_wrong_address_about_ourselves_is_corrected() -> None:
    """memberlist: AliveNode_ChangeMeta, for what we have of it."""
    me = Solo("a")
    me.hear("a", alive("me", address="old:1"))
    assert alive("me", incarnation=1) in me.rumours()


# ---- gone and left ---------------------------------------------------------------------------------------------------


def test_a_suspect_that_is_said_to_be_gone_is_gone() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a", by="c"))
    me.clear()
    me.hear("b", gone("a", by="b"))
    assert me.state("a") == "gone" and me.facts == [HostDown(HostId("a"), left=False)]
    assert gone("a", by="c") in me.rumours()


def test_nobody_dies_by_hearsay_alone() -> None:
    """Otherwise a single deaf host would have every host of the rack called dead."""
    me = Solo("a", "b")
    me.hear("b", gone("a", by="b"))
    assert me.state("a") == "suspect" and me.facts == [MemberSuspected(HostId("a"), HostId("b"))]


def test_the_dead_of_somebodys_table_become_suspects() -> None:
    """memberlist: MergeState."""
    me = Solo("a", "b")
    me.hear("b", m.MemberRecord(HostId("a"), who("a").uuid, 1, 0, "a:1", 2, HostId("b")))
    assert me.state("a") == "suspect"


def test_a_table_makes_us_know_its_living_and_its_suspects_but_not_its_dead() -> None:
    me = Solo("a")
    for state, name in enumerate(("c", "d", "e", "f")):
        me.hear("a", m.MemberRecord(HostId(name), who(name).uuid, 1, 0, f"{name}:1", state, HostId("")))
    assert [me.state(name) for name in ("c", "d", "e", "f")] == ["alive", "suspect", None, None]


def test_old_news_does_not_raise_the_dead() -> None:
    """memberlist: DeadNode_AliveReplay."""
    me = Solo("a", "b")
    me.hear("b", suspect("a"), gone("a"))
    me.hear("b", alive("a"))
    assert me.state("a") == "gone"
    me.hear("b", alive("a", incarnation=1))
    assert me.state("a") == "alive"


def test_a_restart_is_alive_at_once_whatever_was_said_before() -> None:
    """A new boot beats every incarnation of the last one: no waiting for a suspicion to end."""
    me = Solo("a", "b")
    me.hear("b", suspect("a", incarnation=9), gone("a", incarnation=9))
    me.clear()
    me.hear("a", alive("a", boot=2), boot=2)
    assert me.state("a") == "alive" and me.facts == [HostUp(HostId("a"))]


def test_a_restart_that_nobody_noticed_is_told() -> None:
    me = Solo("a")
    me.hear("a", alive("a", boot=2), boot=2)
    assert me.facts == [HostUp(HostId("a"))]


def test_a_restarted_host_that_did_not_say_so_is_asked() -> None:
    me = Solo("a")
    me.hear("a", m.Ping(1, who("me").identity), boot=2)
    assert m.WhoAreYou() in me.words("a")


def test_an_earlier_life_of_a_host_is_not_listened_to() -> None:
    me = Solo("a", "b")
    me.hear("a", alive("a", boot=2), boot=2)
    me.hear("a", suspect("b", by="a"), boot=1)
    assert me.state("b") == "alive"


def test_who_leaves_is_left_at_once_for_everybody() -> None:
    """memberlist: DeadNode_Left."""
    me = Solo("a", "b")
    me.hear("a", left("a"))
    assert me.state("a") == "left" and me.facts == [HostDown(HostId("a"), left=True)]
    assert left("a") in me.rumours()


def test_who_restarts_is_away_and_no_longer_than_it_said() -> None:
    me = Solo("a", "b")
    goodbye = m.Left(HostId("a"), who("a").identity, 1, 0, 60)
    me.hear("a", goodbye)
    member = me.machine.members[HostId("a")]
    assert me.facts == [MemberAway(HostId("a"), 60.0)] and not member.live
    assert any(isinstance(word, m.Left) and word.away_s == 60 for word in me.rumours())
    me.clear()
    me.run(59.0, AwayOver)
    assert (member.shown(me.now_s), member.record(me.now_s).away_s, me.facts) == ("away", 1, [])
    me.run(1.5, AwayOver)
    assert member.shown(me.now_s) == "gone" and me.facts == [HostDown(HostId("a"), left=False)]
    assert member.missing, "it is called until it answers"
    me.hear("a", alive("a", boot=2), boot=2)
    assert member.shown(me.now_s) == "alive" and me.facts[-1] == HostUp(HostId("a"))


def test_who_is_back_in_time_is_not_mourned_later() -> None:
    me = Solo("a", "b")
    me.hear("a", m.Left(HostId("a"), who("a").identity, 1, 0, 60))
    me.hear("a", alive("a", boot=2), boot=2)
    me.clear()
    me.run(120.0, AwayOver)
    assert me.facts == [] and me.machine.members[HostId("a")].shown(me.now_s) == "alive"


def test_leaving_is_said_to_everybody_and_then_nothing_more() -> None:
    me = Solo("a", "b", "c")
    me.dispatch(Leaving())
    assert sorted(say.to for say in me.said) == ["a:1", "b:1", "c:1"]
    assert set(me.words()) == {left("me")}
    me.clear()
    me.hear("a", suspect("me"), m.Ping(1, who("me").identity))
    me.run(5)
    assert me.said == []


def test_a_dead_host_that_speaks_is_told_that_it_is_dead() -> None:
    """foca: message_from_down_member_is_replied_with_turn_undead."""
    me = Solo("a", "b")
    me.hear("b", suspect("a"), gone("a"))
    me.clear()
    me.hear("a", m.Ping(1, who("me").identity))
    assert gone("a") in me.words("a")


def test_rumours_also_go_to_the_recently_dead() -> None:
    """memberlist: GossipToDead."""
    me = Solo("a", gossip_fanout=2)
    me.hear("x", suspect("a"), gone("a"))
    assert gone("a") in me.rumours() and {say.to for say in me.said} == {"a:1"}
    me.now_s += 31
    me.hear("x", alive("b"))
    me.rumours()
    assert {say.to for say in me.said} == {"b:1"}


def test_the_dead_are_called_forever_with_pauses_of_at_most_a_minute() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a"), gone("a"))
    calls = []
    for _ in range(600):
        me.clear()
        me.run(1, CallDue)
        calls += [me.now_s] * sum(say.to == "a:1" for say in me.said)
    pauses = [later - sooner for sooner, later in itertools.pairwise(calls)]
    assert pauses[0] <= 3 and 40 <= max(pauses) <= 61 and calls[-1] > me.now_s - 61


def test_who_left_is_not_called() -> None:
    me = Solo("a", "b")
    me.hear("a", left("a"))
    me.clear()
    me.run(300, CallDue)
    assert all(say.to != "a:1" for say in me.said)


def test_who_left_long_ago_is_forgotten() -> None:
    """serf: RemoveFailedNode_prune, by time."""
    me = Solo("a", "b")
    me.hear("a", left("a"))
    me.now_s += 24 * 3600 + 1
    assert ForgetMember(HostId("a")) in me.dispatch(SyncDue())
    assert me.state("a") is None


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_second_machine_with_a_live_name_is_refused_and_reported() -> None:
    """memberlist: AliveNode_Conflict."""
    me = Solo("a")
    for _ in range(3):
        me.hear("a", alive("a", uuid=b"2" * 16, address="z:1"), uuid=b"2" * 16, source="z:1")
    assert me.facts == [NameConflict(HostId("a"), "z:1")]
    assert me.machine.members[HostId("a")].address == "a:1"
    assert me.words("z").count(m.NameTaken(HostId("a"))) == 1


def test_a_machine_that_has_our_own_name_is_refused_and_reported() -> None:
    me = Solo("a")
    me.hear("me", m.Ping(1, who("me").identity), uuid=b"2" * 16, source="z:1")
    assert me.facts == [NameConflict(ME, "z:1")] and m.NameTaken(ME) in me.words("z")


def test_who_is_refused_says_so_to_its_own_agent() -> None:
    me = Solo()
    me.hear("a", m.NameTaken(ME))
    assert me.facts == [NameConflict(ME)]


@pytest.mark.parametrize("end", [left("a"), gone("a")])
def test_a_name_is_free_again_when_its_machine_is_gone(end: Message) -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a"), end)
    me.clear()
    me.hear("a", alive("a", uuid=b"2" * 16, address="z:1"), uuid=b"2" * 16, source="z:1")
    member = me.machine.members[HostId("a")]
    assert (member.state, member.address) == ("alive", "z:1") and me.facts == [HostUp(HostId("a"))]


def test_a_machine_without_its_identity_file_has_its_name_back_at_once() -> None:
    """The machine was killed, started again at its address and is not yet missed under its old identity."""
    me = Solo("a", "b")
    me.hear("a", m.Ping(1, who("me").identity), uuid=b"2" * 16, boot=2)
    assert m.WhoAreYou() in me.words("a") and me.facts == []
    me.hear("a", alive("a", boot=2, uuid=b"2" * 16), uuid=b"2" * 16, boot=2)
    assert me.facts == [HostUp(HostId("a"))] and me.machine.members[HostId("a")].uuid == b"2" * 16
    me.hear("b", alive("a", boot=1), suspect("a", boot=1), gone("a", boot=1))
    me.hear("a", m.Ping(2, who("me").identity), boot=1)
    assert me.state("a") == "alive" and me.facts == [HostUp(HostId("a"))], "late words are no conflict"


def test_a_copy_of_its_settings_elsewhere_does_not_take_a_name() -> None:
    """The copy gives the address of the first machine, but does not speak from there."""
    me = Solo("a")
    me.hear("a", alive("a", boot=9, uuid=b"2" * 16), uuid=b"2" * 16, source="z:1", boot=9)
    assert me.facts == [NameConflict(HostId("a"), "z:1")]


def test_late_words_about_the_machine_before_do_not_hurt_its_successor() -> None:
    me = Solo("a", "b")
    me.hear("a", left("a"))
    me.hear("a", alive("a", uuid=b"2" * 16, address="z:1"), uuid=b"2" * 16, source="z:1")
    me.hear("b", suspect("a", 9, boot=9), gone("a", 9, boot=9), left("a", 9, boot=9))
    assert me.state("a") == "alive"


def test_who_is_known_as_gone_under_a_later_boot_is_told_to_its_agent() -> None:
    """The machine's identity is an older copy, and all that it says counts as said before."""
    me = Solo("a")
    me.hear("a", suspect("me", boot=5))
    assert me.facts == [], "a clone of it may be alive there"
    me.hear("a", m.Gone(ME, who("me", 5, b"2" * 16).identity, 5, 0, HostId("x")), gone("me", boot=1))
    assert me.facts == [], "another machine; and what it refutes"
    me.hear("a", gone("me", boot=5), left("me", boot=5), gone("me", boot=4))
    assert me.facts == [LaterBootKnown(5)], "once"


def test_a_missing_host_is_called_with_what_it_is_accused_of() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a", boot=7), gone("a", boot=7))
    me.run(60.0, GossipDue)  # the rumour that it is gone has been told by then
    me.clear()
    me.run(60.0, CallDue)
    assert gone("a", boot=7) in me.words("a")


def test_a_clone_with_a_later_boot_of_ourselves_is_reported() -> None:
    me = Solo("a")
    me.hear("a", alive("me", boot=0, uuid=b"2" * 16))
    assert me.facts == [], "what we were before our identity was lost"
    me.hear("a", alive("me", boot=5))
    assert me.facts == [NameConflict(ME, "me:1")]


# ---- restarts --------------------------------------------------------------------------------------------------------


def known(name: str, state: int) -> m.MemberRecord:
    return m.MemberRecord(HostId(name), who(name).uuid, 1, 3, f"{name}:1", state, HostId(""))


def test_after_a_restart_known_hosts_are_called_without_any_seed() -> None:
    """serf: SnapshotRecovery; dead ones are called, too."""
    me = Solo(remembered=[known("a", 0), known("b", 2), known("c", 3)])
    assert (me.state("a"), me.state("b"), me.state("c")) == ("suspect", "gone", None)
    me.run(2, CallDue)
    assert {say.to for say in me.said} == {"a:1", "b:1"}


def test_a_remembered_host_is_alive_by_the_same_news_as_before() -> None:
    me = Solo(remembered=[known("a", 0)])
    me.hear("a", alive("a", incarnation=3))
    assert me.state("a") == "alive" and me.facts == [HostUp(HostId("a"))]


def test_a_host_that_was_gone_before_the_restart_needs_better_news() -> None:
    me = Solo(remembered=[known("a", 2)])
    me.hear("b", alive("b"), alive("a", incarnation=3))
    assert me.state("a") == "gone"


def test_a_remembered_host_that_is_not_heard_of_is_gone_but_not_told_on() -> None:
    me = Solo(remembered=[known("a", 0)])
    me.run(10, SuspicionDue)
    assert me.state("a") == "gone" and me.facts == [HostDown(HostId("a"), left=False)]
    me.hear("b", alive("b"))
    assert not any(isinstance(one, m.Gone | m.Suspect) for one in me.rumours())


def test_a_remembered_host_that_others_buried_is_gone() -> None:
    me = Solo("b", remembered=[known("a", 0)])
    me.hear("b", known("a", 2))
    assert me.state("a") == "gone"


# ---- rumours ---------------------------------------------------------------------------------------------------------


def test_a_rumour_ends_after_so_many_sends_and_gossip_rests() -> None:
    me = Solo("a", "b", "c")
    me.run(10, GossipDue)
    me.clear()
    me.hear("a", alive("d"))
    me.run(10, GossipDue)
    sends = sum(alive("d") in say.messages for say in me.said)
    assert sends == 4 and all(say.messages for say in me.said)
    me.clear()
    me.run(10, GossipDue)
    assert me.said == []


def test_rumours_ride_on_answers() -> None:
    me = Solo("a", "b")
    me.hear("a", alive("c"))
    me.clear()
    me.hear("b", m.Ping(5, who("me").identity))
    assert {m.Ack(5), alive("c")} <= set(me.words("b"))


def test_only_the_newest_of_a_host_is_told() -> None:
    me = Solo("a", "b")
    me.hear("b", suspect("a", by="b"))
    me.hear("a", alive("a", incarnation=1))
    about_a = [one for one in me.rumours() if isinstance(one, m.Alive | m.Suspect) and one.host == "a"]
    assert set(about_a) == {alive("a", incarnation=1)}


def test_rumours_fill_a_datagram_but_not_more() -> None:
    me = Solo(*(f"host-{number}" for number in range(100)))
    me.hear("host-1", m.Ping(5, who("me").identity))
    (say,) = me.said
    assert 5 < len(say.messages) < 40


# ---- whatever comes --------------------------------------------------------------------------------------------------

names = st.sampled_from(["me", "a", "b", "c"])
small = st.integers(0, 3)
said = st.one_of(
    st.builds(alive, names, small, small, st.sampled_from([b"", b"2" * 16])),
    st.builds(suspect, names, small, names, small),
    st.builds(gone, names, small, names, small),
    st.builds(left, names, small, small),
    st.builds(m.Ping, small, names.map(lambda name: who(name).identity)),
    names.flatmap(lambda name: st.builds(m.PingReq, small, st.just(HostId(name)), st.just(who(name).identity))),
    st.builds(known, names, small),
    st.builds(m.SyncAsk, small),
    st.sampled_from([m.SyncSame(), m.SyncPull(), m.WhoAreYou(), m.NameTaken(ME), m.SeenAt("me:2")]),
    st.builds(m.Ack, small),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(names, small, st.booleans(), st.lists(said, max_size=4), st.floats(0, 3)), max_size=30))
def test_whatever_is_said_in_any_order_invariants_hold_and_no_host_grows_younger(
    story: list[tuple[str, int, bool, list[Message], float]],
) -> None:
    me = Solo("a", hosts_max=4)
    newest: dict[tuple[str, int], tuple[int, int]] = {}
    for sender, boot, other, messages, pause_s in story:
        me.hear(sender, *messages, boot=boot, uuid=b"2" * 16 if other else b"")
        me.run(pause_s)
        present = {(member.host, member.identity) for member in me.machine.members.values()}
        newest = {key: order for key, order in newest.items() if key in present}
        for member in me.machine.members.values():
            key, order = (member.host, member.identity), (member.boot, member.incarnation)
            assert order >= newest.get(key, (0, 0))
            newest[key] = order


def test_identity_is_of_name_and_uuid() -> None:
    found = {identity(HostId(name), uuid) for name in ("a", "b") for uuid in (bytes(16), b"1" * 16)}
    assert len(found) == 4 and all(0 <= one < 2**63 for one in found)
