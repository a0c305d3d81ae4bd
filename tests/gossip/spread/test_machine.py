"""Stories of one host that passes facts on."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import Message, SetTimer
from covey.core.ids import HostId
from gossip.settings import GossipSettings
from gossip.spread import messages
from gossip.spread.machine import (
    REPLY_DATAGRAMS,
    Action,
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
from gossip.spread.messages import AnyMessage, Delta, Digest, FactEntry, KnownVersion, Syn, Want
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
        assert isinstance(message, Syn | Want | Delta | Digest)
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
    digests = [a.digest(BUDGET, 2.0) for _ in range(3)]
    listed = {row[0] for one in digests if one is not None for row in messages.unpacked(one.rows)}
    assert listed == {messages.short(identity) for identity in (a.identity, *a.live)}, "a host is never listed"
    asked = a.handle(Told(who("host-000"), "x", (Syn(0, U63_MAX, ()),)), 2.0)
    answers = [action for action in asked if isinstance(action, SendDatagram)]
    assert len(answers) == REPLY_DATAGRAMS
    sent = (
        [(one,) for one in digests if one]
        + [action.messages for action in rounds]
        + [action.messages for action in answers]
    )
    assert all(sum(size(message) for message in messages) <= BUDGET for messages in sent)


def test_a_host_with_nothing_to_say_says_nothing() -> None:
    a = spread("a", "b", "c")
    assert words(a.handle(RoundDue(), 0.5)), "newcomers are asked for what they say"
    for second in range(1, 60):
        assert a.digest(BUDGET, second) is not None
        assert words(a.handle(RoundDue(), second + 0.5)) == []
    (whole,) = words(a.handle(RoundDue(), 62.0))
    assert isinstance(whole, Digest) and len(whole.rows) == 3 * messages.ROW_BYTES, "no probe carried it for long"


def test_the_age_of_what_is_known_never_runs_backwards_nor_gets_too_young() -> None:
    a, c = spread("a", "b", "c"), who("c").identity
    hear(a, "c", Delta(c, 1, 0, 7, 0, 0, ()), now_s=10.0)

    def heard(age_s: float, version: int, now_s: float) -> float:
        row = messages.packed([(messages.short(c), messages.wrapped(version), messages.steps(age_s))])
        hear(a, "b", Digest(True, row), now_s=now_s)
        return a.facts[c].fresh_s

    assert heard(1.0, 7, 20.0) == 19.0
    assert heard(8.0, 7, 21.0) == 19.0, "another one knows it as older"
    assert heard(0.0, 6, 22.0) == 19.0, "it is of an older version"
    assert heard(1000.0, 7, 23.0) == 19.0
    assert heard(0.001, 7, 30.0) == 29.99, "rounded up"


def test_a_probe_is_answered_with_what_the_asker_lacks_and_with_what_is_known_better() -> None:
    a, b, c = spread("a", "b", "c"), spread("b", "a", "c"), who("c").identity
    hear(a, "c", Delta(c, 1, 0, 3, 0, 0, ()), now_s=10.0)
    hear(b, "c", Delta(c, 1, 0, 3, 0, 0, ()), now_s=14.0)
    probe = a.digest(BUDGET, 20.0)
    assert isinstance(probe, Digest)
    (answer,) = [one for one in hear(b, "a", probe, now_s=20.0) if isinstance(one, Digest)]
    assert answer.is_answer and hear(a, "b", answer, now_s=20.0) != [answer]
    assert a.facts[c].fresh_s == 14.0
    assert all(not isinstance(one, Digest) for one in hear(a, "b", answer, now_s=21.0)), "answers have no answers"


@pytest.mark.parametrize("apart", [1, 32767, 32768, 40000, 65534, 65536, 200000])
def test_whoever_is_far_behind_catches_up_whatever_a_row_shows(apart: int) -> None:
    """A digest has versions modulo 65535: which is newer is only certain for the nearer half."""
    a, b, c = spread("a", "b", "c"), spread("b", "a", "c"), who("c").identity
    hear(b, "c", Delta(c, 1, 0, 5, 0, 0, (FactEntry("x", 5, b"old"),)))
    hear(a, "c", Delta(c, 1, 0, 5 + apart, 0, 0, (FactEntry("x", 5 + apart, b"new"),)))
    for first, second in ((a, b), (b, a)):
        first.handle(PeerUp(HostId("c"), c), 1.0)
        talk(first, second, 2.0)
        known = b.of(HostId("c"))
        assert known is not None and (known.version, known.values) == (5 + apart, {"x": b"new"})
        hear(b, "c", Delta(c, 2, 0, 5, 0, 0, (FactEntry("x", 5, b"old"),)))
        hear(a, "c", Delta(c, 2, 0, 5 + apart, 0, 0, (FactEntry("x", 5 + apart, b"new"),)))


def test_two_hosts_whose_rows_would_be_alike_are_told_of_exactly() -> None:
    a, b = spread("a", "b"), spread("b", "a")
    for machine in (a, b):
        for number in (1, 2):
            machine.handle(PeerUp(HostId(f"x{number}"), number << 32 | 77), 0.0)
    hear(a, "x", Delta(1 << 32 | 77, 1, 0, 3, 0, 0, (FactEntry("k", 3, b"1"),)))
    hear(a, "x", Delta(2 << 32 | 77, 1, 0, 3, 0, 0, (FactEntry("k", 3, b"2"),)))
    talk(a, b, 1.0)
    one, two = b.of(HostId("x1")), b.of(HostId("x2"))
    assert one is not None and two is not None and (one.values, two.values) == ({"k": b"1"}, {"k": b"2"})


def test_a_push_that_was_missed_is_asked_for() -> None:
    a, b = spread("a", "b"), spread("b", "a")
    a.handle(Published("long", bytes(200)), 0.0)
    hear(b, "a", *(one for one in words(a.handle(PushDue(), 0.0)) if isinstance(one, Delta)))
    for value in (b"1", b"2"):
        a.handle(Published("x", value), 1.0)
        pushed = words(a.handle(PushDue(), 1.0))
        assert len(pushed[0].entries) == 1 if isinstance(pushed[0], Delta) else False, "only what changed"
    (want,) = hear(b, "a", *(one for one in pushed if isinstance(one, Delta)))
    assert isinstance(want, Want)
    hear(b, "a", *(one for one in hear(a, "b", want) if isinstance(one, Delta)))
    of_a = b.of(HostId("a"))
    assert of_a is not None and of_a.values["x"] == b"2"


def test_a_restarted_host_has_no_facts_until_it_says_some() -> None:
    a, b = spread("a", "b"), who("b").identity
    hear(a, "b", Delta(b, 1, 0, 7, 0, 0, (FactEntry("x", 7, b"1"),)))
    a.handle(PeerUp(HostId("b"), b, 2), 1.0)
    assert a.of(HostId("b")) is None
    hear(a, "b", Delta(b, 1, 0, 8, 0, 0, (FactEntry("x", 8, b"1"),)))
    assert a.of(HostId("b")) is None, "the rest of the former boot"


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
exact_rows = st.lists(st.builds(KnownVersion, idents, u, u), max_size=4).map(tuple)
digests = st.builds(
    Digest,
    st.booleans(),
    st.lists(
        st.tuples(
            idents.map(messages.short), st.sampled_from([0, 1, 2, 3, 40000, 65535]), st.sampled_from([0, 500, 65535])
        ),
        min_size=1,
        max_size=4,
    ).map(messages.packed),
)
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
            st.one_of(
                st.builds(Syn, st.just(0), st.just(U63_MAX), exact_rows),
                st.builds(Want, exact_rows),
                digests,
                consistent,
            ),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(PeerUp, st.sampled_from(["b", "c"]).map(HostId), idents.filter(lambda one: one != who("a").identity)),
    st.builds(PeerDown, st.sampled_from(["b", "c"]).map(HostId)),
    st.builds(PeerForgotten, st.sampled_from(["b", "c"]).map(HostId)),
    st.builds(Published, st.sampled_from("xyz"), st.none() | st.binary(max_size=3)),
    st.sampled_from([RoundDue(), PushDue()]),
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(anything, max_size=30))
def test_whatever_happens_in_any_order_the_invariants_hold(story: list[Told | PeerUp | Published]) -> None:
    a = spread("a", "b", "c")
    for step, event in enumerate(story):
        a.handle(event, float(step))
        a.check()
