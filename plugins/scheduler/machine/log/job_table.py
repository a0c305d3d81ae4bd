"""The replicated state of the scheduler: what is remembered, what follows from it, and how it is kept.

Only commands of the log change it; `machine/log/queue.py` applies them.
"""

import weakref
from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from covey.core.version import VERSION, is_newer
from plugins.facts import Place
from plugins.scheduler.machine.log.jobs import HOLDING, OVER, Job
from plugins.scheduler.machine.log.kept_bytes import KeptBytes
from plugins.scheduler.machine.log.models import Models, StepHistory, model_of
from plugins.scheduler.messages.arrays import tasks_of
from plugins.scheduler.policy.eligible import Drain, leaves
from plugins.scheduler.policy.fair import NO_USE, RecentUse, TenantUse
from plugins.scheduler.policy.shared import device_of

ENDED_MAX = 1000
"""The number of ended jobs that are kept."""
SNAPSHOT_VERSION = 1
"""Format version of what `JobTable.snapshot` writes."""
DRAINED_MAX = 10_000
"""The most hosts that are drained or cordoned at a time."""
FORGOTTEN_MAX = 256
"""The most hosts of which it is remembered that they will never come back: as many as a rack has; the newest ones."""
TENANTS_MAX = 1000
"""The most tenants that have users."""


class SnapshotHead(msgspec.Struct, frozen=True):
    """The part of a snapshot that every version has."""

    version: int


class SnapshotNeeds(msgspec.Struct, frozen=True):
    """What is read of a snapshot before its state, which a newer version may write in another way."""

    needs: str = ""


class QueueState(SnapshotHead, frozen=True):
    """A snapshot of this format version."""

    index: int
    next_number: int
    quotas: dict[str, int | None]
    overshoot: dict[str, int]
    jobs: list[Job]
    """The jobs in order of admission."""
    ended: list[JobId]
    """The ended jobs in order of ending."""
    clock_s: float
    keeper: JobId | None
    kept: dict[HostId, int]
    tensors: dict[str, tuple[int, int]]
    steps: dict[str, StepHistory]
    leading_term: int
    leases_over_s: float
    pairs: dict[str, dict[str, float]]
    pauses_over_s: float
    drained: dict[HostId, Drain]
    rack_s: float
    tenants: dict[str, tuple[str, ...]] = {}
    """The users of each tenant; a snapshot of an older version has none."""
    needs: str = ""
    """The oldest release that applies all commands of this log as they are meant (`messages.releases`); empty: all."""
    forgotten: dict[HostId, int] = {}
    """Hosts that will never come back, and the latest boot that is meant, in the order in which somebody said so."""
    recent: dict[str, RecentUse] = {}
    """What each tenant's guaranteed jobs attained of late."""
    weights: dict[str, float] = {}
    """The weights of tenants that have another than 1."""


UNSEEN_MAX = 10_000
"""The most ended jobs that are kept until somebody looks though the log has forgotten them: as many as may wait."""
FEED_MAX = 200_000
"""The most changes that wait to be read; beyond that, reading all jobs costs no more than reading the changes."""


class Feed:
    """The jobs that changed since the reader last asked, so that whatever follows the queue need not read all of it."""

    def __init__(self) -> None:
        self._ids: dict[JobId, None] = {}
        self._all = True

    def note(self, ids: Iterable[JobId]) -> None:
        if self._all:
            return
        self._ids.update(dict.fromkeys(ids))
        if len(self._ids) > FEED_MAX:
            self.everything()

    def everything(self) -> None:
        """Make the reader begin anew."""
        self._ids, self._all = {}, True

    @property
    def pending(self) -> bool:
        """Whether something changed that the reader has not asked for yet."""
        return self._all or bool(self._ids)

    def take(self) -> list[JobId] | None:
        """The changed jobs, each once, in no order that means anything; None: everything may have changed."""
        ids, whole = self._ids, self._all
        self._ids, self._all = {}, False
        return None if whole else list(ids)


_heads = msgspec.msgpack.Decoder(SnapshotHead)
_needs = msgspec.msgpack.Decoder(SnapshotNeeds)
_snapshots = msgspec.msgpack.Decoder(QueueState)


class JobTable:
    """The replicated table of jobs, quotas, and the holders of GPUs."""

    def __init__(self) -> None:
        self.index = 0
        self.next_number = 1
        self.jobs: dict[JobId, Job] = {}
        self.quotas: dict[str, int | None] = {}
        self.overshoot: dict[str, int] = {}
        self.needs = ""
        """The oldest release that applies all commands so far, such as 0.2; empty: all."""
        self.tenants: dict[str, tuple[str, ...]] = {}
        """The users who may submit for each tenant, ascending. No tenant is here without users."""
        self.forgotten: dict[HostId, int] = {}
        """Hosts that a person said will never be back, as `QueueState` keeps them."""
        self.recent: dict[str, RecentUse] = {}
        """What each tenant's guaranteed jobs attained of late."""
        self.weights: dict[str, float] = {}
        """The weights of tenants that have another than 1. The mapping is replaced whole whenever it changes."""
        self.ended: list[JobId] = []
        self.clock_s = 0.0
        """The log's clock: seconds during which any job waited, as far as leaders wrote them into the log."""
        self.rack_s = 0.0
        """The rack's clock in seconds, as far as commands told it. It only grows, whatever wall clocks do."""
        self.keeper: JobId | None = None
        """The gang that fits its quota and not yet the rack, and keeps GPUs."""
        self.kept: dict[HostId, int] = {}
        """GPUs per host that `keeper` keeps, so that no other guaranteed job gets them."""
        self.models = Models()
        self.leading_term = 0
        """The term of the newest leader that decides."""
        self.leases_over_s = 0.0
        """Seconds within which the leases of leaders up to that one are certainly over."""
        self.pauses_over_s = 0.0
        """Seconds within which ranks that may be lost certainly stand still without those leases; 0: not known."""
        self.drained: dict[HostId, Drain] = {}
        """Hosts where no rank starts, drained or cordoned. The mapping is replaced whole whenever it changes."""
        self.notes: list[LogEvent] = []
        """Events of the command that is being applied."""
        self.woken: dict[JobId, None] = {}
        """Jobs that the command that is being applied changes, beside those that it names."""
        self._changed: dict[JobId, None] = {}
        self._unseen: deque[Job] = deque(maxlen=UNSEEN_MAX)
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        self.rebuild()

    def rebuild(self) -> None:
        """Compute what follows from the rest: keys, usage per tenant, and who holds which GPU."""
        self.keys: dict[str, JobId] = {job.key: job.id for job in self.jobs.values() if job.key}
        self.tasks: dict[tuple[JobId, int], JobId] = {
            (job.task.array, job.task.index): job.id for job in self.jobs.values() if job.task is not None
        }
        """The jobs that tasks of arrays became: by array and index."""
        self.dependents: dict[JobId, dict[JobId, None]] = {}
        """A job that is not over -> the jobs that wait for its end."""
        for job in self.live():
            for after in job.holds.after:
                self.dependents.setdefault(JobId(after.partition(":")[2]), {})[job.id] = None
        self.kept_bytes = KeptBytes(self.jobs.values())
        self.holders: dict[HostId, dict[str, JobId]] = {}
        self._used: dict[str, int] = {}
        self._changed |= dict.fromkeys(self.jobs)
        for feed in self._feeds:
            feed.everything()
        for job in self.jobs.values():
            if job.state in HOLDING:
                self._add(job, 1)
            for place in job.awaited:
                self.hold(job, place)
            job.bill.only({f"{place.host} {gpu}" for place in job.awaited for gpu in place.gpus}, self.rack_s)

    # ---- reading ----

    def live(self) -> list[Job]:
        """Jobs that are not over, in order of admission."""
        return [job for job in self.jobs.values() if not job.over]

    def as_it_runs(self, id: JobId) -> Job | None:
        """The job as its hosts have it now (`Job.as_sure`), whatever it is to become; None: it is not known."""
        job = self.jobs.get(id)
        return None if job is None else job.as_sure()

    def quota(self, tenant: str) -> int | None:
        """GPUs a tenant may hold; None: not limited."""
        return self.quotas.get(tenant, self.quotas.get("*"))

    def tenants_of(self, user: str) -> list[str]:
        """The tenants for which this user may submit jobs, ascending."""
        return sorted(tenant for tenant, users in self.tenants.items() if user in users)

    def has_quota(self, tenant: str) -> bool:
        """Whether a quota limits this tenant; its jobs come before those of tenants without one."""
        return self.quota(tenant) is not None

    def used(self, tenant: str) -> int:
        """GPUs a tenant holds against its quota."""
        return self._used.get(tenant, 0)

    def tenant_use(self, tenants: Iterable[str]) -> TenantUse:
        """By what these tenants take turns, where they have no quota."""
        used = [(tenant, self.recent[tenant]) for tenant in tenants if tenant in self.recent]
        return TenantUse({tenant: use.gpus(self.rack_s) for tenant, use in used}, self.weights)

    def free_quota(self, tenant: str) -> int | None:
        """GPUs a tenant may still take; None: not limited. Never under 0."""
        quota = self.quota(tenant)
        return None if quota is None else max(0, quota - self.used(tenant))

    def apart_from(self, job: Job) -> list[JobId]:
        """Guaranteed jobs beside which an opportunistic one must not be: it harmed them, or another job of its name
        harmed one of their name."""
        harmed = self.models.harmed_by(job.spec)
        known = [id for id in job.measured.harms if id in self.jobs]
        if not harmed:
            return known
        held = {id: self.jobs[id] for gpus in self.holders.values() for id in gpus.values()}
        alike = [other.id for other in held.values() if other.counts and model_of(other.spec) in harmed]
        return list(dict.fromkeys([*known, *sorted(alike)]))

    def was(self, job: JobId) -> bool:
        """Whether this id was once given to a job, which may be forgotten by now."""
        number = job[1:]
        return number.isascii() and number.isdigit() and len(number) < 19 and 0 < int(number) < self.next_number

    def over(self, job: JobId, epoch: int) -> bool:
        """Whether the log says that this grant is over for good. False also when the log does not know it (yet)."""
        known = self.jobs.get(job)
        if known is None:
            return self.was(job)
        return known.grant.epoch > epoch or known.over or (known.grant.epoch == epoch and known.state == "queued")

    def changed(self) -> list[JobId]:
        """Jobs whose state changed since the last call, in order; each once."""
        found = list(self._changed)
        self._changed = {}
        return found

    def drop(self, job: Job) -> None:
        """Keep an ended job that is forgotten for whoever has not looked since it ended."""
        if job.id in self._changed:
            self._unseen.append(job)

    def unseen(self) -> list[Job]:
        """Jobs that ended and were forgotten since the last call of `changed`, or the newest of them."""
        found = list(self._unseen)
        self._unseen.clear()
        return found

    def follow(self) -> Feed:
        """A feed of every change from now on, for as long as the caller holds it."""
        feed = Feed()
        self._feeds.add(feed)
        return feed

    # ---- what commands do ----

    def touch(self, job: Job) -> None:
        """Note that the job's state, or what it asks for, changed: `changed` names it."""
        self._changed[job.id] = None

    def wake(self, job: Job) -> None:
        """Note that a command about another job changed this one."""
        self.touch(job)
        self.woken[job.id] = None

    def tell_feeds(self, jobs: Iterable[JobId]) -> None:
        """Tell all feeds that these jobs changed."""
        for feed in self._feeds:
            feed.note(jobs)

    def say(self, job: Job, event: str, reason: str) -> None:
        """Set why the job is in its state, and note the event."""
        job.reason = reason
        self.touch(job)
        self.note(job.id, event, reason)

    def note(self, job: JobId, event: str, reason: str) -> None:
        """Note an event of this job that changes nothing about it."""
        key = f"log/{self.index}.{len(self.notes)}" if self.notes else f"log/{self.index}"
        self.notes.append(LogEvent(job, event, reason, key))

    def attain(self, tenant: str, gpu_s: float) -> None:
        """Count service of a tenant's guaranteed jobs. Who used the least of late is forgotten where tenants are too
        many."""
        self.recent[tenant] = self.recent.get(tenant, NO_USE).after(self.rack_s, gpu_s)
        if len(self.recent) > TENANTS_MAX:
            del self.recent[min(self.recent, key=lambda each: (self.recent[each].gpus(self.rack_s), each))]

    def limit(self, tenant: str, gpus: int | None) -> None:
        """Set a tenant's quota. What it holds beyond that runs out."""
        self.quotas[tenant] = gpus
        for other, used in sorted(self._used.items()):
            quota = self.quota(other)
            if quota is not None and used > quota:
                self.overshoot[other] = used
        self._trim_overshoot()

    def hold(self, job: Job, place: Place) -> None:
        """Give the GPUs of this place to the job, which pays for them from now on."""
        job.bill.hold(place, job.attained_gpu_s, self.rack_s)
        self.holders.setdefault(place.host, {}).update(dict.fromkeys(place.gpus, job.id))

    def give_back(self, job: Job) -> None:
        """Open what was kept for this job to all again."""
        if self.keeper == job.id:
            self.keeper, self.kept = None, {}

    def use(self, job: Job, sign: int) -> None:
        """Take the job's GPUs from its tenant's quota, or give them back."""
        self._add(job, sign)
        self._trim_overshoot()

    def _add(self, job: Job, sign: int) -> None:
        if not job.counts:
            return
        tenant = job.spec.tenant
        self._used[tenant] = self._used.get(tenant, 0) + sign * job.spec.gpus
        if not self._used[tenant]:
            del self._used[tenant]

    def _trim_overshoot(self) -> None:
        for tenant, allowed in sorted(self.overshoot.items()):
            quota, used = self.quota(tenant), self.used(tenant)
            if quota is None or used <= quota:
                del self.overshoot[tenant]
            else:
                self.overshoot[tenant] = min(allowed, used)

    def free(self, job: Job, host: HostId) -> None:
        """Take the GPUs of one of its hosts from the job."""
        place = job.place_on(host) or job.left_on(host)
        self.release(job, host, place.gpus if place else ())

    def release(self, job: Job, host: HostId, gpus: Iterable[str]) -> None:
        """Take these GPUs of a host from the job."""
        held = self.holders.get(host, {})
        for gpu in gpus:
            if held.get(gpu) == job.id:
                del held[gpu]
                job.bill.release(host, gpu, self.rack_s)
        if not held:
            self.holders.pop(host, None)

    # ---- keeping ----

    def snapshot(self) -> bytes:
        kept = list(self.jobs.values())
        state = QueueState(
            SNAPSHOT_VERSION,
            self.index,
            self.next_number,
            self.quotas,
            self.overshoot,
            kept,
            self.ended,
            self.clock_s,
            self.keeper,
            self.kept,
            self.models.tensors,
            self.models.steps,
            self.leading_term,
            self.leases_over_s,
            self.models.pairs,
            self.pauses_over_s,
            self.drained,
            self.rack_s,
            self.tenants,
            self.needs,
            self.forgotten,
            self.recent,
            self.weights,
        )
        return msgspec.msgpack.encode(state)

    def restore(self, data: bytes) -> None:
        """Become what `snapshot` wrote. ValueError when it is of another version or damaged."""
        version = _heads.decode(data).version
        if version != SNAPSHOT_VERSION:
            raise ValueError(f"the queue's snapshot has version {version}; this agent reads {SNAPSHOT_VERSION}")
        needs = _needs.decode(data).needs
        if is_newer(needs):
            raise ValueError(f"this log has commands of Covey {needs}; here runs {VERSION}")
        state = _snapshots.decode(data)
        self.index, self.next_number = state.index, state.next_number
        self.quotas, self.overshoot, self.ended = dict(state.quotas), dict(state.overshoot), list(state.ended)
        self.jobs = {job.id: job for job in state.jobs}
        self.clock_s, self.keeper, self.kept = state.clock_s, state.keeper, dict(state.kept)
        self.models = Models(state.tensors, state.steps, state.pairs)
        self.leading_term, self.leases_over_s = state.leading_term, state.leases_over_s
        self.pauses_over_s, self.drained, self.rack_s = state.pauses_over_s, state.drained, state.rack_s
        self.tenants = dict(state.tenants)
        self.needs, self.forgotten = state.needs, dict(state.forgotten)
        self.recent, self.weights = dict(state.recent), dict(state.weights)
        self.rebuild()

    def check(self) -> None:
        """Raise AssertionError when quota, epochs or GPUs are not as `machine/log/queue.py` says at its top."""
        used: dict[str, int] = {}
        holders: dict[tuple[HostId, str], JobId] = {}
        guaranteed: dict[tuple[HostId, str], JobId] = {}
        for job in self.jobs.values():
            if job.state in HOLDING and job.counts and job.spec.gpus:
                used[job.spec.tenant] = used.get(job.spec.tenant, 0) + job.spec.gpus
            hosts = [place.host for place in (*job.start.places, *job.healing.leaving)]
            assert len(hosts) == len(set(hosts)), f"{job.id} has two places on a host"
            assert not job.seeks or job.state == "running", f"{job.id} is {job.state} and looks for places"
            assert job.start.tables or not job.start.places, (
                f"{job.id} was placed, and nobody knows how many tables it has"
            )
            self._check_carried(job)
            self._check_holds(job)
            owners = {host for host in job.start.owners if host}
            assert len(job.start.owners) in (0, job.start.tables), f"{job.id} has {len(job.start.owners)} owners"
            assert not owners or job.spec.elastic, f"{job.id} is not elastic, and its tables are to be on {owners}"
            empties = {host for host in self.drained if leaves(host, self.drained)}
            assert job.over or not owners & empties, f"tables of {job.id} are to be on a drained host"
            for place in job.awaited:
                for gpu in place.gpus:
                    assert (place.host, gpu) not in holders, f"GPU {gpu} on {place.host} is held twice"
                    holders[place.host, gpu] = job.id
                    if job.counts:
                        other = guaranteed.setdefault((place.host, device_of(gpu)), job.id)
                        assert other == job.id, f"{gpu} on {place.host} is {other}'s and {job.id}'s, both guaranteed"
            assert job.over == (job.ending.exit_code is not None), (
                f"{job.id} is {job.state} with {job.ending.exit_code}"
            )
        assert used == self._used, f"usage {self._used} is not {used}"
        assert holders == {(h, g): j for h, held in self.holders.items() for g, j in held.items()}
        holds = Counter(holders.values())
        for job in self.jobs.values():
            job.bill.check(holds[job.id])
        for tenant, count in used.items():
            quota = self.quota(tenant)
            allowed = None if quota is None else max(quota, self.overshoot.get(tenant, 0))
            assert allowed is None or count <= allowed, f"{tenant} holds {count} of {allowed}"
        assert len(self.ended) <= ENDED_MAX
        counted = KeptBytes(self.jobs.values())
        assert (self.kept_bytes.live, self.kept_bytes.ended) == (counted.live, counted.ended), "bytes are miscounted"
        assert self.kept_bytes.users == counted.users, "jobs of users are miscounted"
        assert (self.keeper is None) == (not self.kept)
        if self.keeper is not None:
            gang = self.jobs[self.keeper]
            assert gang.state in ("queued", "placing") and gang.counts, f"{gang.id} keeps GPUs and is {gang.state}"
            assert 0 < sum(self.kept.values()) <= gang.spec.gpus

    def _check_holds(self, job: Job) -> None:
        """Raise AssertionError when a job started that had to wait, or an array has other tasks than it knows."""
        assert job.is_free or job.state not in ("placing", "running"), f"{job.id} is {job.state}, and was to wait"
        waits = {JobId(after.partition(":")[2]) for after in job.holds.after}
        for id in waits if not job.over else ():
            other = self.jobs.get(id)
            assert other is not None and not other.over, f"{job.id} waits for {id}, which is over"
            assert job.id in self.dependents.get(id, {}), f"nobody tells {job.id} of the end of {id}"
        if job.task is not None:
            array = self.jobs.get(job.task.array)
            assert job.over or (array is not None and array.array is not None), f"{job.id} is a task of no array"
        if job.array is None:
            return
        record, tasks = job.array, tasks_of(job.spec.array)
        assert job.state in ("queued", *OVER), f"{job.id} is an array, and {job.state}"
        live = {each.task.index: each.id for each in self.live() if each.task is not None and each.task.array == job.id}
        assert live == record.live, f"{job.id} has tasks {live}, and knows {record.live}"
        assert len(live) <= tasks.at_once, f"{len(live)} tasks of {job.id} are begun, and {tasks.at_once} may be"
        counted = record.done + record.failed + record.cancelled + len(live)
        assert record.begun <= tasks.count and counted <= tasks.count, f"{job.id} counts {counted} of {tasks.count}"
        assert not job.over or not live, f"{job.id} is over, and has tasks"

    @staticmethod
    def _check_carried(job: Job) -> None:
        """Raise AssertionError unless each rank of an elastic job is carried once, by a process that has a place."""
        spec, carried, wanted = job.spec, job.start.carried, job.healing.wanted
        names = sorted(name for place in job.start.places for name in place.ranks)
        assert names == sorted(carried) or not spec.elastic, f"{job.id} has places of {names}, and {sorted(carried)}"
        assert spec.elastic or not (carried or wanted), f"{job.id} is not elastic, and carries {carried}"
        ranks = sorted(rank for carries in carried.values() for rank in carries)
        assert not carried or ranks == list(range(spec.world_size)), f"{job.id} carries {ranks}"
        assert all(carries[0] == process for process, carries in carried.items()), f"{job.id} carries {carried}"
        assert not (spec.elastic and job.healing.missing), f"{job.id} is elastic, and waits for a lost host"
        assert not wanted or job.processes < wanted <= spec.workers_max, f"{job.id} wants {wanted} processes"
