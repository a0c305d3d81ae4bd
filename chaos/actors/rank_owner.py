"""What a simulated rank owns tables with: the sums of `aggd`, on the rank's own ports, so that they die with it. A real
rank has `covey.tensors.direct`, with threads."""

import asyncio

from covey.ports.addresses import joined
from covey.ports.env import Env
from covey.wire.job import SumsOrder
from covey.wire.sums import Now
from plugins.aggregator.datapath.aggd import Aggd, AggdConfig

NOTHING = Now("", [], 0.0, 0, 0, 0)


class RankOwner:
    """The tables that one simulated rank owns."""

    def __init__(self, env: Env, name: str) -> None:
        """`name`: of its unix socket, unlike that of every other rank on the host."""
        self._env, self._name = env, name
        self._sums: Aggd | None = None
        self._turn = asyncio.Lock()

    async def obey(self, said: SumsOrder) -> Now:
        """Obey an order of the agent; returns what the rank then owns."""
        async with self._turn:
            if self._sums is None:
                config = AggdConfig(
                    bind=joined(said.ip, 0), control="", memory_bytes_max=said.memory_bytes_max, near=self._name
                )
                sums = Aggd(self._env, config)
                try:
                    await sums.listen()
                except OSError:
                    return NOTHING
                self._sums = sums
            return self._owned(self._sums.perform(said.order))

    def now(self) -> Now:
        """What it owns now."""
        return self._owned(self._sums.now()) if self._sums is not None else NOTHING

    def forget(self) -> None:
        """Lose everything, as a process does that begins anew."""
        if self._sums is not None:
            for job in list(self._sums.jobs.values()):
                self._sums.forget(job.job, job.epoch, 0)

    def _owned(self, now: Now) -> Now:
        return now if now.jobs else NOTHING
