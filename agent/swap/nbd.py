"""The kernel's NBD over generic netlink (`linux/nbd-netlink.h`): connect a device, give it another socket, end it."""

import errno
import struct
from collections.abc import Mapping, Sequence
from typing import Protocol

from agent.swap.netlink import NetlinkError, nested, text, u32, u64

FAMILY = "nbd"
CONNECT, DISCONNECT, RECONFIGURE = 1, 2, 3
INDEX, SIZE_BYTES, BLOCK_SIZE_BYTES, TIMEOUT, SERVER_FLAGS = 1, 2, 3, 4, 5
SOCKETS, DEAD_CONN_TIMEOUT, BACKEND_IDENTIFIER = 7, 8, 10
SOCK_ITEM = SOCK_FD = 1
HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM = 1, 4, 8, 32
FLAGS = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM
DEAD_S = 3600
"""Seconds for which the kernel keeps requests while there is no socket. Then they fail: the programs whose pages are
wanted get SIGBUS."""


class Netlink(Protocol):
    def ask(self, family: int, command: int, *attributes: bytes) -> Mapping[int, bytes]: ...
    def family(self, name: str) -> int: ...


def _socket(descriptor: int) -> bytes:
    return nested(SOCKETS, nested(SOCK_ITEM, u32(SOCK_FD, descriptor)))


def connecting(backend: str, size_bytes: int, block_bytes: int, timeout_s: int, descriptor: int) -> Sequence[bytes]:
    """The attributes of CONNECT: a device of the kernel's choice."""
    return (
        u64(SIZE_BYTES, size_bytes),
        u64(BLOCK_SIZE_BYTES, block_bytes),
        u64(TIMEOUT, timeout_s),
        u64(SERVER_FLAGS, FLAGS),
        u64(DEAD_CONN_TIMEOUT, DEAD_S),
        text(BACKEND_IDENTIFIER, backend),
        _socket(descriptor),
    )


def reconfiguring(index: int, backend: str, timeout_s: int, descriptor: int) -> Sequence[bytes]:
    """The attributes of RECONFIGURE. The kernel refuses a device of another backend."""
    return (
        u32(INDEX, index),
        u64(TIMEOUT, timeout_s),
        u64(DEAD_CONN_TIMEOUT, DEAD_S),
        text(BACKEND_IDENTIFIER, backend),
        _socket(descriptor),
    )


def connect(netlink: Netlink, backend: str, size_bytes: int, block_bytes: int, timeout_s: int, descriptor: int) -> int:
    """Connect a device, and return its number. OSError: what the kernel says."""
    family = netlink.family(FAMILY)
    found = netlink.ask(family, CONNECT, *connecting(backend, size_bytes, block_bytes, timeout_s, descriptor)).get(
        INDEX, b""
    )
    if len(found) != 4:
        raise NetlinkError(errno.EPROTO, "the kernel did not say which device it created")
    return int(struct.unpack("=I", found)[0])


def reconfigure(netlink: Netlink, index: int, backend: str, timeout_s: int, descriptor: int) -> None:
    netlink.ask(netlink.family(FAMILY), RECONFIGURE, *reconfiguring(index, backend, timeout_s, descriptor))


def disconnect(netlink: Netlink, index: int) -> None:
    netlink.ask(netlink.family(FAMILY), DISCONNECT, u32(INDEX, index))
