"""The newest facts of every host, passed on (Scuttlebutt: van Renesse et al. 2008).

Each host writes its own map only. Twice a second it tells a random host which version of every map it has (`Syn`); the
receiver answers with what is newer here (`Delta`) and asks for what is older (`Want`). A map that changed is also
pushed to three hosts at once, so that on a small rack every host has it after one hop. Every two seconds the version
grows even if nothing was written: the age of a host's facts then shows whether they are current.

        A                         B
        | -- Syn(what I have) --> |
        | <-- Delta ... Want ---- |
        | -- Delta ... ---------> |

Facts of hosts that are gone are kept but no longer sent. Nothing is stored for hosts that membership does not know.
"""

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import assert_never

import msgspec

from covey.core.events import Message, SetTimer
from covey.core.ids import HostId
from gossip.settings import GossipSettings
from gossip.spread import policy
from gossip.spread.messages import AnyMessage, Delta, KnownVersion, Syn, Want
from gossip.spread.policy import Facts
from gossip.types import SendDatagram, Sender, batches, size

REPLY_DATAGRAMS = 4
"""The most datagrams sent in answer to one; the rest is sent in a later round."""
PUSH_INTERVAL_S = 0.25
"""The least seconds between two pushes of this host's map, however often it is written."""
KNOWN_BYTES_MAX = 25
"""The most bytes of one row of a digest."""
LIST_BYTES_MAX = 24
"""The most bytes of a digest beside its rows."""


class PeerUp(msgspec.Struct, frozen=True):
    """Event: this host is alive, under this identity (a reinstalled host has a new one, and no facts yet)."""

    host: HostId
    identity: int


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


class BeatDue(msgspec.Struct, frozen=True):
    pass


class PushDue(msgspec.Struct, frozen=True):
    pass


Timer = RoundDue | BeatDue | PushDue
Event = PeerUp | PeerDown | PeerForgotten | Told | Published | SpreadStarted | Timer


class SayTo(msgspec.Struct, frozen=True):
    """Action: one datagram to this host, which may be lost."""

    to: HostId
    messages: tuple[Message, ...]


Action = SayTo | SendDatagram | SetTimer[Timer]


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
        self.ignored = 0
        """The number of deltas from hosts that are not alive here, without news or with a gap."""
        self._pushed_s = float("-inf")
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
                self._up(event.host, event.identity)
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
                return (SetTimer(self._round_s(), RoundDue()), *self._beat(now_s))
            case RoundDue():
                return (*self._round(), SetTimer(self._round_s(), RoundDue()))
            case BeatDue():
                return self._beat(now_s)
            case PushDue():
                return self._push(now_s)
            case _:
                assert_never(event)

    def _up(self, host: HostId, identity: int) -> None:
        if self.identities.get(host, identity) != identity:
            self._forget(host)
        self.identities[host] = identity
        if identity not in self.live:
            self.live[identity] = host
            self.facts.setdefault(identity, Facts())
            insort(self._shared, identity)

    def _down(self, identity: int | None) -> None:
        if identity is not None and self.live.pop(identity, None) is not None:
            self._shared.remove(identity)

    def _forget(self, host: HostId) -> None:
        identity = self.identities.pop(host, None)
        self._down(identity)
        if identity is not None:
            self.facts.pop(identity, None)

    def _publish(self, key: str, value: bytes | None, now_s: float) -> Sequence[Action]:
        mine = self.facts[self.identity]
        after = policy.written(mine, key, value, now_s)
        if after is mine:
            return ()
        self.facts[self.identity] = after
        return self._push_soon(now_s)

    def _push_soon(self, now_s: float) -> Sequence[Action]:
        if self._push_set:
            return ()
        self._push_set = True
        return (SetTimer(max(0.0, self._pushed_s + PUSH_INTERVAL_S - now_s), PushDue()),)

    def _push(self, now_s: float) -> Sequence[Action]:
        self._push_set = False
        if not self.live:
            return ()
        self._pushed_s = now_s
        whole = policy.delta(self.identity, self.facts[self.identity], 0, now_s)
        peers = self._peers()
        return [SayTo(host, (whole,)) for host in self.rng.sample(peers, min(len(peers), self.settings.gossip_fanout))]

    def _beat(self, now_s: float) -> Sequence[Action]:
        """Write a new version, unless there was one since the last beat."""
        mine = self.facts[self.identity]
        pause_s = mine.fresh_s + self.settings.heartbeat_s - now_s
        if mine.version == 0 or pause_s <= 0.01:
            self.facts[self.identity] = msgspec.structs.replace(mine, version=mine.version + 1, fresh_s=now_s)
            pause_s = self.settings.heartbeat_s
        return (SetTimer(pause_s, BeatDue()),)

    def _round_s(self) -> float:
        return self.settings.spread_interval_s * self.rng.uniform(0.8, 1.2)

    def _peers(self) -> list[HostId]:
        return sorted(self.live.values())

    def _round(self) -> Sequence[Action]:
        """Send this host's digest, cut to datagrams by ranges of identities, each to another random host."""
        peers = self._peers()
        if not peers:
            return ()
        rows = [self._known(identity) for identity in self._shared]
        cut = batches(rows, lambda _: KNOWN_BYTES_MAX, self.budget - LIST_BYTES_MAX)
        return [SayTo(self.rng.choice(peers), (Syn(low, high, known),)) for low, high, known in policy.ranges(cut)]

    def _known(self, identity: int) -> KnownVersion:
        facts = self.facts[identity]
        return KnownVersion(identity, facts.boot, facts.version)

    # ---- messages of others ----

    def _told(self, event: Told, now_s: float) -> Sequence[Action]:
        actions: list[Action] = []
        for message in event.messages:
            match message:
                case Syn():
                    actions += self._compare(event.source, message, now_s)
                case Want():
                    actions += self._deltas(event.source, (), message.known, now_s)
                case Delta():
                    self._learn(message, now_s)
                case _:
                    assert_never(message)
        return actions

    def _compare(self, source: str, syn: Syn, now_s: float) -> Sequence[Action]:
        theirs = {row.identity: row for row in syn.known}
        mine = self._shared[bisect_left(self._shared, syn.low) : bisect_right(self._shared, syn.high)]
        missing = [KnownVersion(identity, 0, 0) for identity in mine if identity not in theirs]
        wanted: list[KnownVersion] = []
        for row in syn.known:
            if row.identity == self.identity:
                self._outnumbered(row, now_s)
            elif row.identity in self.live:
                known = self.facts[row.identity]
                if policy.is_newer(row.boot, row.version, known):
                    wanted.append(KnownVersion(row.identity, known.boot, known.version))
        return self._deltas(source, wanted, (*syn.known, *missing), now_s)

    def _deltas(
        self, source: str, wanted: Sequence[KnownVersion], lacking: Iterable[KnownVersion], now_s: float
    ) -> Sequence[Action]:
        """The deltas for a host that has `lacking`, in random order since not all may fit; and this host's own
        `Want`."""
        news: list[Message] = []
        for row in lacking:
            if row.identity not in self.live and row.identity != self.identity:
                continue
            facts = self.facts[row.identity]
            after = policy.since(facts, row.boot, row.version)
            if after is not None:
                news.append(policy.delta(row.identity, facts, after, now_s))
        self.rng.shuffle(news)
        cut = batches(wanted, lambda _: KNOWN_BYTES_MAX, self.budget - LIST_BYTES_MAX)
        say = [*(Want(tuple(batch)) for batch in cut), *news]
        return [SendDatagram(source, tuple(batch)) for batch in batches(say, size, self.budget)[:REPLY_DATAGRAMS]]

    def _outnumbered(self, row: KnownVersion, now_s: float) -> None:
        """Take a newer version of this host's own facts in this boot, which another host has: the boot counter was set
        back."""
        mine = self.facts[self.identity]
        if row.boot == mine.boot and row.version > mine.version:
            self.facts[self.identity] = policy.renumbered(mine, row.version, now_s)

    def _learn(self, delta: Delta, now_s: float) -> None:
        if delta.identity not in self.live:
            self.ignored += 1
            return
        after = policy.merged(self.facts[delta.identity], delta, now_s)
        if after is None:
            self.ignored += 1
        else:
            self.facts[delta.identity] = after

    # ---- invariants ----

    def check(self) -> None:
        mine = self.facts[self.identity]
        assert mine.boot == self.me.boot, "the facts of this host are of another boot"
        assert self.identity not in self.live, "a host is not its own peer"
        for identity, host in self.live.items():
            assert self.identities[host] == identity, f"{host} is alive under an identity that it does not have"
        assert self._shared == sorted([self.identity, *self.live])
        known = {self.identity, *self.identities.values()}
        for identity, facts in self.facts.items():
            assert identity in known, "facts of an unknown identity"
            assert all(0 < entry.version <= facts.version for entry in facts.entries.values()), "a version too high"
            assert facts.floor <= facts.version
