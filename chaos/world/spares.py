"""Simulated processes that are started ahead (`covey.ports.processes.StartsAhead`): they say that they wait, and
become a rank."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from signal import SIGKILL

from chaos.world.seen import ProcessSeen
from covey.ports.env import Env
from covey.ports.processes import Command, ProcessId

IMPORTS_S = (0.1, 4.0)
"""Least and most seconds that a script's imports take."""


class SimSpare:
    """A `covey.ports.processes.WaitingProcess`, as its keeper has it; it ends with its keeper, unless it has become
    something."""

    def __init__(self, keeper: ProcessSeen, process: ProcessSeen) -> None:
        self._keeper, self.process = keeper, process
        self._lines: deque[str] = deque()
        self._heard: asyncio.Future[None] | None = None
        self._command: Command | None = None
        self._taken: asyncio.Future[None]
        keeper.resources.append(self)

    @property
    def id(self) -> ProcessId:
        return self.process.id

    async def work(self, program: Callable[[Env, Command], Awaitable[int]]) -> int:
        """Import, wait, and run the program that the process has become."""
        self._taken = asyncio.get_running_loop().create_future()
        self._say("here")
        await asyncio.sleep(self.process.world.chance.uniform(*IMPORTS_S))
        self._say("warm")
        await self._taken
        assert self._command is not None
        return await program(self.process.env, self._command)

    def _say(self, line: str) -> None:
        self._lines.append(line)
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    async def says(self) -> str:
        while not self._lines:
            if not self.process.alive:
                raise ConnectionError("it has ended")
            self._heard = asyncio.get_running_loop().create_future()
            self.process.waiters.append(self._heard)
            await self._heard
        return self._lines.popleft()

    async def become(self, command: Command) -> None:
        await asyncio.sleep(self.process.world.chance.uniform(0.001, 0.01))
        if not self.process.alive:
            raise ConnectionError("it had ended")
        host = self.process.host
        self._command = host.commands[self.id.pid] = command
        host.runs[command.run] = self.process
        host.world.process_count += 1
        self._taken.set_result(None)
        with contextlib.suppress(ValueError):
            self._keeper.resources.remove(self)

    def end(self) -> None:
        if self._command is None:
            self.process.signal(SIGKILL)

    def release(self) -> None:
        self.end()

    def vanish(self) -> None:
        """Drop the spare, since the power failed."""
