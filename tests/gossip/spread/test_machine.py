"""Stories of one host that passes facts on."""

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import Message, SetTimer
from covey.core.ids import HostId
from gossip.settings import GossipSettings
from gossip.spread.machine import (
    REPLY_DATAGRAMS,
    Action,
    BeatDue,
    PeerDown,
    PeerForgotten,
    PeerUp,
    Published,
    PushDue,
    RoundDue,
    SayTo,
    Spread,
    SpreadStarted,
    Told,
)
from gossip.spread.messages import AnyMessage, Delta, FactEntry, KnownVersion, Syn, Want
from gossip.types import U63_MAX, SendDatagram, Sender, size
from tests.families import examples

BUDGET = 1100


def who(name: str, boot: int = 1) -> Sender:
    return Sender(HostId(name), name.encode().ljust(16, b"."), boot)


def spread(name: str, *peers: str, boot: int = 1) -> Spread:
    machine = Spread(who(name, boot), GossipSettings(), BUDGET, random.Random(3))
    machine.handle(SpreadStarted(), 0.0)
    for peer in peers:
        machine.handle(PeerUp(HostId(peer), who(peer).identity), 0.0)
    return machine


def words(actions: Sequence[Action]) -> list[Message]:
    return [message for action in actions if isinstance(action, SendDatagram | SayTo) for message in action.messages]


def hear(machine: Spread, sender: str, *messages: AnyMessage, now_s: float = 1.0) -> list[Message]:
    found = words(machine.handle(Told(who(sender), f"{sender}:1", messages), now_s))
    machine.check()
    return found


def talk(a: Spread, b: Spread, now_s: float) -> None:
    """Play one round begun by `a`, to the end, without loss."""
    names = (a.me.host, b.me.host)
    waiting = [(b, a, message) for message in words(a.handle(RoundDue(), now_s))]
    for _ in range(50):
        if not waiting:
            return
        to, sender, message = waiting.pop(0)
        assert isinstance(message, Syn | Want | Delta)
        waiting += [(sender, to, answer) for answer in hear(to, sender.me.host, message, now_s=now_s)]
    raise AssertionError(f"{names} do not come to an end")


def test_after_one_round_both_know_what_either_knew() -> None:
    a, b = spread("a", "b"), spread("b", "a")
    a.handle(Published("x", b"1"), 0.0)
    b.handle(Published("y", b"2"), 0.0)
    talk(a, b, 1.0)
    of_a, of_b = b.of(HostId("a")), a.of(HostId("b"))
    assert of_a is not None and of_a.values == {"x": b"1"}
    assert of_b is not None and of_b.values == {"y": b"2"}


def test_facts_of_a_third_host_are_told_on_with_their_age() -> None:
    a, b, c = spread("a", "b", "c"), spread("b", "a", "c"), spread("c", "a", "b")
    c.handle(Published("x", b"1"), 10.0)
    hear(a, "c", Delta(who("c").identity, 1, 0, 2, 0, 0, (FactEntry("x", 2, b"1"),)), now_s=10.0)
    hear(b, "a", *[one for one in hear(a, "b", Syn(0, U63_MAX, ()), now_s=13.0) if isinstance(one, Delta)], now_s=13.0)
    known = b.of(HostId("c"))
    assert known is not None and known.values == {"x": b"1"} and known.fresh_s == 10.0


def test_a_host_that_has_more_is_asked_and_one_that_has_less_is_told() -> None:
    a = spread("a", "b")
    answer = hear(
        a, "b", Syn(0, U63_MAX, (KnownVersion(who("b").identity, 1, 9), KnownVersion(who("a").identity, 1, 0)))
    )
    assert [type(one) for one in answer] == [Want, Delta]


def test_only_the_range_of_a_digest_is_answered() -> None:
    a = spread("a", "b")
    assert hear(a, "b", Syn(who("a").identity + 1, U63_MAX, ())) == []
    assert len(hear(a, "b", Syn(who("a").identity, who("a").identity, ()))) == 1


def test_facts_of_hosts_that_are_not_there_are_not_stored() -> None:
    a = spread("a", "b")
    hear(a, "b", Delta(123, 1, 0, 5, 0, 0, (FactEntry("x", 5, b"1"),)))
    hear(a, "b", Delta(who("a").identity, 1, 0, 500, 0, 0, (FactEntry("x", 5, b"forged"),)))
    assert 123 not in a.facts and a.ignored == 2
    mine = a.of(HostId("a"))
    assert mine is not None and mine.values == {}


def test_facts_of_a_gone_host_are_kept_but_not_told_on_until_it_is_back() -> None:
    a = spread("a", "b", "c")
    hear(a, "c", Delta(who("c").identity, 1, 0, 5, 0, 0, (FactEntry("x", 5, b"1"),)))
    a.handle(PeerDown(HostId("c")), 2.0)
    told = {one.identity for one in hear(a, "b", Syn(0, U63_MAX, ())) if isinstance(one, Delta)}
    assert told == {who("a").identity}
    known = a.of(HostId("c"))
    assert known is not None and known.values == {"x": b"1"}
    a.handle(PeerUp(HostId("c"), who("c").identity), 3.0)
    told = {one.identity for one in hear(a, "b", Syn(0, U63_MAX, ())) if isinstance(one, Delta)}
    assert told == {who("a").identity, who("c").identity}


def test_facts_of_a_gone_host_are_not_told_to_who_asks_for_them_either() -> None:
    a = spread("a", "b", "c")
    hear(a, "b", Delta(who("c").identity, 1, 0, 5, 0, 0, (FactEntry("x", 5, b"1"),)))
    want = Want((KnownVersion(who("c").identity, 0, 0),))
    assert [type(word) for word in hear(a, "b", want)] == [Delta]
    a.handle(PeerDown(HostId("c")), 1.0)
    assert hear(a, "b", want) == []


def test_what_is_published_is_pushed_to_several_hosts_at_once() -> None:
    a = spread("a", *(f"b{number}" for number in range(10)))
    a.handle(Published("x", b"1"), 0.0)
    told = [action.to for action in a.handle(PushDue(), 0.0) if isinstance(action, SayTo)]
    assert len(told) == len(set(told)) == GossipSettings().gossip_fanout > 1


def test_a_reinstalled_host_has_no_facts_of_the_one_before() -> None:
    a = spread("a", "b")
    hear(a, "b", Delta(who("b").identity, 9, 0, 5, 0, 0, (FactEntry("x", 5, b"1"),)))
    a.handle(PeerUp(HostId("b"), 4711), 1.0)
    a.check()
    assert a.of(HostId("b")) is None
    a.handle(PeerForgotten(HostId("b")), 1.0)
    assert a.of(HostId("b")) is None and a.live == {}


def test_a_version_grows_with_every_beat_so_that_age_means_something() -> None:
    a = spread("a")
    before = a.facts[a.identity]
    a.handle(BeatDue(), 50.0)
    after = a.facts[a.identity]
    assert after.version == before.version + 1 and after.fresh_s == 50.0


def test_what_is_published_is_pushed_at_once_but_at_most_four_times_a_second() -> None:
    a = spread("a", "b")
    first = list(a.handle(Published("x", b"1"), 1.0))
    assert first == [SetTimer(0.0, PushDue())]
    assert list(a.handle(Published("x", b"2"), 1.0)) == []
    pushed = words(a.handle(PushDue(), 1.0))
    assert [one.entries[0].value for one in pushed if isinstance(one, Delta)] == [b"2"]
    (timer,) = a.handle(Published("x", b"3"), 1.1)
    assert isinstance(timer, SetTimer) and abs(timer.after_s - 0.15) < 1e-9


def test_a_large_rack_cuts_its_digest_and_every_answer_to_datagrams() -> None:
    peers = [f"host-{number:03}" for number in range(300)]
    a = spread("a", *peers)
    for peer in peers:
        value = (FactEntry("k", 1, bytes(100)),)
        a.handle(Told(who(peer), "x", (Delta(who(peer).identity, 1, 0, 1, 0, 0, value),)), 1.0)
    rounds = [action for action in a.handle(RoundDue(), 2.0) if isinstance(action, SayTo)]
    assert len(rounds) > 2 and len({action.to for action in rounds}) > 1
    covered = [(one.low, one.high) for action in rounds for one in action.messages if isinstance(one, Syn)]
    assert covered[0][0] == 0 and covered[-1][1] == U63_MAX
    asked = a.handle(Told(who("host-000"), "x", (Syn(0, U63_MAX, ()),)), 2.0)
    answers = [action for action in asked if isinstance(action, SendDatagram)]
    assert len(answers) == REPLY_DATAGRAMS
    sent = [action.messages for action in rounds] + [action.messages for action in answers]
    assert all(sum(size(message) for message in messages) <= BUDGET for messages in sent)


def test_a_host_whose_boot_counter_was_set_back_outbids_its_former_self() -> None:
    a = spread("a", "b")
    a.handle(Published("x", b"new"), 0.0)
    hear(a, "b", Syn(0, U63_MAX, (KnownVersion(a.identity, 1, 400),)))
    mine = a.of(HostId("a"))
    assert mine is not None and mine.version > 400 and mine.values == {"x": b"new"}
    for version in (mine.version, mine.version - 1):
        hear(a, "b", Syn(0, U63_MAX, (KnownVersion(a.identity, 1, version),)))
        assert a.of(HostId("a")) is mine, "whoever knows it as it is, or was, is no reason to begin anew"


peers = st.sampled_from(["a", "b", "c"])
u = st.integers(0, 4)
idents = st.sampled_from([who(name).identity for name in "abc"] + [5])
rows = st.lists(st.builds(KnownVersion, idents, u, u), max_size=4).map(tuple)
some_entries = st.lists(
    st.builds(FactEntry, st.sampled_from("xyz"), st.integers(1, 4), st.none() | st.just(b"1")), max_size=3
)
consistent = st.builds(
    lambda identity, boot, since, version, floor, listed: Delta(
        identity, boot, since, version, min(floor, version), 0, tuple(one for one in listed if one.version <= version)
    ),
    idents,
    u,
    u,
    u,
    u,
    some_entries,
)
anything = st.one_of(
    st.builds(
        Told,
        peers.map(who),
        st.just("x:1"),
        st.lists(
            st.one_of(st.builds(Syn, st.just(0), st.just(U63_MAX), rows), st.builds(Want, rows), consistent), max_size=3
        ).map(tuple),
    ),
    st.builds(PeerUp, st.sampled_from(["b", "c"]).map(HostId), idents.filter(lambda one: one != who("a").identity)),
    st.builds(PeerDown, st.sampled_from(["b", "c"]).map(HostId)),
    st.builds(PeerForgotten, st.sampled_from(["b", "c"]).map(HostId)),
    st.builds(Published, st.sampled_from("xyz"), st.none() | st.binary(max_size=3)),
    st.sampled_from([RoundDue(), BeatDue(), PushDue()]),
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(anything, max_size=30))
def test_whatever_happens_in_any_order_the_invariants_hold(story: list[Told | PeerUp | Published]) -> None:
    a = spread("a", "b", "c")
    for step, event in enumerate(story):
        a.handle(event, float(step))
        a.check()
