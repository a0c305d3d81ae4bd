"""The leader that looks only at what changed proposes what the plain one proposes, which looks at everybody."""

import collections
import random
from typing import Any

import msgspec
import pytest

from covey.core.ids import HostId
from plugins.facts import Place, SavedAt
from plugins.scheduler.machine.leader.leader import Leader, RackHost, ScheduleTick
from plugins.scheduler.machine.leader.leases import LeaseAsked
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    CancelAsked,
    Command,
    Demoted,
    Granted,
    HoldAsked,
    HostDrained,
    Placed,
    PlaceFailed,
    PriorityAsked,
    Promoted,
    QuotaSet,
    RanksReported,
    ReleaseAsked,
    RequeueAsked,
    Submitted,
    TakenBack,
    Upgraded,
    WeightSet,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.plugins.scheduler.plain_leader import PlainLeader

TENANTS = ("red", "blue", "green", "grey")
CLASSES = ("guaranteed", "guaranteed", "guaranteed", "auto", "opportunistic")


class Story:
    """A little crowded rack in which anything happens, and two leaders that look at one log."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.gpus = {HostId(f"h{number}"): dice.randrange(1, 5) for number in range(1, dice.randrange(2, 6))}
        self.gone: dict[HostId, float] = {}
        whole = sum(self.gpus.values())
        quotas = {tenant: dice.randrange(whole + 1) for tenant in TENANTS if dice.random() < 0.6}
        self.settings = SchedulerSettings(
            queue_thresholds_gpu_s=tuple(sorted(dice.sample((10.0, 40.0, 100.0, 400.0), dice.randrange(3)))),
            narrow_first=dice.random() < 0.6,
            preemption=dice.random() < 0.9,
            demote_after_s=dice.choice((None, 15.0, 60.0)),
            starve_limit_s=dice.choice((None, 30.0, 200.0)),
            gang_patience_s=dice.choice((None, 5.017, 31.017)),
            unsaved_stops=dice.choice((None, 0, 1, 3)),
            restart_s=dice.choice((0.0, 0.5, 6.0)),
            promote_knob=dice.choice((None, 1.0, 2.0)),
            quotas=quotas,
            default_quota=dice.choice((None, None, None, 3)),
        )
        self.queue = JobTable()
        self.leader, self.plain = Leader(self.queue, self.settings), PlainLeader(self.queue, self.settings)
        self.now_s = 100.0
        self.looks = self.confirmed = 0
        self.said: collections.Counter[str] = collections.Counter()
        """What the leaders proposed, by name, and why for what was taken back."""

    def say(self, command: Command) -> bool:
        result, _ = apply(self.queue, self.queue.index + 1, command)
        return isinstance(result, Applied)

    def some(self, *states: str) -> Job | None:
        jobs = [job for job in self.queue.live() if not states or job.state in states]
        return self.dice.choice(jobs) if jobs else None

    def look(self) -> None:
        self.now_s += self.dice.choice((0.0, 0.3, 1.0, 1.0, 7.0, 30.0, 70.0))
        rack = tuple(RackHost(host, gpus, self.gone.get(host)) for host, gpus in self.gpus.items())
        look = ScheduleTick(rack, self.now_s)
        ours = [action.command for action in self.leader.handle(look, self.now_s)]
        theirs = [action.command for action in self.plain.handle(look, self.now_s)]
        assert ours == theirs
        self.leader.check()
        self.looks += 1
        self.said.update(getattr(command, "cause", type(command).__name__) for command in ours)
        self.said["firm, and has saved"] += sum(
            self.queue.jobs[id].measured.saved is not None for id in self.plain.saves.firm
        )
        if self.dice.random() < 0.9:
            for command in ours[: self.dice.choice((1, 99, 99, 99))]:
                self.say(command)

    def step(self) -> None:
        dice = self.dice
        what = dice.choice(
            ("submit",) * 6 + ("look",) * 8 + ("place",) * 6 + ("end",) * 4 + ("serve",) * 4
            + ("renew", "renew", "fail", "cancel", "quota", "host", "host", "take", "wild", "lead", "restore", "drain")
            + ("save",) * 4 + ("hold", "release", "release", "requeue", "move")
        )  # fmt: skip
        getattr(self, f"do_{what}")() if what != "look" else self.look()

    def do_submit(self) -> None:
        dice = self.dice
        given: dict[str, Any] = {
            "argv": ["x"],
            "workers": dice.choice((1, 1, 1, 2, 2, 3, 4)),
            "gpus_per_worker": dice.choice((1, 1, 1, 2, 2, 3, 0)),
            "tenant": dice.choice(TENANTS),
            "class": dice.choice(CLASSES),
            "skew": dice.choice((0.0, 0.9)),
            "pack": dice.choice(("few", "few", "host", "any", "apart")),
            "on_lost": dice.choice(("heal", "heal", "heal", "keep")),
            "retries": dice.choice((0, 0, 1)),
        }
        if dice.random() < 0.1:
            given["time_limit_s"] = 20
        if dice.random() < 0.1:
            given["array"] = dice.choice(("0-4", "0-9%2", "7,1-2"))
        if dice.random() < 0.1:
            given["begin_wall_s"] = self.now_s + dice.choice((0.0, 10.0, 50.0))
        if dice.random() < 0.1 and (other := self.some()) is not None:
            given["after"] = [f"{dice.choice(('ok', 'any'))}:{other.id}"]
        key = f"key-{self.queue.index:08}"
        self.say(Submitted(wall_s=1.0, key=key, spec=JobSpec.parse(given), may_demote=True))

    def do_renew(self) -> None:
        """Let a host ask for its ranks, and sometimes for some that are over."""
        host = self.dice.choice(list(self.gpus))
        grants = [
            (job.id, job.grant.epoch - (self.dice.random() < 0.1)) for job in self.queue.live() if job.awaits(host)
        ]
        (given,) = self.leader.leases.handle(LeaseAsked(host, tuple(grants)), self.now_s)
        assert list(given.grants) == self.plain.confirm(host, grants, self.now_s)
        self.confirmed += bool(given.grants)

    def do_place(self) -> None:
        """Place a gang anywhere where GPUs are free by the log, or nowhere."""
        for job in [job for job in self.queue.live() if job.state == "placing"]:
            if self.dice.random() < 0.8:
                self.place(job)

    def place(self, job: Job) -> None:
        each, rank, places = job.spec.gpus_per_worker, 0, []
        hosts = [host for host in self.gpus if host not in self.gone or self.dice.random() < 0.1]
        self.dice.shuffle(hosts)
        for host in hosts:
            held = self.queue.holders.get(host, {})
            free = [gpu for gpu in (f"{host}.{number}" for number in range(self.gpus[host])) if gpu not in held]
            count = min(job.spec.workers - rank, len(free) // each if each else 9)
            count = min(count, 1) if job.spec.pack == "apart" else count
            count = 0 if job.spec.pack == "host" and count < job.spec.workers else count
            if count:
                places.append(Place(host, tuple(range(rank, rank + count)), tuple(free[: count * each])))
                rank += count
        if rank < job.spec.workers:
            self.say(PlaceFailed(wall_s=1.0, job=job.id, epoch=job.grant.epoch, reason="no room"))
        else:
            at = tuple(places)
            self.say(Placed(wall_s=1.0, job=job.id, epoch=job.grant.epoch, places=at, master_addr="", master_port=1))

    def do_end(self) -> None:
        job = self.some("running", "stopping", "stopping")
        code = self.dice.choice((0, 0, 0, 1, 75, -15))
        for place in job.start.places if job is not None else ():
            if job is not None and job.awaits(place.host) and self.dice.random() < 0.9:
                codes = dict.fromkeys(place.ranks, code)
                told = {"job": job.id, "epoch": job.grant.epoch, "host": place.host, "codes": codes, "asked": code < 0}
                self.say(msgspec.convert({"wall_s": 1.0, **told}, RanksReported))

    def do_serve(self) -> None:
        job = self.some("running", "running", "queued")
        if job is not None and job.start.places:
            host = job.start.places[0].host
            total = job.measured.attained.get(host, 0.0) + self.dice.choice((3.0, 20.0, 90.0))
            self.say(Attained(wall_s=1.0, host=host, service_gpu_s={job.id: total}))

    def do_save(self) -> None:
        """Let a job save, some time ago."""
        job = self.some("running", "running", "stopping")
        if job is not None and job.start.places:
            step = 1 if job.measured.saved is None else job.measured.saved.step + 1
            saved = SavedAt(step, self.now_s - self.dice.choice((0.0, 0.0, 2.0, 30.0)), "x")
            host = job.start.places[0].host
            self.say(Attained(wall_s=self.now_s, host=host, service_gpu_s={}, saved={job.id: saved}))

    def do_hold(self) -> None:
        if (job := self.some()) is not None:
            self.say(HoldAsked(wall_s=1.0, job=job.id))

    def do_release(self) -> None:
        if (job := self.some()) is not None:
            self.say(ReleaseAsked(wall_s=1.0, job=job.id))

    def do_requeue(self) -> None:
        job, hold = self.some("running", "stopping"), self.dice.random() < 0.3
        if job is not None:
            self.say(RequeueAsked(wall_s=1.0, job=job.id, epoch=job.grant.epoch, hold=hold))

    def do_move(self) -> None:
        job, up = self.some("queued"), self.dice.random() < 0.5
        if job is not None:
            self.say(PriorityAsked(wall_s=1.0, job=job.id, up=up))

    def do_fail(self) -> None:
        job = self.some("placing")
        if job is not None:
            self.say(PlaceFailed(wall_s=1.0, job=job.id, epoch=job.grant.epoch, reason="no"))

    def do_cancel(self) -> None:
        job = self.some()
        if job is not None:
            self.say(CancelAsked(wall_s=1.0, job=job.id))

    def do_quota(self) -> None:
        tenant = self.dice.choice((*TENANTS, "*"))
        self.say(QuotaSet(wall_s=1.0, tenant=tenant, gpus=self.dice.choice((None, 0, 1, 2, 4, 9))))
        if tenant != "*":
            self.say(WeightSet(wall_s=1.0, tenant=tenant, weight=self.dice.choice((0.5, 1.0, 4.0))))

    def do_host(self) -> None:
        """Let a host go, come back, break a GPU or never have been heard of."""
        host = self.dice.choice((*self.gpus, HostId("h9")))
        match self.dice.randrange(4):
            case 0:
                self.gpus[host] = self.dice.randrange(5)
            case 1 if len(self.gpus) > 1 and self.dice.random() < 0.3:
                self.gpus.pop(host, None)
            case 2 if host in self.gpus:
                self.gone[host] = self.dice.choice((1.0, 5.0, 61.0))
            case _:
                self.gone.pop(host, None)

    def do_drain(self) -> None:
        """Drain a host, or use it again."""
        host, dice = self.dice.choice((*self.gpus, HostId("h9"))), self.dice
        self.say(HostDrained(wall_s=1.0, host=host, drained=dice.random() < 0.5, stop_jobs=dice.random() < 0.5))

    def do_take(self) -> None:
        job = self.some("placing", "running")
        if job is not None:
            lost = tuple(place.host for place in job.start.places if self.dice.random() < 0.3)
            cause: Any = "host lost" if lost else "preempted"
            self.say(TakenBack(wall_s=1.0, job=job.id, epoch=job.grant.epoch, cause=cause, reason="r", lost=lost))

    def do_wild(self) -> None:
        """Say what another leader said."""
        job = self.some()
        if job is None:
            return
        wild: list[Command] = [
            Promoted(wall_s=1.0, job=job.id, epoch=job.grant.epoch),
            Demoted(wall_s=1.0, job=job.id, epoch=job.grant.epoch, waited_s=1.0),
            Upgraded(wall_s=1.0, job=job.id, epoch=job.grant.epoch),
            Granted(
                wall_s=1.0,
                job=job.id,
                epoch=job.grant.epoch + 1,
                coordinator=self.dice.choice((*self.gpus, HostId("h9"))),
            ),
        ]
        self.say(self.dice.choice(wild))

    def do_lead(self) -> None:
        self.leader.forget()
        self.plain.forget()

    def do_restore(self) -> None:
        self.queue.restore(self.queue.snapshot())


def agree(seed: int, looks: int) -> Story:
    story = Story(seed)
    steps = 0
    while story.looks < looks and steps < 20 * looks:
        steps += 1
        try:
            story.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, look {story.looks}: {error}") from error
    return story


ALL_KINDS = {
    "BeginReached", "Demoted", "Elapsed", "TaskBegun", "firm, and has saved", "GpusKept", "Granted", "Promoted",
    "QuotaSet", "TimeLimitReached", "Upgraded",
    "coordinator lost", "host lost", "placing took too long", "preempted",
}  # fmt: skip


def test_the_leader_and_a_plain_one_propose_the_same() -> None:
    said = sum((agree(seed, 40).said for seed in range(80)), collections.Counter[str]())
    assert set(said) == ALL_KINDS, "the stories come to everything that a leader says"


@pytest.mark.long
def test_the_leader_and_a_plain_one_propose_the_same_at_10000_looks() -> None:
    stories = [agree(seed, 40) for seed in range(1000, 1250)]
    assert sum(story.looks for story in stories) >= 10_000
    said = sum((story.said for story in stories), collections.Counter[str]())
    assert all(said[kind] > 20 for kind in ALL_KINDS), said
