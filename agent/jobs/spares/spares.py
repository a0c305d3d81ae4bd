"""Spares of one job on one host (`submit --spares`): processes that have imported what its ranks import, and wait.

    agent ------Keep(count)-----> keeper --start_waiting--> spare, spare, ...      one after another, in the background
         <-----Status(warm)------   |
    supervisor --Take(command)--> keeper --become--> a spare is that rank, with its record, output and shim
              <--Taken, or None--   |

A rank whose process is lost, or that moves to this host, is started by its supervisor as ever; one of these is taken
for it if there is one. What it takes to start Python and to import PyTorch has passed then, while the others trained.
They hold no GPU, and belong to no supervisor, since they wait also where nothing of the job runs yet. The keeper ends,
with all that wait, once no agent has been there for `ALONE_S`: one that comes back starts another.

A spare that was asked to become a rank, and does not say whether it has, is the supervisor's to end
(`agent.jobs.spares.taking`): a rank must not run twice.
"""

import asyncio
import contextlib

from agent.jobs.spares.frames import (
    SPARES_MAX,
    KeepSpares,
    NoSpare,
    SparesConfig,
    SparesStatus,
    SpareTaken,
    TakeSpare,
    common,
    decoder,
    unlike,
)
from agent.jobs.supervision import claimed_socket
from agent.ports.processes.shim import GOES_FIRST
from covey.hooks.warm import MODULES
from covey.ports.env import Env
from covey.ports.processes import Command, StartsAhead, WaitingProcess
from covey.ports.streams import ByteStream
from covey.wire.frames import FrameError, pack, read_frame
from plugins.base import Outbox, Program

ALONE_S = 30.0
"""Seconds without an agent after which no spares are wanted."""
HERE_S = 10.0
"""Seconds from a spare's start until it has to say that it waits: a process that has not by then is not one of Covey's
scripts."""
WARM_S = 300.0
"""Seconds in which a spare has to import everything."""
PAUSE_S = 2.0
"""Seconds between a spare that was taken and the start of the next one: its rank starts first."""
FAILS_MAX = 3
"""The number of spares in a row that could not be used after which there are none."""
LOOK_S = 1.0


class SparesKeeper:
    """The keeper of the spares of one `SparesConfig`."""

    def __init__(self, env: Env, config: SparesConfig) -> None:
        self._env, self._config = env, config
        self._wanted = 0
        self._warm: list[WaitingProcess] = []
        self._why = ""
        self._fails = self._started = 0
        self._pause_s = 0.0
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._agents: list[Outbox] = []
        self._alone_since_s = env.clock.boot_s()

    async def run(self) -> None:
        config = self._config
        async with claimed_socket(self._env, config.socket, self._serve, config.agent_uid) as first:
            if not first:
                return
            self._env.spawn("spares", self._fill())
            while not self._is_over():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._over.wait()
            self._wanted = 0
            for spare in self._warm:
                spare.end()

    def _is_over(self) -> bool:
        if self._over.is_set():
            return True
        now_s = self._env.clock.boot_s()
        if self._agents:
            self._alone_since_s = now_s
        return now_s - self._alone_since_s > ALONE_S

    # ---- spares ----

    async def _fill(self) -> None:
        """Start missing spares, one after another."""
        processes = self._env.processes
        if not isinstance(processes, StartsAhead):
            self._say_why("spares cannot wait here")
            return
        while True:
            if self._why or len(self._warm) >= self._wanted:
                self._changed.clear()
                await self._changed.wait()
                await asyncio.sleep(self._pause_s)
                self._pause_s = 0.0
                continue
            await self._start(processes)

    async def _start(self, processes: StartsAhead) -> None:
        template, self._started = self._config.command, self._started + 1
        env = {**common(template.env), MODULES: ",".join(self._config.modules)}
        command = Command(
            argv=template.argv,
            cwd=template.cwd,
            env=env,
            output=template.output,
            run=f"{template.run}.spare{self._started}",
        )
        try:
            spare = await processes.start_waiting(command)
        except OSError as error:
            self._failed(f"{error.filename or command.argv[0]}: {error.strerror or error}")
            return
        why = await _warmed(spare)
        if why:
            spare.end()
            self._failed(why)
            return
        self._fails = 0
        self._warm.append(spare)
        self._env.spawn("spare", self._watch(spare))
        self._tell()

    def _failed(self, why: str) -> None:
        self._fails += 1
        self._env.log.warning("a spare cannot be used", why=why)
        if self._fails >= FAILS_MAX:
            self._say_why(why)

    def _say_why(self, why: str) -> None:
        self._why = why
        self._tell()

    async def _watch(self, spare: WaitingProcess) -> None:
        """Replace a spare that ends while it waits (it was killed, or memory ran out)."""
        while spare in self._warm:
            await asyncio.sleep(LOOK_S)
            if self._env.processes.find(spare.id) is None and spare in self._warm:
                self._warm.remove(spare)
                spare.end()
                self._tell()

    async def _take(self, command: Command) -> SpareTaken | NoSpare:
        if why := unlike(self._config.command, command):
            return NoSpare(why)
        if not self._warm:
            return NoSpare(self._why or "none is ready")
        spare, self._pause_s = self._warm.pop(0), PAUSE_S
        self._tell()
        try:
            await spare.become(command)
        except (OSError, ValueError) as error:  # a ConnectionError too: it had ended, or its shim has
            spare.end()
            if (found := self._env.processes.find(spare.id)) is not None:
                found.kill()
            return NoSpare(str(error) or "it had ended")
        return SpareTaken()

    # ---- the socket ----

    def _tell(self) -> None:
        self._changed.set()
        status = pack(SparesStatus(len(self._warm), self._why))
        for agent in self._agents:
            agent.put(status)

    async def _serve(self, stream: ByteStream) -> None:
        if self._config.agent_uid not in (-1, stream.uid) and stream.uid != self._env.starter.uid:
            return
        outbox = Outbox()
        writer = asyncio.get_running_loop().create_task(outbox.write_to(stream))
        try:
            while True:
                match await read_frame(stream, decoder):
                    case KeepSpares(count):
                        if outbox not in self._agents:
                            self._agents.append(outbox)
                        self._keep(count)
                    case TakeSpare(command):
                        outbox.put(pack(await self._take(command)))
                    case SparesStatus() | SpareTaken() | NoSpare():
                        raise FrameError("only the parent process of spares sends that")
        finally:
            if outbox in self._agents:
                self._agents.remove(outbox)
                self._alone_since_s = self._env.clock.boot_s()
            writer.cancel()

    def _keep(self, count: int) -> None:
        self._wanted = max(0, min(count, SPARES_MAX))
        for spare in self._warm[self._wanted :]:
            spare.end()
        del self._warm[self._wanted :]
        if self._wanted == 0:
            self._over.set()
        self._tell()


async def _warmed(spare: WaitingProcess) -> str:
    """Why a started spare cannot be used; empty: it waits."""
    try:
        async with asyncio.timeout(HERE_S):
            said = await spare.says()
        if said == "here":
            async with asyncio.timeout(WARM_S):
                said = await spare.says()
    except TimeoutError:
        return "it does not say that it waits"
    except OSError as error:
        return str(error)
    return "" if said == "warm" else said


async def run(env: Env, config: SparesConfig) -> None:
    await SparesKeeper(env, config).run()


PROGRAM = Program("spares", SparesConfig, run, goes_first=GOES_FIRST)
