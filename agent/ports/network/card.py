"""The network card under an address: which interface has it, and the bytes that it has carried."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from covey.ports.probes import CardNow

DEVICES = Path("/proc/net/dev")
ADDRESSES_6 = Path("/proc/net/if_inet6")
GET_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface."""
NAME_MAX = 15
"""Characters of an interface's name."""


def card_now(address: str) -> CardNow | None:
    """The counters of the interface that has this IP address, in this process's network namespace; None: none has it,
    or its counters cannot be read."""
    name = _interface(address)
    if name is None:
        return None
    try:
        lines = DEVICES.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        found, colon, counts = line.partition(":")
        if colon and found.strip() == name:
            fields = counts.split()
            return CardNow(name, int(fields[0]), int(fields[8]))
    return None


def _interface(address: str) -> str | None:
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    return _interface_6(wanted) if wanted.version == 6 else _interface_4(wanted)


def _interface_6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    try:
        lines = ADDRESSES_6.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    rows = [line.split() for line in lines]
    return next((row[5] for row in rows if len(row) == 6 and bytes.fromhex(row[0]) == wanted.packed), None)


def _interface_4(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), GET_ADDRESS, struct.pack("256s", name[:NAME_MAX].encode()))
            except OSError:
                continue  # it has no IPv4 address
            if answer[20:24] == wanted.packed:
                return name
    return None
