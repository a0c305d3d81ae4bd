"""What the queue answers when it does not do what a command asks."""

from collections.abc import Iterable, Mapping

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.log.beside import guaranteed_on
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import (
    AboutJob,
    AboutWaiting,
    Applied,
    Arranged,
    Attained,
    Command,
    Elapsed,
    HostDrained,
    HostForgotten,
    Leads,
    NotApplied,
    Placed,
    QuotaSet,
    Result,
    Submitted,
    TenantSet,
    WeightSet,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy import eligible, explain
from plugins.scheduler.policy.eligible import Drain
from plugins.scheduler.policy.shared import device_of, is_part


def touched(command: Command, result: Result) -> Iterable[JobId]:
    """Jobs that this command may have changed."""
    match command:
        case Attained():
            return {**command.service_gpu_s, **command.tensors, **command.heals, **command.saved}
        case QuotaSet() | WeightSet() | TenantSet() | HostDrained() | HostForgotten() | Elapsed() | Leads():
            return ()
        case Arranged():
            return command.jobs
        case Submitted():
            return (result.job,) if isinstance(result, Applied) and result.job is not None else ()
        case _:
            return (command.job,)


def unknown(job: JobId, was: bool) -> NotApplied:
    why = "it ended long ago and is no longer kept" if was else "no job ever had this id"
    return NotApplied(3, f"there is no job {job}", why, "see agentctl jobs --all")


def stale(job: Job, command: AboutJob) -> NotApplied:
    epoch = None if isinstance(command, AboutWaiting) else command.epoch
    why = f"the command is about epoch {epoch}; the job is {job.state} under epoch {job.grant.epoch}"
    return NotApplied(4, f"{job.id} was not changed", why, f"see agentctl why {job.id}")


def over_quota(job: Job, used: int, quota: int, done: str) -> NotApplied:
    why = f"tenant {job.spec.tenant} holds {used} of {explain.gpus(quota)}"
    return NotApplied(4, f"{job.id} was not {done}", why, "wait until one of its jobs ends")


def not_free(job: Job) -> NotApplied:
    """The answer to a grant of a job that may not start yet."""
    return NotApplied(4, f"{job.id} was not granted", "it is held, an array, or waits for other jobs", "none: it waits")


def not_changed(job: Job, why: str, next: str) -> NotApplied:
    return NotApplied(4, f"{job.id} was not changed", why, next)


def not_alone(job: Job, host: HostId, gpu: str, other: JobId) -> NotApplied:
    why = f"GPU {device_of(gpu)} on {host} belongs to {other}, which is guaranteed"
    return NotApplied(4, f"{job.id} was not upgraded", why, "wait until one of them ends")


def barred_place(spec: JobSpec, places: Iterable[Place], drained: Mapping[HostId, Drain]) -> str:
    """Why no rank of this job may start in one of these places; empty when it may."""
    why = eligible.bars(spec, drained)
    return next((why[place.host] for place in places if place.host in why), "")


def wrong_places(
    job: Job, command: Placed, jobs: Mapping[JobId, Job], holders: Mapping[HostId, Mapping[str, JobId]]
) -> str:
    """Why these places are not a whole gang of the job's own; empty when they are. `holders`: the job that has each GPU
    of a host, or each part of it."""
    spec = job.spec
    hosts = {place.host for place in command.places}
    ranks = [rank for place in command.places for rank in place.ranks]
    whole = len(hosts) == len(command.places) and all(place.ranks for place in command.places)
    if not whole or ranks != list(range(spec.workers)):
        return "the placement does not have each rank exactly once"
    if spec.pack == "host" and job.counts and len(hosts) > 1:  # an opportunistic one lies where it is least busy
        return f"it needs one host for all its workers, and the placement has {len(hosts)}"
    if spec.pack == "apart" and len(hosts) < spec.workers:
        return f"it needs a host for each of {spec.workers} workers, and the placement has {len(hosts)}"
    return next(filter(None, (wrong_gpus(job, place, jobs, holders) for place in command.places)), "")


def wrong_gpus(job: Job, place: Place, jobs: Mapping[JobId, Job], holders: Mapping[HostId, Mapping[str, JobId]]) -> str:
    """Why this place cannot have its GPUs; empty when it can. `holders`: as in `wrong_places`."""
    distinct = len(set(map(device_of, place.gpus)))
    if distinct != len(place.gpus) or distinct != len(place.ranks) * job.spec.gpus_per_worker:
        return f"{place.host} gives {explain.gpus(len(place.gpus))} to {len(place.ranks)} workers"
    held = holders.get(place.host, {})
    upgraded = guaranteed_on(place.host, jobs, holders) if job.counts else {}
    for gpu in place.gpus:
        if job.counts and is_part(gpu):
            return f"it is guaranteed, and {place.host} gives it only a part of GPU {device_of(gpu)}"
        holder = held.get(gpu) or upgraded.get(gpu)
        if holder is not None:
            return f"GPU {gpu} on {place.host} belongs to {holder}"
    return ""
