"""One of our byte processes: found again or started, connected, and started again when it dies.

    connect to its control socket -> answers: ours, whoever started it
                                  -> nobody there: wait for a process that is known to live, else start one
    connected -> `up` -> ... -> the connection ends -> `down` -> again from the start

A process that runs but does not listen within the time that `plugins.starting` allows is killed first: two of them
must never share one volume's files. (The control socket guards that too: the second one cannot bind it.)
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from covey.ports.env import Env
from covey.ports.processes import Process, ProcessId
from plugins.memory.datapath.wire.control import (
    Answer,
    No,
    Question,
    StopProgram,
    Told,
)
from plugins.memory.datapath.wire.control_ends import ControlClient
from plugins.starting import LOOK_S, Pauses, StartPatience, why_ended

STOP_S = 5.0
SIGKILL = 9


@dataclass(frozen=True)
class ByteProgram:
    """Program to start, and where it will listen."""

    kind: str
    """Name in the registry: `slabd`, `vold`."""
    name: str
    config: msgspec.Struct
    control: str
    secret: bytes


class ByteProcess:
    """One byte process and the connection to it. `remember` makes a new process id durable; `up` and `down` are called
    when the connection begins and ends; `told` with frames that the process sends by itself."""

    def __init__(
        self,
        env: Env,
        program: ByteProgram,
        known: ProcessId | None,
        remember: Callable[[ProcessId], Awaitable[None]],
        up: Callable[["ByteProcess"], Awaitable[None]],
        down: Callable[[str], None],
        told: Callable[[Told], None],
    ) -> None:
        self.ready = asyncio.Event()
        """Set while it is connected and `up` has run."""
        self.starts = 0
        self.died = ""
        """Why it ended last, for people; empty: it has been reached since."""
        self.deaths = 0
        """How often it ended since it was reached last."""
        self._env, self._program, self._known = env, program, known
        self._remember, self._up, self._down, self._told = remember, up, down, told
        self._client: ControlClient | None = None
        self._process: Process | None = None
        """The process that was started here last."""
        self._stopping = False
        self._lived_s = 0.0
        """Seconds that the last process was connected; 0 when it never was."""

    async def ask(self, question: Callable[[int], Question], timeout_s: float) -> Answer:
        """Ask the process; `question(id)` makes the frame. ConnectionError when it is not there, TimeoutError when it
        is silent."""
        client = self._client
        if client is None:
            raise ConnectionRefusedError(f"{self._program.name} is not running")
        try:
            return await client.ask(question(client.next_id), timeout_s)
        except ConnectionError:
            if self._client is client:
                self.ready.clear()  # whoever asks again waits for the next one, also while nobody has noticed the end
            raise

    async def keep(self) -> None:
        """Keep the process running until `stop`."""
        pauses = Pauses(self._env.rng)
        while not self._stopping:
            why = await self._live()
            if self._stopping:
                return
            self.died, self.deaths = why, self.deaths + 1
            self._down(why)
            await asyncio.sleep(pauses.after(self._lived_s))

    async def _live(self) -> str:
        """One life of the connection; returns why it ended."""
        reached_s: float | None = None
        try:
            self._client = await self._connect() or await self._start()
            reached_s = self._env.clock.now_s()
            await self._up(self)
            self.died, self.deaths = "", 0
            self.ready.set()
            await self._client.ended.wait()
            return await self._reason() or "the process ended"
        except (OSError, TimeoutError) as error:
            return await self._reason() or str(error) or type(error).__name__
        finally:
            self._lived_s = 0.0 if reached_s is None else self._env.clock.now_s() - reached_s
            self.ready.clear()
            if self._client is not None:
                self._client.close()
                self._client = None

    async def _reason(self) -> str:
        return await why_ended(self._env.processes, self._program.name, self._process)

    async def _connect(self) -> ControlClient | None:
        """Connect to a process that listens, or that lives and will listen; None when there is none."""
        patience = StartPatience()
        while True:
            try:
                return await ControlClient.connect(self._env, self._program.control, self._program.secret, self._told)
            except ConnectionError:
                alive = None if self._known is None else self._env.processes.find(self._known)
            if alive is None:
                return None
            if not patience.looked(alive.loaded):
                alive.signal(SIGKILL)
                await alive.wait()
                return None
            await asyncio.sleep(LOOK_S)

    async def _start(self) -> ControlClient:
        self.starts += 1
        program = self._program
        process = await self._env.processes.start_program(program.kind, program.name, program.config)
        self._known, self._process = process.id, process
        await self._remember(process.id)
        client = await self._connect()
        if client is None:
            raise ConnectionRefusedError(f"{program.name} ended right after its start; see logs/{program.name}.log")
        return client

    async def stop(self, forget: bool) -> None:
        """End the process, in good order if it listens; otherwise kill it."""
        self._stopping = True
        try:
            answer = await self.ask(lambda id: StopProgram(id, forget), STOP_S)
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
