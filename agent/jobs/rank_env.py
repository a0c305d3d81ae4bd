"""A rank's environment: the submitter's variables, over them what torchrun would set, the GPUs, and Covey's own.

Two kinds of programs read these variables, and they count different things:

- a *rank* (`python train.py`) reads RANK, LOCAL_RANK, GROUP_RANK: as torchrun sets them for its processes, LOCAL_RANK
  counts the ranks of one host, and GROUP_RANK counts hosts;
- a *launcher* (`torchrun train.py`), which one worker runs, reads NNODES, NODE_RANK and torchrun's own PET_*. What it
  calls a node is one launcher, so these count workers: two launchers on one host are two nodes, and both reach the one
  MASTER_ADDR:MASTER_PORT. Its processes per node are the GPUs of one worker.

GPUs. Each rank sees every GPU that the job has on the host, and `set_device(LOCAL_RANK)` is its own. With several GPUs
per worker its own come first, as far as LOCAL_RANK lets them:

    own = the GPUs of this rank, others = those of its siblings here, in the order of ranks
    LOCAL_RANK < len(own):  own, others
    otherwise:              own[:-1], others, with own[-1] put in at LOCAL_RANK

COVEY_LOCAL_DEVICE is the index of its first device (LOCAL_RANK), COVEY_LOCAL_DEVICES those of all its own.

Bound (`--bind-gpus`), a rank sees its own GPUs and no others, and is a node of its own: LOCAL_RANK 0 of
LOCAL_WORLD_SIZE 1, GROUP_RANK its RANK. So `set_device(LOCAL_RANK)` is right here too. Ranks of a job that has MIG
instances are always bound: CUDA shows a process one instance, the first that it may see, so that a rank with several
can use one of them, and a launcher starts one process.

Devices made of cores are none that a program counts: a rank that has them sees no GPU, COVEY_GPUS names them, it is
bound to their cores, and OMP_NUM_THREADS is how many these are.
"""

import os
import time
from collections.abc import Callable, Mapping

import msgspec

from agent.jobs.slurm_env import slurm_variables
from covey import hooks
from covey.core.ids import HostId
from covey.ports.devices import Devices, is_instance
from plugins.base import RankSpec, RanksSpec

INCARNATIONS_BITS = 16
"""The low bits of a rank's process number, which count the losses on this host; the bits above count how often places
of its gang had been exchanged when it came to this host."""
UNLESS_SET = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
}
"""Variables whose values here hold unless the submitter chooses others."""
NEVER_CHOSEN = frozenset(
    {
        *("COVEY_SPARE", "COVEY_SPARE_MODULES", "COVEY_INCARNATION", "COVEY_ELASTIC", "COVEY_HOST_MEMORY"),
        *("COVEY_SAVED_STEP", "COVEY_SAVED_AT"),
    }
)
"""Variables that only a host's agent gives to a process of a job, and not to each: a job that is submitted with the
environment of another one's rank may carry them."""
UNLESS_SET_BESIDE_OTHERS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""What the submitter of an opportunistic job on GPUs may choose otherwise: JAX would reserve three quarters of a
device's memory when it starts, and reads this at its start only. Where GPUs are shared and a job says what memory it
wants, that is what JAX takes at most (XLA_PYTHON_CLIENT_MEM_FRACTION), whatever its class."""
NO_GPUS = {
    "CUDA_VISIBLE_DEVICES": "",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NVIDIA_VISIBLE_DEVICES": "void",
    "COVEY_LOCAL_DEVICE": "",
    "COVEY_LOCAL_DEVICES": "",
}


class RankEndpoints(msgspec.Struct, frozen=True):
    """The paths through which a rank and its host's agent communicate, and the rank's token."""

    host: HostId
    token: str
    socket: str
    """Path of jobs.sock."""
    preempt_file: str
    """Path of the file that appears when the ranks are asked to end."""


def environment(
    spec: RanksSpec, rank: RankSpec, door: RankEndpoints, hide_gpus: bool, cores: int = 0, gpu_bytes: int = 0
) -> dict[str, str]:
    """The environment of a rank. `hide_gpus`: a rank without a GPU of its own sees none, instead of all. `cores`: the
    number of cores it is bound to; 0: its devices, if it has any, are GPUs. `gpu_bytes`: memory of the smallest of
    these; 0: not known."""
    set_here = {**_rank(spec, rank), **_launcher(spec, rank), **_ours(spec, rank, door)}
    carried = {name: str(value) for name, value in set_here.items()}
    threads = {"OMP_NUM_THREADS": str(cores)} if cores else {}
    gpus = NO_GPUS if cores else _gpus(spec, rank, hide_gpus)
    beside = _beside_others(spec, rank, gpu_bytes)
    chosen = {name: value for name, value in spec.env.items() if name not in NEVER_CHOSEN}
    base = {**UNLESS_SET, **beside, **threads, **chosen, "PWD": spec.cwd}
    slurm = slurm_variables(spec, rank, door.host, base["PATH"])
    return {**base, **slurm, **carried, **_hooked(spec), **gpus}


def set_by_covey(spec: RanksSpec, environment_of: Callable[[RanksSpec], Mapping[str, str]]) -> tuple[str, ...]:
    """The variables of a rank that hold whatever an image says: those that it has without its submitter's, but for
    values that are only there unless somebody chooses others. `environment_of`: the rank's `environment` by its
    spec."""
    bare = environment_of(msgspec.structs.replace(spec, env={}))
    return tuple(sorted(bare.keys() - UNLESS_SET.keys() - {"PYTHONPATH"}))


def _beside_others(spec: RanksSpec, rank: RankSpec, gpu_bytes: int) -> dict[str, str]:
    """The variables that bound JAX's memory beside other jobs. The fraction is rounded down, so that what JAX takes is
    never more than was asked for."""
    if not rank.gpus:
        return {}
    preallocates = UNLESS_SET_BESIDE_OTHERS if spec.job_class == "opportunistic" else {}
    if not 0 < spec.shared_memory <= gpu_bytes:
        return preallocates
    fraction = spec.shared_memory * 10_000 // gpu_bytes / 10_000
    return {**preallocates, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.4f}"} if fraction else preallocates


def cores_of(rank: RankSpec, devices: Devices) -> tuple[int, ...]:
    """The cores of those of the rank's devices that are made of cores; empty: it may run on any."""
    found = (device.cores for device in devices.devices() if device.uuid in rank.gpus)
    return tuple(sorted({core for cores in found for core in cores}))


def memory_of(rank: RankSpec, devices: Devices) -> int:
    """The memory of the smallest of the rank's devices, bytes; 0: not known."""
    found = {device.uuid: device.memory_bytes for device in devices.devices()} if rank.gpus else {}
    return min((found.get(gpu, 0) for gpu in rank.gpus), default=0)


def visible(spec: RanksSpec, rank: RankSpec) -> tuple[str, ...]:
    """The UUIDs in the order in which the rank's program counts its devices."""
    if spec.bind_gpus or not rank.gpus:
        return rank.gpus
    others = tuple(gpu for sibling in spec.ranks if sibling.rank != rank.rank for gpu in sibling.gpus)
    if rank.local_rank < len(rank.gpus):
        return rank.gpus + others
    rest = rank.gpus[:-1] + others
    return (*rest[: rank.local_rank], rank.gpus[-1], *rest[rank.local_rank :])


def usable(rank: RankSpec) -> tuple[str, ...]:
    """The rank's devices that one process can use."""
    return rank.gpus[:1] if any(map(is_instance, rank.gpus)) else rank.gpus


def _local_rank(spec: RanksSpec, rank: RankSpec) -> int:
    return 0 if spec.bind_gpus else rank.local_rank


def _rank(spec: RanksSpec, rank: RankSpec) -> dict[str, object]:
    """The variables that torchrun sets for a process that it starts."""
    group, groups = (rank.rank, spec.world_size) if spec.bind_gpus else (spec.node_rank, len(spec.nodes))
    return {
        "RANK": rank.rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_RANK": _local_rank(spec, rank),
        "LOCAL_WORLD_SIZE": 1 if spec.bind_gpus else len(spec.ranks),
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": groups,
        "ROLE_RANK": rank.rank,
        "ROLE_WORLD_SIZE": spec.world_size,
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": spec.master_port,
        "TORCHELASTIC_RUN_ID": spec.job,  # Lightning goes by RANK and GROUP_RANK where this is set
        "TORCHELASTIC_RESTART_COUNT": spec.attempt - 1,
    }


def _launcher(spec: RanksSpec, rank: RankSpec) -> dict[str, object]:
    """What torchrun (PET_*), and scripts that start it, take for options that are not given."""
    return {
        "NNODES": spec.world_size,
        "NODE_RANK": rank.rank,
        "PET_NNODES": spec.world_size,
        "PET_NODE_RANK": rank.rank,
        "PET_NPROC_PER_NODE": max(1, len(usable(rank))),
        "PET_MASTER_ADDR": spec.master_addr,
        "PET_MASTER_PORT": spec.master_port,
    }


def _ours(spec: RanksSpec, rank: RankSpec, door: RankEndpoints) -> dict[str, object]:
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
        "COVEY_RANKS_HERE": ",".join(str(sibling.rank) for sibling in spec.ranks),
        "COVEY_NODES": ",".join(spec.nodes),
        "COVEY_TABLES": spec.tables,
        "COVEY_GPUS": ",".join(rank.gpus),
        **({"COVEY_GPU_MEMORY": spec.shared_memory} if spec.shared_memory else {}),
        "COVEY_TOKEN": door.token,
        "COVEY_SOCKET": door.socket,
        "COVEY_PREEMPT_FILE": door.preempt_file,
        **({"COVEY_STOP_SIGNAL": spec.stop_signal} if spec.stop_signal != "TERM" else {}),
        **_saved(spec),
        "COVEY_CHECKPOINT_DIR": checkpoints_of(spec),
        **_of_others(spec),
        **({"COVEY_INCARNATION": spec.since << INCARNATIONS_BITS} if spec.since else {}),
        **({"COVEY_ELASTIC": 1} if spec.carried else {}),
        **({"COVEY_HOST_MEMORY": spec.host_memory} if spec.host_memory else {}),
    }


def _saved(spec: RanksSpec) -> dict[str, object]:
    """The newest checkpoint of the job."""
    return {} if spec.saved is None else {"COVEY_SAVED_STEP": spec.saved.step, "COVEY_SAVED_AT": spec.saved.path}


def _of_others(spec: RanksSpec) -> dict[str, object]:
    """The array that the job is a task of, and how the jobs ended for whose end it waited."""
    task = spec.task
    of_array = {} if task is None else {"COVEY_ARRAY": task.array, "COVEY_TASK": task.index, "COVEY_TASKS": task.count}
    ended = ",".join(f"{job}:{how.replace(' ', ':')}" for job, how in spec.after.items())
    return of_array | ({"COVEY_AFTER": ended} if ended else {})


def checkpoints_of(spec: RanksSpec) -> str:
    """The folder for checkpoints of this job and of no other, below the one that the submitter chose or the working
    directory: a rack that was made anew counts its jobs from 1 again."""
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(spec.submitted_wall_s))
    return os.path.join(spec.cwd, spec.env.get("COVEY_CHECKPOINTS") or "checkpoints", f"{spec.job}-{when}")


def _hooked(spec: RanksSpec) -> dict[str, str]:
    """The variables that load `covey.hooks`: Python looks for `sitecustomize` along PYTHONPATH, where Covey's comes
    first, and runs the one behind it."""
    if not spec.hooks:
        return {"COVEY_HOOKS": "0"}
    behind = spec.env.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{hooks.SITE}{os.pathsep}{behind}" if behind else hooks.SITE}


def _gpus(spec: RanksSpec, rank: RankSpec, hide_gpus: bool) -> dict[str, str]:
    if not rank.gpus and not hide_gpus:
        return {}
    seen = visible(spec, rank)
    own = sorted((seen.index(gpu) for gpu in usable(rank)), key=lambda index: (index != _local_rank(spec, rank), index))
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(seen),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NVIDIA_VISIBLE_DEVICES": ",".join(seen) or "void",
        "COVEY_LOCAL_DEVICE": ",".join(map(str, own[:1])),
        "COVEY_LOCAL_DEVICES": ",".join(map(str, own)),
    }
