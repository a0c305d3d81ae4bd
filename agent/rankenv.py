"""A rank's environment: the submitter's variables, over them what torchrun would set, the GPUs, and what is ours."""

import msgspec

from covey.core import HostId
from plugins.base import RankSpec, RanksSpec

UNLESS_SET = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PATH": "/usr/local/bin:/usr/bin:/bin"}
"""What a submitter may choose otherwise."""


class RankDoor(msgspec.Struct, frozen=True):
    """How a rank finds the agent of its host, and what it shows there."""

    host: HostId
    token: str
    socket: str
    """Path of jobs.sock."""
    preempt_file: str
    """Appears when the ranks are asked to end."""


def environment(spec: RanksSpec, rank: RankSpec, door: RankDoor, hide_gpus: bool) -> dict[str, str]:
    """`hide_gpus`: a rank without a GPU of its own sees none, instead of all."""
    set_here = {name: str(value) for name, value in {**_launch(spec, rank), **_ours(spec, rank, door)}.items()}
    return {**UNLESS_SET, **spec.env, **set_here, **_gpus(rank, hide_gpus)}


def _launch(spec: RanksSpec, rank: RankSpec) -> dict[str, object]:
    """As torchrun sets them."""
    return {
        "RANK": rank.rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_RANK": rank.local_rank,
        "LOCAL_WORLD_SIZE": len(spec.ranks),
        "NODE_RANK": spec.node_rank,
        "GROUP_RANK": spec.node_rank,
        "NNODES": len(spec.nodes),
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": spec.master_port,
        "PET_NNODES": len(spec.nodes),
        "PET_NODE_RANK": spec.node_rank,
        "PET_MASTER_ADDR": spec.master_addr,
        "PET_MASTER_PORT": spec.master_port,
    }


def _ours(spec: RanksSpec, rank: RankSpec, door: RankDoor) -> dict[str, object]:
    return {
        "COVEY_JOB_ID": spec.job,
        "COVEY_JOB_NAME": spec.name,
        "COVEY_EPOCH": spec.epoch,
        "COVEY_ATTEMPT": spec.attempt,
        "COVEY_RANK": rank.rank,
        "COVEY_WORLD_SIZE": spec.world_size,
        "COVEY_HOST": door.host,
        "COVEY_TENANT": spec.tenant,
        "COVEY_CLASS": spec.job_class,
        "COVEY_NODES": ",".join(spec.nodes),
        "COVEY_GPUS": ",".join(rank.gpus),
        "COVEY_TOKEN": door.token,
        "COVEY_SOCKET": door.socket,
        "COVEY_PREEMPT_FILE": door.preempt_file,
    }


def _gpus(rank: RankSpec, hide_gpus: bool) -> dict[str, str]:
    if not rank.gpus and not hide_gpus:
        return {}
    gpus = ",".join(rank.gpus)
    return {
        "CUDA_VISIBLE_DEVICES": gpus,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": gpus or "void",
    }
