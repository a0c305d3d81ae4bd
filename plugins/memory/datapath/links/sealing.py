"""Pages are sealed before they leave their host: a lender, and anyone on the network, learns nothing of them but which
were written when, and no page is taken back that is not the one asked for (Memtrade seals, too).

    sealed page   [ciphertext, as long as the page][tag, 16][salt, 12][number, 4]

AES-256-GCM. Page number and version are authenticated with the content, so a lender can give back neither another
page nor another version under the name of the one wanted. An older version is noticed by its version.

No nonce is used twice under one key: each process of a volume draws a salt, its pages are sealed under a key that is
derived from the volume's key and that salt, and the nonce counts them. Nothing of that must survive a crash, a restart
or a disk put back from a copy: the next process draws another salt. Versions, which a disk put back could repeat, are
not what the nonce is made of.

The volume's key is drawn on its host, lies in the volume's file beside its pages, and never leaves.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from plugins.memory.datapath.links.write_buffers import WriteBuffers
from plugins.memory.policy.settings import SEAL_BYTES

TAG_BYTES, SALT_BYTES = 16, 12
_TRAILER = struct.Struct(f">{SALT_BYTES}sI")
assert TAG_BYTES + _TRAILER.size == SEAL_BYTES
_BOUND = struct.Struct(">QQ")
NUMBERS_MAX = 1 << 32
"""Most pages under one salt; then another is drawn."""
KEYS_KEPT = 64
"""Derived keys that are remembered, mostly of earlier processes; a lender that makes salts up costs a derivation."""


def _bound(page: int, version: int) -> bytes:
    """Data that is authenticated with the content."""
    return _BOUND.pack(page, version)


class PageSeal:
    """Seals and opens pages of one volume in one process. `entropy` draws salts."""

    def __init__(self, key: bytes, page_bytes: int, entropy: Callable[[int], bytes]) -> None:
        self.page_bytes, self.sealed_bytes = page_bytes, page_bytes + SEAL_BYTES
        self.buffers = WriteBuffers()
        self.refused = 0
        """Count of pages that were not what had been sealed."""
        self._key, self._entropy = key, entropy
        self._keys: dict[bytes, AESGCM] = {}
        self._zeros = bytes(page_bytes)
        self._new_salt()

    def _new_salt(self) -> None:
        self._salt, self._number = self._entropy(SALT_BYTES), 0
        self._cipher = self._cipher_of(self._salt)

    def _cipher_of(self, salt: bytes) -> AESGCM:
        found = self._keys.get(salt)
        if found is None:
            if len(self._keys) >= KEYS_KEPT:
                del self._keys[next(iter(self._keys))]
            found = AESGCM(hmac.digest(self._key, b"pages of a volume" + salt, hashlib.sha256))
            self._keys[salt] = found
        return found

    def seal(self, first: int, versions: Sequence[int], pages: memoryview | None) -> memoryview:
        """Seal a run of pages from number `first` of the volume on, each under its version; None: zeros. The memory
        comes from `buffers`."""
        size, sealed_size = self.page_bytes, self.sealed_bytes
        sealed = self.buffers.take(len(versions) * sealed_size)
        tagged = size + TAG_BYTES
        for at, version in enumerate(versions):
            if self._number >= NUMBERS_MAX:
                self._new_salt()
            number, self._number = self._number, self._number + 1
            page = self._zeros if pages is None else pages[at * size : at * size + size]
            start = at * sealed_size
            self._cipher.encrypt_into(
                number.to_bytes(12, "big"), page, _bound(first + at, version), sealed[start : start + tagged]
            )
            _TRAILER.pack_into(sealed, start + tagged, self._salt, number)
        return sealed

    def open(self, first: int, versions: Sequence[int], sealed: memoryview, into: memoryview) -> list[int]:
        """Open pages into `into`; returns the positions in this run of pages that are not what was sealed as this page
        and version. Those are zeros in `into`."""
        size, sealed_size = self.page_bytes, self.sealed_bytes
        tagged = size + TAG_BYTES
        wrong: list[int] = []
        for at, version in enumerate(versions):
            start = at * sealed_size
            salt, number = _TRAILER.unpack_from(sealed, start + tagged)
            target = into[at * size : at * size + size]
            try:
                self._cipher_of(salt).decrypt_into(
                    number.to_bytes(12, "big"), sealed[start : start + tagged], _bound(first + at, version), target
                )
            except InvalidTag:
                target[:] = self._zeros
                wrong.append(at)
        self.refused += len(wrong)
        return wrong
