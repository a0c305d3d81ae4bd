"""A little rack without agents: one queue, its leader, and hosts that place and stop gangs when they are told to."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.leader.capacity import Capacity
from plugins.scheduler.machine.leader.leader import Leader, RackHost, ScheduleTick
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    Command,
    Elapsed,
    Placed,
    PlaceFailed,
    RanksReported,
    Result,
    Submitted,
    open_command,
    pack,
)
from plugins.scheduler.messages.spec import JobSpec, Pack
from plugins.scheduler.policy.place import place
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.plugins.scheduler.plain_leader import PlainLeader


class Little:
    """A little rack: `gpus` per host, h1 first. Every command goes through its encoding, and a copy that is restored
    from snapshots hears it too."""

    stamps = True
    """Whether commands carry the rack's clock, which shows `now_s`; otherwise it stands still where none is given."""

    def __init__(self, gpus: Sequence[int], quotas: Mapping[str, int], **settings: Any) -> None:
        given = {"queue_thresholds_gpu_s": (100.0,), "quotas": dict(quotas), **settings}
        self.settings = SchedulerSettings(**given)
        self.queue, self.copy = JobTable(), JobTable()
        self.leader = Leader(self.queue, self.settings)
        self._leads, self._plain = self.leader, PlainLeader(self.queue, self.settings)
        self.totals = {HostId(f"h{number}"): count for number, count in enumerate(gpus, 1)}
        self.now_s = 1000.0
        self.heard: list[Command] = []
        self.held: dict[JobId, float] = {}
        """GPU·s for which each job has held GPUs."""

    def say(self, command: Command) -> Result:
        if self.stamps and not command.rack_s:
            command = msgspec.structs.replace(command, rack_s=max(self.now_s, self.queue.rack_s))
        self._meter(command.rack_s)
        sent = open_command(pack(command))
        assert sent == command
        self.heard.append(command)
        result, notes = apply(self.queue, self.queue.index + 1, sent)
        assert (result, notes) == apply(self.copy, self.copy.index + 1, sent)
        self.queue.check()
        assert self.queue.snapshot() == self.copy.snapshot()
        for id, job in self.queue.jobs.items():
            told = sum(job.bill.by_gpu(self.queue.rack_s).values())
            assert math.isclose(self.held.get(id, 0.0), told, abs_tol=1e-6), f"{id}: {self.held.get(id)}, told {told}"
        return result

    def _meter(self, rack_s: float) -> None:
        """Count for how long each job has held GPUs, by who holds them: what bills say is compared with this."""
        passed_s = max(0.0, rack_s - self.queue.rack_s)
        for gpus in self.queue.holders.values():
            for id in gpus.values():
                self.held[id] = self.held.get(id, 0.0) + passed_s

    def restore(self) -> None:
        """Restore the copy from its snapshot."""
        restored = JobTable()
        restored.restore(self.copy.snapshot())
        assert restored.snapshot() == self.copy.snapshot()
        self.copy = restored

    def submit(self, workers: int, tenant: str, kind: str = "guaranteed", each: int = 1, pack: Pack = "few") -> JobId:
        job = self.try_submit(workers, tenant, kind, each, pack)
        assert job is not None, "it was refused"
        return job

    def try_submit(
        self, workers: int, tenant: str, kind: str = "guaranteed", each: int = 1, pack: Pack = "few"
    ) -> JobId | None:
        """Submit a job; None when the log refuses it."""
        given = {"argv": ["x"], "workers": workers, "gpus_per_worker": each, "tenant": tenant, "pack": pack}
        spec = JobSpec.parse({**given, "class": kind})
        key = f"key{self.queue.index:06}"
        result = self.say(Submitted(wall_s=1.0, key=key, spec=spec, may_demote=True))
        return result.job if isinstance(result, Applied) else None

    def look(self, after_s: float = 1.0) -> list[Command]:
        """What the leader proposes, and the log takes."""
        self.now_s += after_s
        rack = tuple(RackHost(host, gpus) for host, gpus in self.totals.items())
        proposed = self.proposed(ScheduleTick(rack, 1.0))
        return [each for each in proposed if isinstance(self.say(each), Applied) and not isinstance(each, Elapsed)]

    def proposed(self, look: ScheduleTick) -> list[Command]:
        """What the leader proposes, which is what the plain one proposes."""
        proposed = [action.command for action in self.leader.handle(look, self.now_s)]
        self.leader.check()
        if self._leads is not self.leader:
            self._leads, self._plain = self.leader, PlainLeader(self.queue, self.settings)
        assert proposed == [action.command for action in self._plain.handle(look, self.now_s)]
        return proposed

    def jobs(self, *states: str) -> list[Job]:
        return [job for job in self.queue.live() if job.state in states]

    def capacity(self) -> Capacity:
        return Capacity(self.queue, self.totals)

    def place(self, job: Job, on: Mapping[HostId, Sequence[str]] | None = None) -> None:
        """Place a job as its coordinator does: on these GPUs by host, or on a place found as coordinators find it."""
        each = job.spec.gpus_per_worker
        if on is None:
            workers = place(self.capacity().free_for(job), job.spec.workers, each, 0.0, 0.3, job.spec.pack) or {}
            on = {host: self.free(host)[: count * each] for host, count in workers.items()}
        if not on:
            self.say(PlaceFailed(wall_s=1.0, job=job.id, epoch=job.grant.epoch, reason="no room"))
            return
        places, rank = [], 0
        for host, gpus in on.items():
            count = len(gpus) // each
            places.append(Place(host, tuple(range(rank, rank + count)), tuple(gpus)))
            rank += count
        self.say(
            Placed(wall_s=1.0, job=job.id, epoch=job.grant.epoch, places=tuple(places), master_addr="", master_port=1)
        )

    def state(self, job: JobId) -> str:
        return self.queue.jobs[job].state

    def scattered(self, job: Job) -> dict[HostId, list[str]]:
        """GPUs that the job may start on, one per host in turn; none when it does not fit, or its workers take
        several."""
        allowed = self.capacity().free_for(job)
        found: dict[HostId, list[str]] = {}
        for turn in range(max(allowed.values(), default=0)):
            for host in sorted(allowed):
                if turn < allowed[host] and sum(map(len, found.values())) < job.spec.gpus:
                    found.setdefault(host, []).append(self.free(host)[turn])
        whole = job.spec.gpus_per_worker == 1 and sum(map(len, found.values())) == job.spec.gpus
        return found if whole else {}

    def free(self, host: HostId) -> list[str]:
        held = self.queue.holders.get(host, {})
        return [gpu for gpu in (f"{host}.{number}" for number in range(self.totals[host])) if gpu not in held]

    def end(self, job: Job, code: int = 0) -> None:
        """End all ranks of the job."""
        for at in job.start.places:
            if job.awaits(at.host):
                codes = dict.fromkeys(at.ranks, code)
                asked = code != 0
                self.say(
                    RanksReported(wall_s=1.0, job=job.id, epoch=job.grant.epoch, host=at.host, codes=codes, asked=asked)
                )

    def serve(self, job: Job, gpu_s: float) -> None:
        host = job.start.places[0].host
        total = job.measured.attained.get(host, 0.0) + gpu_s
        self.say(Attained(wall_s=1.0, host=host, service_gpu_s={job.id: total}))

    def settle(self, most: int = 80) -> list[Command]:
        """Let everything happen that follows by itself; what the leader said meanwhile."""
        said: list[Command] = []
        for _ in range(most):
            now = self.look()
            said += now
            moving = self.jobs("placing", "stopping")
            for job in moving:
                if job.state == "placing":
                    self.place(job)
                else:
                    self.end(job, -15)
            if not now and not moving and not self.leader.retry_at:
                return said
        raise AssertionError(f"it never comes to rest: {said[-6:]}")


def replay(commands: Sequence[Command]) -> bytes:
    """The state that these commands give on a host that hears them for the first time."""
    queue = JobTable()
    for index, command in enumerate(commands, 1):
        apply(queue, index, msgspec.msgpack.decode(pack(command), type=Command))
    return queue.snapshot()
