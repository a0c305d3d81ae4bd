"""What this host measures of its GPUs for the bills of jobs (`machine/log/bills.py`): how much of the time in which a
job holds them they are in use, and how long its ranks take to their first step.

The driver is asked every few seconds (`UseWatch`); its answer counts for the time since the one before. A GPU that jobs
share counts for none of them: nobody knows which of them used it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from covey.core.ids import HostId, JobId
from covey.ports.devices import Gpu
from plugins.scheduler.machine.host.parts import Hold
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import JobUse
from plugins.scheduler.policy.shared import device_of
from plugins.scheduler.service.ranks.step_times import GrantSteps

LOOK_MAX_S = 30.0
"""The longest time, seconds, for which one answer of the driver counts: after a longer pause of the agent it says
nothing of the time between."""
Grant = tuple[JobId, int]


class SeenGpu(NamedTuple):
    """A GPU when it was last looked at."""

    by: Grant
    at_s: float


class GpuUseSums:
    """The sums of this host, by grant. They only grow; after a restart of the agent they begin with what the log
    knows."""

    def __init__(self, host: HostId) -> None:
        self._host = host
        self._sums: dict[Grant, JobUse] = {}
        self._starting: dict[Grant, float] = {}
        """GPU·s in which ranks ran and no step was seen yet."""
        self._last: dict[str, SeenGpu] = {}
        self._told: dict[Grant, JobUse] = {}
        """What the log was told last."""

    def looked(self, gpus: Sequence[Gpu], use: Mapping[str, float | None], holds: Iterable[Hold], now_s: float) -> None:
        """Take in how much each GPU was in use, 0..1 (None: not known), and who holds it."""
        held = _alone(holds)
        last, self._last = self._last, {}
        for gpu in gpus:
            by = held.get(gpu.uuid)
            if by is None:
                continue
            self._last[gpu.uuid] = SeenGpu(by, now_s)
            before, share = last.get(gpu.uuid), use.get(gpu.uuid)
            passed_s = now_s - before.at_s if before is not None and before.by == by else 0.0
            known = self._sums.get(by)
            if known is None:
                continue  # no rank of it runs yet
            if share is not None and 0.0 < passed_s <= LOOK_MAX_S:
                seen, used = known.seen_gpu_s + passed_s, known.used_gpu_s + passed_s * min(1.0, max(0.0, share))
                known = msgspec.structs.replace(known, seen_gpu_s=round(seen, 3), used_gpu_s=round(min(seen, used), 3))
            if not gpu.simulated:
                known = msgspec.structs.replace(known, gpu_bytes=max(known.gpu_bytes, gpu.memory_used_bytes))
            self._sums[by] = known

    def served(self, job: Job, gpu_s: float, steps: GrantSteps) -> None:
        """Ranks of this job ran here for so many GPU·s more."""
        grant = (job.id, job.grant.epoch)
        known = self._sums.get(grant) or self._as_told(job)
        if steps.step is None:
            self._starting[grant] = self._starting.get(grant, 0.0) + gpu_s
        elif starting := self._starting.pop(grant, 0.0):
            known = msgspec.structs.replace(known, starting_gpu_s=round(starting, 3))
        memory = max(steps.memory_bytes.values(), default=0)
        host_bytes = 0 if steps.memory is None else steps.memory.peak_bytes
        said = JobUse(grant[1], gpu_bytes=memory, host_bytes=host_bytes)
        self._sums[grant] = known.up_to(said)

    def news(self, jobs: Mapping[JobId, Job | None]) -> dict[JobId, JobUse]:
        """What the log is to be told of these jobs."""
        found = {}
        for id, job in jobs.items():
            grant = (id, 0 if job is None else job.grant.epoch)
            known = self._sums.get(grant)
            if job is None or known is None or known == self._told.get(grant, JobUse(grant[1])):
                continue
            found[id] = known
        return found

    def told(self, uses: Mapping[JobId, JobUse]) -> None:
        """The log knows this now."""
        self._told |= {(id, use.epoch): use for id, use in uses.items()}

    def _as_told(self, job: Job) -> JobUse:
        """What the log knows of the job's present start here: an agent that was restarted goes on from there."""
        known = job.bill.uses.get(self._host)
        return known if known is not None and known.epoch == job.grant.epoch else JobUse(job.grant.epoch)

    def forget(self, grant: Grant) -> None:
        for known in (self._sums, self._starting, self._told):
            known.pop(grant, None)


def _alone(holds: Iterable[Hold]) -> dict[str, Grant]:
    """GPU -> the grant that holds it, of GPUs that one alone holds and that has started."""
    found: dict[str, Grant | None] = {}
    for hold in holds:
        for gpu in hold.gpus:
            device = device_of(gpu)
            found[device] = (hold.job, hold.epoch) if device not in found and hold.started else None
    return {device: grant for device, grant in found.items() if grant is not None}
