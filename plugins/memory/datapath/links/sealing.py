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

A page is read back alone, whatever request wrote it, so each has a tag of its own. A request is sealed in one call all
the same where the byte path is compiled (`page_cipher.c`); `PythonCipher` does the same page by page.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from plugins.memory.datapath.links.write_buffers import WriteBuffers
from plugins.memory.policy.log_records import Versions
from plugins.memory.policy.settings import SEAL_BYTES

TAG_BYTES, SALT_BYTES, NONCE_BYTES = 16, 12, 12
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


class PageCipher(Protocol):
    """Seals and opens runs of pages under one key, which one salt made."""

    def seal(
        self, number: int, first: int, versions: Versions, pages: memoryview | None, zeros: bytes, sealed: memoryview
    ) -> None:
        """Seal a run of pages from number `first` of the volume on into `sealed`, each under its version, with nonces
        from `number` on. `zeros` is a page of zeros, which stands for every page if `pages` is None."""

    def open(
        self, at: int, first: int, versions: Versions, sealed: memoryview, into: memoryview, wrong: list[int]
    ) -> int:
        """Open pages of a run into `into`, from position `at` on, up to the first that another salt sealed. Returns
        the position of that one, or the length of the run. `wrong` gets the positions of pages that are not what was
        sealed as this page and version; those are zeros in `into`."""


class PythonCipher:
    """A `PageCipher` that calls the library once for each page."""

    def __init__(self, key: bytes, salt: bytes) -> None:
        self._aead, self._salt = AESGCM(key), salt

    def seal(
        self, number: int, first: int, versions: Versions, pages: memoryview | None, zeros: bytes, sealed: memoryview
    ) -> None:
        size = len(zeros)
        tagged, step = size + TAG_BYTES, size + SEAL_BYTES
        encrypt, trailer, salt, start = self._aead.encrypt_into, _TRAILER.pack_into, self._salt, 0
        for at, version in enumerate(versions):
            page = zeros if pages is None else pages[at * size : at * size + size]
            nonce = number.to_bytes(NONCE_BYTES, "big")
            encrypt(nonce, page, _bound(first + at, version), sealed[start : start + tagged])
            trailer(sealed, start + tagged, salt, number)
            number += 1
            start += step

    def open(
        self, at: int, first: int, versions: Versions, sealed: memoryview, into: memoryview, wrong: list[int]
    ) -> int:
        count = len(versions)
        size = len(into) // count
        tagged, step = size + TAG_BYTES, size + SEAL_BYTES
        while at < count:
            start = at * step
            salt, number = _TRAILER.unpack_from(sealed, start + tagged)
            if salt != self._salt:
                break
            target = into[at * size : at * size + size]
            nonce, bound = number.to_bytes(NONCE_BYTES, "big"), _bound(first + at, versions[at])
            try:
                self._aead.decrypt_into(nonce, sealed[start : start + tagged], bound, target)
            except InvalidTag:
                target[:] = bytes(size)
                wrong.append(at)
            at += 1
        return at


def _fastest() -> Callable[[bytes, bytes], PageCipher]:
    try:
        from plugins.memory.datapath.links.page_cipher import PageCipher as CompiledCipher
    except ImportError:  # not compiled, or no libcrypto here: `agent.compiled` says so
        return PythonCipher
    return CompiledCipher


class PageSeal:
    """Seals and opens pages of one volume in one process. `entropy` draws salts, `cipher` makes ciphers of a key and a
    salt."""

    def __init__(
        self,
        key: bytes,
        page_bytes: int,
        entropy: Callable[[int], bytes],
        cipher: Callable[[bytes, bytes], PageCipher] | None = None,
    ) -> None:
        self.page_bytes, self.sealed_bytes = page_bytes, page_bytes + SEAL_BYTES
        self.buffers = WriteBuffers()
        self.refused = 0
        """Count of pages that were not what had been sealed."""
        self._key, self._entropy, self._made = key, entropy, cipher or _fastest()
        self._keys: dict[bytes, PageCipher] = {}
        self._zeros = bytes(page_bytes)
        self._new_salt()

    def _new_salt(self) -> None:
        self._salt, self._number = self._entropy(SALT_BYTES), 0
        self._cipher = self._cipher_of(self._salt)

    def _cipher_of(self, salt: bytes) -> PageCipher:
        found = self._keys.get(salt)
        if found is None:
            if len(self._keys) >= KEYS_KEPT:
                del self._keys[next(iter(self._keys))]
            found = self._made(hmac.digest(self._key, b"pages of a volume" + salt, hashlib.sha256), salt)
            self._keys[salt] = found
        return found

    def seal(self, first: int, versions: Versions, pages: memoryview | None) -> memoryview:
        """Seal a run of pages from number `first` of the volume on, each under its version; None: zeros. The memory
        comes from `buffers`."""
        count = len(versions)
        sealed = self.buffers.take(count * self.sealed_bytes)
        if self._number + count > NUMBERS_MAX:
            self._new_salt()
        number, self._number = self._number, self._number + count
        self._cipher.seal(number, first, versions, pages, self._zeros, sealed)
        return sealed

    def open(self, first: int, versions: Versions, sealed: memoryview, into: memoryview) -> list[int]:
        """Open pages into `into`; returns the positions in this run of pages that are not what was sealed as this page
        and version. Those are zeros in `into`."""
        count, wrong = len(versions), list[int]()
        at = self._cipher.open(0, first, versions, sealed, into, wrong)  # most are of this process
        while at < count:
            end = (at + 1) * self.sealed_bytes
            salt = bytes(sealed[end - _TRAILER.size : end - _TRAILER.size + SALT_BYTES])
            at = self._cipher_of(salt).open(at, first, versions, sealed, into, wrong)
        self.refused += len(wrong)
        return wrong
