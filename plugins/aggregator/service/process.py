"""The process `aggd`: found again or started, and connected."""

import asyncio
from collections.abc import Awaitable, Callable

from covey.ports.env import Env
from covey.ports.processes import Process, ProcessId
from covey.ports.streams import ByteStream
from plugins.aggregator.datapath.aggd import AggdConfig
from plugins.starting import LOOK_S, StartPatience, why_ended

PROGRAM = "aggd"
CONTROL, NEAR = "aggd.sock", "aggd-ranks.sock"


class AggdProcess:
    """The `aggd` of this host. `keep` records which process it is; `ended` is called at its end."""

    def __init__(self, env: Env, keep: Callable[[], Awaitable[None]], ended: Callable[[], None]) -> None:
        self.id: ProcessId | None = None
        """Id of the last process known."""
        self.starts = 0
        self._started: Process | None = None
        self._env, self._keep, self._ended = env, keep, ended

    async def why_ended(self) -> str:
        """The cause of the last process's death, for people; empty: it may live."""
        return await why_ended(self._env.processes, PROGRAM, self._started)

    def find(self) -> Process | None:
        """The known process, if it lives."""
        return None if self.id is None else self._env.processes.find(self.id)

    async def reach(self, bind: str, memory_bytes_max: int, lanes: int = 1) -> ByteStream:
        """Connection to the `aggd` that runs, or to one that is started. OSError, TimeoutError when neither works."""
        found = self.find()
        try:
            stream = await (self.connect() if found is None else self._connect_in_time(found))
            if found is not None:
                self._env.spawn("aggregator waits for aggd", self._await_end(found))
            self._env.log.info("aggd found", process=self.id)
            return stream
        except ConnectionError:
            pass  # there is none
        config = AggdConfig(bind=bind, control=CONTROL, memory_bytes_max=memory_bytes_max, near=NEAR, lanes=lanes)
        process = await self._env.processes.start_program(PROGRAM, PROGRAM, config)
        self.id, self._started = process.id, process
        self._env.spawn("aggregator waits for aggd", self._await_end(process))
        self.starts += 1
        await self._keep()
        stream = await self._connect_in_time(process)
        self._env.log.info("aggd started", pid=process.id.pid)
        return stream

    async def _await_end(self, process: Process) -> None:
        await process.wait()
        self._ended()

    async def connect(self) -> ByteStream:
        """Connect to aggd. ConnectionError when none listens."""
        return await self._env.bytes.connect(f"unix:{self._env.run_dir}/{CONTROL}")

    async def _connect_in_time(self, process: Process) -> ByteStream:
        """Connect to a process that lives. ConnectionError once it has ended; one that does not listen in time is
        killed."""
        patience = StartPatience()
        while True:
            try:
                return await self.connect()
            except ConnectionError:
                if self._env.processes.find(process.id) is None:
                    why = await why_ended(self._env.processes, PROGRAM, process)
                    raise ConnectionError(why or "ended before it listened; see logs/aggd.log") from None
            if not patience.looked(process.loaded):
                process.signal(9)
                await process.wait()
                raise ConnectionError("did not listen in time and was killed")
            await asyncio.sleep(LOOK_S)
