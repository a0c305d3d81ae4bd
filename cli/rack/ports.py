"""TCP and UDP ports for the agents of a rack on this machine.

Between choosing a port and the agent's bind, a second or so passes. Two racks that are started at once would choose the
same ones, and each would disturb the other merely by trying whether a port is free. So a port is claimed first: a start
of a rack holds an abstract unix socket named after it, which no other can bind and which goes away with its holder.
"""

import errno
import hashlib
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from cli.client import FAILED, AgentctlError

PORTS = range(16_000, 20_000)
"""Where ports are looked for: below Linux's ephemeral ports (32768), so that no outgoing connection takes one between
two starts, and below those that agents reserve for jobs (20000)."""


class Claims:
    """Ports that no other start of a rack on this machine tries until `close`."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, port: int) -> bool:
        """Whether it is claimed by us now."""
        if port in self._held:
            return True
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0covey-rack-port-{port}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._held[port] = claim
        return True

    def drop(self, port: int) -> None:
        self._held.pop(port).close()

    def close(self) -> None:
        for port in list(self._held):
            self.drop(port)


def free_ports(directory: Path, count: int, taken: set[int], claims: Claims) -> list[int]:
    """Ports free for UDP and TCP on loopback, claimed; where the search begins depends on the folder, so a rack mostly
    gets the same again. AgentctlError when there are too few."""
    start = int.from_bytes(hashlib.sha256(os.fsencode(directory)).digest()[:4], "big") % len(PORTS)
    found: list[int] = []
    for i in range(len(PORTS)):
        if len(found) == count:
            break
        port = PORTS[(start + i) % len(PORTS)]
        if port in taken or not claims.take(port):
            continue
        if is_free(f"127.0.0.1:{port}"):
            found.append(port)
        else:
            claims.drop(port)
    if len(found) < count:
        what = f"{count} free ports are needed"
        raise AgentctlError(
            FAILED, what, f"only {len(found)} of {PORTS.start} to {PORTS.stop - 1} are free", "ss -ltnup"
        )
    return found


def is_free(address: str) -> bool:
    """For UDP and TCP."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            probe = stack.enter_context(socket.socket(socket.AF_INET, kind))
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are just ending
            try:
                probe.bind((host, int(port)))
                if kind == socket.SOCK_STREAM:
                    probe.listen(1)
            except OSError:
                return False
    return True
