"""One of our byte processes: found again or started, connected, and started again when it dies.

    connect to its control socket -> answers: ours, whoever started it
                                  -> nobody there: wait for a process that is known to live, else start one
    connected -> `up` -> ... -> the connection ends -> `down` -> again from the start

A process that lives but does not listen within `START_S` is killed first: two of them must never share one volume's
files. (The control socket guards that too: the second one cannot bind it.)
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from covey.ports import Env, ProcessId
from plugins.memory.datapath.control import Answer, ControlClient, No, Question, Stop, Told

START_S = 10.0
"""How long a process may take to listen."""
POLL_S = 0.05
PAUSE_S, PAUSE_MAX_S = 0.5, 10.0
"""Before a process that died is started again; doubles while it dies at once."""
STEADY_S = 30.0
"""A process that lived so long is not dying at once."""
STOP_S = 5.0
SIGKILL = 9


@dataclass(frozen=True)
class Program:
    """What to start, and where it will listen."""

    kind: str
    """Name in the registry: `slabd`, `vold`."""
    name: str
    config: msgspec.Struct
    control: str
    secret: bytes


class ByteProcess:
    """`remember` makes a new process id durable; `up` and `down` tell of its connection; `told` of what it says."""

    def __init__(
        self,
        env: Env,
        program: Program,
        known: ProcessId | None,
        remember: Callable[[ProcessId], Awaitable[None]],
        up: Callable[["ByteProcess"], Awaitable[None]],
        down: Callable[[str], None],
        told: Callable[[Told], None],
    ) -> None:
        self.ready = asyncio.Event()
        """Set while it is connected and `up` has run."""
        self.starts = 0
        self._env, self._program, self._known = env, program, known
        self._remember, self._up, self._down, self._told = remember, up, down, told
        self._client: ControlClient | None = None
        self._stopping = False

    async def ask(self, question: Callable[[int], Question], timeout_s: float) -> Answer:
        """`question(id)` makes the frame. ConnectionError when it is not there, TimeoutError when it is silent."""
        client = self._client
        if client is None:
            raise ConnectionRefusedError(f"{self._program.name} is not running")
        return await client.ask(question(client.next_id), timeout_s)

    async def keep(self) -> None:
        """Runs until `stop`."""
        pause_s = PAUSE_S
        while not self._stopping:
            began_s = self._env.clock.now_s()
            why = await self._live()
            if self._stopping:
                return
            self._down(why)
            lived_s = self._env.clock.now_s() - began_s
            pause_s = PAUSE_S if lived_s >= STEADY_S else min(PAUSE_MAX_S, 2 * pause_s)
            await asyncio.sleep(pause_s / 2)

    async def _live(self) -> str:
        """One life of the connection; why it ended."""
        try:
            self._client = await self._connect() or await self._start()
            await self._up(self)
            self.ready.set()
            await self._client.ended.wait()
            return "the process ended"
        except (OSError, TimeoutError) as error:
            return str(error) or type(error).__name__
        finally:
            self.ready.clear()
            if self._client is not None:
                self._client.close()
                self._client = None

    async def _connect(self) -> ControlClient | None:
        """To one that listens, or that lives and will; None when there is none."""
        give_up_s = self._env.clock.now_s() + START_S
        while True:
            try:
                return await ControlClient.connect(self._env, self._program.control, self._program.secret, self._told)
            except ConnectionError:
                alive = None if self._known is None else self._env.processes.find(self._known)
            if alive is None:
                return None
            if self._env.clock.now_s() >= give_up_s:
                alive.signal(SIGKILL)
                await alive.wait()
                return None
            await asyncio.sleep(POLL_S)

    async def _start(self) -> ControlClient:
        self.starts += 1
        program = self._program
        process = await self._env.processes.start_program(program.kind, program.name, program.config)
        self._known = process.id
        await self._remember(process.id)
        client = await self._connect()
        if client is None:
            raise ConnectionRefusedError(f"{program.name} ended right after its start; see logs/{program.name}.log")
        return client

    async def stop(self, forget: bool) -> None:
        """End it, in good order if it listens; otherwise it is killed."""
        self._stopping = True
        try:
            answer = await self.ask(lambda id: Stop(id, forget), STOP_S)
            refused = isinstance(answer, No)
        except (ConnectionError, TimeoutError):
            refused = True
        alive = None if self._known is None else self._env.processes.find(self._known)
        if alive is None:
            return
        try:
            async with asyncio.timeout(0.1 if refused else STOP_S):
                await alive.wait()
        except TimeoutError:
            alive.signal(SIGKILL)
            await alive.wait()
