"""One datagram of gossip: always sealed, opened once, and not decoded before it is authenticated.

    0    1         5          9        17     25      29        37                       end-16     end
    | ver | key id | cluster  | sender | boot | salt | counter | body, AES-256-GCM       | tag       |

The header is in clear and bound to the body: header and cluster label are the additional data of the seal. `key id`
names one of at most three keys of the ring: the first seals, all open, so that keys rotate without a gap (add to all,
move to front on all, remove from all). `cluster` is a hash of the label under the key, and `sender` a hash of name and
uuid, so that a listener without the key learns neither names nor label.

One shared key with random nonces would reach the 2^32 messages of NIST SP 800-38D in days on a large rack. So each
sender and boot has a key of its own, HKDF-SHA256 of the shared one, and its nonce is a counter that also gives a replay
window. `salt` is drawn at each start and leads the nonce: a machine whose boot counter was set back (a disk restored
from a copy) then repeats a key, but not a nonce. A host that seals with another key of the ring is answered with that
one, since it may lack the newer.

The body is msgpack `[name, uuid, [message, ...]]`. Each message is decoded by itself, with bounds on everything: one
of a later version is counted and skipped, and does not cost the others.

What this does not give: hosts are not protected from one another. A holder of the key can send as any host.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from covey.core.events import Message
from gossip.membership import messages as membership
from gossip.settings import DATAGRAM_BYTES_MAX
from gossip.spread import messages as spread
from gossip.types import KEY_BYTES, UUID_BYTES, HostName, Sender, Uuid, encoded

VERSION = 1
TAG_BYTES = 16
SALT_BYTES = 4
KEYS_MAX = 3
"""The most keys a ring has, like memberlist's: the one that seals, the one before, the one to come."""
WINDOW = 1024
"""The number of counters behind the newest that are still accepted once."""
SENDERS_MAX = 4096
"""The most senders whose replay window is kept; only authenticated ones are."""

_HEADER = struct.Struct(">B4s4sQQ4sQ")
HEADER_BYTES = _HEADER.size

Reason = Literal[
    "malformed",
    "oversized",
    "unknown_key",
    "other_version",
    "other_cluster",
    "unsealed",
    "replayed",
    "reflected",
]
"""Why a datagram was dropped. `unknown_key`: its key is not in this ring, or it is not sealed at all; `unsealed`: the
seal does not hold; `reflected`: this host sent it."""


class Body(msgspec.Struct, frozen=True, array_like=True):
    host: HostName
    uuid: Uuid
    messages: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=1024)]


class Opened(msgspec.Struct, frozen=True):
    sender: Sender
    messages: tuple[Message, ...]
    unknown: int
    """Number of messages that could not be decoded."""


class Dropped(msgspec.Struct, frozen=True):
    reason: Reason
    version: int = VERSION
    """Version in the first byte of the datagram; one that has another version under a known key is logged."""
    earlier: Sender | None = None
    """Who sealed the datagram, where that was in an earlier boot than the sender's newest: it is late, repeated, or
    from another machine with the same identity."""
    counter: int = 0
    """The datagram's number from `earlier`, that sender and boot; it grows with each datagram."""


_body_decoder = msgspec.msgpack.Decoder(Body)
_message_decoder: msgspec.msgpack.Decoder[membership.AnyMessage | spread.AnyMessage] = msgspec.msgpack.Decoder(
    membership.AnyMessage | spread.AnyMessage
)
_body_encoder = msgspec.msgpack.Encoder()
_MALFORMED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)


def budget(datagram_bytes: int, host: str) -> int:
    """Bytes of messages that fit into a datagram of this host: less header, tag, name, uuid and list header."""
    return datagram_bytes - HEADER_BYTES - TAG_BYTES - (1 + 2 + len(host.encode()) + 2 + UUID_BYTES + 3)


class Keyring:
    """A keyring: up to three keys of 32 bytes; the first one seals. ValueError otherwise."""

    def __init__(self, keys: Sequence[bytes], label: str) -> None:
        if not 1 <= len(keys) <= KEYS_MAX:
            raise ValueError(f"gossip has {len(keys)} keys: expected 1 to {KEYS_MAX}")
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"a gossip key is not {KEY_BYTES} bytes long")
        self.label = label.encode()
        self.primary = keys[0]
        self.by_id = {key_id(key): key for key in reversed(keys)}
        if len(self.by_id) != len(keys):
            raise ValueError("the same gossip key is given twice")
        self.cluster = {name: _cluster(key, self.label) for name, key in self.by_id.items()}


def key_id(key: bytes) -> bytes:
    """Four bytes that name a key without revealing it."""
    return hashlib.blake2b(key, digest_size=4, person=b"covey-key-id").digest()


def sealed_by(datagram: bytes) -> bytes:
    """The name of the key with which a datagram says that it is sealed."""
    return datagram[1:5]


def _cluster(key: bytes, label: bytes) -> bytes:
    return hashlib.blake2b(label, digest_size=4, key=key, person=b"covey-cluster").digest()


def _cipher(key: bytes, sender: int, boot: int) -> AESGCM:
    """The cipher of one sender (which is a hash of its name and uuid) in one boot."""
    info = b"covey gossip 1" + struct.pack(">QQ", sender, boot)
    return AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(key))


class Sealer:
    """Seals this host's datagrams. `salt`: four unpredictable bytes, new at each start."""

    def __init__(self, ring: Keyring, me: Sender, salt: bytes) -> None:
        if len(salt) != SALT_BYTES or len(me.uuid) != UUID_BYTES:
            raise ValueError(f"expected {SALT_BYTES} bytes of salt and {UUID_BYTES} of uuid")
        self._me, self._identity, self._salt, self._counter = me, me.identity, salt, 0
        self.rekey(ring)

    def rekey(self, ring: Keyring) -> None:
        """Seal with the first key of this ring from now on; the counter goes on."""
        self._ring, self.primary = ring, key_id(ring.primary)
        self._ciphers: dict[bytes, AESGCM] = {}

    def seal(self, messages: Sequence[Message], name: bytes = b"") -> bytes:
        """Seal one datagram, with the key of this name if the ring has it. The caller limits its length (`budget`)."""
        if name not in self._ring.by_id:
            name = self.primary
        self._counter += 1
        header = _HEADER.pack(
            VERSION, name, self._ring.cluster[name], self._identity, self._me.boot, self._salt, self._counter
        )
        raw = [msgspec.Raw(encoded(message)) for message in messages]
        body = _body_encoder.encode((self._me.host, self._me.uuid, raw))
        return header + self._cipher(name).encrypt(header[-12:], body, header + self._ring.label)

    def _cipher(self, name: bytes) -> AESGCM:
        if name not in self._ciphers:
            self._ciphers[name] = _cipher(self._ring.by_id[name], self._identity, self._me.boot)
        return self._ciphers[name]


class Window:
    """The counters of one sender and boot that were seen: a bitmap that slides with the newest."""

    __slots__ = ("boot", "newest", "seen")

    def __init__(self, boot: int) -> None:
        self.boot, self.newest, self.seen = boot, 0, 0

    def is_new(self, counter: int) -> bool:
        behind = self.newest - counter
        return behind < 0 or (behind < WINDOW and not self.seen >> behind & 1)

    def add(self, counter: int) -> None:
        ahead = counter - self.newest
        if ahead > 0:
            self.seen = (self.seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self.newest = counter
        else:
            self.seen |= 1 << -ahead


class Opener:
    """Opens datagrams that other hosts sealed."""

    def __init__(self, ring: Keyring, me: int) -> None:
        self._ring, self._me = ring, me
        self._windows: OrderedDict[int, Window] = OrderedDict()
        self._ciphers: OrderedDict[tuple[bytes, int, int], AESGCM] = OrderedDict()

    def rekey(self, ring: Keyring) -> None:
        """Open what is sealed with the keys of this ring, and nothing else, from now on."""
        self._ring = ring
        self._ciphers = OrderedDict((of, cipher) for of, cipher in self._ciphers.items() if of[0] in ring.by_id)

    def remember(self, sender: int, boot: int) -> None:
        """Remember, from before a restart, the sender's boot at that time; datagrams of older boots are replays."""
        window = self._windows.get(sender)
        if window is None or window.boot < boot:
            self._windows[sender] = Window(boot)

    def open(self, datagram: bytes) -> Opened | Dropped:
        """Open a datagram: its messages and their sender, or why it is dropped. It never raises."""
        if len(datagram) > DATAGRAM_BYTES_MAX:
            return Dropped("oversized")
        if len(datagram) < HEADER_BYTES + TAG_BYTES:
            return Dropped("malformed")
        header = datagram[:HEADER_BYTES]
        version, name, cluster, sender, boot, _, counter = _HEADER.unpack(header)
        key = self._ring.by_id.get(name)
        if version != VERSION:
            return Dropped("malformed" if key is None else "other_version", version)
        if key is None:
            return Dropped("unknown_key")
        if cluster != self._ring.cluster[name]:
            return Dropped("other_cluster")
        if sender == self._me:
            return Dropped("reflected")
        is_new = self._is_new(sender, boot, counter)
        if not is_new and boot == self._windows[sender].boot:
            return Dropped("replayed")
        cipher = self._ciphers.get((name, sender, boot)) or _cipher(key, sender, boot)
        try:
            body = cipher.decrypt(header[-12:], datagram[HEADER_BYTES:], header + self._ring.label)
        except InvalidTag:
            return Dropped("unsealed" if is_new else "replayed")
        opened = _decoded(body, sender, boot)
        if not is_new:
            return Dropped("replayed", earlier=opened.sender if isinstance(opened, Opened) else None, counter=counter)
        self._proven(name, sender, boot, counter, cipher)
        return opened

    def _is_new(self, sender: int, boot: int, counter: int) -> bool:
        window = self._windows.get(sender)
        if window is None or boot > window.boot:
            return True
        return boot == window.boot and window.is_new(counter)

    def _proven(self, name: bytes, sender: int, boot: int, counter: int, cipher: AESGCM) -> None:
        window = self._windows.get(sender)
        if window is None or boot > window.boot:
            window = self._windows[sender] = Window(boot)
        window.add(counter)
        self._windows.move_to_end(sender)
        self._ciphers[name, sender, boot] = cipher
        self._ciphers.move_to_end((name, sender, boot))
        for table in (self._windows, self._ciphers):
            if len(table) > SENDERS_MAX:
                table.popitem(last=False)


def _decoded(plain: bytes, sender: int, boot: int) -> Opened | Dropped:
    """The messages of an authenticated body."""
    try:
        body = _body_decoder.decode(plain)
    except _MALFORMED:
        return Dropped("malformed")
    who = Sender(body.host, body.uuid, boot)
    if who.identity != sender:
        return Dropped("malformed")
    messages: list[Message] = []
    for raw in body.messages:
        try:
            messages.append(_message_decoder.decode(raw))
        except _MALFORMED:
            continue
    return Opened(who, tuple(messages), len(body.messages) - len(messages))
