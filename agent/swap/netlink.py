"""Generic netlink as far as NBD needs it: messages as bytes, and a socket that asks the kernel.

Written here and not taken from pyroute2, which would have been a sound choice: this runs in a process with every right
over the machine's swap, locked in memory, and the library brings 336 modules and 24 MB for three messages. Tests
compare the bytes with those that pyroute2 makes.

    nlmsghdr (16)  length, type, flags, sequence, port    genlmsghdr (4)  command, version    attributes, padded to 4
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

_HEADER = struct.Struct("=IHHII")
_GENERIC = struct.Struct("=BBH")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR = struct.Struct("=i")
HEADER_BYTES = _HEADER.size
REQUEST, ACK = 1, 4
NLMSG_ERROR, NLMSG_DONE = 2, 3
NETLINK_GENERIC = 16
CONTROLLER, GET_FAMILY, FAMILY_ID, FAMILY_NAME = 0x10, 3, 1, 2
NESTED, KIND_MASK = 0x8000, 0x3FFF
RECEIVE_BYTES = 64 << 10
ANSWER_S = 10.0
"""Seconds that the kernel may take for one answer. It answers before the call that asked returns."""
Value = int | bytes


class NetlinkError(OSError):
    """The kernel said something that is no netlink message, or nothing."""


def attribute(kind: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def u64(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=Q", value))


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def nested(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(attributes))


def message(family: int, command: int, sequence: int, attributes: Sequence[bytes]) -> bytes:
    """A request that is to be acknowledged."""
    body = _GENERIC.pack(command, 1, 0) + b"".join(attributes)
    return _HEADER.pack(HEADER_BYTES + len(body), family, REQUEST | ACK, sequence, 0) + body


def attributes(data: bytes) -> dict[int, bytes]:
    """The attributes by kind, the last of each. NetlinkError when lengths are wrong."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        if len(data) - at < _ATTRIBUTE.size:
            raise NetlinkError(errno.EPROTO, "an incomplete attribute")
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size or at + length > len(data):
            raise NetlinkError(errno.EPROTO, f"an attribute of {length} bytes where {len(data) - at} are left")
        found[kind & KIND_MASK] = data[at + _ATTRIBUTE.size : at + length]
        at += length + -length % 4
    return found


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The type, sequence and body of each message. NetlinkError when lengths are wrong."""
    at = 0
    while at < len(data):
        if len(data) - at < HEADER_BYTES:
            raise NetlinkError(errno.EPROTO, "an incomplete message")
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, at)
        if length < HEADER_BYTES or at + length > len(data):
            raise NetlinkError(errno.EPROTO, f"a message of {length} bytes where {len(data) - at} are left")
        yield kind, sequence, data[at + HEADER_BYTES : at + length]
        at += length + -length % 4


class KernelAnswer:
    """The messages that came back for one request, as they are put in: `over` once the kernel has acknowledged it."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self.attributes: Mapping[int, bytes] = {}
        self.over = False

    def take(self, data: bytes) -> None:
        """Take a message. OSError with the kernel's number when it refused; NetlinkError when that is no answer."""
        for kind, sequence, body in messages(data):
            if sequence != self._sequence:
                continue
            if kind == NLMSG_DONE:
                self.over = True
            elif kind == NLMSG_ERROR:
                if len(body) < _ERROR.size:
                    raise NetlinkError(errno.EPROTO, "an incomplete error")
                number = -_ERROR.unpack_from(body)[0]
                if number:
                    raise OSError(number, os.strerror(number) if 0 < number < 4096 else f"error {number}")
                self.over = True
            elif len(body) < _GENERIC.size:
                raise NetlinkError(errno.EPROTO, "an incomplete answer")
            else:
                self.attributes = attributes(body[_GENERIC.size :])


class GenericNetlink:
    """A netlink socket for one or a few requests. OSError when there is none on this machine."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_GENERIC)
        self._socket.settimeout(ANSWER_S)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def ask(self, family: int, command: int, *attributes: bytes) -> Mapping[int, bytes]:
        """Ask the kernel, and return the attributes of the answer. OSError: what the kernel says."""
        self._sequence += 1
        self._socket.send(message(family, command, self._sequence, attributes))
        answered = KernelAnswer(self._sequence)
        while not answered.over:
            answered.take(self._socket.recv(RECEIVE_BYTES))
        return answered.attributes

    def family(self, name: str) -> int:
        """The number of a family. FileNotFoundError when the kernel has none of that name (a module is not loaded)."""
        found = self.ask(CONTROLLER, GET_FAMILY, text(FAMILY_NAME, name))
        number = found.get(FAMILY_ID, b"")
        if len(number) != 2:
            raise NetlinkError(errno.EPROTO, f"the kernel did not say the number of {name}")
        return int(struct.unpack("=H", number)[0])
