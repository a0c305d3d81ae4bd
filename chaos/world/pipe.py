"""One direction of a simulated connection: chunks on their way, in order, with their times of arrival (`streams`)."""

from collections import deque
from typing import Any, Protocol

RETRANSMIT_S = 0.2
"""Seconds of delay that a lost segment adds, and between two tries of a held pipe."""


class PipeEnd(Protocol):
    """What a pipe needs of a stream (`chaos.world.streams.SimStream`)."""

    host: Any
    world: Any
    broken: ConnectionError | None

    @property
    def connected(self) -> bool:
        """Whether segments get through now."""

    def arrived(self, chunk: bytes) -> None:
        """Take bytes that arrived."""

    def ended(self) -> None:
        """Take the end: the peer sends nothing more."""


class Pipe:
    """One direction of a connection."""

    def __init__(self, writer: PipeEnd, reader: PipeEnd) -> None:
        self.writer, self.reader = writer, reader
        self._within = writer.host is reader.host
        self.way: deque[tuple[float, bytes]] = deque()
        """Earliest arrival and chunk, in order; an empty chunk is the end."""
        self.under_way = 0
        self._last = 0.0
        self._timer = False

    def put(self, chunk: bytes) -> None:
        world, network = self.writer.world, self.writer.world.network
        here, there = self.writer.host.name, self.reader.host.name
        arrives = world.now + network.delay_s(here, there)
        if network.lost(here, there):
            arrives += RETRANSMIT_S
        if arrives < self._last:
            arrives = self._last
        self._last = arrives + len(chunk) / network.conditions.bytes_per_s
        self.way.append((self._last, chunk))
        self.under_way += len(chunk)
        if not self._timer:
            self._wait()

    def _wait(self) -> None:
        """Wait for what arrives next."""
        self._timer = True
        self.writer.world.at(self.way[0][0], self._arrive)

    def _arrive(self) -> None:
        self._timer = False
        world, way, reader = self.writer.world, self.way, self.reader
        while way and way[0][0] <= world.now:
            if reader.broken is not None:
                way.clear()
                return
            if not (self._within or self.writer.connected):
                self._timer = True
                world.at(world.now + RETRANSMIT_S * world.network.rng.uniform(0.5, 2.0), self._arrive)
                return
            chunk = way.popleft()[1]
            self.under_way -= len(chunk)
            if chunk:
                reader.arrived(chunk)
            else:
                reader.ended()
        if way:
            self._wait()
