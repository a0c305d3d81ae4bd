"""From the log's job and its place here to what the runner starts."""

from collections.abc import Mapping

from plugins.base import RankSpec, RanksSpec
from plugins.facts import Place
from plugins.scheduler.machine.jobs import Job


def ranks_spec(job: Job, place: Place, env: Mapping[str, str]) -> RanksSpec:
    """What the runner starts on the host of `place`. `env`: the submitter's variables."""
    each = job.spec.gpus_per_worker
    ranks = [RankSpec(rank, n, place.gpus[n * each : (n + 1) * each]) for n, rank in enumerate(place.ranks)]
    nodes = tuple(other.host for other in job.places)
    return RanksSpec(
        job=job.id,
        epoch=job.epoch,
        name=job.spec.name,
        tenant=job.spec.tenant,
        job_class=job.job_class,
        argv=job.spec.argv,
        cwd=job.spec.cwd,
        env=dict(env),
        ranks=tuple(ranks),
        world_size=job.spec.workers,
        node_rank=nodes.index(place.host),
        nodes=nodes,
        master_addr=job.master_addr,
        master_port=job.master_port,
        attempt=job.attempt,
        grace_s=job.spec.grace_s,
        bind_gpus=job.spec.bind_gpus,
        attach=job.spec.attach,
    )
