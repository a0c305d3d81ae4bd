"""The replicated state machine in every order of commands that hypothesis can think of."""

from typing import Any

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import HOLDING
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Applied,
    Arranged,
    Arrangement,
    Attained,
    CancelAsked,
    Command,
    Granted,
    HostDrained,
    JobHeals,
    MoveAsked,
    Placed,
    PlaceFailed,
    PlacesLost,
    Promoted,
    QuotaSet,
    RanksReported,
    Replaced,
    Result,
    ScaleAsked,
    Submitted,
    TakenBack,
    TenantSet,
    TimeLimitReached,
)
from plugins.scheduler.messages.spec import JobOwner, JobSpec
from plugins.scheduler.policy.carrying import carried_after, ending, shares_of, without
from tests.families import examples

H1, H2, H3 = HostId("h1"), HostId("h2"), HostId("h3")
TENANTS = ("alice", "bob")
HOSTS = (H1, H2, H3, HostId("h4"))


class AnyOrder(RuleBasedStateMachine):
    """Two copies that hear one sequence of commands: right, stale and wild ones. One of them is restored from
    snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.copy = JobTable(), JobTable()
        self.index = 0
        self.epochs: dict[JobId, int] = {}
        self.past: list[Command] = []

    def say(self, command: Command) -> Result:
        self.index += 1
        self.past.append(command)
        before = {tenant: self.queue.used(tenant) for tenant in TENANTS}
        result, notes = apply(self.queue, self.index, command)
        again, noted = apply(self.copy, self.index, command)
        assert (again, list(noted)) == (result, list(notes))
        for tenant in TENANTS:
            quota, used = self.queue.quota(tenant), self.queue.used(tenant)
            assert quota is None or used <= max(quota, before[tenant]), "held more than its quota"
        return result

    def some(self, number: int) -> JobId:
        return JobId(f"j{number}")

    @rule(
        workers=st.integers(1, 4),
        tenant=st.sampled_from(TENANTS),
        kind=st.sampled_from(["guaranteed", "opportunistic"]),
        key=st.integers(0, 30),
        owner=st.sampled_from([None, JobOwner("ann", 5), JobOwner("bob", 6)]),
    )
    def submit(self, workers: int, tenant: str, kind: str, key: int, owner: JobOwner | None) -> None:
        spec = JobSpec.parse({"argv": ["x"], "workers": workers, "tenant": tenant, "class": kind})
        spec = msgspec.structs.replace(spec, owner=owner)
        self.say(Submitted(wall_s=1.0, key=f"key{key:05}", spec=spec))

    @rule(number=st.integers(1, 6), skip=st.sampled_from([1, 1, 1, 0, 2]), coordinator=st.sampled_from(HOSTS))
    def grant(self, number: int, skip: int, coordinator: HostId) -> None:
        job = self.queue.jobs.get(self.some(number))
        self.say(
            Granted(
                wall_s=1.0, job=self.some(number), epoch=(job.grant.epoch if job else 0) + skip, coordinator=coordinator
            )
        )

    @rule(number=st.integers(1, 6), split=st.integers(0, 4), gpu=st.integers(0, 3), stale=st.integers(0, 1))
    def place(self, number: int, split: int, gpu: int, stale: int) -> None:
        job = self.queue.jobs.get(self.some(number))
        workers = job.spec.workers if job else 2
        parts = [(H1, range(min(split, workers))), (H2, range(min(split, workers), workers))]
        places = tuple(Place(h, tuple(r), tuple(f"g{gpu + n}" for n in r)) for h, r in parts if r)
        epoch = max(0, (job.grant.epoch if job else 1) - stale)
        self.say(Placed(wall_s=1.0, job=self.some(number), epoch=epoch, places=places, master_addr="", master_port=1))

    @rule(
        number=st.integers(1, 6),
        host=st.sampled_from(HOSTS),
        code=st.sampled_from([0, 0, 1, 75, -9, -15]),
        asked=st.booleans(),
        stale=st.sampled_from([0, 0, 0, 1]),
    )
    def report(self, number: int, host: HostId, code: int, asked: bool, stale: int) -> None:
        job = self.queue.jobs.get(self.some(number))
        place = (job.left_on(host) or job.place_on(host)) if job else None
        codes = dict.fromkeys(place.ranks if place else (0,), code)
        epoch = max(0, (job.grant.epoch if job else 1) - stale)
        said: dict[str, Any] = {
            "job": self.some(number),
            "epoch": epoch,
            "host": host,
            "since": place.since if place else 0,
        }
        self.say(RanksReported(wall_s=1.0, codes=codes, asked=asked, **said))

    @rule(key=st.integers(31, 40), hosts=st.permutations(HOSTS), workers=st.integers(2, 3))
    def begin(self, key: int, hosts: list[HostId], workers: int) -> None:
        """Begin a gang that runs on a host for each worker, and may lose some."""
        spec = JobSpec.parse({"argv": ["x"], "workers": workers, "tenant": "alice"})
        said = self.say(Submitted(wall_s=1.0, key=f"key{key:05}", spec=spec))
        job = self.queue.jobs.get(said.job) if isinstance(said, Applied) and said.job is not None else None
        if job is None:
            return
        self.say(Granted(wall_s=1.0, job=job.id, epoch=job.grant.epoch + 1, coordinator=H1))
        places = tuple(Place(host, (n,), (f"g{key}",)) for n, host in enumerate(hosts[:workers]))
        self.say(Placed(wall_s=1.0, job=job.id, epoch=job.grant.epoch, places=places, master_addr="", master_port=1))
        self.heal(job.number, True)

    @rule(key=st.integers(41, 46), hosts=st.permutations(HOSTS), fewest=st.integers(1, 2))
    def begin_elastic(self, key: int, hosts: list[HostId], fewest: int) -> None:
        """Begin an elastic job of up to six processes, which has registered its state."""
        spec = JobSpec.parse({"argv": ["x"], "workers": fewest, "workers_max": 6, "tenant": "bob"})
        said = self.say(Submitted(wall_s=1.0, key=f"key{key:05}", spec=spec))
        job = self.queue.jobs.get(said.job) if isinstance(said, Applied) and said.job is not None else None
        if job is None:
            return
        self.say(Granted(wall_s=1.0, job=job.id, epoch=job.grant.epoch + 1, coordinator=H1))
        places = tuple(Place(host, (n,), (f"e{key}",)) for n, host in enumerate(hosts[:fewest]))
        self.say(Placed(wall_s=1.0, job=job.id, epoch=job.grant.epoch, places=places, master_addr="", master_port=1))
        self.heal(job.number, True)

    @rule(number=st.integers(1, 6), workers=st.integers(1, 7), stale=st.sampled_from([0, 0, 1]))
    def scale(self, number: int, workers: int, stale: int) -> None:
        running = [job for job in self.queue.jobs.values() if job.spec.elastic] or list(self.queue.jobs.values())
        for job in running[number % len(running) :][:1] if running else ():
            epoch = max(0, job.grant.epoch - stale)
            self.say(ScaleAsked(wall_s=1.0, job=job.id, epoch=epoch, workers=workers, coordinator=H1))

    @rule(
        number=st.integers(1, 6),
        on=st.lists(st.sampled_from(HOSTS), min_size=1, max_size=3),
        ends=st.integers(0, 2),
        gpu=st.integers(0, 5),
        stale=st.sampled_from([0, 0, 0, 1]),
    )
    def arrange(self, number: int, on: list[HostId], ends: int, gpu: int, stale: int) -> None:
        """Let an elastic job begin processes on these hosts, and end some, in a proposal that may be wrong in every
        way."""
        placed = [job for job in self.queue.jobs.values() if job.spec.elastic and job.placed]
        if not placed:
            return
        job = placed[number % len(placed)]
        gone = ending(job.start.places, job.carriers([0]), ends)
        carried, config = job.start.carried, max(0, job.healing.healed - stale)
        if not 1 <= len(carried) - len(gone) + len(on) <= 6 or len(on) > job.spec.world_size - len(carried):
            return  # none carries a rank, or there are not enough ranks to name those that begin
        names = sorted(carried_after(carried, gone, len(on)).keys() - (carried.keys() - set(gone)))
        places = {place.host: place for place in without(job.start.places, gone, 1)}
        for n, (host, name) in enumerate(zip(on, names, strict=True)):
            old = places.get(host, Place(host, (), ()))
            places[host] = Place(host, (*old.ranks, name), (*old.gpus, f"g{gpu}.{n}"), config + 1)
        new = Arrangement(job.grant.epoch, config, tuple(places.values()))
        self.say(Arranged(wall_s=1.0, jobs={job.id: new}))

    @rule(
        number=st.integers(0, 5),
        cuts=st.lists(st.integers(1, 6), min_size=3, max_size=3),
        owners=st.none() | st.lists(st.sampled_from((*HOSTS, HostId(""))), min_size=6, max_size=6),
        stale=st.sampled_from([0, 0, 0, 1]),
    )
    def share_out(self, number: int, cuts: list[int], owners: list[HostId] | None, stale: int) -> None:
        """Processes stay as they are, and carry other ranks, or tables are to be elsewhere."""
        running = [job for job in self.queue.jobs.values() if job.state == "running" and job.spec.elastic]
        if not running:
            return
        job = running[number % len(running)]
        shares = {place.host: len(place.ranks) for place in job.start.places}
        for at, host in enumerate(list(shares)[:3]):
            shares[host] += cuts[at] if at else 0
        first = next(iter(shares))
        shares[first] += max(0, job.spec.world_size - sum(shares.values()))
        said = None if owners is None else tuple(owners[: job.start.tables])
        new = Arrangement(job.grant.epoch, max(0, job.healing.healed - stale), job.start.places, shares, said)
        result = self.say(Arranged(wall_s=1.0, jobs={job.id: new}))
        if isinstance(result, Applied):
            assert shares_of(job.start.carried, job.start.places) == shares

    @rule(number=st.integers(1, 6), may=st.sampled_from([True, True, True, False]))
    def heal(self, number: int, may: bool) -> None:
        job = self.queue.jobs.get(self.some(number))
        for place in job.start.places if job else ():
            said = {
                self.some(number): JobHeals(job.grant.epoch if job else 0, place.since, may, place.ranks if may else ())
            }
            self.say(Attained(wall_s=1.0, host=place.host, service_gpu_s={}, heals=said))

    @rule(number=st.integers(1, 6), lost=st.sets(st.sampled_from(HOSTS), max_size=2), stale=st.sampled_from([0, 0, 1]))
    def lose(self, number: int, lost: set[HostId], stale: int) -> None:
        job = self.queue.jobs.get(self.some(number))
        epoch, hosts = max(0, (job.grant.epoch if job else 1) - stale), tuple(sorted(lost))
        said: dict[str, Any] = {"job": self.some(number), "epoch": epoch, "coordinator": H1, "reason": "r", "term": 0}
        self.say(PlacesLost(wall_s=1.0, hosts=hosts, **said))

    @rule(number=st.integers(1, 6), host=st.sampled_from(HOSTS), to=st.sampled_from([None, *HOSTS]))
    def move(self, number: int, host: HostId, to: HostId | None) -> None:
        job = self.queue.jobs.get(self.some(number))
        epoch = job.grant.epoch if job else 1
        self.say(MoveAsked(wall_s=1.0, job=self.some(number), epoch=epoch, host=host, to=to, coordinator=H1))

    @rule(host=st.sampled_from(HOSTS), drained=st.booleans(), stop=st.booleans())
    def drain(self, host: HostId, drained: bool, stop: bool) -> None:
        self.say(HostDrained(wall_s=1.0, host=host, drained=drained, stop_jobs=stop))
        assert (host in self.queue.drained) == drained

    @rule(number=st.integers(1, 6), to=st.permutations(HOSTS), gpu=st.integers(0, 3), wild=st.booleans())
    def replace(self, number: int, to: list[HostId], gpu: int, wild: bool) -> None:
        job = self.queue.jobs.get(self.some(number))
        if job is None or not job.seeks:
            return
        left = [place for place in job.start.places if place.host in (*job.healing.missing, *job.healing.moving)]
        taken = () if wild else [place.host for place in (*job.start.places, *job.healing.leaving)]
        hosts, since = [host for host in to if host not in taken], job.healing.healed + 1
        places = {
            place.host: Place(host, place.ranks, tuple(f"g{gpu}.{n}" for n in place.ranks), since)
            for place, host in zip(left, hosts, strict=False)
        }
        if places:
            self.say(Replaced(wall_s=1.0, job=job.id, epoch=job.grant.epoch, places=places))

    @rule(lost=st.sampled_from(HOSTS), move=st.booleans())
    def lose_or_leave(self, lost: HostId, move: bool) -> None:
        """Let every gang that runs on a host lose it, or leave it."""
        for job in list(self.queue.jobs.values()):
            if job.state == "running" and move:
                self.move(job.number, lost, None)
            elif job.state == "running":
                self.lose(job.number, {lost}, 0)

    @rule(number=st.integers(1, 6), lost=st.sets(st.sampled_from(HOSTS)), stale=st.sampled_from([0, 0, 1]))
    def take_back(self, number: int, lost: set[HostId], stale: int) -> None:
        job = self.queue.jobs.get(self.some(number))
        epoch = max(0, (job.grant.epoch if job else 1) - stale)
        cause: Any = "host lost" if lost else "preempted"
        self.say(
            TakenBack(wall_s=1.0, job=self.some(number), epoch=epoch, cause=cause, reason="r", lost=tuple(sorted(lost)))
        )

    @rule(number=st.integers(1, 6), what=st.sampled_from(["cancel", "fail", "time", "promote"]))
    def other(self, number: int, what: str) -> None:
        id, job = self.some(number), self.queue.jobs.get(self.some(number))
        epoch = job.grant.epoch if job else 1
        commands: dict[str, Command] = {
            "cancel": CancelAsked(wall_s=1.0, job=id),
            "fail": PlaceFailed(wall_s=1.0, job=id, epoch=epoch, reason="r"),
            "time": TimeLimitReached(wall_s=1.0, job=id, epoch=epoch),
            "promote": Promoted(wall_s=1.0, job=id, epoch=epoch),
        }
        self.say(commands[what])

    @rule(tenant=st.sampled_from([*TENANTS, "*"]), gpus=st.none() | st.integers(0, 6), if_absent=st.booleans())
    def quota(self, tenant: str, gpus: int | None, if_absent: bool) -> None:
        self.say(QuotaSet(wall_s=1.0, tenant=tenant, gpus=gpus, if_absent=if_absent))

    @rule(
        tenant=st.sampled_from(TENANTS),
        users=st.lists(st.sampled_from(["ann", "bob"]), max_size=3),
        gpus=st.none() | st.integers(0, 6),
        sets_quota=st.booleans(),
        before=st.sampled_from([None, (), ("ann",)]),
    )
    def users(
        self, tenant: str, users: list[str], gpus: int | None, sets_quota: bool, before: tuple[str, ...] | None
    ) -> None:
        asked: dict[str, Any] = {"users": tuple(users), "sets_quota": sets_quota, "gpus": gpus, "before": before}
        result = self.say(TenantSet(wall_s=1.0, tenant=tenant, **asked))
        now = self.queue.tenants.get(tenant, ())
        assert now == self.copy.tenants.get(tenant, ()) and list(now) == sorted(set(now))
        assert not isinstance(result, Applied) or now == tuple(sorted(set(users)))

    @rule(number=st.integers(1, 6), host=st.sampled_from(HOSTS), done=st.floats(0, 100))
    def attain(self, number: int, host: HostId, done: float) -> None:
        job = self.queue.jobs.get(self.some(number))
        before = job.attained_gpu_s if job else 0.0
        self.say(Attained(wall_s=1.0, host=host, service_gpu_s={self.some(number): done}))
        assert job is None or job.attained_gpu_s >= before

    @precondition(lambda self: self.past)
    @rule(at=st.integers(0, 10**6))
    def repeat(self, at: int) -> None:
        """Repeat what a leader that was cut off said long ago."""
        self.say(self.past[at % len(self.past)])

    @rule()
    def restore(self) -> None:
        restored = JobTable()
        restored.restore(self.copy.snapshot())
        assert restored.snapshot() == self.copy.snapshot()
        self.copy = restored

    @invariant()
    def all_holds(self) -> None:
        self.queue.check()
        self.copy.check()
        assert self.queue.snapshot() == self.copy.snapshot()
        for job in self.queue.jobs.values():
            assert job.grant.epoch >= self.epochs.get(job.id, 0), "an epoch fell"
            self.epochs[job.id] = job.grant.epoch
            if job.placed:
                names = sorted(rank for place in job.start.places for rank in place.ranks)
                assert names == (sorted(job.start.carried) if job.spec.elastic else list(range(job.spec.workers)))
                assert job.awaited, "a gang of which nothing is left"
            assert job.state not in HOLDING or job.grant.epoch > 0


AnyOrder.TestCase.settings = hypothesis_settings(max_examples=examples(120), stateful_step_count=50, deadline=None)
test_in_any_order_of_commands_the_promises_hold_and_copies_agree = AnyOrder.TestCase
