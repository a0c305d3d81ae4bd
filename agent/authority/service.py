"""The authority of this host's rack now, and the TLS of its door: contexts are made anew when keys or names change, and
before the host's certificate is out of date. The host's private key is in memory alone.
"""

import ipaddress
import os
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from agent.authority import certificates
from agent.authority.certificates import CURVE, SERIAL_BYTES, Named, NotBelieved, RackAuthority
from covey.ports.clock import Clock

HOST_GOOD_S = 8 * 86_400.0
"""Seconds for which the certificate of a host is good."""
HOST_RENEWED_S = 86_400.0
"""Seconds after which a host makes itself another one."""
CONTEXTS_MAX = 16
"""The most addresses of a host for which a context is kept."""


class _Made(NamedTuple):
    for_what: tuple[object, ...]
    at_s: float
    context: ssl.SSLContext


class HostAuthority:
    """The authority as this host has it. `keys` returns the keys of gossip, of which the first one seals."""

    def __init__(self, keys: Callable[[], Sequence[bytes]], clock: Clock) -> None:
        self._keys, self._clock = keys, clock
        self._known: dict[bytes, RackAuthority] = {}
        self._made: dict[str, _Made] = {}

    @property
    def trusted(self) -> tuple[RackAuthority, ...]:
        """The authorities of the rack, the one that signs first: more than one while its keys are being rotated."""
        keys = tuple(self._keys())
        self._known = {key: self._known.get(key) or certificates.authority_of(key) for key in keys}
        return tuple(self._known[key] for key in keys)

    @property
    def pem(self) -> str:
        return "".join(each.pem for each in self.trusted)

    def named_by(self, der: bytes) -> Named | NotBelieved:
        """Whom a certificate names now, or why it is not believed."""
        return certificates.named_by(der, self.trusted, self._clock.wall_s())

    def certified(self, key: ec.EllipticCurvePublicKey, named: Named, serial: bytes) -> str:
        """A certificate of this user for the holder of the key, as PEM."""
        signs = self.trusted[0]
        return certificates.pem_of(certificates.user_certificate(signs, key, named, self._clock.wall_s(), serial))

    def context(self, names: Sequence[str], address: str) -> ssl.SSLContext:
        """The server's side of TLS under these names, for connections to this IP address of the host."""
        address, now_s = _plain(address), self._clock.wall_s()
        trusted = self.trusted
        for_what = (tuple(self._known), tuple(names))
        made = self._made.get(address)
        if made is None or made.for_what != for_what or not 0 <= now_s - made.at_s < HOST_RENEWED_S:
            if len(self._made) >= CONTEXTS_MAX:
                self._made.clear()
            made = self._made[address] = _Made(for_what, now_s, _context(trusted, [*names, address], now_s))
        return made.context


def _plain(address: str) -> str:
    """The address without what IPv6 sockets add to it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(inner or ip)


def _context(trusted: Sequence[RackAuthority], names: Sequence[str], now_s: float) -> ssl.SSLContext:
    key = ec.generate_private_key(CURVE)
    serial = os.urandom(SERIAL_BYTES)
    certificate = certificates.host_certificate(trusted[0], key.public_key(), names, now_s, HOST_GOOD_S, serial)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata="".join(each.pem for each in trusted))
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0  # a session that is resumed is not asked for a certificate, which may be out of date
    _load(context, private + certificates.pem_of(certificate).encode())
    return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load key and certificate, which the library reads from a file alone: from one that is on no disk."""
    file = os.memfd_create("covey-host", os.MFD_CLOEXEC)
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
