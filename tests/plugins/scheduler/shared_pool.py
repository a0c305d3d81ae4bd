"""The agents' queue and leader on a pool of shared GPUs, in the words of the plain one (`plain_pool.py`)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from plugins.scheduler.machine.leader.shared_capacity import unit_of
from plugins.scheduler.machine.log.jobs import Job
from sim.vectors.classes import SharedPool
from tests.plugins.scheduler.plain_pool import (
    Action,
    Demote,
    Ended,
    Event,
    Looked,
    Measured,
    Reserve,
    Start,
    Submitted,
    Upgrade,
)


class Numbers(dict[str, int]):
    """The numbers of jobs, in the order in which they come."""

    def __init__(self) -> None:
        super().__init__()
        self.next = itertools.count(1)

    def __missing__(self, name: str) -> int:
        return self.setdefault(name, next(self.next))


class Shared:
    """The queue and leader on a pool: everything comes one after the other; queues 0 to 2."""

    def __init__(
        self,
        gpus: int,
        per_host: int,
        quotas: Mapping[str, int],
        *,
        demote_after_s: float | None = None,
        opportunistic_max: int = 1,
    ) -> None:
        config = {"n": gpus, "per_node": per_host, "quota": dict(quotas), "demote_after": demote_after_s}
        self.pool = SharedPool({**config, "ot_per_gpu": opportunistic_max}, [["submit", 0, {"id": "-", "q": 2}]])
        self.pool.numbers = Numbers()

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        said = [_action(each) for each in self.pool.handle(_event(event, now_s))]
        self.check()
        return said

    def check(self) -> None:
        self.pool.check()

    def job(self, name: str) -> Job:
        id = self.pool.ids[name]
        assert id is not None, f"{name} was refused"
        return self.pool.queue.jobs[id]

    def gpus(self, name: str) -> tuple[int, ...]:
        """The GPUs on which a job runs; none while it waits."""
        held = [(place.host, gpu) for place in self.job(name).awaited for gpu in place.gpus]
        return tuple(self.pool.number(unit_of(host, gpu)) for host, gpu in held)

    @property
    def reserving(self) -> str | None:
        id = self.pool.queue.keeper
        return None if id is None else self.pool.names[id]

    @property
    def reserved(self) -> tuple[int, ...]:
        return tuple(self.pool.number(unit) for unit in self.pool.queue.kept)

    def free_quota(self, tenant: str) -> int | None:
        return self.pool.queue.free_quota(tenant)


def _event(event: Event, now_s: float) -> list[Any]:
    match event:
        case Submitted():
            job = event.job
            what = {"id": job.id, "tenant": job.tenant, "W": job.gpus, "cls": job.job_class, "q": job.queue}
            return ["submit", now_s, {**what, "same_node": job.same_host}]
        case Ended():
            return ["finish", now_s, event.job]
        case Measured():
            return ["util", now_s, {str(gpu): share for gpu, share in event.utilisation.items()}]
        case Looked():
            return ["tick", now_s]


def _action(said: list[Any]) -> Action:
    match said:
        case ["DEMOTE", job]:
            return Demote(job)
        case ["UPGRADE", job]:
            return Upgrade(job)
        case ["RESERVE", job, gpus]:
            return Reserve(job, tuple(gpus))
        case _:
            kind, job, gpus = said
            return Start(job, tuple(gpus), kind == "START_RG")
