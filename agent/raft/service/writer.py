"""The only writer of a log: requests in order, those that gathered meanwhile as one write.

A disk without room is waited for: nothing counts as written before it is, so this host acknowledges nothing, gives no
vote and, after `machine.disk_pace.SLOW_S`, leads no longer; its part in the log continues by itself once there is room.
Any other failure of the disk ends that part (`failed`): what is on the disk then is known after a restart.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from agent.raft.disk import NO_ROOM, Store, write_length
from agent.raft.machine.types import Persist, SaveSnapshot
from covey.ports.env import Env

RETRY_S = 0.5
"""Seconds to pause before a write that the full disk refused is tried again."""


class LogWriter:
    """Writes a log. `written(number)`: everything up to this number is durable. `failed`: the disk did something that
    no wait mends. `told`: called when `no_room` begins and when it ends."""

    def __init__(
        self,
        env: Env,
        store: Store,
        counters: Counter[str],
        written: Callable[[int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._env, self._store, self._counters = env, store, counters
        self._written, self._failed = written, failed
        self._requests: deque[Persist | SaveSnapshot] = deque()
        self._work, self._turned = asyncio.Event(), asyncio.Event()
        self._over = False
        self._error: BaseException | None = None
        self.no_room = ""
        """Why the disk takes nothing now; empty when it does."""
        self.told: Callable[[], None] = lambda: None

    def ask(self, request: Persist | SaveSnapshot) -> None:
        self._requests.append(request)
        self._work.set()

    def end(self, error: BaseException | None = None) -> None:
        """Write nothing any more. `error`: why not; the first one fails `run`."""
        self._over, self._error = True, self._error or error
        self._work.set()
        self._turned.set()

    async def turned(self) -> None:
        """Wait until something was written, the disk refused something, or all is over."""
        if not self._over:
            self._turned.clear()
            await self._turned.wait()

    async def idle(self) -> None:
        """Wait until all that was asked for is written, or will not be."""
        while self._requests and not self._over and not self.no_room:
            await self.turned()

    async def run(self) -> None:
        """Write until `end`. OSError when the disk fails, and the error that `end` was given."""
        try:
            while not self._over:
                await self._work.wait()
                self._work.clear()
                while self._requests and not self._over:
                    await self._try()
        except OSError as error:
            self._failed(error)
            raise
        if self._error is not None:
            raise self._error

    async def _try(self) -> None:
        try:
            number = await self._write_some()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            await self._wait_for_room(error)
            return
        if self.no_room:
            self._env.log.info("the log is written again", waited_for=self.no_room)
            self.no_room = ""
            self.told()
        self._written(number)
        self._turned.set()

    async def _wait_for_room(self, error: OSError) -> None:
        if not self.no_room:
            self.no_room = error.strerror or str(error)
            self._counters["waits_for_room"] += 1
            self._env.log.error("the log waits for room", why=self.no_room, next="free some space on this host's disk")
            self.told()
        self._turned.set()
        await asyncio.sleep(RETRY_S)

    async def _write_some(self) -> int:
        """Write some requests, and return the number up to which everything is durable now."""
        first = self._requests[0]
        if isinstance(first, SaveSnapshot):
            await self._store.checkpoint(first)
            self._requests.popleft()
            self._counters["snapshots_saved"] += 1
            return first.number
        ready: list[Persist] = []
        for request in self._requests:
            if not isinstance(request, Persist):
                break
            ready.append(request)
        ready = ready[: write_length(ready)]
        await self._store.append(ready)
        for _ in ready:
            self._requests.popleft()
        self._counters["writes"] += 1
        return ready[-1].number
