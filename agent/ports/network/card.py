"""The network card under an address: which interface has it, and the bytes that it has carried."""

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from covey.ports.probes import CardNow

DEVICES = Path("/proc/net/dev")
ADDRESSES_6 = Path("/proc/net/if_inet6")
LIST_ADDRESSES = 0x8912
"""SIOCGIFCONF: each IPv4 address, with its label: an interface's name, and for some of them a colon and more."""
ENTRY = struct.Struct("16s4x4s16x")
"""`struct ifreq` on 64-bit Linux: the label, and of its socket address the IPv4 address."""
MORE = 16
"""Entries of room for addresses that come between asking for their number and for themselves."""
LOOPBACK = "lo"


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
    if wanted.is_loopback:
        return LOOPBACK  # each of them, whether it names it or not
    try:
        addresses = _addresses_6() if wanted.version == 6 else _addresses_4()
    except OSError:
        return None
    # an address that others reach over any card is often kept at the loopback too: its counters are no card's
    return next((name for name, packed in addresses if packed == wanted.packed and name != LOOPBACK), None)


def _addresses_6() -> list[tuple[str, bytes]]:
    """Each IPv6 address, after its interface's name."""
    rows = [line.split() for line in ADDRESSES_6.read_text(encoding="ascii", errors="replace").splitlines()]
    return [(row[5], bytes.fromhex(row[0])) for row in rows if len(row) == 6]


def _addresses_4() -> list[tuple[str, bytes]]:
    """Each IPv4 address, after its interface's name: one has several where jobs, services or routes have their own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        length, _ = struct.unpack("iP", fcntl.ioctl(asked.fileno(), LIST_ADDRESSES, struct.pack("iP", 0, 0)))
        room = array.array("B", bytes(length + MORE * ENTRY.size))
        answer = fcntl.ioctl(asked.fileno(), LIST_ADDRESSES, struct.pack("iP", len(room), room.buffer_info()[0]))
    entries = ENTRY.iter_unpack(room[: struct.unpack("iP", answer)[0]])
    return [(label.split(b"\0")[0].decode(errors="replace").partition(":")[0], address) for label, address in entries]
