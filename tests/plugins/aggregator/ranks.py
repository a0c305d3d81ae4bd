"""Ranks of a job on a simulated rack, and the messages about them that the log and the runner would give the agents."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from chaos.actors.rank_owner import NOTHING, RankOwner
from chaos.actors.workload import SIZES
from chaos.rackworld import SimRack
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.simulated.block_streams import BlockStreams, TensorRank
from covey.tensors.numbers.blocks import tables_of
from covey.wire.job import AggregatorAt, AggregatorLost, Frame, SumsNow, SumsOrder
from covey.wire.sums import Now
from plugins import facts
from plugins.aggregator.service import AggregatorService
from plugins.facts import Place
from tests.plugins.aggregator.harness import Tensor, contribution, initial, rate_in, reference

TENSOR = Tensor("w", "model", (40,))


class Rank:
    """One rank's process on its host, and its line to whichever agent runs there."""

    def __init__(self, job: "Job", host: str, rank: int) -> None:
        self.job_on_rack, self.host, self.rank = job, host, rank
        self.results: list[bytes] = []
        self.told: list[AggregatorAt] = []
        self.tables_wanted: set[int] = set()
        self._stepped_s = 0.0
        self.process = job.rack.hosts[host].run(f"rank-{rank}", self.main)
        self.tensors: BlockStreams | None = None
        self.sums: RankOwner | None = None
        self.is_deaf = False
        """It obeys no order for now."""
        self.cannot_listen = False
        self.orders: list[SumsOrder] = []

    async def main(self, env: Env, _command: Command) -> int:
        job, tensor = self.job_on_rack, self.job_on_rack.tensor
        self.sums = RankOwner(env, f"rank-{job.name}-{self.rank}.sock")
        self.tensors = BlockStreams(
            env,
            TensorRank(job.name, self.rank, job.workers, job.tables),
            self.lost,
            wanted=self.wanted,
            part_bytes=32,
            sizes=SIZES,
        )
        env.spawn("obeys", self._obey(self.sums))
        for at in self.told:
            self.tensors.moved(at)
        await self.tensors.model("w", initial(tensor, self.rank).tobytes(), tensor.shape, tensor.update)
        for round in range(1, job.rounds + 1):
            mine = contribution(tensor, self.rank, round).tobytes()
            self.results.append(await self.tensors.push_pull("w", mine, rate_in(round)))
            await job.pause(env)
            self.tell_step(round)
        await self.tensors.push_pull("covey/leave", bytes(4))
        return 0

    def tell_step(self, round: int) -> None:
        """Report the step, as `job.step()` would."""
        if not self.job_on_rack.steps:
            return
        now_s = self.job_on_rack.rack.world.now
        took_s, self._stepped_s = now_s - self._stepped_s, now_s
        fact = facts.StepTimed(self.job, self.epoch, self.rank, round, took_s, took_s, 0.0, {})
        agent, process = self.job_on_rack.rack.agents[self.host], self.job_on_rack.rack.hosts[self.host].agent
        if process is not None and process.alive:

            async def tell() -> None:
                agent.bus.publish(fact)

            process.spawn("step", tell())

    # ---- jobs.sock ----

    @property
    def job(self) -> JobId:
        return self.job_on_rack.name

    @property
    def epoch(self) -> int:
        return self.job_on_rack.grant

    uid = 1000

    @property
    def may_own(self) -> bool | None:
        return self.job_on_rack.direct if self.tables_wanted else None

    @property
    def gone(self) -> bool:
        return not self.process.alive

    async def _obey(self, sums: RankOwner) -> None:
        """Obey orders, one after the other; while this rank is deaf they wait."""
        done = 0
        while True:
            await asyncio.sleep(0.01)
            while done < len(self.orders) and not self.is_deaf:
                done += 1
                self.say(NOTHING if self.cannot_listen else await sums.obey(self.orders[done - 1]))

    def say(self, now: Now) -> None:
        """Say to the agent what this rank sums."""
        plugin, agent = self.job_on_rack.plugin(self.host), self.job_on_rack.rack.hosts[self.host].agent
        if plugin is not None and agent is not None and agent.alive:
            agent.spawn("sums", plugin.frame(cast(Any, self), SumsNow(now)))

    def send(self, frame: Frame) -> None:
        if isinstance(frame, SumsOrder):
            self.orders.append(frame)
            return
        assert isinstance(frame, AggregatorAt)
        self.told.append(frame)

        async def moved() -> None:
            if self.tensors is not None:
                self.tensors.moved(frame)

        self.process.spawn("moved", moved())

    def wanted(self, table: int) -> None:
        self.tables_wanted.add(table)
        agent, process = self.job_on_rack.rack.agents[self.host], self.job_on_rack.rack.hosts[self.host].agent
        if process is not None and process.alive:

            async def tell() -> None:
                agent.bus.publish(facts.TableUsed(self.job, self.epoch, table))

            process.spawn("table", tell())

    def lost(self, epoch: int, why: str, table: int) -> None:
        plugin, agent = self.job_on_rack.plugin(self.host), self.job_on_rack.rack.hosts[self.host].agent
        if plugin is not None and agent is not None and agent.alive:
            agent.spawn("frame", plugin.frame(cast(Any, self), AggregatorLost(epoch, why, table)))


class Job:
    def __init__(
        self,
        rack: SimRack,
        hosts: list[str],
        rounds: int = 40,
        step_s: float = 0.25,
        grant: int = 1,
        *,
        name: str = "j1",
        even: bool = False,
        steps: bool = False,
        cut: bool = False,
        direct: bool = False,
        tensor: Tensor = TENSOR,
    ) -> None:
        """`direct`: ranks can own tables, each host one.
        `even`: every step takes `step_s`, else around it. `steps`: ranks say when they finished one. `cut`: tensors
        are cut into Blocks, and each host is asked to own a table."""
        self.tensor, self.tables = tensor, tables_of(len(set(hosts))) if cut else 1
        self.rack, self.rounds, self.step_s, self.grant, self.workers = rack, rounds, step_s, grant, len(hosts)
        self.name, self.even, self.steps, self.direct = JobId(name), even, steps, direct
        self._ended: set[int] = set()
        self.places = tuple(Place(HostId(host), (rank,), ()) for rank, host in enumerate(hosts))
        self.ranks = [Rank(self, host, rank) for rank, host in enumerate(hosts)]
        self._boots: dict[str, object] = {}
        self.told = True
        self.tell_agents()

    async def pause(self, env: Env) -> None:
        await asyncio.sleep(self.step_s if self.even else env.rng.uniform(0.5, 1.5) * self.step_s)

    def plugin(self, host: str) -> AggregatorService | None:
        agent = self.rack.agents.get(host)
        return cast(AggregatorService | None, agent.plugins.get("aggregator")) if agent is not None else None

    def tell_agents(self) -> None:
        """Tell agents of the job as the log and the joining ranks would: each agent learns of it once it is up, also
        after a restart."""
        for host in self.rack.alive() if self.told else ():
            agent, plugin = self.rack.agents[host], self.plugin(host)
            if plugin is None or not self.rack.began(host) or self._boots.get(host) is agent or not agent.boot:
                continue
            self._boots[host] = agent
            ranks = [rank for rank in self.ranks if rank.host == host and rank.process.alive]
            others = plugin.host.peers
            plugin.host.peers = partial(self._peers, ranks, others)  # type: ignore[method-assign]
            process = self.rack.hosts[host].agent
            assert process is not None
            process.spawn("log", self._tell(agent, ranks))
        for rank in self.ranks:
            if rank.gone and rank.rank not in self._ended and self.rack.hosts[rank.host].agent is not None:
                self._ended.add(rank.rank)
                self._tell_of_end(rank)
        self.rack.world.at(self.rack.world.now + 0.1, self.tell_agents)

    def _tell_of_end(self, rank: Rank) -> None:
        agent, process = self.rack.agents[rank.host], self.rack.hosts[rank.host].agent

        async def tell() -> None:
            agent.bus.publish(facts.RankDisconnected(self.name, self.grant, rank.rank))

        if process is not None and process.alive:
            process.spawn("rank ended", tell())

    def _peers(self, ranks: "list[Rank]", others: Callable[[JobId], Any], job: JobId) -> Any:
        return ranks if job == self.name else others(job)

    async def _tell(self, agent: Any, ranks: list[Rank]) -> None:
        agent.bus.publish(
            facts.JobPlaced(self.name, self.grant, "t", self.workers, self.places, tables_of(len(self.places)))
        )
        for rank in ranks:
            agent.bus.publish(facts.JobJoined(self.name, self.grant, rank.rank))
            for table in sorted(rank.tables_wanted):
                agent.bus.publish(facts.TableUsed(self.name, self.grant, table))
            if rank.sums is not None and rank.sums.now().jobs:
                rank.say(rank.sums.now())

    def owner(self, table: int = 0) -> str:
        """The host that sums the table by the highest epoch that any rank was told; empty while none was."""
        told = [at for rank in self.ranks for at in rank.told if at.table == table]
        return max(told, key=lambda at: at.epoch).host if told else ""

    def epoch(self, table: int) -> int:
        """The highest epoch of the table that any rank was told."""
        return max(at.epoch for rank in self.ranks for at in rank.told if at.table == table)

    def ended(self) -> bool:
        return not any(rank.process.alive for rank in self.ranks)

    def reached(self, round: int) -> Callable[[], bool]:
        return lambda: all(len(rank.results) >= round for rank in self.ranks)

    def finish(self, within_s: float = 200.0) -> None:
        """Wait until all ranks end well, with the results that one process would have computed."""
        self.rack.until(self.ended, within_s, "every rank has ended")
        expected = [array.tobytes() for array in reference(self.tensor, self.workers, self.rounds)]
        for rank in self.ranks:
            assert rank.process.code == 0
            assert rank.results == expected, f"rank {rank.rank}"
