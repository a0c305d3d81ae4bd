"""A rack where nothing happens from outside any more is at rest in the end: no job is stopped for ever, and the log
does not grow.

Coordinators and hosts take their time here. Whoever is granted is placed, and whoever stops ends, in any order and some
looks later, on the GPUs that its coordinator finds by what the log says at that moment.
"""

import random
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.leader.defragmenting import AGAIN_S, LASTS_S, TOGETHER_AGAIN_S
from plugins.scheduler.machine.leader.leader import ScheduleTick
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.machine.log.replacing import taken_over
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    Command,
    GpusKept,
    Granted,
    JobHeals,
    MoveAsked,
    PlaceFailed,
    RanksReported,
    Replaced,
    Result,
    TakenBack,
)
from plugins.scheduler.messages.spec import Pack
from tests.plugins.scheduler.little import Little

H1, H2, H3, H4 = (HostId(f"h{number}") for number in range(1, 5))
SHAPES = ((1, 1), (1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (1, 2), (1, 3), (1, 4), (2, 2))
"""Shapes of gangs: workers, and GPUs of each."""
PACKS: tuple[Pack, ...] = ("few", "few", "few", "host", "any", "apart")
LOOKS_MAX = 150


def about(commands: Sequence[Command], kind: type[Granted] | type[TakenBack]) -> list[JobId]:
    """The jobs that commands of one kind are about."""
    return [command.job for command in commands if isinstance(command, kind)]


class Full(Little):
    """A gang of 4 keeps three GPUs of h1, where a guaranteed job has the fourth. On h2 and h3 a guaranteed job and an
    opportunistic one run, on h4 an opportunistic one. `gang`: it fits once those of h2 and h3 are gone."""

    def __init__(self) -> None:
        super().__init__([4, 2, 2, 1], {"red": 4, "blue": 8})
        self.guests: list[JobId] = []
        """The opportunistic jobs of h2 and h3."""
        self.put(self.submit(1, "red", "opportunistic"), H4)
        for host in (H1, H2, H3):
            self.put(self.submit(1, "red" if host != H1 else "blue"), host)
        for host in (H2, H3):
            self.guests.append(self.submit(1, "red", "opportunistic"))
            self.put(self.guests[-1], host)
        self.keeper = self.submit(1, "blue", each=4)
        assert [type(command) for command in self.look()] == [GpusKept] and self.queue.kept == {H1: 3}
        self.gang = self.submit(2, "red")

    def put(self, id: JobId, host: HostId) -> None:
        assert about(self.look(), Granted) == [id]
        self.place(self.queue.jobs[id], {host: self.free(host)[:1]})


def test_nobody_starts_where_others_stop_for_a_gang_while_another_keeps_gpus() -> None:
    """The three GPUs of h1 are free and open to opportunistic jobs, but coordinators put these into the tightest gaps,
    which the stopped ones leave."""
    rack = Full()
    late = [rack.submit(1, "red", "opportunistic") for _ in range(2)]
    said = rack.look()
    assert about(said, TakenBack) == rack.guests[::-1] and about(said, Granted) == []
    assert rack.look() == [], "they have not stopped yet"
    said = rack.settle()
    assert rack.state(rack.gang) == "running"
    assert len(about(said, TakenBack)) <= 2
    assert sorted(rack.state(job) for job in [*rack.guests, *late]) == ["queued", "running", "running", "running"]


def test_nobody_starts_in_the_way_of_a_gang_that_is_placed_again_beside_a_keeper() -> None:
    rack = Full()
    rack.look()
    for id in rack.guests:
        rack.end(rack.queue.jobs[id], -15)
    assert about(rack.look(), Granted) == [rack.gang, *rack.guests]
    for id in [*rack.guests, rack.gang]:  # the coordinators of the guests are faster
        rack.place(rack.queue.jobs[id])
    assert isinstance(rack.heard[-1], PlaceFailed) and rack.heard[-1].job == rack.gang
    rack.look()
    assert [type(command) for command in rack.look()] == [TakenBack, TakenBack]
    for id in rack.guests:
        rack.end(rack.queue.jobs[id], -15)
    assert about(rack.look(), Granted) == [rack.gang]
    assert rack.look() == [], "its coordinator has not placed it yet"
    rack.settle()
    assert [rack.state(job) for job in (rack.gang, *rack.guests)] == ["running"] * 3


class Kept(Little):
    """A gang without a quota wants all GPUs of h1 and keeps those that are open: a job has the first. `red`, which has
    a quota, comes before it."""

    def __init__(self, *gpus: int) -> None:
        super().__init__(gpus, {"red": 4})
        self.other = self.submit(1, "grey")
        self.look()
        self.place(self.queue.jobs[self.other], {H1: ["h1.0"]})
        self.gang = self.submit(1, "grey", each=gpus[0])
        self.settle()
        assert self.keeps(gpus[0] - 1)

    def keeps(self, gpus: int) -> bool:
        """Whether the gang keeps that many of h1 now."""
        return self.queue.keeper == self.gang and self.queue.kept == {H1: gpus}


def test_a_gang_gives_nothing_back_to_one_that_can_keep_nothing() -> None:
    """A tenant with a quota comes before one without, but no host is wide enough for its gang."""
    rack = Kept(3, 1, 1, 1, 1, 1)
    first = rack.submit(1, "red", each=4)
    assert rack.settle() == [] and rack.keeps(2)
    assert [rack.state(job) for job in (rack.other, rack.gang, first)] == ["running", "queued", "queued"]


def test_a_gang_with_a_quota_waits_for_no_keeper_without_one() -> None:
    """Tenants with a quota come before those without, whoever was first to keep GPUs."""
    rack = Kept(4, 1, 1, 1)
    first = rack.submit(1, "red", each=2)
    rack.settle()
    assert rack.state(first) == "running"
    assert rack.keeps(1), "it keeps what is open still"


def test_nobody_stops_for_a_gang_with_a_quota_where_a_keeper_gives_gpus_back() -> None:
    rack = Kept(3, 1, 1)
    guests = [rack.submit(1, "grey", "opportunistic") for _ in (H2, H3)]
    for guest, host in zip(guests, (H2, H3), strict=True):
        assert guest in about(rack.look(), Granted) or rack.state(guest) == "placing"
        rack.place(rack.queue.jobs[guest], {host: [f"{host}.0"]})
    first = rack.submit(1, "red")
    assert about(rack.settle(), TakenBack) == []
    assert [rack.state(job) for job in (first, *guests)] == ["running"] * 3
    assert rack.keeps(1)


class Life(Little):
    """A crowded rack of any shape, without the checks that make `Little` slow."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        gpus = [dice.choice((1, 2, 3, 4, 4)) for _ in range(dice.randrange(2, 9))]
        red = dice.randrange(1, sum(gpus))
        quotas = {"red": red, "blue": sum(gpus) - red} if dice.random() < 0.7 else {"red": red}
        super().__init__(gpus, quotas, narrow_first=dice.random() < 0.5, preemption=dice.random() < 0.8)
        self.late = dice.choice((0.0, 0.5))
        """The chance that a coordinator or a host does nothing before the next look."""
        self.scatters = dice.random() < 0.3
        self.order = dice.choice((1, -1))
        """Whether coordinators of older jobs are faster, or of younger ones."""
        self.stops_first = dice.choice((0.0, 0.5, 1.0))
        """The chance that what stops has ended before anybody is placed."""

    def say(self, command: Command) -> Result:
        return apply(self.queue, self.queue.index + 1, command)[0]

    def proposed(self, look: ScheduleTick) -> list[Command]:
        return [action.command for action in self.leader.handle(look, self.now_s)]

    def happen(self) -> None:
        dice = self.dice
        for _ in range(dice.randrange(1, 5)):
            (workers, each), kind = dice.choice(SHAPES), dice.choice(("guaranteed", "opportunistic"))
            self.try_submit(workers, dice.choice(("red", "blue", "grey")), kind, each, dice.choice(PACKS))
        running = self.jobs("running")
        for job in dice.sample(running, min(len(running), dice.randrange(3))):
            self.end(job)
        running = self.jobs("running")
        if running and dice.random() < 0.3:
            self.serve(dice.choice(running), 150.0)

    def rest(self) -> int:
        """Let the rack settle, and return how many opportunistic jobs were stopped meanwhile."""
        stopped = 0
        for _ in range(LOOKS_MAX):
            said = self.look()
            stopped += sum(isinstance(each, TakenBack) and not self.queue.jobs[each.job].counts for each in said)
            placing, stopping = self.jobs("placing")[:: self.order], self.jobs("stopping")
            if not said and not placing and not stopping and not self.leader.retry_at:
                return stopped
            first = self.dice.random() < self.stops_first
            self.stop(stopping if first else ())
            for job in placing:
                if self.dice.random() >= self.late:
                    anywhere = self.scatters and job.spec.pack in ("few", "any")
                    self.place(job, (anywhere and self.scattered(job)) or None)
            self.stop(() if first else stopping)
        raise AssertionError(f"it does not come to rest; said last: {said}")

    def stop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self.dice.random() >= self.late:
                self.end(job, -15)


def lives(seeds: Sequence[int]) -> int:
    """The number of opportunistic jobs that were stopped in all of these lives."""
    stopped = 0
    for seed in seeds:
        life = Life(seed)
        for _ in range(12):
            life.happen()
            promised = sum(job.spec.gpus for job in life.jobs("queued") if job.counts)
            try:
                now = life.rest()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            assert now <= 2 * promised, f"seed {seed}: {now} jobs were stopped for gangs of {promised} GPUs"
            stopped += now
    return stopped


def test_every_rack_comes_to_rest() -> None:
    assert lives(range(100)) > 100, "jobs have to stop for others, or this shows nothing"


@pytest.mark.long
def test_every_one_of_600_more_racks_comes_to_rest() -> None:
    assert lives([*range(100, 300), *range(1000, 1400)]) > 600


class Healing(Life):
    """A crowded rack whose gangs heal, and mind being spread, or not: their parts move for others."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.moves: list[tuple[JobId, float]] = []
        """The gangs that were to move, and when."""
        self.together = 0
        """Moves for a gang that could have started without."""
        self.merged = 0
        """Moves of a gang that ran on several hosts, to one of these."""

    def look(self, after_s: float = 1.0) -> list[Command]:
        said = super().look(after_s)
        moves = [command for command in said if isinstance(command, MoveAsked)]
        for move in moves:
            pause_s = AGAIN_S if move.gang is not None else LASTS_S
            recent = [at_s for id, at_s in self.moves if id == move.job and self.now_s - at_s < pause_s]
            assert not recent, f"{move.job} moves again after {self.now_s - recent[-1]} s"
        self.moves += [(move.job, self.now_s) for move in moves]
        self.together += sum("lies on one host" in move.by for move in moves if move.gang is not None)
        self.merged += sum(move.gang is None for move in moves)
        assert len({move.gang for move in moves}) <= 1, "for one gang at a time"
        return said

    def place(self, job: Job, on: Mapping[HostId, Sequence[str]] | None = None) -> None:
        super().place(job, on)
        if len(job.start.places) > 1 and job.state == "running" and self.dice.random() < 0.8:
            for at in job.start.places:
                self.heals(job, at)
        if job.state == "running" and self.dice.random() < 0.5:
            tensors = (70, 100)
            self.say(Attained(wall_s=1.0, host=job.start.places[0].host, service_gpu_s={}, tensors={job.id: tensors}))

    def heals(self, job: Job, at: Place) -> None:
        said = JobHeals(job.grant.epoch, at.since, True)
        self.say(Attained(wall_s=1.0, host=at.host, service_gpu_s={}, heals={job.id: said}))

    def end(self, job: Job, code: int = 0) -> None:
        for at in job.awaited:
            self.report(job, at, code)

    def report(self, job: Job, at: Place, code: int) -> None:
        codes = dict.fromkeys(at.ranks, code)
        said = RanksReported(wall_s=1.0, job=job.id, epoch=job.grant.epoch, host=at.host, codes=codes, asked=code != 0)
        self.say(msgspec.structs.replace(said, since=at.since))

    def stop(self, jobs: Sequence[Job]) -> None:
        """Let gangs that move get on too, or find no room."""
        for job in self.jobs("running"):
            for left in job.healing.leaving:
                self.report(job, left, -9)
                for at in job.start.places:
                    self.heals(job, at)
            for host, to in dict(job.healing.moving).items():
                place, free = job.place_on(host), self.free(to)
                assert place is not None
                if len(free) < len(place.gpus) or self.dice.random() < 0.1:
                    self.say(PlaceFailed(wall_s=1.0, job=job.id, epoch=job.grant.epoch, reason="no room"))
                    break
                new = Place(to, place.ranks, tuple(free[: len(place.gpus)]), job.healing.healed + 1)
                new = taken_over(new, job.place_on(to))
                done = self.say(Replaced(wall_s=1.0, job=job.id, epoch=job.grant.epoch, places={host: new}))
                assert isinstance(done, Applied), done
        super().stop(jobs)


def test_every_rack_whose_gangs_move_comes_to_rest() -> None:
    """Gangs come to rest also once those may move again that moved a while ago. (One that continues on fewer hosts may
    do so later: it never goes back.)"""
    moved = together = merged = again = 0
    for seed in range(100):
        life = Healing(seed)
        for _ in range(12):
            life.happen()
            try:
                life.rest()
                before = len(life.moves) - life.merged
                life.now_s += TOGETHER_AGAIN_S
                life.rest()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            life.queue.check()
            again += len(life.moves) - life.merged - before
        moved += len(life.moves)
        together += life.together
        merged += life.merged
    assert moved > 50 and together > 5 and merged > 5, "gangs have to move, or this shows nothing"
    assert again * 20 < moved, "who came to rest does not move for others, but for those that found no room"
