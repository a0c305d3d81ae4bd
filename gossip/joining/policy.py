"""The exchange of a new host and a member: each proves to the other that it knows one secret, and neither says it.

    new host   public key x, mac(secret, ask)                          -> it knows the secret of this id
    member     public key y, AES-GCM(K, what is given),                -> so does the member, and only it can read it
               K = HKDF(x and y, secret; rack, ask, y)

The secret has 160 random bits, so that trying them all is out of reach, and no exchange for passwords is needed. The
keys are new each time (X25519): who learns a token later cannot read what was recorded. An ask that is repeated by
somebody else gets what only the new host can open. What a token is for is in its secret: a member of another rack does
not know it.

A host that has the key of gossip needs no token: its secret is a hash of the key, and is good at any time.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from covey.core.ids import HostId
from gossip.joining.messages import (
    BY_KEY,
    MAC_BYTES,
    SECRET_BYTES,
    VOTERS_MAX,
    Ask,
    JoinRefusal,
    JoinToken,
    RackGiven,
    RackGiving,
    decode_given,
    encode_given,
    fingerprint,
    giving_header,
    of,
    pack_ask,
    read_answer,
)

TOKEN_S = 3600.0
"""Seconds for which a token is good (chosen: long enough to type it on a few hosts)."""
REPLIES_PER_S = 20.0
"""Replies of a member in a second at most, beside the one that each token is good for: whoever floods a member cannot
have it flood others."""
_NONCE = bytes(12)
"""Each key seals one message."""


def by_key(key: bytes) -> JoinToken:
    """The token of a host that has the key of gossip."""
    secret = hashlib.blake2b(b"join", digest_size=SECRET_BYTES, key=key, person=b"covey-join-key").digest()
    return JoinToken(BY_KEY, fingerprint(key), secret)


def mac(secret: bytes, signed: bytes) -> bytes:
    return hashlib.blake2b(signed, digest_size=MAC_BYTES, key=secret, person=b"covey-join-ask").digest()


def proves(ask: Ask, token: JoinToken) -> bool:
    """Whether whoever sent the ask knows the token's secret."""
    return hmac.compare_digest(ask.mac, mac(token.secret, ask.signed))


def voters_to_name(voters: Sequence[HostId], leader: HostId | None) -> tuple[HostId, ...]:
    """The voters for the agent.toml of a new host: it follows any leader whose log has one of them, and the file takes
    one, three or five. Of an even number the leader is kept."""
    first = sorted(voters, key=lambda host: (host != leader, host))[:VOTERS_MAX]
    return tuple(sorted(first[: len(first) - (len(first) + 1) % 2]))


def _session(token: JoinToken, private: X25519PrivateKey, theirs: bytes, ask: bytes, public: bytes) -> AESGCM | None:
    """The cipher of one exchange; None when the other side's public key is none."""
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        return None
    info = b"covey join 1" + token.rack
    salt = hashlib.sha256(ask + public).digest()
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(shared + token.secret))


def give(token: JoinToken, ask: Ask, datagram: bytes, given: RackGiven, private: bytes) -> bytes | None:
    """The giving for an ask that proves the token; None when its public key is none. `private`: 32 random bytes."""
    own = X25519PrivateKey.from_private_bytes(private)
    public = own.public_key().public_bytes_raw()
    cipher = _session(token, own, ask.public, datagram, public)
    if cipher is None:
        return None
    header = giving_header(datagram, public)
    return header + cipher.encrypt(_NONCE, encode_given(given), header)


class JoinAsking:
    """The new host's side of one exchange. `private`: 32 random bytes."""

    def __init__(self, token: JoinToken, private: bytes) -> None:
        self._token = token
        self._private = X25519PrivateKey.from_private_bytes(private)
        public = self._private.public_key().public_bytes_raw()
        signed = pack_ask(token.id, public, bytes(MAC_BYTES))[:-MAC_BYTES]
        self.datagram = signed + mac(token.secret, signed)
        """The ask, which may be sent several times."""

    def answer(self, datagram: bytes) -> RackGiven | JoinRefusal | None:
        """What a member answers; None for a datagram that is no answer to this ask, or that no holder of the token
        sealed."""
        found = read_answer(datagram)
        if found is None or found.of != of(self.datagram):
            return None
        return self._opened(found) if isinstance(found, RackGiving) else found

    def _opened(self, giving: RackGiving) -> RackGiven | None:
        cipher = _session(self._token, self._private, giving.public, self.datagram, giving.public)
        if cipher is None:
            return None
        try:
            plain = cipher.decrypt(_NONCE, giving.sealed, giving.header)
        except InvalidTag:
            return None
        given = decode_given(plain)
        return given if given is not None and _is_of(self._token, given.keys) else None


def _is_of(token: JoinToken, keys: Iterable[bytes]) -> bool:
    return any(fingerprint(key) == token.rack for key in keys)
