"""RDMA of one process for tensors: queue pairs to owners of tables and to ranks, and why there is none.

Each connection has a protection domain of its own, so that its keys open no other one's memory. A connection that had a
pair and failed goes on over TCP alone: the next ones to that address are without a pair for a while.
"""

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Callable

from covey.ports.verbs import NoVerbs, Verbs
from covey.tensors.numbers.tensor_wire import FAULT_BYTES_MAX, Payload
from covey.tensors.rdma.tensor_pair import LOCKED_BYTES, TensorPair

AGAIN_S, AGAIN_MAX_S = 60.0, 3600.0
"""Seconds for which an address is reached over TCP alone after its pair failed once; it doubles, up to the most."""


class RdmaHere:
    """The RDMA of this process. Any thread may call."""

    def __init__(self, verbs: Verbs, now_s: Callable[[], float] = time.monotonic) -> None:
        self._verbs, self._now_s = verbs, now_s
        self._failed: dict[str, tuple[str, float, float]] = {}
        """Address -> why its pair failed, the length of the pause after it, and when that ends."""
        self._pairs: list[TensorPair] = []
        self._lock = threading.Lock()
        """Guards the last field."""

    def why_not(self) -> str:
        """Why there is no RDMA here, as far as can be seen without opening a device; empty: there is."""
        return self._verbs.look(LOCKED_BYTES).why

    def warm(self) -> None:
        """Load what is needed and open the device, so that the next pair is made at once: the other end waits for it no
        longer than for a handshake."""
        with contextlib.suppress(NoVerbs):
            self._verbs.open().close()

    def pair(self, connection: socket.socket, address: str = "") -> TensorPair:
        """One end of a pair beside this connection. NoVerbs, also while pairs to this address pause."""
        why, _, until_s = self._failed.get(address, ("", 0.0, 0.0))
        if self._now_s() < until_s:
            raise NoVerbs(f"its queue pair failed: {why}")
        pair = TensorPair(self._verbs.open(), connection.fileno(), connection.sendall)
        with self._lock:
            self._pairs = [each for each in self._pairs if not each.why] + [pair]
        return pair

    def failed(self, address: str, why: str) -> None:
        """The connection to this address ended while it had a pair, or the pair could not be made."""
        pause_s = min(2 * self._failed[address][1], AGAIN_MAX_S) if address in self._failed else AGAIN_S
        self._failed[address] = why, pause_s, self._now_s() + pause_s

    def abandon(self) -> None:
        """Leave the pairs to the parent, in a forked child: when they are freed here, pyverbs would destroy them
        there."""
        for pair in self._pairs:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pair))


def packed_words(why: str) -> bytes:
    """Why there is no pair, for the other end."""
    return why.encode()[:FAULT_BYTES_MAX]


def words(data: Payload) -> str:
    """Why there is no pair, as the other end says."""
    return "".join(filter(str.isprintable, bytes(data).decode("utf-8", "replace")))
