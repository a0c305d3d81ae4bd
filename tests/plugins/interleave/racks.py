"""A rack in virtual time for the groups of jobs: machines of `plugins/interleave` on every host, a log that arranges,
messages that are late or lost, hosts that die."""

import random
from collections.abc import Sequence

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
from plugins.interleave.policy.groups import PlacedGroup, PlacedJob, groups_of
from plugins.interleave.policy.model import JobProfile, iteration_s


class Job(msgspec.Struct):
    """One job as it really is, and as the log has it."""

    placed: JobPlaced
    profile: JobProfile
    done: float = 0.0
    told: int = 0

    @property
    def hosts(self) -> list[HostId]:
        return [place.host for place in self.placed.places]


class Rack:
    """Hosts `h1`.. with a machine each, and the log. `step` is one second."""

    def __init__(self, hosts: int, seed: int = 1, loss: float = 0.0, late_s: float = 0.05, review_s: float = 600.0):
        self.rng, self.loss, self.late_s, self.review_s = random.Random(seed), loss, late_s, review_s
        self.hosts = [HostId(f"h{n}") for n in range(1, hosts + 1)]
        self.machines = {h: Pools(h, random.Random(f"{seed}/{h}"), review_s) for h in self.hosts}
        self.jobs: dict[JobId, Job] = {}
        self.now_s = 0.0
        self.due: list[tuple[float, int, HostId, PoolsEvent]] = []
        self.wishes: list[tuple[HostId, ArrangementsWanted, str]] = []
        """Every wish: of whom, and why it was refused; empty: it is in force."""
        self.notes: list[LogEvent] = []
        self.barred: set[HostId] = set()
        """Hosts on which the scheduler lets no process begin."""
        self.answers = True
        self.decision_s = 1.0
        self._count = 0

    # ---- what happens ----

    def submit(self, job: JobId, hosts: Sequence[HostId], work_s: float, net_s: float, most: int = 8) -> None:
        """A job begins with a process on each of these hosts, rank 0 on the first."""
        places = tuple(Place(host, (n,), ()) for n, host in enumerate(hosts))
        placed = JobPlaced(job, 1, "lab", most or len(hosts), places, 1, share_host="auto", workers=1 if most else 0)
        self.jobs[job] = Job(placed, JobProfile(job, work_s, net_s))
        self._everybody(placed)

    def end(self, job: JobId) -> None:
        del self.jobs[job]
        self._everybody(JobUnplaced(job, 1, True))

    def kill(self, host: HostId) -> None:
        """The host is gone: its jobs go on without it, at once."""
        del self.machines[host]
        for job in list(self.jobs.values()):
            if host in job.hosts:
                self._arrange(job, [place for place in job.placed.places if place.host != host])

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.step()

    def step(self) -> None:
        self.now_s += 1.0
        for job in self.jobs.values():
            self._compute(job)
        for host in list(self.machines):
            live = frozenset(self.machines)
            self._feed(host, HostsNow(live, live))
            self._feed(host, SecondBegan())
        while self.due and min(self.due)[0] <= self.now_s:
            entry = min(self.due, key=lambda each: each[:2])
            self.due.remove(entry)
            self._feed(entry[2], entry[3])
        self.check()

    def check(self) -> None:
        for machine in self.machines.values():
            machine.check()
        for job in self.jobs.values():
            assert job.placed.places, f"{job.placed.job} is lost"
            hosts = job.hosts
            assert len(hosts) == len(set(hosts))
            assert set(hosts) <= set(self.hosts)
        seen = [host for group in self.groups() for host in group.hosts]
        assert len(seen) == len(set(seen)), "a host has the orders of two groups"

    def groups(self) -> tuple[PlacedGroup, ...]:
        """The groups as the log has them."""
        return groups_of(
            PlacedJob(j.placed.job, "auto", 1, j.placed.config, j.placed.places) for j in self.jobs.values()
        )

    def apart(self) -> list[tuple[tuple[JobId, ...], int]]:
        """The jobs of each group, and the number of its hosts."""
        return [(group.jobs, len(group.hosts)) for group in self.groups()]

    # ---- inside ----

    def _compute(self, job: Job) -> None:
        """Each job does one mini-batch in an iteration of its group."""
        group = next(group for group in self.groups() if job.placed.job in group.jobs)
        others = [self.jobs[name].profile for name in group.jobs]
        each_s = iteration_s(others, len(group.hosts))
        job.done += 1.0 / max(each_s, 1e-6)
        while job.told < int(job.done):
            job.told += 1
            took = job.profile.work_s / len(job.hosts)
            for place in job.placed.places:
                if place.host in self.machines:
                    of = job.placed.job, 1, place.ranks[0], job.told
                    self._feed(place.host, StepTimed(*of, each_s, took, job.profile.net_s, {}))

    def _everybody(self, fact: JobPlaced | JobUnplaced) -> None:
        for host in self.machines:
            self._later(host, fact, self.rng.uniform(0.0, self.late_s))

    def _later(self, host: HostId, event: PoolsEvent, after_s: float) -> None:
        self._count += 1
        self.due.append((self.now_s + after_s, self._count, host, event))

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
                self._arrange(self.jobs[job], self._places(self.jobs[job], new))
        self._later(host, ArrangementsAnswered(wish.ask, refused), self.rng.uniform(0.1, self.decision_s))

    def _wrong(self, name: JobId, new: WantedArrangement) -> str:
        job = self.jobs.get(name)
        if job is None:
            return f"there is no job {name}"
        if new.replaces != job.placed.config:
            return f"the configuration of {name} is {job.placed.config} by now"
        if not job.placed.workers:
            return f"{name} is not elastic"
        if bad := set(new.processes) & (self.barred | (set(self.hosts) - set(self.machines))):
            return f"{sorted(bad)[0]} takes no process"
        if not 1 <= sum(new.processes.values()) <= job.placed.world_size:
            return "out of its range"
        first = next(place.host for place in job.placed.places if 0 in place.ranks)
        return "" if first in new.processes else f"the process on {first} that carries rank 0 ends only with its host"

    def _places(self, job: Job, new: WantedArrangement) -> list[Place]:
        names = iter(n for n in range(64) if not any(n in place.ranks for place in job.placed.places))
        kept = {place.host: place.ranks for place in job.placed.places}
        found = []
        for host, count in new.processes.items():
            ranks = kept.get(host, ())[:count]
            found.append(Place(host, (*ranks, *(next(names) for _ in range(count - len(ranks)))), ()))
        return found

    def _arrange(self, job: Job, places: Sequence[Place]) -> None:
        """Take these places, in a new configuration; who carries rank 0 is named 0."""
        if not any(0 in place.ranks for place in places):
            places = [msgspec.structs.replace(places[0], ranks=(0, *places[0].ranks[1:])), *places[1:]]
        changed = {"places": tuple(places), "config": job.placed.config + 1}
        job.placed = msgspec.structs.replace(job.placed, **changed)
        self._everybody(job.placed)
