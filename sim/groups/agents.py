"""Agents that make groups of jobs, each host for itself: the machines of `plugins/interleave`, in virtual time.

Every host has the machine that agents run (`plugins.interleave.machine.pools.Pools`). Around them is what they need of
the rest of a rack: a log that takes a wish whole or not at all, messages that are late or lost, hosts that die.
"""

import random
from collections.abc import Collection, Sequence

import msgspec

from covey.core.events import Heard, LogEvent, Publish, Send
from covey.core.ids import HostId, JobId
from plugins.facts import (
    ArrangementsAnswered,
    ArrangementsWanted,
    JobPlaced,
    JobUnplaced,
    Place,
    StepTimed,
    WantedArrangement,
)
from plugins.interleave.machine.pools import HostsNow, Pools, PoolsEvent, SecondBegan
from plugins.interleave.policy.groups import AUTO, PlacedGroup, PlacedJob, groups_of
from plugins.interleave.policy.rules import REVIEW_S
from sim.kernel import Kernel


class Agents:
    """The machine of each host, and the log. Time is what `second` says."""

    def __init__(
        self,
        hosts: Sequence[HostId],
        seed: int = 1,
        loss: float = 0.0,
        late_s: float = 0.05,
        review_s: float = REVIEW_S,
    ) -> None:
        self.rng, self.loss, self.late_s = random.Random(seed), loss, late_s
        self.hosts = list(hosts)
        self.machines = {h: Pools(h, random.Random(f"{seed}/{h}"), review_s) for h in self.hosts}
        self.log: dict[JobId, JobPlaced] = {}
        """The jobs, as the log has them."""
        self.now_s = 0.0
        self.wishes: list[tuple[HostId, ArrangementsWanted, str]] = []
        """Every wish: of whom, and why it was refused; empty: it is in force."""
        self.notes: list[LogEvent] = []
        self.barred: set[HostId] = set()
        """Hosts on which the scheduler lets no process begin."""
        self.answers = True
        self.decision_s = 1.0
        self._due: Kernel[float, tuple[HostId, PoolsEvent]] = Kernel(0.0)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def submit(self, job: JobId, hosts: Sequence[HostId], most: int = 8, fewest: int = 1) -> None:
        """A job begins with a process on each of these hosts, rank 0 on the first. `most` 0: it is not elastic."""
        places = tuple(Place(host, (n,), ()) for n, host in enumerate(hosts))
        size, workers = most or len(hosts), fewest if most else 0
        self.log[job] = JobPlaced(job, 1, "lab", size, places, 1, share_host=AUTO, workers=workers)
        self._everybody(self.log[job])

    def end(self, job: JobId) -> None:
        del self.log[job]
        self._everybody(JobUnplaced(job, 1, True))

    def kill(self, host: HostId) -> None:
        """The host is gone: its jobs go on without it, at once."""
        del self.machines[host]
        for job in list(self.log.values()):
            if any(place.host == host for place in job.places):
                self._arrange(job, [place for place in job.places if place.host != host])

    def stepped(self, job: JobId, host: HostId, step: int, step_s: float, comp_s: float, comm_s: float) -> None:
        """A process on this host has done a mini-batch."""
        rank = next(place.ranks[0] for place in self.log[job].places if place.host == host)
        self._feed(host, StepTimed(job, 1, rank, step, step_s, comp_s, comm_s, {}))

    def second(self, now_s: float) -> None:
        """It is `now_s`, and all hosts look at what they know."""
        self.now_s = now_s
        live = frozenset(self.machines)
        for host in list(self.machines):
            self._feed(host, HostsNow(live, live))
            self._feed(host, SecondBegan())
        while (due_s := self._due.next_at()) is not None and due_s <= now_s:
            host, event = self._due.pop()
            self._feed(host, event)

    def check(self) -> None:
        for machine in self.machines.values():
            machine.check()
        for job in self.log.values():
            hosts = self.hosts_of(job.job)
            assert hosts, f"{job.job} is lost"
            assert len(hosts) == len(set(hosts)) and set(hosts) <= set(self.hosts)
        seen = [host for group in self.groups() for host in group.hosts]
        assert len(seen) == len(set(seen)), "a host has the orders of two groups"

    # ---- how it is ---------------------------------------------------------------------------------------------------

    def hosts_of(self, job: JobId) -> list[HostId]:
        return [place.host for place in self.log[job].places]

    def placed(self) -> dict[JobId, PlacedJob]:
        """The jobs, as the policies see them."""
        return {name: PlacedJob(name, AUTO, 1, job.config, job.places) for name, job in self.log.items()}

    def groups(self) -> tuple[PlacedGroup, ...]:
        """The groups as the log has them."""
        return groups_of(self.placed().values())

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _everybody(self, fact: JobPlaced | JobUnplaced) -> None:
        for host in self.machines:
            self._later(host, fact, self.rng.uniform(0.0, self.late_s))

    def _later(self, host: HostId, event: PoolsEvent, after_s: float) -> None:
        self._due.post(self.now_s + after_s, (host, event))

    def _feed(self, host: HostId, event: PoolsEvent) -> None:
        if host not in self.machines:
            return
        for action in self.machines[host].handle(event, self.now_s):
            match action:
                case Send():
                    if self.rng.random() >= self.loss:
                        self._later(action.to, Heard(host, action.message), self.rng.uniform(0.0, 2 * self.late_s))
                case Publish():
                    assert isinstance(action.fact, ArrangementsWanted)
                    if self.answers:
                        self._propose(host, action.fact)
                case LogEvent():
                    self.notes.append(action)

    def _propose(self, host: HostId, wish: ArrangementsWanted) -> None:
        """The scheduler: all jobs of the wish, or none."""
        refused = next(filter(None, (self._wrong(job, new) for job, new in wish.jobs.items())), "")
        self.wishes.append((host, wish, refused))
        if not refused:
            for job, new in wish.jobs.items():
                self._arrange(self.log[job], places_of(self.log[job], new))
        self._later(host, ArrangementsAnswered(wish.ask, refused), self.rng.uniform(0.1, self.decision_s))

    def _wrong(self, name: JobId, new: WantedArrangement) -> str:
        job = self.log.get(name)
        if job is None:
            return f"there is no job {name}"
        if new.replaces != job.config:
            return f"the configuration of {name} is {job.config} by now"
        if not job.workers:
            return f"{name} is not elastic"
        if bad := set(new.processes) & (self.barred | (set(self.hosts) - set(self.machines))):
            return f"{sorted(bad)[0]} takes no process"
        if not 1 <= sum(new.processes.values()) <= job.world_size:
            return "out of its range"
        first = next(place.host for place in job.places if 0 in place.ranks)
        return "" if first in new.processes else f"the process on {first} that carries rank 0 ends only with its host"

    def _arrange(self, job: JobPlaced, places: Sequence[Place]) -> None:
        """Take these places, in a new configuration; who carries rank 0 is named 0."""
        if not any(0 in place.ranks for place in places):
            places = [msgspec.structs.replace(places[0], ranks=(0, *places[0].ranks[1:])), *places[1:]]
        self.log[job.job] = msgspec.structs.replace(job, places=tuple(places), config=job.config + 1)
        self._everybody(self.log[job.job])


def places_of(job: JobPlaced, new: WantedArrangement) -> list[Place]:
    """The places of the job once it is arranged so: processes that stay keep their numbers."""
    taken: Collection[int] = {rank for place in job.places for rank in place.ranks}
    names = iter(n for n in range(2 * job.world_size + len(taken)) if n not in taken)
    kept = {place.host: place.ranks for place in job.places}
    found = []
    for host, count in new.processes.items():
        ranks = kept.get(host, ())[:count]
        found.append(Place(host, (*ranks, *(next(names) for _ in range(count - len(ranks)))), ()))
    return found
