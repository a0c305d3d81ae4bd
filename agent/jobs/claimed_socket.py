"""The control socket of a supervisor: whoever listens there is the one supervisor of its epoch."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from covey.ports import Address, ByteStream, Env, Listener

SOCKET_CHECK_S = 2.0


class ClaimedSocket:
    """`serve`: one connection, to its end."""

    def __init__(self, env: Env, address: Address, serve: Callable[[ByteStream], Coroutine[Any, Any, None]]) -> None:
        self._env, self._address, self._serve = env, address, serve
        self._over = False
        self._listener: Listener

    @asynccontextmanager
    async def claimed(self) -> AsyncIterator[bool]:
        """Whether nobody had it before; it is held until the context ends."""
        try:
            self._listener = await self._env.bytes.listen(self._address, self._serve)
        except OSError as error:
            self._env.log.info("another supervisor is at work", why=str(error))
            yield False
            return
        self._env.spawn("socket", self._keep())
        try:
            yield True
        finally:
            self._over = True
            await self._listener.close()

    async def _keep(self) -> None:
        """Somebody may remove the directory of sockets while the agent is away (systemd does when a service stops)."""
        while not self._over:
            await asyncio.sleep(SOCKET_CHECK_S)
            try:
                (await self._env.bytes.connect(self._address)).close()
                continue
            except ConnectionError:
                if self._over:
                    return
            try:
                again = await self._env.bytes.listen(self._address, self._serve)
            except OSError as error:
                self._env.log.warning("no control socket", why=str(error))
                continue
            lost, self._listener = self._listener, again
            await lost.close()
