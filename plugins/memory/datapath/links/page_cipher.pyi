"""AES-256-GCM over runs of pages (`page_cipher.c`): there where the byte path is compiled (`agent.compiled`)."""

from typing_extensions import Buffer

class PageCipher:
    def __new__(cls, key: bytes, salt: bytes) -> PageCipher: ...
    def seal(
        self, number: int, first: int, versions: Buffer, pages: Buffer | None, zeros: bytes, sealed: memoryview
    ) -> None: ...
    def open(
        self, at: int, first: int, versions: Buffer, sealed: memoryview, into: memoryview, wrong: list[int]
    ) -> int: ...
