"""Twenty batch scripts as sites and courses show them to their users, in our own words: the header of each, what
becomes of it, and why it is refused."""

from typing import Any, NamedTuple


class Script(NamedTuple):
    """One script: its header and body; `asks`: fields of the job; `says`: words on stderr; `refused`: no job."""

    text: str
    asks: dict[str, Any]
    says: tuple[str, ...] = ()
    refused: bool = False


GIB = 1 << 30
SCRIPTS = {
    "first-job-of-a-course": Script(
        "#!/bin/bash\n#SBATCH --job-name=hello\n#SBATCH --output=hello_%j.out\n#SBATCH --time=00:05:00\n"
        '#SBATCH --mem=1G\n\nmodule purge\nmodule load python/3.11\necho "$(hostname)"\n',
        {"name": "hello", "time_limit_s": 300.0, "host_memory": GIB},
    ),
    "one-gpu-conda": Script(
        "#!/bin/bash\n#SBATCH -J resnet\n#SBATCH -p gpu\n#SBATCH --gres=gpu:1\n#SBATCH -c 8\n#SBATCH --mem=32G\n"
        "#SBATCH -t 1-00:00:00\n#SBATCH -o logs/%x-%j.log\nsource ~/miniconda3/etc/profile.d/conda.sh\n"
        "conda activate torch\nsrun python train.py --epochs 90\n",
        {"gpus_per_worker": 1, "cpus": 8, "host_memory": 32 * GIB, "time_limit_s": 86400.0},
        ("partition gpu",),
    ),
    "typed-gpu": Script(
        "#!/bin/bash\n#SBATCH --gpus=a100:2\n#SBATCH --ntasks=2\n#SBATCH --cpus-per-task=4\npython eval.py\n",
        {"workers": 2, "gpus_per_worker": 1, "cpus": 4},
    ),
    "ddp-a-task-a-gpu": Script(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"
        '#SBATCH --cpus-per-task=10\nexport MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        "export MASTER_PORT=29500\nsrun python ddp.py\n",
        {"workers": 8, "gpus_per_worker": 1, "cpus": 10},
    ),
    "torchrun-a-task-a-host": Script(
        "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n#SBATCH --exclusive\n"
        "head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)\n"
        "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint "
        "$head:29500 t.py\n",
        {"workers": 4, "gpus_per_worker": 8, "pack": "apart"},
        ("--exclusive",),
    ),
    "sweep-as-an-array": Script(
        "#!/bin/bash\n#SBATCH --array=0-9%2\n#SBATCH --output=slurm-%A_%a.out\n#SBATCH --gpus-per-task=1\n"
        "#SBATCH -n 1\n"
        "LRS=(1e-3 3e-3 1e-2)\npython train.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]}\n",
        {"array": "0-9%2", "gpus_per_worker": 1},
    ),
    "array-with-a-step": Script(
        "#!/bin/bash\n#SBATCH -a 1-100:10\n#SBATCH -t 30\n./simulate $SLURM_ARRAY_TASK_ID\n",
        {"array": "1-100:10", "time_limit_s": 1800.0},
    ),
    "signal-and-requeue": Script(
        "#!/bin/bash\n#SBATCH --signal=B:USR1@300\n#SBATCH --requeue\n#SBATCH --open-mode=append\n#SBATCH -t 04:00:00\n"
        "trap 'scontrol requeue $SLURM_JOB_ID' USR1\npython train.py --resume &\nwait\n",
        {"stop_signal": "USR1", "signal_before_s": 300.0, "time_limit_s": 14400.0},
        ("--open-mode",),
    ),
    "openmp": Script(
        "#!/bin/bash\n#SBATCH --ntasks=1\n#SBATCH --cpus-per-task=16\n#SBATCH --hint=nomultithread\n"
        "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\n./solver input.dat\n",
        {"cpus": 16},
    ),
    "mpi": Script(
        "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=32\n#SBATCH --mem-per-cpu=2G\nmodule load openmpi\n"
        "srun ./cfd\n",
        {"workers": 64, "host_memory": 64 * GIB},
    ),
    "accounts-and-mail": Script(
        "#!/bin/bash\n#SBATCH -A physics\n#SBATCH --qos=opportunistic\n#SBATCH --mail-type=END,FAIL\n"
        "#SBATCH --mail-user=a@b.example\n#SBATCH --comment=paper\npython plot.py\n",
        {"tenant": "physics", "class": "opportunistic"},
        ("nobody gets mail",),
    ),
    "dependency-and-begin": Script(
        "#!/bin/bash\n#SBATCH --dependency=afterok:12:13\n#SBATCH --begin=now+1hour\n#SBATCH --hold\npython step2.py\n",
        {"after": ["ok:j12", "ok:j13"], "hold": True},
    ),
    "environment": Script(
        "#!/bin/bash\n#SBATCH --export=NONE,SEED=7\n#SBATCH --chdir=/tmp\n#SBATCH --error=err-%j\npython x.py\n",
        {"cwd": "/tmp"},
    ),
    "apptainer": Script(
        "#!/bin/bash\n#SBATCH --gpus=1\n#SBATCH --time=2:00:00\nsrun apptainer exec --nv pytorch.sif python train.py\n",
        {"gpus_per_worker": 1, "time_limit_s": 7200.0},
    ),
    "notebook": Script(
        "#!/bin/bash\n#SBATCH --gres=gpu:1\n#SBATCH --time=8:00:00\nport=$(shuf -i 8000-9999 -n 1)\n"
        "jupyter lab --no-browser --ip=$(hostname -s) --port=$port\n",
        {"gpus_per_worker": 1},
    ),
    "features-of-hosts": Script(
        '#!/bin/bash\n#SBATCH --gres=gpu:1\n#SBATCH --constraint="a100|h100"\npython train.py\n',
        {},
        ("hosts have no features here",),
        refused=True,
    ),
    "named-hosts": Script(
        "#!/bin/bash\n#SBATCH --nodelist=gpu[01-02]\n#SBATCH -N 2\nsrun ./x\n",
        {},
        ("--nodelist is refused", "agentctl hosts cordon HOST"),
        refused=True,
    ),
    "a-range-of-hosts": Script(
        "#!/bin/bash\n#SBATCH --nodes=2-4\nsrun ./x\n",
        {},
        ("invalid --nodes=2-4",),
        refused=True,
    ),
    "licences": Script(
        "#!/bin/bash\n#SBATCH -L matlab:1\nmatlab -batch run\n",
        {},
        ("and no licenses",),
        refused=True,
    ),
    "heterogeneous": Script(
        "#!/bin/bash\n#SBATCH -n 1 --gpus=1\n#SBATCH hetjob\n#SBATCH -n 16\nsrun a : b\n",
        {},
        ("hetjob",),
        refused=True,
    ),
}
