"""The newest facts of every host, passed on (Scuttlebutt: van Renesse et al. 2008).

Each host writes its own map only. What it writes is pushed to three hosts at once. What a host learns or writes stands
in its next digests (`Digest`, twice a second, to a random host): whoever has newer answers with it (`Delta`), and
whoever has older says so, and is sent it. A host that learned nothing sends no digest of its own.

        A                                   B
        | -- Digest (what is new here) -->  |
        | <-- Delta, Digest (what I lack) - |
        | -- Delta ... ------------------>  |

Probes of membership carry the whole digest, as far as it fits, and their answers what the other lacks: so whatever was
lost on the way is found again, and hosts hear how old their knowledge is. The owner's own row has the age 0; everybody
else's knowledge of the same version is as old as the youngest that they heard of. So a host whose facts stay as they
are says nothing, and the age of its facts still shows whether they are current. Where no probe goes out for
`heartbeat_s`, the round has the whole digest instead.

Facts of hosts that are gone are kept but no longer sent. Nothing is stored for hosts that membership does not know.
"""

import random
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar, assert_never

import msgspec

from covey.core.events import Message, SetTimer
from covey.core.ids import HostId
from gossip.settings import GossipSettings
from gossip.spread import messages, policy
from gossip.spread.messages import AnyMessage, Delta, Digest, KnownVersion, Syn, Want
from gossip.spread.policy import Facts
from gossip.types import SendDatagram, Sender, batches, size

REPLY_DATAGRAMS = 4
"""The most datagrams sent in answer to one; the rest is sent in a later round."""
ANSWER_DATAGRAMS = 2
"""The most datagrams in answer to the digest of a host that has something of everybody: where everything changes, that
goes first by which most is gained. Of 200 hosts with a change a second each 99 % of ages stay under 3.7 s with two
datagrams, and under 5.7 s with one."""
ANSWERED_MAX = 128
"""The most deltas that are made in answer to one digest: more do not fit into `REPLY_DATAGRAMS`."""
NOTHING = messages.AGE_UNKNOWN + 1
"""The rank of a host of which the asker knows nothing: before all others."""
PUSH_INTERVAL_S = 0.25
"""The least seconds between two pushes of this host's map, however often it is written."""
PUSHED_BYTES = 128
"""The most bytes of a map that is pushed whole; of a larger one only what changed since the last push."""
KNOWN_BYTES_MAX = 25
"""The most bytes of one row of a digest."""
LIST_BYTES_MAX = 24
"""The most bytes of a digest beside its rows."""
TELLS = 1
"""The number of rounds in which a host tells that it has a newer version; probes carry it, too. With two, 200 hosts
with a change a second each send 15 % more, and ages fall by as much."""
FRESHER_S = 0.5
"""Seconds by which knowledge is younger than that of whoever sent a digest, so that the answer says so."""


class PeerUp(msgspec.Struct, frozen=True):
    """Event: this host is alive, under this identity (a reinstalled host has a new one, and no facts yet), in this
    boot."""

    host: HostId
    identity: int
    boot: int = 0


class PeerDown(msgspec.Struct, frozen=True):
    """Event: this host is gone or has left."""

    host: HostId


class PeerForgotten(msgspec.Struct, frozen=True):
    host: HostId


class Told(msgspec.Struct, frozen=True):
    """Event: a message from a live host."""

    sender: Sender
    source: str
    messages: tuple[AnyMessage, ...]


class Published(msgspec.Struct, frozen=True):
    """Event: this host sets a key of its map, or removes it (None)."""

    key: str
    value: bytes | None


class SpreadStarted(msgspec.Struct, frozen=True):
    pass


class RoundDue(msgspec.Struct, frozen=True):
    pass


class PushDue(msgspec.Struct, frozen=True):
    pass


Timer = RoundDue | PushDue
Event = PeerUp | PeerDown | PeerForgotten | Told | Published | SpreadStarted | Timer


class SayTo(msgspec.Struct, frozen=True):
    """Action: one datagram to this host, which may be lost."""

    to: HostId
    messages: tuple[Message, ...]


Action = SayTo | SendDatagram | SetTimer[Timer]


Ranked = TypeVar("Ranked", bound=tuple[float, ...])


class Spread:
    """The spread of facts on one host. `budget`: bytes of messages that fit into one datagram."""

    def __init__(self, me: Sender, settings: GossipSettings, budget: int, rng: random.Random) -> None:
        self.me, self.identity = me, me.identity
        self.settings, self.budget, self.rng = settings, budget, rng
        self.facts: dict[int, Facts] = {self.identity: Facts(boot=me.boot)}
        self.identities: dict[HostId, int] = {}
        """The identity of every host that was up since it was last forgotten."""
        self.live: dict[int, HostId] = {}
        self._shared = [self.identity]
        """The identities of the hosts whose facts are sent, sorted: the live ones and this host."""
        self._rows: list[int] = [self.identity]
        """The identities of `_shared` that have a row in digests, sorted."""
        self._by_row = {messages.short(self.identity): self.identity}
        self._alike: list[int] = []
        """The identities of `_shared` that have no row in digests, since another one would have the same."""
        self._hot: dict[int, int] = {}
        """Identities with a version that is new here -> in how many rounds it is still told."""
        self._next = 0
        """The place in `_rows` with which the next digest begins that does not hold all."""
        self._carried_s = float("-inf")
        """When a digest of all was last sent."""
        self.ignored = 0
        """The number of deltas from hosts that are not alive here, without news or with a gap."""
        self.changes = 0
        """How often anything that is known changed, but ages."""
        self._pushed_s = float("-inf")
        self._pushed = 0
        """The version that was pushed last."""
        self._push_set = False

    # ---- what is known ----

    def of(self, host: HostId) -> Facts | None:
        """The facts of a host; None when none are known."""
        identity = self.identity if host == self.me.host else self.identities.get(host)
        facts = None if identity is None else self.facts.get(identity)
        return facts if facts is not None and facts.version > 0 else None

    # ---- events ----

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case PeerUp():
                self._up(event)
                return ()
            case PeerDown():
                self._down(self.identities.get(event.host))
                return ()
            case PeerForgotten():
                self._forget(event.host)
                return ()
            case Told():
                return self._told(event, now_s)
            case Published():
                return self._publish(event.key, event.value, now_s)
            case SpreadStarted():
                return self._start(now_s)
            case RoundDue():
                return (*self._round(now_s), SetTimer(self._round_s(), RoundDue()))
            case PushDue():
                return self._push(now_s)
            case _:
                assert_never(event)

    def _start(self, now_s: float) -> Sequence[Action]:
        """Begin; that there is nothing to say is a version, too, which the others can know."""
        mine = self.facts[self.identity]
        self._carried_s = now_s
        self.facts[self.identity] = msgspec.structs.replace(mine, version=max(1, mine.version))
        return (SetTimer(self._round_s(), RoundDue()),)

    # ---- peers ----

    def _up(self, up: PeerUp) -> None:
        if self.identities.get(up.host, up.identity) != up.identity:
            self._forget(up.host)
        self.identities[up.host] = up.identity
        if up.identity not in self.live:
            self.live[up.identity] = up.host
            self.facts.setdefault(up.identity, Facts())
            insort(self._shared, up.identity)
            self._recount()
        if self.facts[up.identity].boot < up.boot:
            self.facts[up.identity] = Facts(up.boot)
            self.changes += 1
        self._hot[up.identity] = 1

    def _down(self, identity: int | None) -> None:
        if identity is not None and self.live.pop(identity, None) is not None:
            self._shared.remove(identity)
            self._hot.pop(identity, None)
            self._recount()

    def _recount(self) -> None:
        """Note who has a row of its own, after a host came or went."""
        counted = Counter(map(messages.short, self._shared))
        self._rows = [identity for identity in self._shared if counted[messages.short(identity)] == 1]
        self._alike = [identity for identity in self._shared if counted[messages.short(identity)] > 1]
        self._by_row = {messages.short(identity): identity for identity in self._rows}

    def _forget(self, host: HostId) -> None:
        identity = self.identities.pop(host, None)
        self._down(identity)
        if identity is not None:
            self.facts.pop(identity, None)
            self.changes += 1

    def _peers(self) -> list[HostId]:
        return sorted(self.live.values())

    # ---- this host's own facts ----

    def _publish(self, key: str, value: bytes | None, now_s: float) -> Sequence[Action]:
        mine = self.facts[self.identity]
        after = policy.written(mine, key, value, now_s)
        if after is mine:
            return ()
        self._is_news(self.identity, after)
        return self._push_soon(now_s)

    def _is_news(self, identity: int, facts: Facts) -> None:
        self.facts[identity] = facts
        self._hot[identity] = TELLS
        self.changes += 1

    def _push_soon(self, now_s: float) -> Sequence[Action]:
        if self._push_set:
            return ()
        self._push_set = True
        return (SetTimer(max(0.0, self._pushed_s + PUSH_INTERVAL_S - now_s), PushDue()),)

    def _push(self, now_s: float) -> Sequence[Action]:
        """Push what was written since the last push; whoever missed that one asks for more."""
        self._push_set = False
        if not self.live:
            return ()
        mine = self.facts[self.identity]
        if mine.version == self._pushed:
            return ()
        after = self._pushed if policy.map_bytes(mine.entries) > PUSHED_BYTES else 0
        self._pushed_s, self._pushed = now_s, mine.version
        news = self._delta(self.identity, policy.since(mine, mine.boot, after) or 0, now_s)
        peers = self._peers()
        return [SayTo(host, (news,)) for host in self.rng.sample(peers, min(len(peers), self.settings.gossip_fanout))]

    # ---- digests ----

    def _round_s(self) -> float:
        return self.settings.spread_interval_s * self.rng.uniform(0.8, 1.2)

    def _round(self, now_s: float) -> Sequence[Action]:
        """Send a random host what is new here; all, where no probe has carried that for long."""
        peers = self._peers()
        if not peers:
            return ()
        said = [SayTo(self.rng.choice(peers), (Syn(each, each, (self._known(each),)),)) for each in self._alike]
        if now_s - self._carried_s >= self.settings.heartbeat_s:
            digest = self.digest(self.budget, now_s)
        else:
            digest = self._digest(self._told_now(), now_s)
        return said if digest is None else [*said, SayTo(self.rng.choice(peers), (digest,))]

    def _told_now(self) -> list[int]:
        """The hosts with news here, as many as fit into a datagram, those first that were told least."""
        rows = set(self._rows)
        hottest = sorted((-left, identity) for identity, left in self._hot.items() if identity in rows)
        told = [identity for _, identity in hottest[: _rows_in(self.budget)]]
        for identity in told:
            self._hot[identity] -= 1
        self._hot = {identity: left for identity, left in self._hot.items() if left > 0}
        return told

    def digest(self, room: int, now_s: float) -> Digest | None:
        """What this host has of all hosts, for a probe to carry: as many as fit into `room` bytes, the others the next
        time. None: of nobody."""
        count = min(len(self._rows), _rows_in(room))
        if count < 1:
            return None
        start = 0 if count == len(self._rows) else self._next % len(self._rows)
        self._next = start + count
        if self.live:
            self._carried_s = now_s
        return self._digest((self._rows * 2)[start : start + count], now_s)

    def _digest(self, identities: Sequence[int], now_s: float, is_answer: bool = False) -> Digest | None:
        if not identities:
            return None
        return Digest(is_answer, messages.packed(self._row(identity, now_s) for identity in identities))

    def _row(self, identity: int, now_s: float) -> messages.Row:
        facts = self.facts[identity]
        return messages.short(identity), messages.wrapped(facts.version), messages.steps(self._age_s(identity, now_s))

    def _age_s(self, identity: int, now_s: float) -> float:
        """Seconds since these facts were certainly their owner's newest."""
        return 0.0 if identity == self.identity else max(0.0, now_s - self.facts[identity].fresh_s)

    def _known(self, identity: int) -> KnownVersion:
        facts = self.facts[identity]
        return KnownVersion(identity, facts.boot, facts.version)

    def _delta(self, identity: int, after: int, now_s: float) -> Delta:
        facts = self.facts[identity]
        return policy.delta(identity, facts, after, facts.fresh_s + self._age_s(identity, now_s))

    # ---- messages of others ----

    def _told(self, event: Told, now_s: float) -> Sequence[Action]:
        actions: list[Action] = []
        for message in event.messages:
            match message:
                case Digest():
                    actions += self._read(event.source, message, now_s)
                case Syn():
                    actions += self._compare(event.source, message, now_s)
                case Want():
                    actions += self._asked(event, message, now_s)
                case Delta():
                    actions += self._learn(event.source, message, now_s)
                case _:
                    assert_never(message)
        return actions

    def _read(self, source: str, digest: Digest, now_s: float) -> Sequence[Action]:
        """Answer a digest with what is newer here, and say where this host has less, or knows it to be younger."""
        news: list[tuple[int, int, int]] = []
        answer: list[tuple[int, int]] = []
        exactly: list[KnownVersion] = []
        for short, theirs, steps in messages.unpacked(digest.rows):
            identity = self._by_row.get(short)
            if identity is None:
                continue
            facts = self.facts[identity]
            behind = messages.behind(theirs, facts.version)
            if behind > 0:
                gains = steps - messages.steps(self._age_s(identity, now_s)) if theirs else NOTHING
                news.append((gains, identity, max(0, facts.version - behind)))
            elif behind == 0:
                if self._hear_age(identity, steps, now_s) and not digest.is_answer:
                    answer.append((0, identity))
            elif digest.is_answer or identity == self.identity:
                exactly.append(self._known(identity))
            else:
                answer.append((messages.steps(self._age_s(identity, now_s)) - steps, identity))
        said = [identity for _, identity in self._most_first(answer)[: _rows_in(self.budget)]]
        return self._say(
            source, exactly, self._newest(news, now_s), self._digest(said, now_s, is_answer=True), _datagrams(news)
        )

    def _most_first(self, found: list[Ranked]) -> list[Ranked]:
        """These, those first by which knowledge gets younger the most; in random order where that is the same."""
        self.rng.shuffle(found)
        return sorted(found, key=lambda each: -each[0])

    def _newest(self, lacking: list[tuple[int, int, int]], now_s: float) -> list[Message]:
        """The deltas for whoever has these versions: (steps by which it gets younger, identity, version)."""
        found: list[Message] = []
        for _, identity, version in self._most_first(lacking)[:ANSWERED_MAX]:
            facts = self.facts[identity]
            after = policy.since(facts, facts.boot, version)
            found += [] if after is None else [self._delta(identity, after, now_s)]
        return found

    def _hear_age(self, identity: int, steps: int, now_s: float) -> bool:
        """Take the age of the same version elsewhere, if it is less; True when it is much less here."""
        facts, theirs_s = self.facts[identity], now_s - steps * messages.AGE_STEP_S
        if identity == self.identity:
            return steps * messages.AGE_STEP_S > FRESHER_S
        if steps < messages.AGE_UNKNOWN and theirs_s > facts.fresh_s and facts.version > 0:
            self.facts[identity] = msgspec.structs.replace(facts, fresh_s=theirs_s)
        return facts.version > 0 and facts.fresh_s - theirs_s > FRESHER_S

    def _compare(self, source: str, syn: Syn, now_s: float) -> Sequence[Action]:
        theirs = {row.identity: row for row in syn.known}
        mine = self._shared[bisect_left(self._shared, syn.low) : bisect_right(self._shared, syn.high)]
        missing = [KnownVersion(identity, 0, 0) for identity in mine if identity not in theirs]
        wanted: list[KnownVersion] = []
        for row in syn.known:
            if row.identity == self.identity:
                self._outnumbered(row, now_s)
            elif row.identity in self.live and self._is_newer(row):
                wanted.append(self._known(row.identity))
        return self._say(source, wanted, self._news((*syn.known, *missing), now_s))

    def _is_newer(self, row: KnownVersion) -> bool:
        return policy.is_newer(row.boot, row.version, self.facts[row.identity])

    def _asked(self, event: Told, want: Want, now_s: float) -> Sequence[Action]:
        """Answer who says exactly what it has: with what is newer here, or by asking for what is newer there."""
        known = [row for row in want.known if row.identity in self.live or row.identity == self.identity]
        of_sender = [row for row in known if row.identity == event.sender.identity and not self._is_newer(row)]
        exact = [Syn(row.identity, row.identity, (self._known(row.identity),)) for row in of_sender]
        newer = [row for row in known if self._is_newer(row)]
        for row in newer:
            if row.identity == self.identity:
                self._outnumbered(row, now_s)
        wanted = [self._known(row.identity) for row in newer if row.identity != self.identity]
        others = [row for row in known if row not in newer and row not in of_sender]
        return self._say(event.source, wanted, [*exact, *self._news(others, now_s)])

    def _news(self, lacking: Iterable[KnownVersion], now_s: float) -> list[Message]:
        """The deltas for a host that has `lacking`, in random order since not all may fit."""
        news: list[Message] = []
        for row in lacking:
            if row.identity not in self.live and row.identity != self.identity:
                continue
            after = policy.since(self.facts[row.identity], row.boot, row.version)
            if after is not None:
                news.append(self._delta(row.identity, after, now_s))
        self.rng.shuffle(news)
        return news

    def _say(
        self,
        source: str,
        wanted: Sequence[KnownVersion],
        news: Sequence[Message],
        digest: Digest | None = None,
        datagrams: int = REPLY_DATAGRAMS,
    ) -> Sequence[Action]:
        """At most so many datagrams with all this, as far as it fits."""
        cut = batches(wanted, lambda _: KNOWN_BYTES_MAX, self.budget - LIST_BYTES_MAX)
        say = [*(() if digest is None else (digest,)), *(Want(tuple(batch)) for batch in cut), *news]
        return [SendDatagram(source, tuple(batch)) for batch in batches(say, size, self.budget)[:datagrams]]

    def _outnumbered(self, row: KnownVersion, now_s: float) -> None:
        """Take a newer version of this host's own facts in this boot, which another host has: the boot counter was set
        back."""
        mine = self.facts[self.identity]
        if row.boot == mine.boot and row.version > mine.version:
            self._is_news(self.identity, policy.renumbered(mine, row.version, now_s))

    def _learn(self, source: str, delta: Delta, now_s: float) -> Sequence[Action]:
        if delta.identity not in self.live:
            self.ignored += 1
            return ()
        facts = self.facts[delta.identity]
        after = policy.merged(facts, delta, now_s)
        if after is not None:
            self._is_news(delta.identity, after)
            return ()
        self.ignored += 1
        if policy.is_newer(delta.boot, delta.version, facts):
            return self._say(source, [self._known(delta.identity)], [])  # a gap before it
        if facts.boot == delta.boot and facts.version - delta.version > messages.VERSIONS // 2:
            return self._say(source, [], self._news([KnownVersion(delta.identity, delta.boot, delta.version)], now_s))
        return ()

    # ---- invariants ----

    def check(self) -> None:
        mine = self.facts[self.identity]
        assert mine.boot == self.me.boot, "the facts of this host are of another boot"
        assert self.identity not in self.live, "a host is not its own peer"
        for identity, host in self.live.items():
            assert self.identities[host] == identity, f"{host} is alive under an identity that it does not have"
        assert self._shared == sorted([self.identity, *self.live])
        assert sorted([*self._rows, *self._alike]) == self._shared, "a host has neither a row nor exact words"
        known = {self.identity, *self.identities.values()}
        for identity, facts in self.facts.items():
            assert identity in known, "facts of an unknown identity"
            assert all(0 < entry.version <= facts.version for entry in facts.entries.values()), "a version too high"
            assert facts.floor <= facts.version


def _rows_in(room: int) -> int:
    """The number of rows that fit into `room` bytes with the rest of a digest."""
    return max(0, room - LIST_BYTES_MAX) // messages.ROW_BYTES


def _datagrams(lacking: Sequence[tuple[int, int, int]]) -> int:
    """The number of datagrams in answer to a digest: more for a host that has nothing yet of somebody."""
    return REPLY_DATAGRAMS if any(gains == NOTHING for gains, _, _ in lacking) else ANSWER_DATAGRAMS
