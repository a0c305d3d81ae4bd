"""Plugins that wish elastic jobs to be arranged anew, at any agent: where processes are, how many ranks each host
carries, and which host owns each table; one at a time, or two at once, of which one must be refused."""

from collections.abc import Sequence
from typing import Any

from chaos.rackworld import SimRack
from covey.core.events import Fact
from covey.core.ids import HostId, JobId
from plugins.facts import ArrangementsAnswered, ArrangementsWanted, WantedArrangement
from plugins.scheduler.machine.log.jobs import Job


class Wisher:
    """All that was wished on a rack, and what became of it."""

    def __init__(self, rack: SimRack) -> None:
        self.rack, self.rng = rack, rack.rng
        self.wished: dict[str, dict[JobId, WantedArrangement]] = {}
        self.answers: dict[str, str] = {}
        """Name of a wish -> why it was refused; empty: it is in force."""
        self._heard: list[Any] = []
        """Agents whose facts are heard."""

    def one(self, jobs: Sequence[JobId]) -> str | None:
        """Wish something for these jobs at some agent; returns the name of the wish, None where no agent is up."""
        up = [name for name in self.rack.alive() if self.rack.plugin(name, "scheduler") is not None]
        if not up:
            return None
        name = self.rng.choice(up)
        known = self.rack.plugin(name, "scheduler").queue.jobs
        wanted = {id: self._some(known[id]) for id in jobs if id in known and known[id].placed}
        return self.ask(name, wanted) if wanted else None

    def ask(self, name: str, wanted: dict[JobId, WantedArrangement]) -> str:
        """Wish this at the agent of this name, and return the wish's own name."""
        agent, process = self.rack.agents[name], self.rack.hosts[name].agent
        assert process is not None
        if agent not in self._heard:
            self._heard.append(agent)
            agent.bus.listen(self._listen)
        ask = f"w{len(self.wished)}"
        self.wished[ask] = wanted
        self.rack.world.mark("wished", name, ", ".join(map(str, wanted)))

        async def publish() -> None:
            agent.bus.publish(ArrangementsWanted(ask, wanted, "a plugin", "somebody thinks that it is better so"))

        process.spawn(f"wish {ask}", publish())
        return ask

    def check(self) -> None:
        """Raise AssertionError when two wishes that replace one configuration are both in force."""
        in_force: dict[tuple[JobId, int, int], WantedArrangement] = {}
        for ask in [ask for ask, refused in self.answers.items() if not refused]:
            for job, wanted in self.wished[ask].items():
                other = in_force.setdefault((job, wanted.epoch, wanted.replaces), wanted)
                assert other == wanted, f"{job} was arranged as {other}, and as {wanted}"

    def _listen(self, fact: Fact) -> None:
        if isinstance(fact, ArrangementsAnswered) and fact.ask in self.wished:
            if fact.ask in self.answers:
                self.rack.saw_wrong(
                    f"the wish {fact.ask} was answered twice: {self.answers[fact.ask]!r}, {fact.refused!r}"
                )
            self.answers[fact.ask] = fact.refused

    def _some(self, job: Job) -> WantedArrangement:
        """Something that may be wished for this job, or nearly so."""
        rng, kind = self.rng, self.rng.choice(("shares", "shares", "owners", "processes", "all", "all", "equal"))
        counts = {place.host: len(place.ranks) for place in job.start.places}
        after = self._moved(job, counts) if kind in ("processes", "all") else counts
        shares = self._shares(job, after) if kind in ("shares", "all") else {}
        owners = self.owners(job) if kind in ("owners", "all") else rng.choice((None, None, ()))
        processes = after if kind in ("processes", "all") else {}
        return WantedArrangement(job.grant.epoch, job.healing.healed, processes, shares, owners)

    def _moved(self, job: Job, counts: dict[HostId, int]) -> dict[HostId, int]:
        """Some processes more here, some less there."""
        after = dict(counts)
        for _ in range(self.rng.randint(1, 3)):
            host = HostId(self.rng.choice(list(self.rack.hosts)))
            after[host] = max(0, after.get(host, 0) + self.rng.choice((-1, 1, 1)))
        return {host: count for host, count in after.items() if count}

    def _shares(self, job: Job, counts: dict[HostId, int]) -> dict[HostId, int]:
        shares = dict(counts)
        for _ in range(max(0, job.spec.world_size - sum(counts.values()))):
            shares[self.rng.choice(sorted(shares))] += 1
        return shares

    def owners(self, job: Job) -> tuple[HostId, ...]:
        """Hosts that might own the tables of this job, with processes of it or without; of some nobody says one."""
        hosts = [HostId(host) for host in self.rack.hosts]
        some = self.rng.sample(hosts, self.rng.randint(1, len(hosts)))
        return tuple(self.rng.choice((*some, HostId(""))) for _ in range(job.start.tables))
