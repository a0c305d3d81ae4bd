"""Simulated control links: what ZeroMQ guarantees (reliability notes, decision 4).

One connection per ordered pair of agents, made when a peer is known and made again for ever. Within a connection
messages keep their order and come once. But it is *at most once, silently*: when the connection breaks (a cut longer
than the heartbeats, a killed agent, a new key) everything on its way and in the outbox is gone, and the sender is told
nothing. While there is no connection, or when the outbox is full, `send` returns False. The sender is the host whose
key authenticated the connection: with an unknown key there is none, and messages under a forgotten one are dropped.
"""

import zlib
from collections import deque
from collections.abc import Callable

from chaos.world.net import bind_address, split
from chaos.world.seen import ProcessSeen
from covey.core.ids import HostId
from covey.ports.addresses import Address

OUTBOX_MAX = 1000
"""Most messages to one peer that may wait (high-water mark)."""
HEARTBEAT_S = 3.0
"""Seconds of silence after which a connection is given up."""
RECONNECT_S = (0.1, 2.0)
"""Seconds before the next try: the first bound after a success, then twice the pause each time up to the second."""
RETRANSMIT_S = 0.2
MESSAGE_BYTES_MAX = (1 << 20) + 4096
KEY_BYTES = 40


class Connection:
    """One sender's connection to one peer."""

    def __init__(self, links: "SimLinks", peer: HostId) -> None:
        self.links, self.peer = links, peer
        self.outbox: deque[tuple[float, bytes]] = deque()
        """Earliest arrival and message, in order."""
        self.target: SimLinks | None = None
        """The instance of the peer's agent that the connection leads to; None: not connected."""
        self.closed = False
        self._last = 0.0
        self._pause_s = RECONNECT_S[0]
        self._delivering = False
        self._stalled_since: float | None = None
        self._try_after(0.0)

    # ---- making and losing it ----------------------------------------------------------------------------------------

    def _try_after(self, pause_s: float) -> None:
        network = self.links.world.network
        there = self.links.host_of(self.peer)
        trips = 3 * network.delay_s(self.links.host.name, there or self.links.host.name)
        self.links.world.at(self.links.world.now + pause_s * network.rng.uniform(0.9, 1.1) + trips, self._try)

    def _try(self) -> None:
        if self.closed or self.links.closed or not self.links.process.alive or self.target is not None:
            return
        found = self.links.world.link_ends.get(self.links.address_of(self.peer))
        if found is None or not self._through() or not self._proven(found):
            self._pause_s = min(2 * self._pause_s, RECONNECT_S[1])
            self._try_after(self._pause_s)
            return
        self.target, self._pause_s = found, RECONNECT_S[0]
        self.look()

    def _proven(self, found: "SimLinks") -> bool:
        """Whether both sides hold the other's key."""
        known = self.links.known.get(self.peer)
        return (
            found.process.alive
            and known is not None
            and found.public_key == known[1]
            and self.links.public_key in found.names
        )

    def _through(self) -> bool:
        there = self.links.host_of(self.peer)
        if there is None:
            return False
        world, here = self.links.world, self.links.host
        return here.up and world.hosts[there].up and world.network.both_ways(here.name, there)

    def look(self) -> None:
        """Check, after a change of the network, whether the connection still holds."""
        if self.target is None or self.closed:
            return
        world = self.links.world
        if self._through():
            self._stalled_since = None
            if self.target.closed:
                self.lose()
        elif self._stalled_since is None:
            self._stalled_since = since = world.now
            world.at(world.now + HEARTBEAT_S, lambda: self._silent(since))

    def _silent(self, since: float) -> None:
        if self._stalled_since == since:
            self.lose()

    def lose(self) -> None:
        """Break the connection: what was on its way is gone."""
        if self.outbox:
            world = self.links.world
            world.mark("link lost", self.links.process.name, f"{len(self.outbox)} messages to {self.peer}")
        self.outbox.clear()
        self.target, self._stalled_since = None, None
        if not self.closed:
            self._try_after(self._pause_s)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> bool:
        if self.target is None or len(self.outbox) >= OUTBOX_MAX or len(data) > MESSAGE_BYTES_MAX:
            return False
        network, world = self.links.world.network, self.links.world
        here, there = self.links.host.name, self.target.host.name
        delay = network.delay_s(here, there, len(data)) + (RETRANSMIT_S if network.lost(here, there) else 0.0)
        self._last = max(self._last, world.now + delay)
        self.outbox.append((self._last, data))
        self._deliver_at(self.outbox[0][0])
        return True

    def _deliver_at(self, when: float) -> None:
        if not self._delivering:
            self._delivering = True
            self.links.world.at(when, self._deliver)

    def _deliver(self) -> None:
        self._delivering = False
        world = self.links.world
        if self.target is None or not self.outbox:
            return
        if not self._through():
            self._deliver_at(world.now + RETRANSMIT_S)
            return
        if self.target.closed:
            self.lose()
            return
        while self.outbox and self.outbox[0][0] <= world.now:
            self.target.take(self.links, self.outbox.popleft()[1])
        if self.outbox:
            self._deliver_at(self.outbox[0][0])


class SimLinks:
    """The `Links` port of one process. Each process has a new key."""

    def __init__(self, process: ProcessSeen, public_key: bytes) -> None:
        self.process, self.host, self.world = process, process.host, process.world
        self.public_key = public_key
        self.address: Address = ""
        self.closed = True
        self.known: dict[HostId, tuple[Address, bytes]] = {}
        self.names: dict[bytes, HostId] = {}
        self._heard: Callable[[HostId, bytes], None] | None = None
        self._to: dict[HostId, Connection] = {}
        self._addresses: dict[HostId, Address] = {}
        """Addresses of the known hosts, as they are seen from here."""

    async def open(self, bind: Address, heard: Callable[[HostId, bytes], None]) -> None:
        ends = self.world.link_ends
        self.address = bind_address(self.host, bind, lambda candidate: candidate in ends)
        ends[self.address] = self
        self._heard, self.closed = heard, False
        self.process.resources.append(self)
        self.world.network.on_change.append(self.look)

    def know(self, host: HostId, address: Address, public_key: bytes) -> None:
        key = bytes(public_key)
        if self.known.get(host) == (address, key) or len(key) != KEY_BYTES:
            return
        self.forget(host)
        self.known[host] = (address, key)
        ip, port = split(address)
        self._addresses[host] = f"{self.host.ip}:{port}" if ip.startswith("127.") else f"{ip}:{port}"
        self.names[key] = host
        self._to[host] = Connection(self, host)

    def forget(self, host: HostId) -> None:
        known = self.known.pop(host, None)
        if known is not None:
            del self._addresses[host]
            self.names.pop(known[1], None)
            old = self._to.pop(host)
            old.closed = True
            old.lose()

    def address_of(self, host: HostId) -> Address:
        return self._addresses.get(host, "")

    def host_of(self, peer: HostId) -> str | None:
        """The machine at a peer's address (it may claim another name)."""
        address = self._addresses.get(peer, "")
        found = self.world.network.hosts_by_ip.get(split(address)[0]) if address else None
        return None if found is None else found.name

    def send(self, to: HostId, data: bytes) -> bool:
        if self.closed or not self.process.alive or to not in self._to or self.world.mischief.strikes("link"):
            return False
        return self._to[to].send(bytes(data))

    def take(self, sender: "SimLinks", data: bytes) -> None:
        """Take a message that arrived. It is dropped unless its sender authenticated with a key that is known here."""
        name = self.names.get(sender.public_key)
        if name is None:
            self.world.mark("link refused", self.process.name, f"from {sender.host.name}")
            return
        for hears in self.world.on_message:
            hears(sender.process, self.process)
        self.world.mark("link", self.process.name, "", zlib.crc32(data))
        if self._heard is not None and not self.closed:
            self.process.loop.call_soon(self._heard, name, data)

    def look(self) -> None:
        for connection in self._to.values():
            connection.look()

    def reset(self, host: str) -> None:
        """Break connections to this host now, or all if it is this one."""
        for connection in self._to.values():
            if connection.target is not None and host in (self.host.name, connection.target.host.name):
                connection.lose()

    async def close(self) -> None:
        self.release()

    def vanish(self) -> None:
        """Drop the links, since the power failed: peers find out by their heartbeats."""
        if not self.closed:
            self.closed = True
            self.world.link_ends.pop(self.address, None)
            self.world.network.on_change.remove(self.look)
            for connection in self._to.values():
                connection.closed = True

    def release(self) -> None:
        """End the links with the process: its kernel resets the connections."""
        if not self.closed:
            self.vanish()
            for changed in list(self.world.network.on_change):
                changed()
