"""The supervisor's end of its control socket: the agents that are connected, what they are told, and what they say."""

import asyncio
from collections.abc import Callable

from agent.jobs.supervision import Frame, RanksStatus, SupervisorConfig, SupervisorState, decoder
from covey.ports.streams import ByteStream
from covey.wire.frames import pack, read_frame
from plugins.base import Outbox


class ConnectedAgents:
    """The agents that are connected. `heard`: called with each frame; FrameError ends the connection."""

    def __init__(self, config: SupervisorConfig, heard: Callable[[Frame], None]) -> None:
        self._config, self._heard = config, heard
        self.said = SupervisorState()
        """The newest state that the agents were told."""
        self._agents: list[Outbox] = []

    def tell(self, state: SupervisorState) -> None:
        self.said = state
        status = self._status()
        for agent in self._agents:
            agent.put(status)

    def _status(self) -> bytes:
        return pack(RanksStatus(self._config.job, self._config.epoch, self.said))

    async def serve(self, stream: ByteStream) -> None:
        """Serve an agent until the connection ends; nobody but the agent, where that is another user's process."""
        if self._config.agent_uid not in (-1, stream.uid):
            return
        outbox = Outbox()
        self._agents.append(outbox)
        outbox.put(self._status())
        writer = asyncio.get_running_loop().create_task(outbox.write_to(stream))
        try:
            while True:
                self._heard(await read_frame(stream, decoder))
        finally:
            self._agents.remove(outbox)
            writer.cancel()

    async def say_goodbye(self) -> None:
        """Let connected agents read the last status; what they miss is on disk."""
        for _ in range(50):
            if all(agent.queue.empty() for agent in self._agents):
                break
            await asyncio.sleep(0.01)
