"""Random racks that share their GPUs: the log, its leader, coordinators and hosts as agents have them; anything may
happen.

Between a grant and its start other things happen: an upgrade, a GPU that vanishes, a job taken back. Whatever the
order, a GPU has at most one guaranteed job and `beside` others, quotas hold, and in the end everything is free.
"""

import random
from collections import Counter

import pytest

from covey.core.events import Heard, Send
from covey.core.ids import HostId, JobId
from plugins.facts import GpuUse, Place
from plugins.scheduler.machine.host.reservations import (
    GpusSeen,
    GrantNews,
    HeldReservations,
    KeepPort,
    RanksGone,
    Reservations,
    Starting,
    UseSeen,
)
from plugins.scheduler.machine.leader.leader import Leader, RackHost, ScheduleTick
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity, SharedGpus, Sharing
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Applied,
    CancelAsked,
    Command,
    Granted,
    NotApplied,
    Placed,
    PlaceFailed,
    RanksReported,
    Submitted,
    TakenBack,
)
from plugins.scheduler.messages.spec import JobClass, JobSpec, Pack
from plugins.scheduler.messages.wire import Release, Reserve, Reserved
from plugins.scheduler.policy.place import place as place_gang
from plugins.scheduler.policy.place import spread
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.policy.shared import device_of, is_part, short_name
from plugins.scheduler.service.gpus.shared_gpus import where
from tests.families import in_gate

HOME = HostId("coordinator")
QUOTAS = {"red": 3, "blue": 2}
LEASE_S = 1e6
BIG = 1 << 40
WHAT = ("submit",) * 6 + ("end",) * 4 + ("place",) * 8 + ("look",) * 6 + ("busy", "gpu", "odd")
KINDS: tuple[JobClass, ...] = ("guaranteed", "auto", "auto", "opportunistic")
PACKS: tuple[Pack, ...] = ("few", "few", "any", "host", "apart")


class SharedRack:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.beside = self.dice.choice((1, 1, 2, 3))
        self.sharing = Sharing(beside=self.beside, busy=0.8)
        self.now_s = 0.0
        settings = SchedulerSettings(demote_after_s=20.0, quotas=QUOTAS, beside=self.beside, starve_limit_s=None)
        self.queue = JobTable()
        self.leader = Leader(self.queue, settings, self.sharing)
        self.gpus: dict[HostId, list[str]] = {}
        self.hosts: dict[HostId, Reservations] = {}
        self.busy: dict[str, float] = {}
        self.says: dict[HostId, int] = {}
        for number in range(self.dice.randrange(1, 5)):
            host = HostId(f"h{number}")
            self.gpus[host] = [f"GPU-{number:08x}-{gpu:04x}" for gpu in range(self.dice.randrange(1, 5))]
            self.hosts[host] = Reservations(HeldReservations(), LEASE_S, 0.0, self.sharing)
            self.says[host] = self.beside
        self.pending: list[tuple[JobId, int, list[Place]]] = []
        """The gangs whose hosts said yes, not proposed yet."""
        self.upgrades = 0
        self.refused: Counter[str] = Counter()
        self.measure()
        self.look()

    # ---- what happens ----

    def step(self) -> None:
        self.now_s += self.dice.choice((0.0, 0.5, 3.0, 9.0))
        what = self.dice.choice(
            ("submit",) * 6 + ("end",) * 4 + ("place",) * 5 + ("look",) * 6 + ("busy", "gpu", "odd")
        )
        live = self.queue.live()
        job = self.dice.choice(live) if live else None
        if what == "submit":
            self.submit()
        elif what == "end" and job is not None:
            self.end(job)
        elif what == "place":
            self.place()
        elif what == "busy":
            self.busy[self.any_gpu()] = self.dice.choice((0.0, 0.5, 0.79, 0.8, 1.0))
            self.measure()
        elif what == "gpu":
            self.lose_or_find_a_gpu()
        elif what == "odd" and job is not None:
            self.odd(job)
        self.look()
        self.check()

    def submit(self) -> None:
        spec = JobSpec(
            name="x",
            tenant=self.dice.choice(("red", "blue", "green")),
            job_class=self.dice.choice(KINDS),
            workers=self.dice.choice((1, 1, 2, 3)),
            gpus_per_worker=self.dice.choice((1, 1, 1, 2, 0)),
            pack=self.dice.choice(PACKS),
            argv=("x",),
        )
        number = self.queue.next_number
        self.say(Submitted(wall_s=0.0, key=f"job-{number:08}", spec=spec, may_demote=True))

    def end(self, job: Job) -> None:
        if not job.placed:
            self.say(CancelAsked(wall_s=0.0, job=job.id))
            return
        for place in list(job.awaited):
            codes = dict.fromkeys(place.ranks, 0)
            self.say(RanksReported(wall_s=0.0, job=job.id, epoch=job.grant.epoch, host=place.host, codes=codes))
            if job.state != "running" or self.dice.random() < 0.3:
                break

    def odd(self, job: Job) -> None:
        """Say that a job cannot stay, with or without harm done; its hosts say that its ranks ended, some later."""
        others = [other.id for other in self.queue.live() if other.counts and other.state == "running"]
        harms = self.dice.choice(others) if others and not job.counts else None
        told = TakenBack(
            wall_s=0.0, job=job.id, epoch=job.grant.epoch, cause="unfit", reason="it does not fit", harms=harms
        )
        self.say(told)

    def lose_or_find_a_gpu(self) -> None:
        host = self.dice.choice(list(self.gpus))
        if len(self.gpus[host]) > 1 and self.dice.random() < 0.5:
            self.gpus[host].pop(self.dice.randrange(len(self.gpus[host])))
        else:
            self.gpus[host].append(f"GPU-new-{self.dice.randrange(1 << 30):08x}")
        if self.dice.random() < 0.2:
            self.says[host] = self.dice.choice((0, self.beside))
        self.measure()

    def any_gpu(self) -> str:
        return self.dice.choice([gpu for gpus in self.gpus.values() for gpu in gpus])

    def measure(self) -> None:
        for host, gpus in self.gpus.items():
            self.hosts[host].handle(GpusSeen(tuple(gpus)), self.now_s)
            uses = tuple(GpuUse(gpu, self.busy.get(gpu, 0.0), BIG) for gpu in gpus)
            self.hosts[host].handle(UseSeen(uses), self.now_s)

    # ---- agents ----

    def say(self, command: Command) -> bool:
        """Say a command, and return whether it was applied. Hosts look at the log after it."""
        result, notes = apply(self.queue, self.queue.index + 1, command)
        self.upgrades += any(note.event == "upgraded" for note in notes)
        if isinstance(result, NotApplied):
            self.refused[f"{type(command).__name__}: {result.why.split(' on ')[0][:12]}"] += 1
        self.hosts_look()
        return isinstance(result, Applied)

    def look(self) -> None:
        rack = tuple(
            RackHost(host, len(gpus), None, SharedGpus(names=tuple(map(short_name, gpus)), utilisation=self.uses(host),
                                                       beside=self.says[host]))
            for host, gpus in self.gpus.items()
        )  # fmt: skip
        for action in self.leader.handle(ScheduleTick(rack, self.now_s), self.now_s):
            applied = self.say(action.command)
            if isinstance(action.command, Granted) and applied:
                self.reserve(self.queue.jobs[action.command.job])

    def uses(self, host: HostId) -> tuple[float, ...]:
        return tuple(self.busy.get(gpu, 0.0) for gpu in self.gpus[host])

    def reserve(self, job: Job) -> None:
        """Let a job's coordinator ask every host of its plan."""
        capacity = self.leader.capacity
        assert isinstance(capacity, SharedCapacity)
        each = job.spec.gpus_per_worker
        spec, ranks = job.spec, dict.fromkeys(self.gpus, 0)
        free = where(capacity.anew(), job, None, 0.3, {})
        plan = spread(ranks, spec.workers, spec.pack)
        if each:
            plan = place_gang(free, spec.workers, each, None, 0.3, spec.pack) or {}
        places: list[Place] = []
        rank = 0
        for host, workers in sorted(plan.items()):
            apart = tuple(self.queue.apart_from(job))
            ask = Reserve(job.id, job.grant.epoch, 1, workers, each, not places, LEASE_S, not job.counts, 0, apart)
            said = list(self.hosts[host].handle(Heard(HOME, ask), self.now_s))[-1]
            answer = said.reserved if isinstance(said, KeepPort) else said.message if isinstance(said, Send) else None
            if not isinstance(answer, Reserved):
                break
            places.append(Place(host, tuple(range(rank, rank + workers)), answer.gpus))
            rank += workers
        if rank == job.spec.workers:
            self.pending.append((job.id, job.grant.epoch, places))
            return
        for place in places:
            self.hosts[place.host].handle(Heard(HOME, Release(job.id, job.grant.epoch, 1)), self.now_s)
        self.say(PlaceFailed(wall_s=0.0, job=job.id, epoch=job.grant.epoch, reason="no room"))

    def place(self) -> None:
        if not self.pending:
            return
        id, epoch, places = self.pending.pop(self.dice.randrange(len(self.pending)))
        placed = Placed(wall_s=0.0, job=id, epoch=epoch, places=tuple(places), master_addr="", master_port=1)
        if self.say(placed):
            return
        for place in places:
            self.hosts[place.host].handle(Heard(HOME, Release(id, epoch, 1)), self.now_s)
        self.say(PlaceFailed(wall_s=0.0, job=id, epoch=epoch, reason="the log said no"))

    def hosts_look(self) -> None:
        for host, reservations in self.hosts.items():
            for hold in reservations.all():
                job = self.queue.jobs.get(hold.job)
                mine = job if job is not None and job.grant.epoch == hold.epoch else None
                live = mine is not None and (mine.state == "placing" or mine.awaits(host))
                over = not live and self.queue.over(hold.job, hold.epoch)
                elsewhere = mine is not None and mine.placed and mine.place_on(host) is None
                counts = mine is not None and mine.counts
                news = GrantNews(hold.job, hold.epoch, live, over or elsewhere, counts)
                reservations.handle(news, self.now_s)
                if hold.started and not live:
                    reservations.handle(RanksGone(hold.job, hold.epoch), self.now_s)
            for job in self.queue.live():
                place = job.place_on(host)
                if place is not None and job.awaits(host):
                    reservations.handle(Starting(job.id, job.grant.epoch, place.gpus, job.counts), self.now_s)
            reservations.check()

    # ---- what must be ----

    def check(self) -> None:
        self.queue.check()
        self.leader.check()
        guaranteed: dict[tuple[HostId, str], JobId] = {}
        beside: Counter[tuple[HostId, str]] = Counter()
        for job in self.queue.live():
            for place in job.awaited:
                assert len(set(map(device_of, place.gpus))) == len(place.gpus), "two ranks of one gang share a GPU"
                for gpu in place.gpus:
                    device = (place.host, device_of(gpu))
                    if job.counts:
                        assert guaranteed.setdefault(device, job.id) == job.id
                    else:
                        assert is_part(gpu)
                        beside[device] += 1
        assert all(count <= self.beside for count in beside.values()), beside

    def drain(self) -> None:
        """End every job; then nothing is held anywhere."""
        for _ in range(400):
            if not self.queue.live():
                break
            self.now_s += 31.0
            while self.pending:
                self.place()
            self.end(self.dice.choice(self.queue.live()))
            self.look()
            self.check()
        assert not self.queue.live() and not self.queue.holders
        assert all(not host.all() for host in self.hosts.values())
        capacity = self.leader.capacity
        assert isinstance(capacity, SharedCapacity) and set(capacity.open) == set(capacity.units)
        assert not capacity.beside and not capacity.alone


@pytest.mark.parametrize("begins", in_gate(1, range(0, 240, 40)))
def test_a_gpu_has_one_guaranteed_job_and_so_many_others_whatever_happens(begins: int) -> None:
    """240 racks, 60 steps each. Reference: AntMan §3.3."""
    seen: Counter[str] = Counter()
    for seed in range(begins, begins + 40):
        rack = SharedRack(seed)
        try:
            for _ in range(60):
                rack.step()
            rack.drain()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen["upgrades"] += rack.upgrades
        seen["parts"] += sum(
            is_part(gpu) for job in rack.queue.jobs.values() for p in job.start.places for gpu in p.gpus
        )
        seen += rack.refused
    assert seen["upgrades"] > 10 and seen["parts"] > 120, seen
