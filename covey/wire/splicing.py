"""Streams that send bytes as the pages in which they lie (`covey.wire.page_pipe`), instead of a copy."""

from typing import Protocol, runtime_checkable

LEAST_BYTES = 64 << 10
"""Below, a copy costs less."""


@runtime_checkable
class PageStream(Protocol):
    """A `covey.ports.ByteStream` that can do so."""

    async def lend(self, head: bytes, pages: memoryview) -> None:
        """As `write`, by who alone writes; but `pages` are to stay as they are until the peer has read them."""
