"""A rack of gossip machines on one heap of events: virtual time, one seed, datagrams sealed and opened for real."""

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from covey.core.events import Fact, Publish, SetTimer
from covey.core.ids import HostId
from gossip.machine import DatagramHeard, Event, Gossip, GossipStarted
from gossip.membership.machine.events import EarlierHeard, Leaving, LoopStalled
from gossip.membership.messages import Gone, Left, MemberRecord, Suspect
from gossip.packet import Dropped, Keyring, Opener, Sealer, budget
from gossip.settings import GossipSettings
from gossip.spread.machine import Published
from gossip.spread.messages import Delta
from gossip.types import HostDown, HostUp, HostView, SendDatagram, Sender

KEY = bytes(range(32))
OUTWEIGHS = {"alive": 0, "suspect": 1, "gone": 2, "left": 3}
"""Ranks of states in SWIM 4.2; written down again here, since the agents' own code is what is checked."""
SAID = {Suspect: "suspect", Gone: "gone", Left: "left"}
SLOW_S = 2.0


class Member:
    """One simulated host: its machine, its seal, and what it told its agent."""

    def __init__(
        self, crowd: "Crowd", name: str, place: str, key: bytes, uuid: bytes, boot: int, settings: GossipSettings
    ) -> None:
        self.crowd, self.name, self.place = crowd, HostId(name), place
        self.address = f"{place}:7946"
        me = Sender(self.name, uuid, boot)
        room = budget(settings.datagram_bytes, name)
        self.gossip = Gossip(me, settings, room, random.Random(crowd.rng.getrandbits(64)))
        ring = Keyring([key], settings.cluster)
        self.datagram_bytes = settings.datagram_bytes
        self.sealer, self.opener = Sealer(ring, me, b"salt"), Opener(ring, me.identity)
        self.up = True
        self.paused_until_s = 0.0
        self.told: list[tuple[float, Fact]] = []
        self.dropped: list[str] = []
        self.sent = 0
        self.sent_bytes = 0
        self._newest: dict[HostId, tuple[bytes, int, int, int]] = {}
        """Newest state seen of each other host: uuid, boot, incarnation, and how much the state outweighs others of
        that incarnation."""
        self._at: dict[HostId, str] = {}
        """The address of each other host when it was last looked at."""
        self._versions: dict[int, tuple[int, int]] = {}
        """For each identity, the boot and version of the facts that were looked at last."""

    def dispatch(self, event: Event) -> None:
        before = len(self.told)
        for action in self.gossip.handle(event, self.crowd.now_s):
            match action:
                case SendDatagram():
                    self._send(action)
                case SetTimer():
                    self.crowd.after(action.after_s, self, partial(self.dispatch, action.event))
                case Publish():
                    self.told.append((self.crowd.now_s, action.fact))
        if self.crowd.checking:
            self.gossip.check()
            self._in_order({fact.host for _, fact in self.told[before:] if isinstance(fact, HostDown)})
            self._as_said()

    def _in_order(self, down: set[HostId]) -> None:
        """Assert that in one boot of a host nothing older replaces something newer (SWIM 4.2), and another machine has
        its name only after it was gone; one that began later at the same address is the same machine, installed anew.
        `down`: hosts that were said to be down just now."""
        members = self.gossip.membership.members
        self._newest = {host: newest for host, newest in self._newest.items() if host in members}
        before_at = self._at
        self._at = {host: member.address for host, member in members.items()}
        for host, member in members.items():
            if member.remembered:
                continue
            now = (member.uuid, member.boot, member.incarnation, OUTWEIGHS[member.state])
            before = self._newest.get(host, now)
            assert before[0] != now[0] or before[1:] <= now[1:], f"{self.name} of {host}: {now} after {before}"
            lived = before[3] < OUTWEIGHS["gone"] and host not in down
            anew = self._at[host] == before_at.get(host) and now[1] > before[1]
            another = before[0] != now[0] and not anew
            assert not (another and lived), f"{self.name} gives the name of {host}, which lives, to another"
            self._newest[host] = now

    def _believes(self, sender: Sender, messages: Sequence[object], suspects: Mapping[HostId, tuple[int, int]]) -> None:
        """Assert that a host that received a Suspect, Gone or Left holds that, or more, from then on (SWIM 4.2):
        "gone" only of hosts that were `suspects`; the others are suspects then. Suspicions of the dead are idle."""
        members = self.gossip.membership.members
        by = members.get(sender.host)
        if self.gossip.membership.leaving or by is None or (by.uuid, by.boot) != (sender.uuid, sender.boot):
            return
        for message in messages:
            if not isinstance(message, Suspect | Gone | Left):
                continue
            member, said = members.get(message.host), SAID[type(message)]
            if member is not None and member.identity == message.identity:
                was_suspect = suspects.get(member.host) == (message.boot, message.incarnation)
                least = "suspect" if said == "gone" and not was_suspect else said
                if least == "suspect" and not member.live:
                    continue
                believed = (member.boot, member.incarnation, OUTWEIGHS[member.state])
                told = (message.boot, message.incarnation, OUTWEIGHS[least])
                assert believed >= told, f"{self.name} was told that {member.host} is {said}, and goes on as before"

    def _as_said(self) -> None:
        """Assert that what is known of a host is what that host itself had said by that version, all of it and nothing
        else."""
        spread = self.gossip.spread
        for identity, facts in spread.facts.items():
            written = (facts.boot, facts.version)
            if self._versions.get(identity) == written:
                continue
            self._versions[identity] = written
            if identity == spread.identity:
                self.crowd.said[identity, *written] = facts.values
            elif facts.version:
                said = self.crowd.said[identity, *written]
                assert facts.values == said, f"{self.name} knows {facts.values} of {identity:x}, who said {said}"

    def _send(self, say: SendDatagram) -> None:
        if self.crowd.checking:
            shared = {self.gossip.spread.identity, *self.gossip.spread.live}
            told = {message.identity for message in say.messages if isinstance(message, Delta)}
            assert told <= shared, f"{self.name} tells facts of hosts that it does not take for alive"
        datagram = self.sealer.seal(say.messages)
        assert len(datagram) <= self.datagram_bytes, say
        self.sent += 1
        self.sent_bytes += len(datagram)
        self.crowd.carry(self, say.to, datagram)

    def receive(self, source: str, datagram: bytes) -> None:
        opened = self.opener.open(datagram)
        if isinstance(opened, Dropped):
            self.dropped.append(opened.reason)
            if opened.earlier is not None:
                self.dispatch(EarlierHeard(opened.earlier, source, opened.counter))
        else:
            assert opened.unknown == 0
            members = self.gossip.membership.members
            suspects = {host: member.order[:2] for host, member in members.items() if member.state == "suspect"}
            self.dispatch(DatagramHeard(opened.sender, source, opened.messages))
            if self.crowd.checking:
                self._believes(opened.sender, opened.messages, suspects)

    def spread(self, key: str, value: bytes | None) -> None:
        self.dispatch(Published(key, value))

    def peers(self) -> dict[str, HostView]:
        return {peer.host: peer for peer in self.gossip.hosts(self.crowd.now_s)}

    def sees(self, name: str) -> str:
        """State in which this host sees another; `unknown` when it does not."""
        found = self.peers().get(name)
        return found.state if found is not None else "unknown"

    def heard_of(self, name: str, kind: type[Fact]) -> list[float]:
        return [at_s for at_s, fact in self.told if isinstance(fact, kind) and getattr(fact, "host", "") == name]


class Crowd:
    """A rack of members. `loss`: fraction of datagrams lost; `cut`: pairs of places that cannot hear one another
    (from, to)."""

    def __init__(self, seed: int = 1, loss: float = 0.0, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.loss = loss
        self.cut: set[tuple[str, str]] = set()
        self.members: dict[str, Member] = {}
        self.settings = settings
        self.checking = True
        self.said: dict[tuple[int, int, int], Mapping[str, bytes]] = {}
        """Identity, boot and version -> the facts that this host told of itself then."""
        self.slow = 0.0
        """Fraction of datagrams that are late by up to `SLOW_S`."""
        self.steps = 0
        self._heap: list[tuple[float, int, Member, Callable[[], None]]] = []
        self._serial = 0

    def start(
        self,
        name: str,
        seeds: Iterable[str] = (),
        boot: int = 1,
        uuid: bytes = b"",
        place: str = "",
        key: bytes = KEY,
        remembered: tuple[MemberRecord, ...] = (),
        **more: Any,
    ) -> Member:
        """Start, or restart, a host. `place` is where its datagrams arrive, by default its name."""
        place = place or name
        settings = GossipSettings(seeds=tuple(f"{seed}:7946" for seed in seeds), **self.settings, **more)
        uuid = uuid or name.encode().ljust(16, b".")[:16]
        member = self.members[place] = Member(self, name, place, key, uuid, boot, settings)
        member.dispatch(GossipStarted(member.address, remembered, settings.seeds))
        return member

    def rack(self, count: int, **more: Any) -> list[Member]:
        """`count` hosts that were all given the first three as seeds, started within a second."""
        names = [f"h{index:03}" for index in range(count)]
        found = []
        for name in names:
            found.append(self.start(name, names[:3], **more))
            self.run(1 / count)
        return found

    def kill(self, member: Member) -> None:
        member.up = False

    def leave(self, member: Member, away_s: int = 0) -> None:
        member.dispatch(Leaving(away_s))
        self.run(0.05)
        member.dispatch(Leaving(away_s))
        self.run(0.05)
        member.up = False

    def pause(self, member: Member, for_s: float) -> None:
        """Stop a member as SIGSTOP does: nothing runs, datagrams wait, and afterwards the late timers show it."""
        member.paused_until_s = self.now_s + for_s
        start_s = self.now_s
        self.after(for_s, member, lambda: member.dispatch(LoopStalled(start_s, self.now_s)))

    def partition(self, one: Iterable[Member], other: Iterable[Member]) -> None:
        others = list(other)
        for a in one:
            for b in others:
                self.cut |= {(a.place, b.place), (b.place, a.place)}

    def carry(self, sender: Member, to: str, datagram: bytes) -> None:
        place = to.removesuffix(":7946")
        if (sender.place, place) in self.cut or self.rng.uniform(0, 1) < self.loss or place not in self.members:
            return
        target = self.members[place]
        late = self.slow and self.rng.random() < self.slow
        delay_s = self.rng.uniform(0.0, SLOW_S) if late else self.rng.uniform(0.0002, 0.002)
        self.after(delay_s, target, lambda: target.receive(sender.address, datagram))

    def after(self, delay_s: float, member: Member, what: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._serial, member, what))

    def run(self, for_s: float, until: Callable[[], bool] | None = None) -> float:
        """Let virtual time pass for `for_s` seconds, or until the condition holds (looked at every 50 ms). Returns the
        seconds passed."""
        start_s, end_s, look_s = self.now_s, self.now_s + for_s, self.now_s
        while self._heap and self._heap[0][0] <= end_s:
            at_s, serial, member, what = heapq.heappop(self._heap)
            if until is not None and at_s >= look_s:
                if until():
                    heapq.heappush(self._heap, (at_s, serial, member, what))
                    return self.now_s - start_s
                look_s = at_s + 0.05
            if not member.up or self.members.get(member.place) is not member:
                continue
            if at_s < member.paused_until_s:
                heapq.heappush(self._heap, (member.paused_until_s, serial, member, what))
                continue
            self.now_s = max(self.now_s, at_s)
            self.steps += 1
            what()
        self.now_s = end_s
        return for_s

    def running(self) -> list[Member]:
        return [member for member in self.members.values() if member.up]

    def agree(self) -> bool:
        """Whether every running host sees exactly the running hosts alive, and as the machines that they are."""
        up = {member.name: member.gossip.me.uuid for member in self.running()}
        return all(
            {member.name: up[member.name]}
            | {host: other.uuid for host, other in member.gossip.membership.members.items() if other.state == "alive"}
            == up
            for member in self.running()
        )

    def all_see(self, name: str, *states: str) -> bool:
        return all(member.sees(name) in states for member in self.running() if member.name != name)


__all__ = ["Crowd", "HostDown", "HostUp", "Member"]
