"""Two datagrams of a new host and a member, on the socket of gossip, and the text of a token.

    0x4A  ask      | kind | version | token id | new host's public key | mac |
    0x4B  giving   | kind | version | of | member's public key | RackGiven, AES-256-GCM | tag |
    0x4C  refusal  | kind | version | of | reason |

`of` is a hash of the ask that is answered. No kind is a version of gossip, so a datagram is one or the other by its
first byte; agents that do not know these kinds drop them as malformed.
"""

import base64
import binascii
import hashlib
import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gossip.types import KEY_BYTES, HostName, PeerAddress

ASK, GIVING, REFUSAL = 0x4A, 0x4B, 0x4C
VERSION = 1
ID_BYTES, RACK_BYTES, SECRET_BYTES = 5, 5, 20
PRIVATE_BYTES, PUBLIC_BYTES, MAC_BYTES, OF_BYTES, TAG_BYTES = 32, 32, 32, 8, 16
BY_KEY = bytes(ID_BYTES)
"""The id in an ask of a host that has the key of the rack, and no token."""
GIVING_BYTES_MAX = 1232
"""The longest giving, bytes (`gossip.settings.DATAGRAM_BYTES`)."""
VOTERS_MAX, SEEDS_MAX = 5, 4
"""The most voters and seeds that are told: with the longest names and addresses they fit into one giving."""
PREFIX = "covey-"

Reason = Literal["wrong", "unknown", "used", "expired", "version"]
REASONS: tuple[Reason, ...] = ("wrong", "unknown", "used", "expired", "version")
"""Why an ask is refused; in a refusal the reason is its place here. `wrong`: the secret does not match the id;
`unknown`: the agent made no such token, or has restarted since."""

_ASK = struct.Struct(f">BB{ID_BYTES}s{PUBLIC_BYTES}s{MAC_BYTES}s")
_GIVING = struct.Struct(f">BB{OF_BYTES}s{PUBLIC_BYTES}s")
_REFUSAL = struct.Struct(f">BB{OF_BYTES}sB")
ASK_BYTES = _ASK.size
GIVING_HEADER_BYTES = _GIVING.size


class JoinToken(msgspec.Struct, frozen=True):
    """What lets one host join one rack."""

    id: bytes
    """It names the token to the agent that made it."""
    rack: bytes
    """The fingerprint of the key that seals gossip: the token is of that rack alone."""
    secret: bytes

    @property
    def text(self) -> str:
        """The token as people copy it."""
        return PREFIX + base64.b32encode(self.id + self.rack + self.secret).decode().lower()


TOKEN_CHARACTERS = len(PREFIX) + 48


class RackGiven(msgspec.Struct, frozen=True, array_like=True):
    """What a new host is given."""

    host: HostName
    """The member that gives it."""
    keys: Annotated[tuple[Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)], ...], Meta(max_length=3)]
    """The keys of gossip, of which the first one seals."""
    cluster: Annotated[str, Meta(max_length=64)]
    voters: Annotated[tuple[HostName, ...], Meta(min_length=1, max_length=VOTERS_MAX)]
    """Hosts that vote: an odd number, as `[leader] voters` takes it."""
    seeds: Annotated[tuple[PeerAddress, ...], Meta(max_length=SEEDS_MAX)]


class Ask(msgspec.Struct, frozen=True):
    token: bytes
    """The id of a token, or `BY_KEY`."""
    public: bytes
    mac: bytes
    signed: bytes
    """What the mac is of."""
    version: int = VERSION


class RackGiving(msgspec.Struct, frozen=True):
    of: bytes
    public: bytes
    header: bytes
    sealed: bytes


class JoinRefusal(msgspec.Struct, frozen=True):
    of: bytes
    reason: Reason


_given_decoder = msgspec.msgpack.Decoder(RackGiven)
_MALFORMED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)


def parsed(text: str) -> JoinToken | None:
    """The token of a text; None when it is none."""
    text = text.strip().lower()
    if len(text) != TOKEN_CHARACTERS or not text.startswith(PREFIX):
        return None
    try:
        data = base64.b32decode(text.removeprefix(PREFIX).upper())
    except (binascii.Error, ValueError):
        return None
    token = JoinToken(data[:ID_BYTES], data[ID_BYTES : ID_BYTES + RACK_BYTES], data[ID_BYTES + RACK_BYTES :])
    return None if token.id == BY_KEY else token


def fingerprint(key: bytes) -> bytes:
    """Some bytes that name a key of gossip without revealing it."""
    return hashlib.blake2b(key, digest_size=RACK_BYTES, person=b"covey-rack").digest()


def of(ask: bytes) -> bytes:
    """What an answer says of the ask that it answers."""
    return hashlib.blake2b(ask, digest_size=OF_BYTES, person=b"covey-join-of").digest()


def is_ask(datagram: bytes) -> bool:
    return datagram[:1] == bytes((ASK,))


def pack_ask(token: bytes, public: bytes, mac: bytes) -> bytes:
    return _ASK.pack(ASK, VERSION, token, public, mac)


def read_ask(datagram: bytes) -> Ask | None:
    """An ask; None when the datagram is none. One of another version has its length, and is refused as such."""
    if len(datagram) != ASK_BYTES:
        return None
    kind, version, token, public, mac = _ASK.unpack(datagram)
    return Ask(token, public, mac, datagram[:-MAC_BYTES], version) if kind == ASK else None


def giving_header(ask: bytes, public: bytes) -> bytes:
    return _GIVING.pack(GIVING, VERSION, of(ask), public)


def pack_refusal(ask: bytes, reason: Reason) -> bytes:
    return _REFUSAL.pack(REFUSAL, VERSION, of(ask), REASONS.index(reason))


def read_answer(datagram: bytes) -> RackGiving | JoinRefusal | None:
    """The answer of a member; None when the datagram is none."""
    if datagram[:1] == bytes((REFUSAL,)) and len(datagram) == _REFUSAL.size:
        _, version, ask, reason = _REFUSAL.unpack(datagram)
        return JoinRefusal(ask, REASONS[reason]) if version == VERSION and reason < len(REASONS) else None
    if datagram[:1] != bytes((GIVING,)) or not GIVING_HEADER_BYTES + TAG_BYTES < len(datagram) <= GIVING_BYTES_MAX:
        return None
    header = datagram[:GIVING_HEADER_BYTES]
    _, version, ask, public = _GIVING.unpack(header)
    return RackGiving(ask, public, header, datagram[GIVING_HEADER_BYTES:]) if version == VERSION else None


def encode_given(given: RackGiven) -> bytes:
    return msgspec.msgpack.encode(given)


def decode_given(plain: bytes) -> RackGiven | None:
    """What was given; None when it cannot be read."""
    try:
        found = _given_decoder.decode(plain)
    except _MALFORMED:
        return None
    return found if found.keys and len(found.voters) % 2 else None
