"""Streams that can send bytes as the pages that hold them (`covey.wire.page_pipe`), without a copy."""

from typing import Protocol, runtime_checkable

LEAST_BYTES = 64 << 10
"""Bytes below which a copy costs less."""


@runtime_checkable
class PageStream(Protocol):
    """A `covey.ports.streams.ByteStream` that can send pages without a copy."""

    async def lend(self, head: bytes, pages: memoryview) -> None:
        """Write, as the stream's only writer; `pages` must not change until the peer has read them."""
