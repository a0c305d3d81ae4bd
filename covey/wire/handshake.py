"""Authentication on a bulk link: both ends prove that they know a key, and neither ever sends it.

    client                                                  server
      HELLO: what it wants, and a nonce of its own ->
                                                        <-  CHALLENGE: a nonce, and the server's proof
      PROOF: the client's ->
                                                        <-  the protocol's own yes or no

Both get the key over a link that is encrypted and authenticated (CURVE). A proof covers the whole hello and both
nonces, so it is valid on this connection only: who overhears it cannot use it for another. A server that does not know
what the hello names answers with a proof under a random key, so that strangers learn nothing from the answer either.

A connection is a stranger until it has proven the key. `Strangers` limits their number, per address and in all. A new
one takes the place of the oldest, which had more time for its proof, so many silent connections cannot keep a new one
out. Connections that have proven the key do not count.
"""

import hashlib
import hmac
from typing import Generic, NamedTuple, TypeVar

NONCE_BYTES = 16
PROOF_BYTES = 32
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
HANDSHAKE_S = 5.0
"""Seconds that a connection may take until it has proven the key."""
PER_ADDRESS_MAX = 64
"""Most strangers of one address at once: a host whose volumes all open their slabs again makes about so many."""
STRANGERS_MAX = 256
"""Most strangers at once in all."""

Visitor = TypeVar("Visitor")


class Challenge(NamedTuple):
    nonce: bytes
    proof: bytes
    """The server's proof."""


def proof_of_server(key: bytes, hello: bytes, nonce: bytes) -> bytes:
    return _proof(key, b"covey server", hello, nonce)


def proof_of_client(key: bytes, hello: bytes, nonce: bytes) -> bytes:
    return _proof(key, b"covey client", hello, nonce)


def is_proof(found: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one, compared in constant time."""
    return hmac.compare_digest(found, expected)


def is_secret(found: bytes, expected: bytes) -> bool:
    """Whether this is the expected secret, compared in constant time. An empty expected secret means that none is
    known: then the answer is always False."""
    return bool(expected) and hmac.compare_digest(found, expected)


def challenge(key: bytes, hello: bytes, nonce: bytes) -> bytes:
    """The challenge of a server that knows `key`."""
    return nonce + proof_of_server(key, hello, nonce)


def parse_challenge(data: bytes | bytearray) -> Challenge:
    """The parts of a challenge of `CHALLENGE_BYTES` bytes."""
    return Challenge(bytes(data[:NONCE_BYTES]), bytes(data[NONCE_BYTES:]))


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    """The proof under `key` for one side. `hello` has one length in each protocol, so its end is clear. ValueError for
    an empty key: anyone could compute that proof."""
    if not key:
        raise ValueError("a connection without a secret")
    return hashlib.blake2b(hello + nonce, digest_size=PROOF_BYTES, key=key, person=role).digest()


class Strangers(Generic[Visitor]):
    """Connections that have not proven the key, oldest first."""

    def __init__(self, per_address_max: int = PER_ADDRESS_MAX, all_max: int = STRANGERS_MAX) -> None:
        self._per_address_max, self._all_max = per_address_max, all_max
        self._from: dict[Visitor, str] = {}
        self.turned_away = 0
        """Number of connections closed to make room for a newer one."""

    def __len__(self) -> int:
        return len(self._from)

    def come(self, visitor: Visitor, address: str) -> Visitor | None:
        """Add a new connection. Returns the connection to close, if there are too many: the oldest of its address, else
        the oldest of the address with most."""
        same = self._of(address)
        goes: Visitor | None = None
        if len(same) >= self._per_address_max:
            goes = same[0]
        elif len(self._from) >= self._all_max:
            crowd = max(dict.fromkeys(self._from.values()), key=lambda each: len(self._of(each)))
            goes = self._of(crowd)[0]
        self._from[visitor] = address
        if goes is not None:
            del self._from[goes]
            self.turned_away += 1
        return goes

    def go(self, visitor: Visitor) -> None:
        """Remove a connection that has proven the key, or has ended."""
        self._from.pop(visitor, None)

    def _of(self, address: str) -> list[Visitor]:
        return [visitor for visitor, each in self._from.items() if each == address]
