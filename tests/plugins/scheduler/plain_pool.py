"""Who may hold which GPU of a pool whose GPUs are shared: a plain reading of the rules with which `Queue` and `Leader`
are compared (AntMan §3.2, §3.3).

A GPU holds at most one guaranteed job and up to `opportunistic_max` opportunistic ones. After every event, in this
order: jobs of class auto that waited too long become opportunistic; opportunistic jobs that were demoted so are
upgraded where their tenant's quota allows it; guaranteed jobs start, each on all its GPUs at once; opportunistic jobs
start on GPUs that are not busy.

Each tenant's guaranteed jobs are walked with its quota as the capacity, those that run first: whoever is chosen keeps
its claim on the quota, also while no place for it is free. Of those, one gang of the pool *reserves* what is there; its
reservation only grows, and is given back when it starts, ends, is demoted or is chosen no more. Reserved GPUs are
closed to other guaranteed jobs and open to opportunistic ones. When a gang that reserved has started, the four steps
are taken once more, because only then another may reserve.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, assert_never

import msgspec

from plugins.scheduler.policy import classes

JobClass = Literal["guaranteed", "auto", "opportunistic"]
BUSY = 0.8
"""Utilisation from which on a GPU takes no more opportunistic jobs (AntMan §3.3: M, over the last 10 s)."""


class PoolJob(msgspec.Struct, frozen=True, kw_only=True):
    """One gang that may ask for GPUs of this pool."""

    id: str
    tenant: str
    gpus: int
    job_class: JobClass
    queue: int = 0
    """The job's queue in 2DAS; guaranteed jobs start in the order (queue, submitted, id)."""
    same_host: bool = False
    """Whether all its GPUs have to be on one host."""


class Submitted(msgspec.Struct, frozen=True):
    """A job came."""

    job: PoolJob


class Ended(msgspec.Struct, frozen=True):
    """A job is over, whether it ran, held a reservation or only waited."""

    job: str


class Measured(msgspec.Struct, frozen=True):
    """How busy some GPUs were over the last 10 s, 0..1."""

    utilisation: Mapping[int, float]


class Looked(msgspec.Struct, frozen=True):
    """Event: time passed."""


Event = Submitted | Ended | Measured | Looked


class Start(msgspec.Struct, frozen=True):
    """Give the job these GPUs; `guaranteed`, or beside other jobs."""

    job: str
    gpus: tuple[int, ...]
    guaranteed: bool


class Reserve(msgspec.Struct, frozen=True):
    """Keep these GPUs, all that the job has reserved now, for it."""

    job: str
    gpus: tuple[int, ...]


class Demote(msgspec.Struct, frozen=True):
    """This auto job is opportunistic from now on."""

    job: str


class Upgrade(msgspec.Struct, frozen=True):
    """This running job is guaranteed from now on, where it runs."""

    job: str


Action = Start | Reserve | Demote | Upgrade


class _Entry(msgspec.Struct):
    """A job that waits or runs."""

    job: PoolJob
    submitted_s: float
    job_class: JobClass
    auto_demoted: bool = False
    gpus: tuple[int, ...] = ()
    """The GPUs that it runs on; empty: it waits."""
    guaranteed: bool = False
    """Whether it runs against its tenant's quota."""


class Pool:
    """The pool: `gpus` GPUs numbered from 0, `per_host` to a host. Quotas in GPUs; a tenant without one has 0."""

    def __init__(
        self,
        gpus: int,
        per_host: int,
        quotas: Mapping[str, int],
        *,
        demote_after_s: float | None = None,
        opportunistic_max: int = 1,
        busy: float = BUSY,
    ) -> None:
        if gpus < 1 or per_host < 1 or opportunistic_max < 0 or any(quota < 0 for quota in quotas.values()):
            raise ValueError("a pool has GPUs, and quotas of 0 or more")
        if sum(quotas.values()) > gpus:
            raise ValueError(f"quotas of {sum(quotas.values())} GPUs in a pool of {gpus}")
        self.per_host, self.quotas = per_host, dict(quotas)
        self.demote_after_s, self.opportunistic_max, self.busy = demote_after_s, opportunistic_max, busy
        self.holder: list[str | None] = [None] * gpus
        """The guaranteed job of each GPU."""
        self.opportunistic: list[int] = [0] * gpus
        """Opportunistic jobs on each GPU."""
        self.utilisation = [0.0] * gpus
        self.reserving: str | None = None
        self.reserved: tuple[int, ...] = ()
        self.used: dict[str, int] = {}
        """GPUs per tenant that count against its quota."""
        self.jobs: dict[str, _Entry] = {}

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        """ValueError when a job comes twice, or an end names a job that is not there."""
        match event:
            case Submitted():
                self._submitted(event.job, now_s)
            case Ended():
                self._ended(event.job)
            case Measured():
                for gpu, share in sorted(event.utilisation.items()):
                    self.utilisation[gpu] = share
            case Looked():
                pass
            case _:
                assert_never(event)
        actions: list[Action] = []
        again = True
        while again:
            reserving = self.reserving
            actions += [*self._demotions(now_s), *self._upgrades(), *self._guaranteed(), *self._opportunistic()]
            again = reserving is not None and any(
                isinstance(a, Start) and a.guaranteed and a.job == reserving for a in actions
            )
            again = again and self.reserving is None
        return actions

    def free_quota(self, tenant: str) -> int:
        """GPUs that this tenant may still take."""
        return self.quotas.get(tenant, 0) - self.used.get(tenant, 0)

    def _submitted(self, job: PoolJob, now_s: float) -> None:
        if job.id in self.jobs:
            raise ValueError(f"{job.id} is here already")
        if job.gpus < 1:
            raise ValueError(f"{job.id} asks for no GPU")
        self.jobs[job.id] = _Entry(job=job, submitted_s=now_s, job_class=job.job_class)

    def _ended(self, id: str) -> None:
        entry = self.jobs.pop(id, None)
        if entry is None:
            raise ValueError(f"{id} is not here")
        for gpu in entry.gpus:
            if entry.guaranteed:
                self.holder[gpu] = None
            else:
                self.opportunistic[gpu] -= 1
        if entry.guaranteed:
            self.used[entry.job.tenant] -= entry.job.gpus
        self._drop_reservation(id)

    def _drop_reservation(self, id: str) -> None:
        if self.reserving == id:
            self.reserving, self.reserved = None, ()

    def _by_age(self, entries: Sequence[_Entry]) -> list[_Entry]:
        return sorted(entries, key=lambda entry: (entry.submitted_s, entry.job.id))

    # ---- the four steps ----

    def _demotions(self, now_s: float) -> list[Action]:
        late = [
            entry
            for entry in self.jobs.values()
            if not entry.gpus and classes.is_late(entry.job_class, now_s - entry.submitted_s, self.demote_after_s)
        ]
        actions: list[Action] = []
        for entry in self._by_age(late):
            entry.job_class, entry.auto_demoted = "opportunistic", True
            self._drop_reservation(entry.job.id)
            actions.append(Demote(entry.job.id))
        return actions

    def _upgrades(self) -> list[Action]:
        guests = [entry for entry in self.jobs.values() if entry.gpus and not entry.guaranteed and entry.auto_demoted]
        actions: list[Action] = []
        for entry in self._by_age(guests):
            id, tenant = entry.job.id, entry.job.tenant
            closed = any(self.holder[gpu] is not None or self._closed(gpu, id) for gpu in entry.gpus)
            if not classes.may_upgrade(entry.job.gpus, self.free_quota(tenant), closed):
                continue
            entry.guaranteed = True
            self.used[tenant] = self.used.get(tenant, 0) + entry.job.gpus
            for gpu in entry.gpus:
                self.holder[gpu] = id
                self.opportunistic[gpu] -= 1
            actions.append(Upgrade(id))
        return actions

    def _closed(self, gpu: int, id: str) -> bool:
        return not classes.may_keep(id, self.reserving) and gpu in self.reserved

    def _chosen(self) -> list[_Entry]:
        """Waiting jobs that 2DAS chooses within their tenants' quotas, in order."""
        left, chosen = dict(self.quotas), []
        counted = [entry for entry in self.jobs.values() if entry.guaranteed or self._waits(entry)]
        for entry in sorted(counted, key=self._place_in_order):
            tenant, gpus = entry.job.tenant, entry.job.gpus
            if gpus <= left.get(tenant, 0):
                left[tenant] -= gpus
                chosen += [] if entry.gpus else [entry]
        return chosen

    def _waits(self, entry: _Entry) -> bool:
        return not entry.gpus and entry.job_class != "opportunistic"

    def _place_in_order(self, entry: _Entry) -> Any:
        runs = bool(entry.gpus)
        return (not runs, 0 if runs else entry.job.queue, entry.submitted_s, entry.job.id)

    def _guaranteed(self) -> list[Action]:
        chosen = self._chosen()
        if self.reserving is not None and self.reserving not in [entry.job.id for entry in chosen]:
            self._drop_reservation(self.reserving)
        actions: list[Action] = []
        over: str | None = None
        for entry in chosen:
            job = entry.job
            if job.gpus > self.free_quota(job.tenant):
                continue
            candidates = [
                gpu for gpu, holder in enumerate(self.holder) if holder is None and not self._closed(gpu, job.id)
            ]
            picked = self._pick(candidates, job)
            if picked is not None:
                entry.gpus, entry.guaranteed = picked, True
                self.used[job.tenant] = self.used.get(job.tenant, 0) + job.gpus
                for gpu in picked:
                    self.holder[gpu] = job.id
                over = job.id if job.id == self.reserving else over
                actions.append(Start(job.id, picked, True))
            elif classes.may_keep(job.id, self.reserving):
                actions += self._reserve(job, candidates)
        if over is not None:
            self._drop_reservation(over)
        return actions

    def _pick(self, candidates: list[int], job: PoolJob) -> tuple[int, ...] | None:
        """The GPUs with the fewest guests; for one host the host with the fewest candidates that suffice."""
        if job.same_host:
            hosts: dict[int, list[int]] = {}
            for gpu in candidates:
                hosts.setdefault(gpu // self.per_host, []).append(gpu)
            fits = [(len(gpus), host) for host, gpus in hosts.items() if len(gpus) >= job.gpus]
            if not fits:
                return None
            candidates = hosts[min(fits)[1]]
        if len(candidates) < job.gpus:
            return None
        return tuple(sorted(sorted(candidates, key=lambda gpu: (self.opportunistic[gpu], gpu))[: job.gpus]))

    def _reserve(self, job: PoolJob, candidates: list[int]) -> list[Action]:
        """Reserve what there is, up to what the job asks for; for one host the host where most is. It never shrinks."""
        wanted = candidates
        mine = self.reserved if self.reserving == job.id else ()
        if job.same_host:
            there, anything = self._by_host(candidates), dict.fromkeys(self._by_host(candidates), job.gpus)
            kept = classes.gpus_to_keep(self._by_host(mine), there, anything, 1, job.gpus)
            wanted = [gpu for gpu in candidates if gpu // self.per_host in kept]
        more = sorted((gpu for gpu in wanted if gpu not in mine), key=lambda gpu: (self.opportunistic[gpu], gpu))
        grown = tuple(sorted([*mine, *more[: max(0, job.gpus - len(mine))]]))
        if not grown or grown == mine:
            return []
        self.reserving, self.reserved = job.id, grown
        return [Reserve(job.id, grown)]

    def _by_host(self, gpus: Sequence[int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for gpu in gpus:
            counts[gpu // self.per_host] = counts.get(gpu // self.per_host, 0) + 1
        return counts

    def _opportunistic(self) -> list[Action]:
        waiting = [entry for entry in self.jobs.values() if not entry.gpus and entry.job_class == "opportunistic"]
        actions: list[Action] = []
        for entry in self._by_age(waiting):
            free = [
                gpu
                for gpu, share in enumerate(self.utilisation)
                if share < self.busy and self.opportunistic[gpu] < self.opportunistic_max
            ]
            if len(free) < entry.job.gpus:
                continue
            free.sort(key=lambda gpu: (self.utilisation[gpu], self.opportunistic[gpu], gpu))
            entry.gpus = tuple(sorted(free[: entry.job.gpus]))
            for gpu in entry.gpus:
                self.opportunistic[gpu] += 1
            actions.append(Start(entry.job.id, entry.gpus, False))
        return actions

    def check(self) -> None:
        """Raise AssertionError unless no gang is half there, no GPU has two guaranteed jobs, no quota is exceeded, and
        there is one reservation at most."""
        for id, entry in self.jobs.items():
            assert len(entry.gpus) in (0, entry.job.gpus), f"{id} is half there"
            assert len(set(entry.gpus)) == len(entry.gpus)
            assert entry.guaranteed == (bool(entry.gpus) and all(self.holder[gpu] == id for gpu in entry.gpus))
        for gpu, holder in enumerate(self.holder):
            assert holder is None or gpu in self.jobs[holder].gpus
            guests = [e for e in self.jobs.values() if gpu in e.gpus and not e.guaranteed]
            assert len(guests) == self.opportunistic[gpu] <= self.opportunistic_max
        for tenant, used in self.used.items():
            mine = sum(e.job.gpus for e in self.jobs.values() if e.guaranteed and e.job.tenant == tenant)
            assert used == mine <= self.quotas.get(tenant, 0)
        assert (self.reserving is None) == (not self.reserved)
        if self.reserving is not None:
            assert not self.jobs[self.reserving].gpus, "who reserves does not run"
            assert all(self.holder[gpu] is None for gpu in self.reserved), "what is reserved is free"
