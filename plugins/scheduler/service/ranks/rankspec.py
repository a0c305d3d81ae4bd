"""The way from the log's job and its place here to what the runner starts, and back."""

from collections.abc import Mapping

import msgspec

from covey.core.ids import HostId
from covey.ports.devices import is_instance
from plugins.base import ArrayTask, RankSpec, RanksSpec
from plugins.facts import Place
from plugins.scheduler.machine.host.parts import Hold
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.arrays import tasks_of
from plugins.scheduler.policy.shared import part_of


def ranks_spec(
    job: Job, place: Place, env: Mapping[str, str], shares: bool = False, rack_s: float | None = None
) -> RanksSpec:
    """What the runner starts on the host of `place`. `env`: the submitter's variables; `shares`: GPUs are shared;
    `rack_s`: what the rack's clock shows, where a time limit counts."""
    each, gpus = job.spec.gpus_per_worker, place.devices
    ranks = [RankSpec(rank, n, gpus[n * each : (n + 1) * each]) for n, rank in enumerate(place.ranks)]
    nodes, limit_s = tuple(other.host for other in job.start.places), job.spec.time_limit_s
    return RanksSpec(
        job=job.id,
        epoch=job.grant.epoch,
        name=job.spec.called,
        tenant=job.spec.tenant,
        job_class=job.job_class,
        argv=job.spec.argv,
        cwd=job.spec.cwd,
        env=dict(env),
        ranks=tuple(ranks),
        world_size=job.spec.world_size,
        node_rank=nodes.index(place.host),
        nodes=nodes,
        tables=job.start.tables,
        master_addr=job.start.master_addr,
        master_port=job.start.master_port,
        attempt=job.tally.attempt,
        grace_s=job.spec.grace_s,
        stop_signal=job.spec.stop_signal,
        share_host=job.spec.share_host,
        bind_gpus=job.spec.bind_gpus or _on_instances(job),
        hooks=job.spec.hooks,
        since=place.since,
        config=job.healing.healed if job.spec.elastic else 0,
        carried=dict(job.start.carried),
        came=dict(job.start.came),
        awaited=not set(place.ranks).isdisjoint(job.healing.awaited),
        spares=job.spec.spares if job.spec.on_lost == "heal" else 0,
        may_heal=job.spec.on_lost == "heal",
        held_back=shares and job.job_class == "opportunistic" and bool(each),
        shared_memory=job.spec.gpu_memory if shares else 0,
        host_memory=job.spec.host_memory,
        cpus=job.spec.cpus,
        private_tmp=job.spec.private_tmp,
        image=job.spec.image,
        time_left_s=None if limit_s is None or rack_s is None else max(0.0, limit_s - job.ran_of_limit_s(rack_s)),
        saved=job.measured.saved,
        submitted_wall_s=job.times.submitted_wall_s,
        user=job.spec.owner.user if job.spec.owner is not None else "",
        uid=job.spec.owner.uid if job.spec.owner is not None else None,
        hang_s=job.spec.hang_s,
        stdout=job.spec.stdout,
        stderr=job.spec.stderr,
        task=task_of(job),
        after=dict(job.holds.ended),
    )


def task_of(job: Job) -> ArrayTask | None:
    """Which task of an array the job is, and how many the array has."""
    if job.task is None:
        return None
    tasks = tasks_of(job.task.tasks)
    return ArrayTask(job.task.array, job.task.index, tasks.count, tasks.first, tasks.last, tasks.step)


def _on_instances(job: Job) -> bool:
    """Whether some rank has a MIG instance: then all ranks count as those do whose device can only be 0."""
    return any(is_instance(device) for place in job.start.places for device in place.devices)


def spares_spec(job: Job, env: Mapping[str, str], gpus: tuple[str, ...], count: int) -> RanksSpec:
    """The spec of spares on a host that has no rank of the job yet. `gpus`: any, as many as a worker has."""
    any_place = ranks_spec(job, job.start.places[0], env)
    return msgspec.structs.replace(any_place, ranks=(RankSpec(0, 0, gpus),), spares=count, since=job.healing.healed)


def hold_of(spec: RanksSpec, shares: bool) -> Hold:
    """The hold of these ranks, which run here. `shares`: an opportunistic job may hold parts of its GPUs; only the log
    knows which, so the hold gets names that no other job has until the log is read."""
    gpus = tuple(gpu for rank in spec.ranks for gpu in rank.gpus)
    guest = shares and spec.job_class == "opportunistic"
    held = tuple(part_of(gpu, f"{spec.job}.{spec.epoch}") for gpu in gpus) if guest else gpus
    of, cpus = (spec.job, spec.epoch, 0, HostId("")), spec.cpus * len(spec.ranks)
    return Hold(*of, held, 0, True, not guest, host_memory=spec.host_memory, cpus=cpus)
