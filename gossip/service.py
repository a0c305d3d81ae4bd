"""GossipService: the UDP socket and timers around the machines; the one file of gossip that touches a loop.

    datagram -> packet.open (dropped and counted here, once) -> Gossip.handle -> actions -> seal, call_later, tell

Every timer that fires late shows how long the loop stalled; the machine gets that before it gets the timer, so that no
probe or suspicion that ran out meanwhile counts. A tick makes sure that there is such a timer five times a second.

An exception in a timer or datagram callback would only go to asyncio's log while gossip kept running in a broken state.
It is caught, stops the service and is raised in the task that `env.spawn` watches.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from covey.core.events import Publish, SetTimer
from covey.core.ids import HostId
from covey.core.metrics import Measured
from covey.core.version import VERSION
from covey.ports.addresses import Address, ip_port, is_everywhere, joined
from covey.ports.datagrams import DatagramSocket
from covey.ports.env import Env
from covey.wire import checked
from gossip import metrics
from gossip.joining.machine import JoinTokens
from gossip.joining.messages import ID_BYTES, PRIVATE_BYTES, SECRET_BYTES, JoinToken, RackGiven, is_ask
from gossip.machine import Action, DatagramHeard, Event, Gossip, GossipStarted
from gossip.membership.machine.events import EarlierHeard, Forget, Leaving, LoopStalled, SeedsFound
from gossip.membership.messages import MemberRecord
from gossip.packet import SALT_BYTES, Dropped, Keyring, Opener, Sealer, budget, sealed_by
from gossip.packet import VERSION as PACKET_VERSION
from gossip.seeds import LOOK_AGAIN_ALONE_S, LOOK_AGAIN_S, Seeds
from gossip.settings import GossipSettings
from gossip.spread.machine import Published
from gossip.types import (
    GossipEvent,
    HostDown,
    HostState,
    HostUp,
    HostView,
    LaterBootKnown,
    MemberAway,
    MemberSuspected,
    NameConflict,
    SendDatagram,
    Sender,
    TableFull,
    identity,
)

__all__ = [
    "GossipEvent",
    "GossipService",
    "GossipSettings",
    "HostDown",
    "HostUp",
    "HostView",
    "LaterBootKnown",
    "MemberAway",
    "MemberSuspected",
    "NameConflict",
    "TableFull",
]

PEERS_FILE = "gossip/peers"
PEERS_INTERVAL_S = 10.0
"""The least seconds between two writes of the file of known hosts."""
TICK_S = 0.2
"""The most seconds between two ticks; shorter where probes are quicker than by default."""
STALL_S = 0.1
"""Seconds by which a late timer shows a stall; less, too, where probes are quicker than by default."""
VIEW_S = 1.0
"""Seconds after which the view of all hosts is made anew although nothing changed: by so much are its ages late."""
GOODBYES = 3
GOODBYE_INTERVAL_S = 0.05


class PeersFile(msgspec.Struct, frozen=True):
    """The file of known hosts, gone ones too, so that a restart finds the rack without seeds. It has a checksum: after
    one wrong bit in a boot number all datagrams of a live host count as replays, here and wherever the record is passed
    on."""

    records: tuple[MemberRecord, ...]


_peers_decoder = msgspec.msgpack.Decoder(PeersFile)


class GossipHealth(NamedTuple):
    """How well this host can hear others."""

    score: int
    """Lifeguard's score: 0 is healthy."""
    alone: bool
    """Whether no other host answers although seeds or known hosts should."""
    stalled_s: float
    """The longest stall of the event loop since the start, seconds."""


class GossipService:
    """One host's part in gossip. `keys`: up to three of 32 bytes, the first seals; ValueError otherwise. `boot` must
    grow with every start. `tell` is called on this loop and must not block."""

    def __init__(
        self,
        env: Env,
        settings: GossipSettings,
        keys: Sequence[bytes],
        uuid: bytes,
        boot: int,
        tell: Callable[[GossipEvent], None],
    ) -> None:
        self._env, self._settings, self._tell = env, settings, tell
        self._me = Sender(env.host, uuid, boot)
        ring = Keyring(keys, settings.cluster)
        self._sealer = Sealer(ring, self._me, env.entropy(SALT_BYTES))
        self._opener = Opener(ring, self._me.identity)
        self._gossip = Gossip(self._me, settings, budget(settings.datagram_bytes, env.host), env.rng)
        self._counts: Counter[str] = Counter()
        self._socket: DatagramSocket | None = None
        self._failed: asyncio.Future[None] | None = None
        self._stopped = False
        self._lag_s_max = 0.0
        self._tick_s = min(TICK_S, settings.probe_timeout_s / 2)
        self._stall_s = min(STALL_S, settings.probe_timeout_s / 4)
        self._saved: tuple[MemberRecord, ...] = ()
        self._alone = False
        self._viewed: tuple[int, float, tuple[HostView, ...]] = (-1, 0.0, ())
        """The view of all hosts, after how many changes and when it was made."""
        self._versions: set[int] = set()
        """Other gossip versions, received under this host's key: one byte, so at most 255."""
        self._seeds: Seeds | None = None
        self._tokens = JoinTokens(keys)
        self._other_keys: dict[Address, bytes] = {}
        """Addresses whose newest datagram was sealed with another key of the ring, and the name of that key."""
        self.gives: Callable[[], RackGiven | None] = lambda: None
        """What a host that joins by a token is given; None: nothing now."""
        self.gave: Callable[[Address, bool], None] = lambda at, by_key: None
        """Called when a host at this address was given it for the first time; `by_key`: it had the key before."""

    # ---- life ----

    async def start(self) -> None:
        """Start gossip. OSError when the address cannot be bound."""
        remembered = await self._remembered()
        self._failed = asyncio.get_running_loop().create_future()
        self._socket = await self._env.datagrams.open(self._settings.bind, self._received)
        bound = self._socket.address
        self._seeds = Seeds(self._settings.seeds, bound, self._env.datagrams, self._env.log)
        self._dispatch(GossipStarted(self._advertised(bound), remembered, self._seeds.addresses))
        self._tick(self._env.clock.now_s())
        self._env.spawn("gossip: peers file", self._keep_peers(self._failed))
        self._env.spawn("gossip: watch", self._watch(self._failed))
        if self._seeds.names:
            self._env.spawn("gossip: seeds", self._keep_seeds(self._seeds, self._failed))

    async def stop(self, leave: bool = True, away_s: int = 0) -> None:
        """Stop gossip. `leave`: tell all hosts at once that this host `left`, or is `away` for `away_s` seconds."""
        if self._socket is None:
            return
        if leave and not self._stopped:
            for _ in range(GOODBYES):
                self._dispatch(Leaving(away_s))
                await asyncio.sleep(GOODBYE_INTERVAL_S)
        self._end()
        await self._save_peers()

    def _end(self) -> None:
        self._stopped = True
        if self._socket is not None:
            self._socket.close()
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)

    async def _watch(self, failed: "asyncio.Future[None]") -> None:
        """Raise the exception of a callback."""
        await failed

    def _advertised(self, bound: Address) -> Address:
        """This host's address for the others; empty when bound to all addresses and `advertise` is empty."""
        ip, port = ip_port(bound)
        if self._settings.advertise:
            return joined(self._settings.advertise, port)
        return "" if is_everywhere(ip) else bound

    # ---- for the agent ----

    @property
    def address(self) -> Address:
        """The address to which the socket is bound. RuntimeError before start."""
        if self._socket is None:
            raise RuntimeError("gossip is not started")
        return self._socket.address

    @property
    def seeds_unknown(self) -> Mapping[Address, str]:
        """The seeds that cannot be called, and why: the name does not resolve, or has no address of this host's
        family."""
        return {} if self._seeds is None else dict(self._seeds.unknown)

    def spread(self, key: str, value: bytes | None) -> None:
        """Publish a value of this host under this key, in place of the former one; None removes it. ValueError when it
        is too long (256 bytes a value, 32 keys, 960 bytes in all). Values published before `start` are sent as soon as
        another host is alive."""
        if not self._stopped:
            self._dispatch_checked(Published(key, value))

    def rekey(self, keys: Sequence[bytes]) -> None:
        """Take these keys from now on: up to three, the first seals, all open. ValueError otherwise."""
        ring = Keyring(keys, self._settings.cluster)
        self._sealer.rekey(ring)
        self._opener.rekey(ring)
        self._tokens.rekey(keys)
        self._other_keys.clear()

    def forget(self, host: HostId, boot: int) -> None:
        """Forget a host that is gone or has left, and has not begun anew after this boot."""
        self._dispatch(Forget(host, boot))

    def make_token(self) -> JoinToken | None:
        """A new token, by which one host can get the key of the rack from this agent; None: too many are good."""
        return self._tokens.make(self._env.entropy(ID_BYTES + SECRET_BYTES), self._env.clock.now_s())

    @property
    def changes(self) -> int:
        """It grows with each change of a host's state or facts, and not with their ages."""
        return self._gossip.changes

    def hosts(self) -> Sequence[HostView]:
        """Every host that is remembered, this one included, sorted by name: one view for all who ask, made anew when a
        fact or a state changes, and otherwise once in `VIEW_S`."""
        now_s, changes = self._env.clock.now_s(), self._gossip.changes
        if changes != self._viewed[0] or now_s - self._viewed[1] >= VIEW_S:
            self._viewed = changes, now_s, tuple(self._gossip.hosts(now_s))
        return self._viewed[2]

    def peer(self, host: HostId) -> HostView | None:
        """One host, or None when it is not known."""
        return self._gossip.peer(host, self._env.clock.now_s())

    def holder(self, host: HostId) -> int:
        """The identity of the installation that has this name; 0 while none is known. This is the one place that
        decides it."""
        member = self._gossip.membership.members.get(host)
        return 0 if member is None else member.identity

    def said(self, key: str) -> Sequence[tuple[HostId, HostState, bytes | None]]:
        """Every other host, its state, and the value it published under this key in its present boot, by name."""
        return self._gossip.said(key, self._env.clock.now_s())

    @property
    def counters(self) -> Mapping[str, int]:
        """What was counted since the start, for metrics: datagrams received, sent, dropped by reason; probes,
        suspicions."""
        found = {**self._counts, **self._gossip.membership.counts}
        found["facts_ignored"] = self._gossip.spread.ignored
        found["facts_refused"] = self._gossip.refused
        return dict(sorted(found.items()))

    @property
    def health(self) -> GossipHealth:
        return GossipHealth(self._gossip.membership.health, self._is_forsaken(), self._lag_s_max)

    def metrics(self) -> Measured:
        """The present state, and what was counted since the start."""
        return {
            metrics.ALONE.of(): float(self._is_forsaken()),
            metrics.HEALTH_SCORE.of(): float(self._gossip.membership.health),
            metrics.LOOP_LAG_MAX_SECONDS.of(): self._lag_s_max,
            metrics.SEEDS_UNKNOWN.of(): float(len(self.seeds_unknown)),
            **metrics.COUNTED.of(self.counters),
            **self._gossip.membership.round_trips.measured(),
        }

    # ---- events in ----

    def _received(self, datagram: bytes, source: Address) -> None:
        if self._stopped:
            return
        self._counts["received"] += 1
        self._counts["received_bytes"] += len(datagram)
        if is_ask(datagram):
            self._asked_to_join(datagram, source)
            return
        opened = self._opener.open(datagram)
        if isinstance(opened, Dropped):
            self._counts[f"dropped_{opened.reason}"] += 1
            if opened.reason == "other_version":
                self._notice_version(opened.version, source)
            if opened.earlier is not None:
                self._dispatch(EarlierHeard(opened.earlier, source, opened.counter))
            return
        self._note_key(sealed_by(datagram), source)
        self._counts["messages_unknown"] += opened.unknown
        self._dispatch(DatagramHeard(opened.sender, source, opened.messages))

    def _note_key(self, key: bytes, source: Address) -> None:
        """Remember who seals with another key than this host: whoever was away when a key was installed lacks it."""
        if key == self._sealer.primary:
            self._other_keys.pop(source, None)
        elif source in self._other_keys or len(self._other_keys) < self._settings.hosts_max:
            self._other_keys[source] = key

    def _asked_to_join(self, datagram: bytes, source: Address) -> None:
        given = self.gives()
        if given is None or self._socket is None:
            return
        replied = self._tokens.asked(datagram, given, self._env.entropy(PRIVATE_BYTES), self._env.clock.now_s())
        self._counts[f"joins_{replied.outcome}"] += 1
        if replied.reply:
            self._socket.send(replied.reply, source)
        if replied.outcome == "given":
            self.gave(source, replied.by_key)

    def _dispatch(self, event: Event) -> None:
        """Hand an event to the machine. An exception in here is a defect: gossip stops, and `_watch` raises it."""
        try:
            self._dispatch_checked(event)
        except Exception as error:
            if self._failed is None or self._failed.done():
                raise
            self._failed.set_exception(error)
            self._end()

    def _dispatch_checked(self, event: Event) -> None:
        for action in self._gossip.handle(event, self._env.clock.now_s()):
            self._perform(action)

    def _timer(self, due_s: float, event: Event) -> None:
        if not self._stopped:
            self._lag(due_s)
            self._dispatch(event)

    def _tick(self, due_s: float) -> None:
        if not self._stopped:
            self._lag(due_s)
            next_s = self._env.clock.now_s() + self._tick_s
            asyncio.get_running_loop().call_later(self._tick_s, self._tick, next_s)

    def _lag(self, due_s: float) -> None:
        """Note that a timer that was due at `due_s` runs now: the difference is the loop's stall."""
        now_s = self._env.clock.now_s()
        late_s = now_s - due_s
        self._lag_s_max = max(self._lag_s_max, late_s)
        if late_s > self._stall_s:
            self._counts["stalls"] += 1
            self._dispatch(LoopStalled(due_s, now_s))

    # ---- actions out ----

    def _perform(self, action: Action) -> None:
        match action:
            case SendDatagram():
                self._send(action)
            case SetTimer():
                due_s = self._env.clock.now_s() + action.after_s
                asyncio.get_running_loop().call_later(action.after_s, self._timer, due_s, action.event)
            case Publish():
                self._told(action)

    def _send(self, say: SendDatagram) -> None:
        if self._socket is None:
            return
        datagram = self._sealer.seal(say.messages, self._other_keys.get(say.to, b""))
        if len(datagram) > self._settings.datagram_bytes:
            raise ValueError(f"a datagram of {len(datagram)} bytes: {[type(one).__name__ for one in say.messages]}")
        if self._socket.send(datagram, say.to):
            self._counts["sent"] += 1
            self._counts["sent_bytes"] += len(datagram)
        else:
            self._counts["not_sent"] += 1

    def _told(self, tell: Publish) -> None:
        match tell.fact:
            case (
                HostUp()
                | MemberSuspected()
                | MemberAway()
                | HostDown()
                | NameConflict()
                | TableFull()
                | LaterBootKnown()
            ):
                self._counts[f"told_{type(tell.fact).__name__}"] += 1
                self._tell(tell.fact)
            case _:
                raise TypeError(f"gossip does not tell {type(tell.fact).__name__}")

    # ---- seeds that are names ----

    async def _keep_seeds(self, seeds: Seeds, ended: "asyncio.Future[None]") -> None:
        while not ended.done():
            await seeds.look()
            self._dispatch(SeedsFound(seeds.addresses))
            began_s = self._env.clock.now_s()
            while not ended.done() and self._env.clock.now_s() - began_s < self._look_again_s():
                await asyncio.wait([ended], timeout=1.0)

    def _look_again_s(self) -> float:
        return LOOK_AGAIN_ALONE_S if self._gossip.membership.alone else LOOK_AGAIN_S

    # ---- the file of known hosts ----

    async def _remembered(self) -> tuple[MemberRecord, ...]:
        """Hosts that were known before the restart; none when the file is missing or cannot be read."""
        try:
            stored = await checked.load(self._env.disk, PEERS_FILE, _peers_decoder)
        except (OSError, checked.Damaged) as error:
            self._env.log.warning("known hosts not read", file=PEERS_FILE, why=str(error), next="joining by seeds")
            return ()
        found = stored.records if stored is not None else ()
        for record in found:
            self._opener.remember(identity(record.host, record.uuid), record.boot)
        return found[: self._settings.hosts_max - 1]

    async def _keep_peers(self, ended: "asyncio.Future[None]") -> None:
        while not ended.done():
            await asyncio.wait([ended], timeout=PEERS_INTERVAL_S)
            await self._save_peers()
            self._notice_alone()

    def _notice_version(self, version: int, source: Address) -> None:
        """Log once for each version that a host with our key sends datagrams which cannot be read."""
        if version in self._versions:
            return
        self._versions.add(version)
        self._env.log.warning(
            "a host sends datagrams of another gossip version",
            source=source,
            why=f"it sends version {version} of gossip; covey-agent {VERSION} here reads and sends {PACKET_VERSION}",
            next="install the same covey-agent on both: agentctl version",
        )

    def _notice_alone(self) -> None:
        """Log once that no host answers although there are seeds or known hosts."""
        was_alone, self._alone = self._alone, not self._stopped and self._is_forsaken()
        if self._alone and not was_alone:
            self._env.log.warning(
                "no other host answers",
                seeds=self._settings.seeds,
                seeds_unknown=self.seeds_unknown,
                dropped={name: count for name, count in self.counters.items() if name.startswith("dropped_")},
                next="compare gossip port, key file and cluster label with another host's",
            )

    def _is_forsaken(self) -> bool:
        membership = self._gossip.membership
        return membership.alone and bool(self._settings.seeds or membership.members)

    async def _save_peers(self) -> None:
        records = tuple(record for record in self._gossip.membership.records() if record.host != self._me.host)
        if records == self._saved:
            return
        try:
            await checked.save(self._env.disk, PEERS_FILE, PeersFile(records))
        except OSError as error:
            self._env.log.warning("known hosts not written", file=PEERS_FILE, why=str(error), next="trying again")
        else:
            self._saved = records
