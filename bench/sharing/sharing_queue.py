"""`make bench-sharing ONLY=queue`: twenty jobs of two classes on eight devices: with sharing, without, and the model.

    python bench/sharing/sharing_queue.py [--seed 1] [--step 0.04]

Four real agents with two devices each, made of the cores of this machine, which cannot compute for eight: the jobs
mostly wait. A twentieth of a mini-batch is work and the rest sleep. Half of the jobs are guaranteed, of a tenant whose
quota is all eight devices; the others are opportunistic. The same arrivals once with `beside = 0`, once with 1. A job
that yields continues where it was. Before that `sim/jobs/sharing_cluster.py` is asked about the same jobs (it knows
their lengths alone, and neither starts nor hosts).
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import options, print_head  # noqa: E402
from plugins.scheduler.policy.rules import COVEY  # noqa: E402
from sim.jobs.engine import SimJob  # noqa: E402
from sim.jobs.sharing_cluster import GUARANTEED, Cluster, Sharing  # noqa: E402
from tests.rack.living_rack import wait  # noqa: E402
from tests.rack.sharing_rack import SharingRack, rank, sharing_rack  # noqa: E402

USED = 0.05
"""Share of a mini-batch that is work; the rest is sleep."""
HOSTS, GPUS, JOBS = 4, 2, 20
OVER_S = 300.0
Times = dict[str, float]


def drawn(seed: int) -> list[SimJob]:
    """Jobs that arrive within a quarter of a minute, and take 6 to 16 s alone."""
    rng = Random(f"queue/{seed}")
    submit_s = sorted(rng.randrange(0, 15) for _ in range(JOBS))
    tenants = [GUARANTEED, "b"] * (JOBS // 2)
    rng.shuffle(tenants)
    lengths = [(rng.choice((1, 1, 2, 4)), rng.randrange(6, 17)) for _ in range(JOBS)]
    return [
        SimJob(at, begins, gpus, seconds, tenant=tenant)
        for at, (begins, tenant, (gpus, seconds)) in enumerate(zip(submit_s, tenants, lengths, strict=True))
    ]


def modelled(jobs: Sequence[SimJob], beside: int) -> list[float]:
    """Completion times of the jobs by the model, in seconds."""
    sharing = Sharing(classes=True, busy=(USED, USED), memory_large=0.0, move_s=None, per_gpu_max=1 + beside)
    ends = Cluster(jobs, HOSTS * GPUS, sharing, 1, COVEY).run().end_s
    return [end - job.submit_s for job, end in zip(jobs, ends, strict=True)]


def lived(jobs: Sequence[SimJob], beside: int, step_s: float) -> list[float]:
    """Completion times of these jobs on real agents, in seconds."""
    with sharing_rack(HOSTS, GPUS, f"beside = {beside}\nquotas = {{{GUARANTEED} = {HOSTS * GPUS}}}") as rack:
        began_s, ids = time.monotonic(), []
        for job in jobs:
            time.sleep(max(0.0, began_s + job.submit_s - time.monotonic()))
            ids.append(_submit(rack, job, step_s))
        wait("all are done", lambda: all(row["over"] for row in rack.agent().get("jobs", all=1).data), OVER_S)
        rows = {row["id"]: row for row in rack.agent().get("jobs", all=1).data}
        assert {row["state"] for row in rows.values()} == {"done"}, [row["reason"] for row in rows.values()]
        times = [rows[id]["times"] for id in ids]
        return [each["ended_wall_s"] - each["submitted_wall_s"] for each in times]


def _submit(rack: SharingRack, job: SimJob, step_s: float) -> str:
    job_class = "guaranteed" if job.tenant == GUARANTEED else "opportunistic"
    argv = rank(USED * step_s, (1 - USED) * step_s, round(job.duration_s / step_s))
    more = {"tenant": job.tenant, "job_class": job_class, "workers": job.gpus, "gpu_memory": 256 << 20, "grace_s": 0.5}
    return rack.submit(f"job{job.id}", argv, **more)


def row(name: str, jobs: Sequence[SimJob], without: Sequence[float], shared: Sequence[float]) -> str:
    def mean(spans: Sequence[float], tenant: str = "") -> float:
        return statistics.fmean(s for job, s in zip(jobs, spans, strict=True) if tenant in ("", job.tenant))

    told = [(mean(without, tenant), mean(shared, tenant)) for tenant in ("", GUARANTEED, "b")]
    return f"| {name} | {' | '.join(f'{a:.1f} / {b:.1f} ({a / b:.2f}x)' for a, b in told)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step", type=float, default=0.04, metavar="SECONDS", help="a mini-batch")
    args = parser.parse_args(argv)
    jobs = drawn(args.seed)
    print_head("average completion, s: without / with sharing | all | guaranteed | opportunistic")
    print(row("the model said", jobs, modelled(jobs, 0), modelled(jobs, 1)), flush=True)
    print(row("real agents", jobs, lived(jobs, 0, args.step), lived(jobs, 1, args.step)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
