"""The simulated network: its conditions, cuts, and datagrams.

`Network` knows, for every ordered pair of hosts, whether a packet gets through now (`cut` is directed, so one-way
partitions are one cut) and how long it takes. `SimDatagrams` loses, delays, reorders (by delay) and duplicates;
`chaos.world.streams` and `chaos.world.links` build connections under the same conditions.
"""

import asyncio
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log

from chaos.world.seen import HostSeen, ProcessSeen, WorldSeen
from covey.ports.addresses import Address, is_ip, joined

LOOPBACK_S = (0.00001, 0.00005)
"""Least and most seconds of a packet within a host."""
RESOLVE_S = (0.001, 0.05)
"""Least and most seconds that the name server takes."""
NO_ANSWER_S = 40.0
"""Seconds until a resolver gives up whose servers are all silent."""
DATAGRAM_BYTES_MAX = 65_507
SOCKET_PACKETS_MAX = 512
"""Most datagrams that wait in a socket whose process is not looking; more are dropped, as a kernel does."""


@dataclass
class NetworkConditions:
    """What the network does to every packet. Probabilities 0..1, times in seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0002
    jitter_s: float = 0.0003
    """Mean seconds of the exponential part of the delay."""
    spike: float = 0.0
    spike_s: float = 0.05
    bytes_per_s: float = 1.25e9
    """Bandwidth of one connection, in bytes per second."""


class Network:
    """Which hosts reach which, and how fast."""

    def __init__(self, world: WorldSeen, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.conditions = NetworkConditions()
        self.cuts: dict[tuple[str, str], float] = {}
        """(from, to) host names -> when it was cut."""
        self.slow: dict[str, float] = {}
        """Host -> factor on every delay to and from it."""
        self.unheard: dict[str, None] = {}
        """Hosts whose datagrams are dropped, to them and from them."""
        self.sockets: dict[Address, SimSocket] = {}
        self.hosts_by_ip: dict[str, HostSeen] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        """Answers of the name server: name -> IPs. A story may change them."""
        self.sent = self.dropped = 0
        self.on_change: list[Callable[[], None]] = []
        """Functions called after every cut and heal."""

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        for pair in pairs:
            if pair[0] != pair[1]:
                self.cuts.setdefault(pair, self.world.now)
        self.changed()

    def heal(self, pairs: Iterable[tuple[str, str]] | None = None) -> None:
        """Join these directed pairs again; None: all."""
        for pair in list(self.cuts) if pairs is None else pairs:
            self.cuts.pop(pair, None)
        self.changed()

    def changed(self) -> None:
        """Let connections check whether they still hold, after a cut, a heal or a power failure."""
        for changed in list(self.on_change):
            changed()

    def open(self, source: str, target: str) -> bool:
        """Whether a packet from host `source` reaches host `target` now."""
        return source == target or (source, target) not in self.cuts

    def heard(self, source: str, target: str) -> bool:
        """Whether a datagram from host `source` reaches host `target` now."""
        return self.open(source, target) and not (self.unheard and {source, target} & self.unheard.keys())

    def both_ways(self, one: str, other: str) -> bool:
        return self.open(one, other) and self.open(other, one)

    def delay_s(self, source: str, target: str, size: int = 0) -> float:
        if source == target:
            return LOOPBACK_S[0] + (LOOPBACK_S[1] - LOOPBACK_S[0]) * self.rng.random()
        conditions = self.conditions
        delay = conditions.delay_s + -log(1.0 - self.rng.random()) * conditions.jitter_s + size / conditions.bytes_per_s
        if conditions.spike and self.rng.random() < conditions.spike:
            delay += self.rng.uniform(0, 2 * conditions.spike_s)
        return delay * max(self.slow.get(source, 1.0), self.slow.get(target, 1.0)) if self.slow else delay

    def lost(self, source: str, target: str) -> bool:
        return source != target and self.conditions.loss > 0 and self.rng.random() < self.conditions.loss

    def doubled(self, source: str, target: str) -> bool:
        return source != target and self.conditions.duplicate > 0 and self.rng.random() < self.conditions.duplicate

    def bound(self, address: Address, here: str) -> "SimSocket | None":
        """The datagram socket at `address` as host `here` sees it."""
        return self.sockets.get(_seen_from(address, self.world.hosts[here].ip))


@lru_cache(4096)
def split(address: Address) -> tuple[str, int]:
    """`10.0.0.1:7946` -> its two halves. Raises ValueError when it is not an address."""
    ip, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"{address!r} is not an address: write IP:PORT")
    return ip.strip("[]"), int(port)


@lru_cache(4096)
def _has_ip(address: Address) -> bool:
    return is_ip(split(address)[0])


@lru_cache(4096)
def _seen_from(address: Address, here: str) -> Address:
    """An address as host IP `here` means it: loopback means the host that says it."""
    ip, port = split(address)
    return f"{here if ip.startswith('127.') or ip in ('::1', 'localhost') else ip}:{port}"


def bind_address(host: HostSeen, bind: Address, taken: Callable[[Address], bool]) -> Address:
    """The address that a socket really gets. Raises OSError when it is taken or not this host's."""
    ip, port = split(bind)
    if ip in ("0.0.0.0", "::", "", "localhost", "::1") or ip.startswith("127."):
        ip = host.ip
    if ip != host.ip:
        raise OSError(99, f"cannot assign requested address {bind} on {host.name}")
    if port == 0:
        port = host.free_port(lambda candidate: taken(f"{ip}:{candidate}"))
    if taken(f"{ip}:{port}"):
        raise OSError(98, f"address {ip}:{port} is already in use")
    return f"{ip}:{port}"


class SimSocket:
    """One bound datagram socket."""

    def __init__(self, process: ProcessSeen, address: Address, received: Callable[[bytes, Address], None]) -> None:
        self._process, self.address, self._received = process, address, received
        self._waiting = 0
        self.closed = False

    def send(self, data: bytes, to: Address) -> bool:
        process, network = self._process, self._process.world.network
        if self.closed or not process.alive or len(data) > DATAGRAM_BYTES_MAX or not _has_ip(to):
            return False
        if process.world.mischief.strikes("full datagram socket"):
            return False
        network.sent += 1
        here = process.host.name
        address = _seen_from(to, process.host.ip)
        host = network.hosts_by_ip.get(split(address)[0])
        if host is None or network.lost(here, host.name) or not network.heard(here, host.name):
            network.dropped += 1
            process.world.mark("datagram lost", process.name, f"to {to}")
            return True
        data = bytes(data)
        if process.world.mischief.strikes("datagram"):
            data = data[: process.world.mischief.rng.randrange(len(data))]
        for _ in range(2 if network.doubled(here, host.name) else 1):
            arrives = process.world.now + network.delay_s(here, host.name, len(data))
            process.world.at(arrives, lambda: _arrive(network, here, self.address, address, data))
        return True

    def take(self, data: bytes, sender: Address) -> None:
        """Take a packet that the kernel hands over."""
        if self._waiting >= SOCKET_PACKETS_MAX:
            self._process.world.network.dropped += 1
            return
        self._waiting += 1
        self._process.loop.call_soon(self._hand, data, sender)

    def _hand(self, data: bytes, sender: Address) -> None:
        self._waiting -= 1
        if not self.closed:
            self._received(data, sender)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._process.world.network.sockets.pop(self.address, None)

    release = vanish = close


def _arrive(network: Network, source: str, sender: Address, address: Address, data: bytes) -> None:
    socket = network.sockets.get(address)
    host = network.hosts_by_ip[split(address)[0]]
    if socket is None or not network.open(source, host.name):
        network.dropped += 1
        return
    network.world.mark("datagram", source, "", zlib.crc32(data))
    socket.take(data, sender)


class SimDatagrams:
    """The `Datagrams` port of one process."""

    def __init__(self, process: ProcessSeen) -> None:
        self._process = process

    async def open(self, bind: Address, received: Callable[[bytes, Address], None]) -> SimSocket:
        network = self._process.world.network
        address = bind_address(self._process.host, bind, lambda candidate: candidate in network.sockets)
        socket = SimSocket(self._process, address, received)
        network.sockets[address] = socket
        self._process.resources.append(socket)
        return socket

    async def resolve(self, address: Address) -> Sequence[Address]:
        name, port = split(address)
        if is_ip(name):
            return (address,)
        world = self._process.world
        await asyncio.sleep(world.network.rng.uniform(*RESOLVE_S))
        ips = world.network.names.get(name, ())
        struck = world.mischief.strikes("resolve")
        if struck and world.mischief.rng.random() < 0.5:
            await asyncio.sleep(NO_ANSWER_S)
        if not ips or struck:
            raise OSError(-2, f"Name or service not known: {name}")
        return tuple(joined(ip, port) for ip in ips)
