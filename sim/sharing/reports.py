"""Sharing's experiments over many jobs: 2DAS with and without sharing, what is assumed swept, AntMan's two tenants, and
the split of memory among opportunistic jobs. Every function returns a `Report`; `make tables` runs them."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

import msgspec

from covey.core.units import GIB
from plugins.scheduler.policy.rules import LAS_PUBLISHED, OrderRules
from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.policy import memory
from sim.jobs.engine import Engine, SimJob
from sim.jobs.sharing_cluster import GUARANTEED, Cluster, Sharing, opportunistic_time
from sim.jobs.trace import read_trace
from sim.report import Cell, Figure, Progress, Report, Series, Table, Wrong
from sim.sharing.device import Scenario, simulate

COST_S = 30
"""Seconds to checkpoint a job, and again to restore it; sharing pays both for a job that it preempts."""
GPUS = 60
CLASSES_GPUS = 64
SHARED = Sharing()
FIRST_COME = OrderRules()
"""Rules of one queue, first come, first served."""
INTERFERENCES = (0.0, 0.05, 0.1, 0.2)
BUSY = ((0.1, 0.5), (0.1, 0.9), (0.5, 1.0), (1.0, 1.0))
PAPER_YARN, PAPER_GANDIVA = 2.05, 1.84
"""How many times better AntMan's average JCT is than that of YARN-CS and of Gandiva (AntMan figure 13a)."""


def jct_mean(jobs: Sequence[SimJob], end_s: Sequence[float], tenant: str | None = None) -> float:
    """Average job completion time in seconds; of one tenant if it is named."""
    return fmean(end - job.submit_s for job, end in zip(jobs, end_s, strict=True) if tenant in (None, job.tenant))


def geometric(values: Sequence[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def published(jobs: Sequence[SimJob], gpus: int) -> float:
    """Average JCT under 2D-LAS as published, in seconds."""
    rules = msgspec.structs.replace(LAS_PUBLISHED, preempt_s=COST_S, restore_s=COST_S)
    return jct_mean(jobs, Engine(jobs, gpus, rules).run().end_s)


def shared(jobs: Sequence[SimJob], gpus: int, sharing: Sharing) -> float:
    """Average JCT with sharing, in seconds."""
    return jct_mean(jobs, Cluster(jobs, gpus, sharing, 1).run().end_s)


def assumed(sharing: Sharing) -> list[str]:
    """Notes on what is assumed, which a reader must know."""
    low, high = sharing.busy
    return [
        f"Assumed: a guaranteed job with another beside it is {100 * sharing.interference:g} % slower all the time; "
        f"jobs use their GPU for {100 * low:g} to {100 * high:g} % of the time, uniformly; "
        f"{100 * sharing.memory_large:g} % of them need more than half of its memory.",
        f"An opportunistic job gets {100 * sharing.used:g} % of what the device model gives; a gang goes at its worst. "
        f"Preempting costs {COST_S} + {COST_S} s. Virtual time, a model of devices: not measured on GPUs.",
    ]


def trace(paths: Sequence[Path], progress: Progress, gpus: int = GPUS, sharing: Sharing = SHARED) -> Report:
    """Compare 2D-LAS as published with our order without and with sharing, per trace."""
    found: list[dict[str, Cell]] = []
    warnings = []
    for done, path in enumerate(paths):
        loaded = read_trace(path)
        progress(done / len(paths), loaded.name)
        jobs = [job for job in loaded.jobs if job.gpus <= gpus]
        if len(jobs) < len(loaded.jobs):
            warnings.append(f"{loaded.name}: gangs of more than {gpus} GPUs left out: {len(loaded.jobs) - len(jobs)}")
        if not jobs:
            raise Wrong(f"{path}: no job", f"every gang has more than {gpus} GPUs", "give more with --gpus")
        las, unshared = published(jobs, gpus), shared(jobs, gpus, replace(sharing, per_gpu_max=1))
        both, worst = (shared(jobs, gpus, replace(sharing, own_waits=waits)) for waits in (True, False))
        row: dict[str, Cell] = {"trace": loaded.name, "jobs": len(jobs)}
        row |= {"las_published_jct_s": las, "unshared_jct_s": unshared, "shared_jct_s": both}
        row |= {"by_sharing": unshared / both, "over_las_published": las / both, "at_worst": las / worst}
        found.append(row)
    mean, bound = (geometric([float(str(row[key])) for row in found]) for key in ("over_las_published", "at_worst"))
    table = Table(
        f"Average JCT with GPU sharing, {gpus} GPUs",
        ["trace", "jobs", "las-published_s", "unshared_s", "shared_s", "by_sharing", "over_las-published", "at_worst"],
        [list(row.values()) for row in found],
        [
            f"Geometric mean over las-published: {mean:.2f}; at worst {bound:.2f}.",
            "unshared: the same order with one job on a GPU. by_sharing: what sharing alone brings.",
            "at_worst: the waits of an opportunistic job never fall into the busy time of the guaranteed one.",
            *assumed(sharing),
        ],
    )
    data = {"schema": 1, "gpus": gpus, "over_las_published_mean": mean, "at_worst_mean": bound, "traces": found}
    return Report("sharing-trace", data, [table], warnings=warnings)


def sweep(paths: Sequence[Path], progress: Progress, gpus: int = GPUS) -> Report:
    """Test how far the gain holds when the assumptions do not: interference by how busy jobs keep their GPUs."""
    traces = [read_trace(path) for path in paths]
    base = [published(loaded.jobs, gpus) for loaded in traces]
    rows: list[list[Cell]] = []
    found: list[dict[str, float]] = []
    for done, (low, high) in enumerate(BUSY):
        row: list[Cell] = [f"{100 * low:g}..{100 * high:g}"]
        for more, interference in enumerate(INTERFERENCES):
            progress((done + more / len(INTERFERENCES)) / len(BUSY), f"busy {low:g}..{high:g}, {interference:g}")
            sharing = replace(SHARED, interference=interference, busy=(low, high))
            gains = [las / shared(loaded.jobs, gpus, sharing) for las, loaded in zip(base, traces, strict=True)]
            row.append(geometric(gains))
            gain = {"mean": geometric(gains), "least": min(gains)}
            found.append({"busy_low": low, "busy_high": high, "interference": interference, **gain})
        rows.append(row)
    table = Table(
        "How many times better than las-published (average JCT, geometric mean)",
        ["busy_%", *(f"slower_{100 * each:g}_%" for each in INTERFERENCES)],
        rows,
        [
            "busy: how much of its time a job uses its GPU. slower: a guaranteed job with another beside it.",
            "With 100..100 no GPU takes a second job (M is 80 %): what is left is the order, and preemption.",
            f"{len(traces)} traces, {gpus} GPUs.",
        ],
    )
    lines = [
        Series(str(row[0]) + " % busy", [100 * each for each in INTERFERENCES], [float(str(cell)) for cell in row[1:]])
        for row in rows
    ]
    figure = Figure("sharing-sweep", "Gain over 2D-LAS", "interference, %", "times better", lines)
    return Report("sharing-sweep", {"schema": 1, "gpus": gpus, "gains": found}, [table], [figure])


def classes(paths: Sequence[Path], progress: Progress, gpus: int = CLASSES_GPUS) -> Report:
    """AntMan's trace experiment (§5.2): tenant A has quota for all GPUs, tenant B none; jobs are theirs at random."""
    rows: list[list[Cell]] = []
    for done, path in enumerate(paths):
        progress(done / len(paths), path.name)
        loaded = read_trace(path)
        rng = random.Random(f"tenants/{loaded.name}")
        jobs = [replace(job, tenant=rng.choice((GUARANTEED, "b"))) for job in loaded.jobs]
        own = [job for job in jobs if job.tenant == GUARANTEED]
        first_come: Sequence[float] = Engine(jobs, gpus, OrderRules(discipline="fifo")).run().end_s
        packing = replace(SHARED, mode="packing", move_s=None)
        packed = Cluster(jobs, gpus, packing, 1, FIRST_COME).run().end_s
        antman = Cluster(jobs, gpus, replace(SHARED, classes=True, move_s=None), 1, FIRST_COME).run().end_s
        # the bound: tenant A's jobs with the whole cluster to themselves
        alone = jct_mean(own, Engine(own, gpus, OrderRules(discipline="fjf")).run().end_s)
        means = [jct_mean(jobs, end_s) for end_s in (first_come, packed, antman)]
        slower = [100 * (jct_mean(jobs, end_s, GUARANTEED) / alone - 1) for end_s in (first_come, packed, antman)]
        makespan = [max(first_come) / max(antman), max(packed) / max(antman)]
        rows.append([loaded.name, *means, means[0] / means[2], means[1] / means[2], *slower, *makespan])
    table = Table(
        f"AntMan's two tenants, {gpus} GPUs: average JCT, and what it costs tenant A",
        [
            *("trace", "yarn-cs_s", "packing_s", "antman_s", "over_yarn-cs", "over_packing"),
            *("A_yarn-cs_%", "A_packing_%", "A_antman_%", "makespan_yarn-cs", "makespan_packing"),
        ],
        rows,
        [
            f"The paper, on its own trace and 64 V100: {PAPER_YARN} over YARN-CS, {PAPER_GANDIVA} over Gandiva.",
            "yarn-cs: first come, first served, blocking. packing: Gandiva's, no job is protected. A_: how much longer "
            "tenant A's jobs take than with the cluster to themselves, in %.",
            *assumed(SHARED),
        ],
    )
    keys = [
        *("trace", "yarn_cs_jct_s", "packing_jct_s", "antman_jct_s", "over_yarn_cs", "over_packing"),
        *("a_yarn_cs_percent", "a_packing_percent", "a_antman_percent", "makespan_yarn_cs", "makespan_packing"),
    ]
    found = [dict(zip(keys, row, strict=True)) for row in rows]
    return Report("sharing-classes", {"schema": 1, "gpus": gpus, "traces": found}, [table])


# ---- what the cluster model takes from the device model --------------------------------------------------------------


def pairs(progress: Progress, count: int = 40, seconds: float = 200.0, seed: int = 5) -> Report:
    """Run pairs of jobs drawn at random on one modelled GPU under the ladder, against the formula of the cluster
    model. Mini-batches last as in AntMan's figure 5 (80 % under 600 ms), jobs use the device as the cluster model
    assumes."""
    rng = random.Random(seed)
    rows: list[list[Cell]] = []
    for at in range(count):
        progress(at / count, f"pair {at + 1} of {count}")
        step_s, busy = rng.uniform(0.05, 0.4), rng.uniform(*SHARED.busy) * 0.9
        guest_s, guest_busy = rng.uniform(0.05, 0.4), rng.uniform(*SHARED.busy)
        ops = max(10, math.ceil(guest_s * guest_busy / 0.004))
        scenario = Scenario(
            f"pair-{at}",
            step_s * busy,
            step_s * (1 - busy),
            guest_s * guest_busy / ops,
            variation=0.05,
            guest_ops=ops,
            guest_wait_s=guest_s * (1 - guest_busy),
        )
        found = simulate(scenario, Ladder, 1, seconds)
        late = [share for _, _, share in found.timeline[len(found.timeline) // 2 :]]
        formula = 1 / opportunistic_time(guest_busy, 1 - busy)
        rows.append([step_s, busy, guest_s, guest_busy, 100 * found.slowdown, fmean(late), formula, 1 - busy])
    means = [fmean(float(str(row[column])) for row in rows) for column in (5, 6, 7)]
    table = Table(
        "Pairs of jobs on one modelled GPU: share of an opportunistic job, measured and by formula",
        ["guaranteed_s", "busy", "opportunistic_s", "its_busy", "slower_%", "share", "formula", "at_worst"],
        rows,
        [
            f"Means: {means[0]:.3f} measured (second half of {seconds:g} s), "
            f"{means[1]:.3f} formula, {means[2]:.3f} at worst."
        ],
    )
    data = {"schema": 1, "pairs": count, "share_mean": means[0], "formula_mean": means[1], "worst_mean": means[2]}
    return Report("sharing-pairs", data, [table])


# ---- memory among opportunistic jobs ---------------------------------------------------------------------------------

Curve = tuple[tuple[float, float], ...]
"""Points of speed, as a share of the best, by memory as a share of the demand; straight between them."""
JOBS: dict[str, tuple[int, Curve]] = {
    "SuperResolution": (10, ((0, 0.65), (0.1, 0.75), (1, 1))),
    "VGG16": (16, ((0, 0.3), (0.5, 0.97), (1, 1))),
    "ResNet50": (17, ((0, 0.25), (0.9, 0.38), (0.999, 0.45), (1, 1))),
    "fourth": (8, ((0, 0.4), (0.3, 0.9), (1, 1))),
}
"""Demand in GiB and curve of each job. The first three are as AntMan describes figure 10 in words; the fourth is made
up."""


def speed(curve: Curve, share: float) -> float:
    """Speed of a job that has this share of its demand."""
    for (low, at_low), (high, at_high) in pairwise(curve):
        if share <= high:
            return at_low + (at_high - at_low) * (share - low) / (high - low)
    return 1.0


def speeds(limits: Sequence[int]) -> list[float]:
    """Speeds of the four jobs under these limits, which are in bytes."""
    return [speed(curve, held / (want * GIB)) for held, (want, curve) in zip(limits, JOBS.values(), strict=True)]


def climb(search: memory.LimitSearch, noise: Callable[[], float]) -> memory.LimitSearch:
    """Run the whole search, with measurements that are wrong by a factor of 1 + `noise()`."""
    while not search.over:
        search = memory.measured(search, [each * (1 + noise()) for each in speeds(search.trial)])
    return search


def plain(room: int) -> memory.LimitSearch:
    """A search that climbs from the proportional split without trying each job once with all it asks for."""
    search = memory.begin(room, [want * GIB for want, _ in JOBS.values()])
    first = (search.trial, tuple(speeds(search.trial)))
    return msgspec.structs.replace(
        search,
        full=(1.0,) * len(JOBS),
        probed=(first,) * (len(JOBS) + 1),
        best=search.trial,
        best_score=sum(first[1]),
    )


def best_split(room_gib: int) -> float:
    """The best sum of speeds of all splits by whole GiB."""
    wants = [want for want, _ in JOBS.values()]
    rest = (
        (*some, room_gib - sum(some))
        for some in product(*(range(want + 1) for want in wants[:-1]))
        if 0 <= room_gib - sum(some) <= wants[-1]
    )
    return max(sum(speeds([gib * GIB for gib in split])) for split in rest)


def split(progress: Progress, rooms: Sequence[int] = (20, 26, 34, 42, 48), seed: int = 1) -> Report:
    """Compare trial and error with the split by demand, plain climbing and the optimum (AntMan §3.3, figure 10)."""
    rows: list[list[Cell]] = []
    for done, room in enumerate(rooms):
        progress(done / len(rooms), f"{room} GiB")
        rng = random.Random(seed)
        begun = memory.begin(room * GIB, [want * GIB for want, _ in JOBS.values()])
        ours, noisy = climb(begun, lambda: 0.0), climb(begun, lambda rng=rng: rng.gauss(0, 0.02))  # type: ignore[misc]
        simple = climb(plain(room * GIB), lambda: 0.0)
        scores = [sum(speeds(each.trial)) for each in (begun, simple, ours, noisy)]
        rows.append([room, *scores, best_split(room), ours.trials])
    table = Table(
        "Memory among four opportunistic jobs (51 GiB wanted): sum of speeds",
        ["room_GiB", "by_demand", "plain_climb", "ours", "ours_2%_noise", "optimum", "trials"],
        rows,
        [
            "optimum: the best of all splits by whole GiB; ours moves half GiB and may be a little above.",
            "Curves: three as AntMan describes figure 10, one made up. A trial lasts six mini-batches of each job.",
        ],
    )
    keys = ("room_gib", "by_demand", "plain_climb", "ours", "ours_noisy", "optimum", "trials")
    data = {"schema": 1, "rooms": [dict(zip(keys, row, strict=True)) for row in rows]}
    return Report("sharing-split", data, [table])
