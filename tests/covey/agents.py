"""An agent as a job sees it: the real socket, and a runner that knows two ranks."""

import asyncio
import time

from agent.jobs.socket.jobs_socket import JobSocket
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.job.client import JobClient
from covey.wire.job import Frame
from plugins.base import JobPeer
from plugins.facts import StepTimed
from tests.agent.here import Here, ranks
from tests.agent.jobs.one_epoch import OneEpoch

J1 = JobId("j1")


def lease(seconds: float = 30.0) -> int:
    """Time at which limits written now end: `seconds` from now, ns of the monotonic clock (`RankLimits.lease_ns`)."""
    return time.monotonic_ns() + int(seconds * 1e9)


class Agent:
    """An agent as a job sees it, that can go away and come back."""

    def __init__(self, host: Here) -> None:
        self.host = host
        self.facts: list[Fact] = []
        self.heard: list[Frame] = []
        self.runner = OneEpoch(ranks("j1", "x", count=2))
        self.socket = self._made()

    def _made(self) -> JobSocket:
        async def deliver(peer: JobPeer, frame: Frame) -> None:
            self.heard.append(frame)

        return JobSocket(self.host.env, self.runner, self.facts.append, deliver)

    async def restart(self) -> None:
        await self.socket.stop()
        self.facts.clear()
        self.heard.clear()
        self.socket = self._made()
        await self.socket.start()

    def environ(self, **changed: str) -> dict[str, str]:
        mine = {
            "COVEY_SOCKET": f"{self.host.env.run_dir}/jobs.sock",
            "COVEY_JOB_ID": "j1",
            "COVEY_RANK": "1",
            "COVEY_WORLD_SIZE": "2",
            "COVEY_EPOCH": "1",
            "COVEY_TABLES": "1",
            "COVEY_TOKEN": "secret",
            "COVEY_HOST": "h1",
        }
        return {**mine, **changed}

    def steps(self) -> list[StepTimed]:
        return [fact for fact in self.facts if isinstance(fact, StepTimed)]

    async def client(self, **changed: str) -> JobClient:
        found = JobClient(self.environ(**changed))
        await asyncio.to_thread(found.wait_joined, 5.0)
        return found
