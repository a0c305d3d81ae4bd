"""Certificates of a rack: how they are made, and whom one is believed to name. All pure: time and serials are
arguments.

What a certificate is for stands in it: a user's is no host's, and a host's no user's.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from plugins.scheduler.messages.spec import USER_PATTERN

CSR_CHARACTERS_MAX = 4096
"""The longest certificate request, in characters of PEM; one for a key on P-256 has about 400."""
CERTIFICATE_BYTES_MAX = 4096
"""The longest certificate of a user that is looked at, in bytes."""
NAME_CHARACTERS_MAX = 64
"""The longest name that a certificate can have (X.520)."""
UID_MAX = (1 << 32) - 2
SKEW_S = 600.0
"""Seconds by which the clock of another host may be behind the one that signs (chosen; `agentctl doctor` says of more
than 2 s)."""
SERIAL_BYTES = 16
SINCE, UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
"""How long an authority is good: as long as the key that it is made from."""
CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_SCALAR_BYTES = 48
"""16 more than the order has, so that no private key is more likely than another (RFC 9380, section 5)."""
_UID = re.compile(r"0|[1-9][0-9]{0,9}")
_NAME = re.compile(USER_PATTERN)
_USAGE = {"content_commitment": False, "key_encipherment": False, "data_encipherment": False, "key_agreement": False,
          "encipher_only": False, "decipher_only": False}  # fmt: skip
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension,
               x509.ExtensionNotFound, x509.UnsupportedGeneralNameType)  # fmt: skip
"""What the library raises for bytes that are no certificate, or no request."""


class Named(NamedTuple):
    """Whom a certificate names."""

    user: str
    uid: int
    """The user's number on the host where the certificate was made."""
    until_s: float
    """The wall clock's second at which the certificate is out of date."""


class NotBelieved(NamedTuple):
    """Why a certificate is not believed. `reason` is a label of `covey_http_refused_total`."""

    reason: str
    why: str


class RackAuthority(NamedTuple):
    """One certificate authority."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def pem(self) -> str:
        return pem_of(self.certificate)


def authority_of(gossip_key: bytes) -> RackAuthority:
    """The authority that belongs to this key of gossip: on every host the same name and key."""
    seed = HKDF(algorithm=SHA256(), length=_SCALAR_BYTES, salt=b"covey authority 1", info=b"").derive(gossip_key)
    key = ec.derive_private_key(1 + int.from_bytes(seed, "big") % (_ORDER - 1), CURVE)
    ski = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Covey rack {ski.digest[:8].hex()}")])
    builder = _builder(name, name, key.public_key(), SINCE, UNTIL, int.from_bytes(ski.digest[:8], "big") | 1)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=False, **_USAGE)
    builder = builder.add_extension(usage, critical=True).add_extension(ski, critical=False)
    return RackAuthority(key, builder.sign(key, SHA256()))


# ---- certificates ----------------------------------------------------------------------------------------------------


def requested_key(csr: str) -> ec.EllipticCurvePublicKey | None:
    """The public key of a certificate request whose sender has the private one; None: it is no such request. Nothing
    else in it counts, whatever name it says."""
    if not 0 < len(csr) <= CSR_CHARACTERS_MAX or not csr.isascii():
        return None
    try:
        request = x509.load_pem_x509_csr(csr.encode())
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != CURVE.name:
            return None
        return key if request.is_signature_valid else None
    except _UNREADABLE:
        return None


def may_be_named(user: str, uid: int) -> bool:
    """Whether a certificate can name this user."""
    return len(user) <= NAME_CHARACTERS_MAX and _NAME.fullmatch(user) is not None and 0 < uid <= UID_MAX


def user_certificate(
    authority: RackAuthority, key: ec.EllipticCurvePublicKey, named: Named, now_s: float, serial: bytes
) -> x509.Certificate:
    """The certificate of a user (`may_be_named`) for the holder of a key. `serial`: `SERIAL_BYTES` random bytes."""
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, named.user),
            x509.NameAttribute(NameOID.USER_ID, str(named.uid)),
        ]
    )
    return _signed(authority, key, subject, _at(now_s - SKEW_S), _at(named.until_s), serial, "user", ())


def host_certificate(
    authority: RackAuthority, key: ec.EllipticCurvePublicKey, names: Iterable[str], now_s: float, good_s: float,
    serial: bytes,
) -> x509.Certificate:  # fmt: skip
    """The certificate of a host under these DNS names and IP addresses; the first is its own name."""
    names = list(dict.fromkeys(names))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:NAME_CHARACTERS_MAX])])
    return _signed(
        authority, key, subject, _at(now_s - SKEW_S), _at(now_s + good_s), serial, "host", [_known_as(n) for n in names]
    )


def _signed(
    authority: RackAuthority, key: ec.EllipticCurvePublicKey, subject: x509.Name, since: datetime, until: datetime,
    serial: bytes, whose: str, names: Sequence[x509.GeneralName],
) -> x509.Certificate:  # fmt: skip
    number = int.from_bytes(serial[:SERIAL_BYTES], "big") | 1
    builder = _builder(subject, authority.certificate.subject, key, since, until, number)
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if whose == "user" else ExtendedKeyUsageOID.SERVER_AUTH
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **_USAGE)
    of = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(usage, critical=True).add_extension(of, critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority.key, SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, since: datetime, until: datetime, number: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.not_valid_before(since).not_valid_after(until).serial_number(number)


def _known_as(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _at(wall_s: float) -> datetime:
    return datetime.fromtimestamp(int(wall_s), UTC)


def pem_of(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


# ---- whom a certificate names ----------------------------------------------------------------------------------------


def named_by(der: bytes, trusted: Sequence[RackAuthority], now_s: float) -> Named | NotBelieved:
    """Whom this certificate names, or why it is not believed. `trusted`: the authorities of the rack now."""
    if not 0 < len(der) <= CERTIFICATE_BYTES_MAX:
        return NotBelieved("certificate", "it is no certificate of a user")
    try:
        found = x509.load_der_x509_certificate(der)
        return _named(found, trusted, now_s)
    except _UNREADABLE:
        return NotBelieved("certificate", "it is no certificate of a user")


def _named(found: x509.Certificate, trusted: Sequence[RackAuthority], now_s: float) -> Named | NotBelieved:
    if not any(_is_signed_by(found, authority) for authority in trusted):
        return NotBelieved("certificate_of_others", "another rack's authority signed it, or one before a rotation")
    since_s, until_s = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    if not since_s <= now_s < until_s:
        when = f"since {_words(until_s)}" if now_s >= until_s else f"until {_words(since_s)}"
        return NotBelieved("certificate_out_of_date", f"it is not good {when}")
    purpose = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    if list(purpose) != [ExtendedKeyUsageOID.CLIENT_AUTH]:
        return NotBelieved("certificate", "it is no certificate of a user")
    users = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    uids = found.subject.get_attributes_for_oid(NameOID.USER_ID)
    user, uid = (str(each[0].value) if len(each) == 1 else "" for each in (users, uids))
    if not _UID.fullmatch(uid) or not may_be_named(user, int(uid)):
        return NotBelieved("certificate", "it names no user")
    return Named(user, int(uid), until_s)


def _is_signed_by(found: x509.Certificate, authority: RackAuthority) -> bool:
    try:
        found.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _words(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M} UTC"
