"""Which jobs share a GPU, as the log says."""

from collections.abc import Iterator, Mapping

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.policy.shared import device_of, is_part

Holders = Mapping[HostId, Mapping[str, JobId]]
"""Host -> GPU, or part of one -> the job that has it."""


def guaranteed_on(host: HostId, jobs: Mapping[JobId, Job], holders: Holders) -> dict[str, JobId]:
    """GPUs of a host of which a guaranteed job holds a part: it was upgraded there."""
    held = holders.get(host, {})
    return {device_of(name): id for name, id in held.items() if is_part(name) and jobs[id].counts}


def guaranteed_beside(job: Job, jobs: Mapping[JobId, Job], holders: Holders) -> tuple[HostId, str, JobId] | None:
    """Another guaranteed job, on whatever host, that has a GPU of which this one holds a part, as (host, GPU, job)."""
    for place in job.awaited:
        held, upgraded = holders.get(place.host, {}), guaranteed_on(place.host, jobs, holders)
        for device in (device_of(name) for name in place.gpus if is_part(name)):
            other = upgraded.get(device) or held.get(device)
            if other is not None and other != job.id:
                return place.host, device, other
    return None


def beside(job: Job, holders: Holders) -> dict[JobId, list[HostId]]:
    """Jobs that share a GPU with this one, and on which of its hosts."""
    found: dict[JobId, list[HostId]] = {}
    for host, other in dict.fromkeys(_beside(job, holders)):
        found.setdefault(other, []).append(host)
    return dict(sorted(found.items()))


def _beside(job: Job, holders: Holders) -> Iterator[tuple[HostId, JobId]]:
    for place in job.awaited:
        held = holders.get(place.host, {})
        if any(map(is_part, held)):
            devices = set(map(device_of, place.gpus))
            yield from ((place.host, id) for name, id in held.items() if id != job.id and device_of(name) in devices)
