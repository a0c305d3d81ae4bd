"""Sends pages over one unix socket of the loop (`covey.wire.page_pipe`)."""

import asyncio
import os

from covey.wire.page_pipe import PagePipe


class PageLender:
    """The way of pages into a socket whose transport holds nothing back."""

    def __init__(self, descriptor: int) -> None:
        """Lend pages to this socket. OSError where that cannot be."""
        self._pipe = PagePipe()
        try:
            self._socket = os.dup(descriptor)
        except OSError:
            self._pipe.close()
            raise
        self._waiting: asyncio.Future[None] | None = None
        self._sending = self._over = False

    async def send(self, pages: memoryview) -> None:
        """Send pages, one call at a time. OSError: some of them may be gone, and the connection is of no more use."""
        self._sending = True
        try:
            while pages.nbytes:
                count = self._pipe.fill(pages)
                pages = pages[count:]
                while count:
                    if self._over:
                        raise ConnectionAbortedError("closed here")
                    try:
                        count -= self._pipe.drain(self._socket, count, waits=False)
                    except BlockingIOError:
                        await self._writable()
        finally:
            self._sending = False
            if self._over:
                self._release()

    def close(self) -> None:
        """End the lender, and a `send` under way. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._sending:
            self._wake()
        else:
            self._release()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        loop.add_writer(self._socket, self._wake)
        try:
            await self._waiting
        finally:
            loop.remove_writer(self._socket)
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _release(self) -> None:
        self._pipe.close()
        os.close(self._socket)
