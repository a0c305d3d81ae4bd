"""The variables of Slurm that a rank has too, in a job that came with `#SBATCH` lines or by `sbatch`.

Only such jobs have them: frameworks that find SLURM_ variables take themselves for jobs of Slurm. `srun` of these jobs
is `covey/hooks/slurm/srun`. Left out is what this host does not know: a variable that is missing is asked for, one that
is wrong is believed."""

import os

from covey import hooks
from covey.core.ids import HostId
from plugins.base import RankSpec, RanksSpec

ASKED_BY = "COVEY_SLURM"
"""The submitter's variable, not empty, that asks for these."""
SRUN = os.path.join(os.path.dirname(hooks.SITE), "slurm")
"""The folder of `srun`, first in PATH."""


def slurm_variables(spec: RanksSpec, rank: RankSpec, host: HostId, path: str) -> dict[str, str]:
    """What Slurm would set for this task; empty where nobody asks for it. `path`: its PATH."""
    if not spec.env.get(ASKED_BY):
        return {}
    number, nodes, here = spec.job[1:], ",".join(spec.nodes), len(spec.ranks)
    said: dict[str, object] = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), number),
        "SLURM_JOB_NAME": spec.name,
        "SLURM_JOB_ACCOUNT": spec.tenant,
        "SLURM_CLUSTER_NAME": "covey",
        "SLURM_JOB_PARTITION": "covey",
        "SLURM_JOB_QOS": spec.job_class,
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), spec.world_size),
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), len(spec.nodes)),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), nodes),
        "SLURM_PROCID": rank.rank,
        "SLURM_LOCALID": rank.local_rank,
        "SLURM_NODEID": spec.node_rank,
        "SLURMD_NODENAME": host,
        "SLURM_STEP_ID": 0,
        "SLURM_LAUNCH_NODE_IPADDR": spec.master_addr,
        "SLURM_SUBMIT_DIR": spec.cwd,
        "SLURM_RESTART_COUNT": spec.attempt - 1,
        "SLURM_GPUS_ON_NODE": sum(len(each.gpus) for each in spec.ranks),
    }
    if spec.user:
        said["SLURM_JOB_USER"] = spec.user
    if spec.uid is not None:
        said["SLURM_JOB_UID"] = spec.uid
    if spec.cpus:
        said["SLURM_CPUS_PER_TASK"] = spec.cpus
    if spec.host_memory:
        said["SLURM_MEM_PER_NODE"] = spec.host_memory >> 20
    if here * len(spec.nodes) == spec.world_size:
        each = f"{here}(x{len(spec.nodes)})" if len(spec.nodes) > 1 else str(here)
        said |= {"SLURM_NTASKS_PER_NODE": here, "SLURM_TASKS_PER_NODE": each}
    if (task := spec.task) is not None:
        said |= {
            "SLURM_ARRAY_JOB_ID": task.array[1:],
            "SLURM_ARRAY_TASK_ID": task.index,
            "SLURM_ARRAY_TASK_COUNT": task.count,
            "SLURM_ARRAY_TASK_MIN": task.first,
            "SLURM_ARRAY_TASK_MAX": task.last,
            "SLURM_ARRAY_TASK_STEP": task.step,
        }
    return {name: str(value) for name, value in said.items()} | {"PATH": f"{SRUN}:{path}"}
