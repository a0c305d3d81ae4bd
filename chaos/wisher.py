"""Plugins that wish elastic jobs to be arranged anew, at any agent: where processes are, how many ranks each host
carries, and which host owns each table; one at a time, or two at once, of which one must be refused."""

import math
from collections.abc import Mapping, Sequence
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
        self._before: dict[tuple[JobId, int, int], dict[HostId, int]] = {}
        """By job, epoch and configuration: how many processes each host has in it."""
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
        for id, each in wanted.items():
            self._before[id, each.epoch, each.replaces] = self._counts(id, each)
        self.rack.world.mark("wished", name, ", ".join(map(str, wanted)))

        async def publish() -> None:
            agent.bus.publish(ArrangementsWanted(ask, wanted, "a plugin", "somebody thinks that it is better so"))

        process.spawn(f"wish {ask}", publish())
        return ask

    def _counts(self, id: JobId, wanted: WantedArrangement) -> dict[HostId, int]:
        """How many processes the job has on each host in the configuration that is to be replaced. The agent that is
        asked may not have heard of the job yet, or of that configuration."""
        plugins = [self.rack.plugin(name, "scheduler") for name in self.rack.alive()]
        copies = [plugin.queue.jobs.get(id) for plugin in plugins if plugin is not None]
        known = [job for job in copies if job is not None and job.grant.epoch == wanted.epoch]
        return next(counts_of(job) for job in known if job.healing.healed == wanted.replaces)

    def check(self) -> None:
        """Raise AssertionError when two wishes that replace one configuration are both in force, and want unlike
        things."""
        in_force: dict[tuple[JobId, int, int], list[WantedArrangement]] = {}
        for ask in [ask for ask, refused in self.answers.items() if not refused]:
            for job, wanted in self.wished[ask].items():
                before = self._before[job, wanted.epoch, wanted.replaces]
                others = in_force.setdefault((job, wanted.epoch, wanted.replaces), [])
                for other in others:
                    assert _alike(other, wanted, before), f"{job} was arranged as {other}, and as {wanted}"
                others.append(wanted)

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
        counts = counts_of(job)
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
        for _ in range(max(0, bool(shares) and job.spec.world_size - sum(counts.values()))):
            shares[self.rng.choice(sorted(shares))] += 1
        return shares

    def owners(self, job: Job) -> tuple[HostId, ...]:
        """Hosts that might own the tables of this job, with processes of it or without, other ones than now; of some
        nobody says one."""
        hosts = [HostId(host) for host in self.rack.hosts]
        while True:
            some = self.rng.sample(hosts, self.rng.randint(1, len(hosts)))
            found = tuple(self.rng.choice((*some, HostId(""))) for _ in range(job.start.tables))
            if _said(found) != job.start.owners:
                return found


def counts_of(job: Job) -> dict[HostId, int]:
    """How many processes of the job each host has."""
    return {place.host: len(place.ranks) for place in job.start.places}


def _alike(one: WantedArrangement, other: WantedArrangement, before: Mapping[HostId, int]) -> bool:
    """Whether the job can be as both want it to be; `before`: its processes by host until then."""
    counts = one.processes or before
    if counts != (other.processes or before):
        return False
    if None not in (one.owners, other.owners) and _said(one.owners or ()) != _said(other.owners or ()):
        return False
    if bool(one.shares) == bool(other.shares):
        return one.shares == other.shares
    shares = one.shares or other.shares  # the other one wants equal shares
    each = sum(shares.values()) / sum(counts.values())
    return all(
        count * math.floor(each) <= shares.get(host, 0) <= count * math.ceil(each) for host, count in counts.items()
    )


def _said(owners: tuple[HostId, ...]) -> tuple[HostId, ...]:
    return owners if any(owners) else ()
