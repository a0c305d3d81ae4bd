"""Control links between hosts: ZeroMQ with CURVE, every peer known by its key.

Each host binds one ROUTER, and connects a DEALER to a peer when it has something to tell it; bytes flow from DEALER to
ROUTER only, so there is no routing id to forge and no handover to lose. The sender is the one that the CURVE handshake
proved (the ZAP user id), never a name in the message. Keys are new at every start, kept in memory, and sent by sealed
gossip: a host without the gossip key can neither learn nor announce one. A forgotten key is refused at once, also on an
open connection. A connection that shows no key is counted and, beyond a limit, closed
(`agent.ports.network.handshake_limit`).

    know --> named --send--> opening: messages are held, for `HELD_S` --handshake--> open --`QUIET_S` silent--> named
                             opening, open: nothing is taken for a while --> connected anew (`_renew`)

Who is alive is gossip's affair: a connection is pinged seldom, so that what ends silently is found at all. A peer that
does not acknowledge what it is sent loses the connection after `UNACKNOWLEDGED_MS`.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from agent import metrics
from agent.ports.network.handshake_limit import HANDSHAKE_S, HandshakeLimit, Kind
from covey.core.ids import HostId
from covey.core.metrics import MetricSeries
from covey.ports.addresses import Address, is_v6
from covey.ports.log import Logger

DOMAIN = "covey"
MESSAGE_BYTES_MAX = (1 << 20) + 4096
OUTBOX_MESSAGES_MAX = 1000
HEARTBEAT_MS = 20_000
"""Milliseconds between two pings. Both ends ping: with only one end, a partition can leave a black hole."""
UNACKNOWLEDGED_MS = 3000
"""Milliseconds after which TCP gives up a connection whose other end does not acknowledge what it was sent."""
SOCKETS_MAX = 16_384
"""The most sockets of ZeroMQ's context: one for each peer in use, and a few more."""
QUIET_S = 60.0
"""Seconds after which a connection that nothing was sent over is closed."""
HELD_S = 2.0
"""Seconds for which messages wait for a connection that is opened for the first of them."""
HELD_MESSAGES_MAX, HELD_BYTES_MAX = 64, 2 * MESSAGE_BYTES_MAX
FLUSH_S = (0.002, 0.05)
"""The least and the most seconds between two looks whether a connection is open for what is held."""

EVENTS: Mapping[int, Kind] = {
    zmq.EVENT_ACCEPTED: "accepted",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "proven",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "failed",
    zmq.EVENT_DISCONNECTED: "ended",
}
"""The events of the router's monitor that are used. Refused keys are counted where they are refused."""
MORE_FILES = "let the agent open more files: LimitNOFILE= of its systemd unit"
RECONNECT_S = (0.25, 2.0)
"""The least and the most seconds before a new ZeroMQ connection is opened: a refused handshake ends one for good, and a
peer refuses until gossip has brought it this host's key."""


@dataclass
class LinkPeer:
    """A peer's address and key, and the connection to it while there is one. Times are those of `time.monotonic`."""

    address: Address
    public_key: bytes
    dealer: "zmq.Socket[bytes] | None" = None
    """None: nothing was to be sent for a while."""
    good_s: float = 0.0
    """When the connection was last made, or last took a message."""
    pause_s: float = RECONNECT_S[0]
    asked_s: float = 0.0
    """When something was last to be sent."""
    held_until_s: float = 0.0
    """Until when messages are held for the first connection."""
    held: deque[bytes] = field(default_factory=deque)
    held_bytes: int = 0
    is_usable: bool = True
    """Whether the address is one."""


class ZmqLinks:
    """The `covey.ports.links.Links` over ZeroMQ."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._public, self._secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._peers: dict[HostId, LinkPeer] = {}
        self._names: dict[bytes, HostId] = {}
        self._router: zmq.asyncio.Socket | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self._reader: asyncio.Task[None] | None = None
        self._address = ""
        self._monitor: zmq.asyncio.Socket | None = None
        self._doorkeeper: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._flushes: dict[HostId, asyncio.TimerHandle] = {}
        """When to look next whether a connection is open for what is held for it."""
        self.counters: Counter[str] = Counter()
        self.visitors = HandshakeLimit(self.counters)

    @property
    def address(self) -> Address:
        return self._address

    @property
    def public_key(self) -> bytes:
        return self._public

    async def open(self, bind: Address, heard: Callable[[HostId, bytes], None]) -> None:
        """Open the links. OSError when the address cannot be bound."""
        shadow = zmq.asyncio.Context.shadow(self._context.underlying)
        self._authenticator = AsyncioAuthenticator(shadow)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._router = router = shadow.socket(zmq.ROUTER)
        self._harden(router)
        router.setsockopt(zmq.IPV6, int(is_v6(bind)))
        router.curve_server = True
        router.curve_secretkey = self._secret
        router.curve_publickey = self._public
        router.zap_domain = DOMAIN.encode()
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # while nobody answers whether a key is known, none is
        self._monitor = monitor = router.get_monitor_socket(sum(EVENTS))
        try:
            router.bind(f"tcp://{bind}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot bind the control link to {bind}: {error}") from error
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._address = endpoint.decode().rstrip("\0").removeprefix("tcp://")
        self._reader = asyncio.create_task(self._read(router, heard), name="links")
        self._doorkeeper = asyncio.create_task(self._watch(monitor), name="links: visitors")
        self._sweeper = asyncio.create_task(self._sweep(), name="links: quiet ones")

    def callback(self, _domain: str, key: bytes | str) -> bool:
        """Answer ZAP, which asks whether this client key is allowed."""
        known = (key.encode() if isinstance(key, str) else key) in self._names
        self.counters["allowed" if known else "refused_key"] += 1
        return known

    async def _read(self, router: zmq.asyncio.Socket, heard: Callable[[HostId, bytes], None]) -> None:
        while True:
            frames = await router.recv_multipart(copy=False)
            last = frames[-1]
            sender = self._names.get(_user_id(last))
            if sender is None or len(frames) != 2:
                self.counters["dropped"] += 1
                continue
            self.counters["received"] += 1
            heard(sender, last.bytes)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            told = parse_monitor_message(await monitor.recv_multipart())
            kind = EVENTS.get(told["event"])
            if kind is not None and self.visitors.heard(kind, told["value"], time.monotonic()):
                _turn_away(told["value"], self._address)

    def metrics(self) -> Mapping[MetricSeries, float]:
        unproven = self.visitors.unproven(time.monotonic())
        return {
            metrics.CONTROL_CONNECTIONS.of("shown"): float(self.visitors.open - unproven),
            metrics.CONTROL_CONNECTIONS.of("not_shown"): float(unproven),
            metrics.CONTROL_LINKS.of("open"): float(sum(peer.dealer is not None for peer in self._peers.values())),
            metrics.CONTROL_LINKS.of("known"): float(len(self._peers)),
            **metrics.LINKS.of(self.counters),
        }

    def know(self, host: HostId, address: Address, public_key: bytes) -> None:
        known = self._peers.get(host)
        if known and (known.address, known.public_key) == (address, public_key):
            return
        if len(public_key) != 40:
            self.counters["bad_key"] += 1
            return
        self.forget(host)
        self._peers[host] = LinkPeer(address, public_key)
        self._names[public_key] = host

    def _connected(self, host: HostId, peer: LinkPeer) -> "zmq.Socket[bytes] | None":
        """A new connection to a peer; None: its address is none, or this process may open no more sockets."""
        address = peer.address
        try:
            dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            if not self.counters["no_socket"]:
                self._log.warning("no socket is left for a control link", peer=host, why=str(error), next=MORE_FILES)
            self.counters["no_socket"] += 1
            return None
        self._harden(dealer)
        dealer.setsockopt(zmq.IPV6, int(is_v6(address)))
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        dealer.curve_serverkey = peer.public_key
        dealer.curve_publickey = self._public
        dealer.curve_secretkey = self._secret
        try:
            dealer.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._log.warning("peer's control address cannot be used", peer=host, address=address, why=str(error))
            dealer.close()
            peer.is_usable = False
            return None
        return dealer

    def forget(self, host: HostId) -> None:
        known = self._peers.pop(host, None)
        if known:
            self._names.pop(known.public_key, None)
            self._close(host, known)

    def _close(self, host: HostId, peer: LinkPeer) -> None:
        """Close a connection, and drop what is held for it."""
        if flush := self._flushes.pop(host, None):
            flush.cancel()
        self.counters["not_connected_or_full"] += len(peer.held)
        peer.held.clear()
        peer.held_bytes = 0
        if peer.dealer is not None:
            peer.dealer.close()
            peer.dealer = None

    def send(self, to: HostId, data: bytes) -> bool:
        known = self._peers.get(to)
        if known is None:
            return False
        known.asked_s = now_s = time.monotonic()
        if known.dealer is None and not self._open(to, known, now_s):
            self.counters["not_connected_or_full"] += 1
            return False
        if not known.held and self._given(known, data):
            return True
        if now_s < known.held_until_s and self._hold(to, known, data):
            return True
        self.counters["not_connected_or_full"] += 1
        self._renew(to, known)
        return False

    def _open(self, host: HostId, peer: LinkPeer, now_s: float) -> bool:
        if peer.is_usable and (dealer := self._connected(host, peer)) is not None:
            peer.dealer, peer.good_s, peer.pause_s = dealer, now_s, RECONNECT_S[0]
            peer.held_until_s = now_s + HELD_S
            self.counters["opened"] += 1
        return peer.dealer is not None

    def _given(self, peer: LinkPeer, data: bytes) -> bool:
        """Give a message to the connection. False: it is not open yet, or no longer, or its queue is full."""
        if peer.dealer is None:
            return False
        try:
            peer.dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        peer.good_s, peer.pause_s, peer.held_until_s = time.monotonic(), RECONNECT_S[0], 0.0
        self.counters["sent"] += 1
        return True

    def _hold(self, host: HostId, peer: LinkPeer, data: bytes) -> bool:
        """Keep a message until the connection is open. False: there are too many."""
        if len(peer.held) >= HELD_MESSAGES_MAX or peer.held_bytes + len(data) > HELD_BYTES_MAX:
            return False
        peer.held.append(data)
        peer.held_bytes += len(data)
        if host not in self._flushes:
            self._flush_after(host, FLUSH_S[0])
        return True

    def _flush_after(self, host: HostId, pause_s: float) -> None:
        self._flushes[host] = asyncio.get_running_loop().call_later(pause_s, self._flush, host, pause_s)

    def _flush(self, host: HostId, pause_s: float) -> None:
        """Send what is held for a connection, or look again a little later; drop it when that took too long."""
        del self._flushes[host]
        peer = self._peers[host]
        while peer.held and self._given(peer, peer.held[0]):
            peer.held_bytes -= len(peer.held.popleft())
        if not peer.held:
            return
        if time.monotonic() < peer.held_until_s:
            self._renew(host, peer)
            self._flush_after(host, min(2 * pause_s, FLUSH_S[1]))
        else:
            self.counters["not_connected_or_full"] += len(peer.held)
            peer.held.clear()
            peer.held_bytes = 0

    async def _sweep(self) -> None:
        """Close connections over which nothing was to be sent for `QUIET_S`."""
        while True:
            await asyncio.sleep(QUIET_S / 6)
            self.close_quiet(time.monotonic())

    def close_quiet(self, now_s: float) -> None:
        for host, peer in self._peers.items():
            if peer.dealer is not None and now_s - peer.asked_s > QUIET_S:
                self._close(host, peer)
                self.counters["closed"] += 1

    def _renew(self, host: HostId, peer: LinkPeer) -> None:
        """Replace the connection when it has taken no message for a while."""
        now_s = time.monotonic()
        if now_s - peer.good_s < peer.pause_s:
            return
        dealer = self._connected(host, peer)
        if dealer:
            if peer.dealer is not None:
                peer.dealer.close()
            peer.dealer, peer.good_s = dealer, now_s
            peer.pause_s = min(2 * peer.pause_s, RECONNECT_S[1])
            self.counters["renewed"] += 1

    async def close(self) -> None:
        for task in (self._reader, self._doorkeeper, self._sweeper):
            if task:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        for host in list(self._peers):
            self.forget(host)
        if self._router and self._monitor:
            self._router.disable_monitor()
            self._monitor.close(linger=0)
            self._router.close()
        if self._authenticator:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    @staticmethod
    def _harden(end: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.SNDHWM, OUTBOX_MESSAGES_MAX)
        end.setsockopt(zmq.RCVHWM, OUTBOX_MESSAGES_MAX)
        end.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        end.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        end.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        end.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_MS)
        end.setsockopt(zmq.HEARTBEAT_TTL, 2 * HEARTBEAT_MS)
        end.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)


def _turn_away(file: int, bound: Address) -> None:
    """End a connection that ZeroMQ accepted. The descriptor may be another file's by now: only connections to this
    host's own TCP port are closed, and a peer that is closed by mistake connects again."""
    with contextlib.suppress(OSError):
        copy = os.dup(file)
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # no socket at all
            os.close(copy)
            return
        with connection:
            tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and str(connection.getsockname()[1]) == bound.rpartition(":")[2]:
                connection.shutdown(socket.SHUT_RDWR)


def _user_id(frame: zmq.Frame) -> bytes:
    """The key that the handshake proved, Z85; empty when there was none."""
    try:
        found = frame.get("User-Id")
    except zmq.ZMQError:
        return b""
    return found.encode() if isinstance(found, str) else bytes(found)
