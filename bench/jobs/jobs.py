"""The scheduler's tables: every policy on every trace, the papers' own comparisons, and sensitivity."""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from plugins.scheduler.policy.rules import COVEY
from sim.jobs import jobs as simulator
from sim.jobs.jobs import Plan, plan_of
from sim.jobs.trace import Trace, read_trace
from sim.report import Cell, Figure, Progress, Report, Series, Table

TRACES = Path(__file__).parents[1] / "traces"
OWN_TRACES = "COVEY_TRACES"
"""Environment variable that names a folder with more traces, such as openb2023_first_half, which may not be shipped."""
SIZES: tuple[tuple[str, int], ...] = (
    ("tiresias_60", 16),
    *((f"tiresias480r_seed{seed}", 60) for seed in range(1, 6)),
    ("muri_cluster400", 64),
    ("muri_trace3", 64),
    ("philly_vc_ee9e8c", 64),
    ("muri_trace1", 128),
    ("openb2023_first_half", 16),
    ("chronus_philly_mix1_first_half", 1024),
    ("philly_2017-09_10", 640),
    ("philly_2017-09_10", 512),
)
"""(trace, GPUs) on which policies are compared."""
CHEAP = ("covey", "las-published", "dlas", "dgittins", "srsf", "srtf", "sjf", "fjf", "fifo", "backfill", "gandiva")
COSTLY = ("las", "gittins")
LONG_S = 20 * 86400
"""Length in seconds of a long trace: there COSTLY are left out and turns are longer, because they look at every
running job at every event, or switch so often, that they would take an hour."""
LONG_TURN_S = 3600
NEAREST = ("philly_2017-09_10", 640)
"""The public trace that is most like the one of the papers."""
SHOWN = {
    "covey": "covey",
    "las-published": "Tiresias-L (published)",
    "dlas": "2D-LAS, sticky",
    "dgittins": "2D-Gittins, K=2",
    "las": "2D-LAS, no queues",
    "gittins": "2D-Gittins, no queues",
    "srsf": "SRSF",
    "srtf": "SRTF",
    "sjf": "SF",
    "fjf": "best effort",
    "fifo": "YARN-CS (FIFO)",
    "backfill": "FCFS + backfill",
    "gandiva": "time-slicing",
}
Found = dict[str, Any]


def there() -> list[tuple[str, int, Path]]:
    """The (trace, GPUs, file) that this checkout can run."""
    folders = [TRACES, *([Path(os.environ[OWN_TRACES])] if os.environ.get(OWN_TRACES) else [])]
    found = []
    for name, gpus in SIZES:
        file = next((f / f"{name}.csv.gz" for f in folders if (f / f"{name}.csv.gz").is_file()), None)
        if file is not None:
            found.append((name, gpus, file))
    return found


@lru_cache(maxsize=2)
def loaded(file: Path) -> Trace:
    return read_trace(file)


def one(file: Path, gpus: int, plan: Plan, progress: Progress) -> Report:
    return simulator.simulate(loaded(file), gpus, plan, progress)


def part(progress: Progress, done: int, total: int, what: str) -> Progress:
    """Progress of one of several runs."""
    return lambda share, text: progress((done + share) / total, f"{what}: {text}")


def mean(values: Sequence[float]) -> float:
    """Geometric mean of these values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def runs(
    cases: Sequence[tuple[str, int, Path]],
    plans: dict[str, Plan],
    progress: Progress,
    curves: list[Series] | None = None,
) -> Iterator[tuple[str, int, dict[str, Found]]]:
    """Run every plan on every trace. `curves` is given the distributions on the trace of NEAREST."""
    total, done = len(cases) * len(plans), 0
    for name, gpus, file in cases:
        found: dict[str, Found] = {}
        long = loaded(file).jobs[-1].submit_s > LONG_S
        for label, plan in plans.items():
            done += 1
            if long and (label in COSTLY or "knob" in label):
                continue
            if plan.rules.discipline == "gandiva" and long:
                plan = replace(plan, rules=msgspec.structs.replace(plan.rules, quantum_s=LONG_TURN_S))
            report = one(file, gpus, plan, part(progress, done - 1, total, f"{label} on {name}, {gpus} GPUs"))
            found[label] = report.data
            if curves is not None and (name, gpus) == NEAREST:
                curve = report.figures[0].series[0]
                curves.append(Series(SHOWN[label], curve.x[::50], curve.y[::50]))
        yield name, gpus, found


def without_cost(policy: str, **more: Any) -> Plan:
    """A plan as the papers' simulators have it: stopping and starting is free, decisions at every event."""
    plan = plan_of(policy, {})
    rules = msgspec.structs.replace(plan.rules, preempt_s=0, restore_s=0, **more)
    return Plan(plan.policy, rules, plan.limit_factor, plan.samples)


# ---- every policy on every trace ----


def policies(progress: Progress) -> Report:
    """Average and 95th percentile completion time of all policies, as multiples of covey's."""
    plans = {policy: plan_of(policy, {}) for policy in (*CHEAP, *COSTLY)}
    average: list[list[Cell]] = []
    tail: list[list[Cell]] = []
    data: Found = {}
    for name, gpus, found in runs(there(), plans, progress):
        base = found["covey"]
        data[f"{name}/{gpus}"] = found
        title: list[Cell] = [name, gpus, base["jobs"]]
        average.append([*title, base["jct_s_mean"], *_ratios(found, base, "jct_s_mean", plans)])
        tail.append([*title, base["jct_s_p95"], *_ratios(found, base, "jct_s_p95", plans)])
    columns = ["trace", "GPUs", "jobs", "covey (s)", *(SHOWN[policy] for policy in plans if policy != "covey")]
    notes = [
        "multiples of covey's: above 1 means that the policy is slower than covey",
        "30 s for every checkpoint and 30 s for every restart; 60 s turns and 1 s per change of turn for time-slicing",
        "SRSF and SRTF know every duration, backfill's limits are the durations, 2D-Gittins knows this trace's totals",
        f"traces over 20 days: turns of {LONG_TURN_S} s, and nothing without queues, which switches all the time",
    ]
    tables = []
    for title_of, rows in (("average job completion time", average), ("95th percentile", tail)):
        bottom: list[Cell] = ["geometric mean", None, None, None]
        for at in range(4, len(columns)):
            bottom.append(mean([float(str(row[at])) for row in rows if row[at] is not None]))
        tables.append(Table(f"{title_of}, all policies", columns, [*rows, bottom], notes))
    return Report("jobs-policies", {"runs": data}, tables)


def _ratios(found: dict[str, Found], base: Found, what: str, plans: dict[str, Plan]) -> list[Cell]:
    return [found[p][what] / base[what] if p in found else None for p in plans if p != "covey"]


# ---- what covey gains ----


def gain(progress: Progress) -> Report:
    """Covey against Tiresias-L as published, with the same information: gang size and attained service."""
    plans = {policy: plan_of(policy, {}) for policy in ("covey", "las-published", "dlas")}
    rows: list[list[Cell]] = []
    averages, tails, sticky = [], [], []
    for name, gpus, found in runs(there(), plans, progress):
        ours, theirs = found["covey"], found["las-published"]
        averages.append(ours["jct_s_mean"] / theirs["jct_s_mean"])
        tails.append(ours["jct_s_p95"] / theirs["jct_s_p95"])
        sticky.append(found["dlas"]["jct_s_mean"] / theirs["jct_s_mean"])
        rows.append(
            [name, gpus, theirs["jct_s_mean"], ours["jct_s_mean"], averages[-1], sticky[-1], theirs["jct_s_p95"],
             ours["jct_s_p95"], tails[-1], theirs["preemptions"], ours["preemptions"]]
        )  # fmt: skip
    bottom = [mean(averages), mean(sticky), None, None, mean(tails), None, None]
    rows.append(["geometric mean", None, None, None, *bottom])
    columns = [
        "trace", "GPUs", "published: mean (s)", "covey: mean (s)", "covey / published", "only sticky / published",
        "published: 95 % (s)", "covey: 95 % (s)", "covey / published, 95 %", "published: stops", "covey: stops",
    ]  # fmt: skip
    notes = [
        "published: Tiresias-L of the testbed, K=2, 3,200 GPU-s, event-driven, FIFO by first start, no promotion",
        f"covey: thresholds {COVEY.thresholds_gpu_s} GPU-s, sticky, narrow gangs first, a week of waiting at most",
        f"worst average {max(averages):.3f}, arithmetic mean of the 95 % ratios {sum(tails) / len(tails):.3f}",
    ]
    data = {
        "jct_mean_ratio_geometric": mean(averages), "jct_mean_ratio_max": max(averages),
        "jct_p95_ratio_geometric": mean(tails), "jct_p95_ratio_arithmetic": sum(tails) / len(tails),
    }  # fmt: skip
    return Report("jobs-gain", data, [Table("covey against Tiresias-L as published", columns, rows, notes)])


# ---- the papers' tables ----


def table_31(progress: Progress) -> Report:
    """One dimension against two (Gu 2021, table 3.1)."""
    printed = {"sjf": (1.52, 1.20, 3.45), "srtf": (1.03, 1.01, 1.55)}
    plans = {policy: without_cost(policy) for policy in ("srsf", "sjf", "srtf")}
    return _normalised(
        "jobs-table-3-1", "table 3.1: one dimension, as multiples of SRSF", "srsf", plans, printed, progress
    )


def table_36(progress: Progress) -> Report:
    """Policies as multiples of Tiresias-L (Gu 2021, table 3.6)."""
    printed = {
        "fifo": (2.41, 30.85, 1.25), "fjf": (1.50, 9.03, 1.08), "srtf": (1.00, 1.00, 0.84),
        "gandiva": (2.00, 2.59, 2.08), "dgittins": (0.97, 1.00, 0.85),
    }  # fmt: skip
    first = {"inside": "first"}
    plans = {
        "las-published": without_cost("las-published", thresholds_gpu_s=(3600,)),
        "fifo": without_cost("fifo"),
        "fjf": without_cost("fjf"),
        "srtf": without_cost("srtf"),
        "gandiva": without_cost("gandiva"),
        "dgittins": without_cost("dgittins", thresholds_gpu_s=(3600,), **first),
        "covey": without_cost("covey"),
    }
    title = "table 3.6: as multiples of Tiresias-L (K=2, 1 GPU-h)"
    return _normalised("jobs-table-3-6", title, "las-published", plans, printed, progress)


def _normalised(
    name: str,
    title: str,
    base: str,
    plans: dict[str, Plan],
    printed: Mapping[str, tuple[float, ...]],
    progress: Progress,
) -> Report:
    rows: list[list[Cell]] = []
    whats = ("jct_s_mean", "jct_s_p50", "jct_s_p95")
    data: Found = {}
    curves: list[Series] = []
    for trace, gpus, found in runs(there(), plans, progress, curves):
        for policy in plans:
            if policy != base and policy in found:
                ratios = [found[policy][what] / found[base][what] for what in whats]
                data.setdefault(policy, []).append({"trace": trace, "gpus": gpus, "mean_p50_p95": ratios})
                rows.append([SHOWN[policy], trace, gpus, *ratios])
    order = [policy for policy in plans if policy != base]
    rows.sort(key=lambda row: order.index(next(p for p in order if SHOWN[p] == row[0])))
    means: list[list[Cell]] = []
    for policy in order:
        ours = [[row[at] for row in rows if row[0] == SHOWN[policy]] for at in (3, 4, 5)]
        theirs = printed.get(policy, (None, None, None))
        near = next((row[3:] for row in rows if row[:3] == [SHOWN[policy], *NEAREST]), [None, None, None])
        means.append([SHOWN[policy], *theirs, *near, *(mean([float(str(v)) for v in column]) for column in ours)])
    whose = ("paper", "philly 640", "all")
    columns = ["policy", *(f"{who}: {what}" for who in whose for what in ("average", "median", "95th"))]
    notes = [
        "philly 640: the public trace of the papers' cluster, on 640 GPUs; all: geometric mean over the traces",
        "the papers' own trace, ten weeks of the same cluster, is not public",
        "stopping and starting is free here, as in the paper's simulator",
        f"time-slicing: turns of 60 s, in traces over 20 days of {LONG_TURN_S} s",
    ]
    every = Table("the same for each trace", ["policy", "trace", "GPUs", "average", "median", "95th"], rows)
    figure = Figure(
        name,
        f"{NEAREST[0]}, {NEAREST[1]} GPUs",
        "job completion time (s)",
        "share of jobs",
        curves,
        log_x=True,
        steps=True,
    )
    return Report(name, data, [Table(title, columns, means, notes), every], [figure] if curves else [])


def fidelity(progress: Progress) -> Report:
    """The testbed's 480 jobs in the simulator (Gu 2021, §3.5.3.1), on five rebuilt workloads."""
    printed = {"fifo": (5.11, 1.50), "srtf": (0.74, 0.55), "dgittins": (1.01, 1.13)}
    cases = [case for case in there() if case[0].startswith("tiresias480r")]
    rows: list[list[Cell]] = []
    for label, free in (("free", True), ("30 s + 30 s", False)):
        plans = {
            policy: without_cost(policy) if free else plan_of(policy, {})
            for policy in ("las-published", "fifo", "srtf", "dgittins", "covey")
        }
        plans["dgittins"] = Plan("dgittins", msgspec.structs.replace(plans["dgittins"].rules, inside="first"))
        found = [each for _, _, each in runs(cases, plans, progress)]
        for policy in ("fifo", "srtf", "dgittins", "covey"):
            average = mean([each[policy]["jct_s_mean"] / each["las-published"]["jct_s_mean"] for each in found])
            tail = mean([each[policy]["jct_s_p95"] / each["las-published"]["jct_s_p95"] for each in found])
            makespan = mean([each[policy]["makespan_s"] / each["las-published"]["makespan_s"] for each in found])
            rows.append([SHOWN[policy], label, *printed.get(policy, (None, None)), average, tail, makespan])
    columns = [
        "policy",
        "stop and start",
        "paper: average",
        "paper: 95th",
        "ours: average",
        "ours: 95th",
        "ours: makespan",
    ]
    notes = [
        "as multiples of Tiresias-L (K=2, 3,200 GPU-s); geometric mean of five seeds on 60 GPUs",
        "the paper's workload is not public: these are rebuilt from its counts, bins and arrival rate",
        "its makespans: Tiresias-L 27,400 s, YARN-CS 1.21 x as long",
    ]
    data = {"rows": rows}
    return Report("jobs-fidelity", data, [Table("fidelity: the testbed's workload", columns, rows, notes)])


# ---- sensitivity ----


def sensitivity(progress: Progress) -> Report:
    """K, thresholds, knob, starvation limit and the cost of stopping, each alone, around both policies."""
    hour = 3600
    settings: dict[str, tuple[str, dict[str, str]]] = {
        "published": ("las-published", {}),
        **{
            f"published, threshold {h:g} h": ("las-published", {"thresholds": f"{int(h * hour)}"})
            for h in (0.5, 1, 2, 4)
        },
        "published, K=3: 1 h, 2 h": ("las-published", {"thresholds": f"{hour}/{2 * hour}"}),
        "published, K=4: 1 h, 2 h, 4 h": ("las-published", {"thresholds": f"{hour}/{2 * hour}/{4 * hour}"}),
        **{f"published, knob {k}": ("las-published", {"knob": f"{k}"}) for k in (1, 4, 16, 64)},
        "covey": ("covey", {}),
        "covey, K=2: 3,200": ("covey", {"thresholds": "3200"}),
        "covey, K=3: 3,200 x8": ("covey", {"thresholds": "3200/25600"}),
        "covey, K=3: 3,200 x64": ("covey", {"thresholds": "3200/204800"}),
        "covey, K=4: 3,200 x16": ("covey", {"thresholds": "3200/51200/819200"}),
        "covey, K=3: 800 x16": ("covey", {"thresholds": "800/12800"}),
        "covey, K=3: 12,800 x16": ("covey", {"thresholds": "12800/204800"}),
        "covey, not narrow first": ("covey", {"narrow": "off"}),
        "covey, no starvation limit": ("covey", {"starve": "inf"}),
        "covey, starvation limit 1 day": ("covey", {"starve": "86400"}),
        "covey, starvation limit 30 days": ("covey", {"starve": "2592000"}),
        "covey, knob 8": ("covey", {"knob": "8"}),
    }
    plans = {label: plan_of(policy, given) for label, (policy, given) in settings.items()}
    cases = there()
    found = {(name, gpus): each for name, gpus, each in runs(cases, plans, progress)}
    rows: list[list[Cell]] = []
    for label in plans:
        averages, tails, stops = [], [], []
        for each in found.values():
            if label not in each:
                continue
            averages.append(each[label]["jct_s_mean"] / each["published"]["jct_s_mean"])
            tails.append(each[label]["jct_s_p95"] / each["published"]["jct_s_p95"])
            stops.append(max(1, each[label]["preemptions"]) / max(1, each["published"]["preemptions"]))
        rows.append([label, len(averages), mean(averages), max(averages), mean(tails), mean(stops)])
    columns = ["settings", "traces", "average", "worst average", "95th", "stops"]
    notes = [
        "as multiples of Tiresias-L as published on the same trace; geometric mean over the traces, and the worst",
        "knobs only on traces under 20 days: they promote and demote jobs of weeks every few minutes",
    ]
    per_trace = [
        [f"{name}, {gpus}", *(_of_published(each, label) for label in plans)] for (name, gpus), each in found.items()
    ]
    tables = [
        Table("sensitivity", columns, rows, notes),
        Table("sensitivity, average on each trace", ["trace, GPUs", *plans], per_trace),
    ]
    return Report("jobs-sensitivity", {"rows": rows}, tables)


def _of_published(found: dict[str, Found], label: str) -> Cell:
    return found[label]["jct_s_mean"] / found["published"]["jct_s_mean"] if label in found else None


# ---- chosen without the trace that they are shown on ----

CHOICES: Mapping[str, tuple[str, ...]] = {
    "thresholds": ("3200", "3200/25600", "3200/51200", "3200/102400", "3200/204800"),
    "narrow": ("on", "off"),
    "starve": ("86400", "604800", "inf"),
}
"""Values that covey's three constants could have had."""
WORST_MAX = 1.01
"""Largest factor by which a choice may be worse than published on a trace that it may see; otherwise it is not
taken."""


def family(name: str) -> str:
    """Name of a trace's origin; traces of one origin are left out together: seeds of one generator, sizes of one
    cluster."""
    return name.split("_seed")[0]


def held_out(progress: Progress) -> Report:
    """Covey's constants chosen again for each trace from all the others, and shown on that one."""
    grid = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    plans = {
        "published": plan_of("las-published", {}),
        "covey": plan_of("covey", {}),
        **{", ".join(f"{key}={value}" for key, value in each.items()): plan_of("covey", each) for each in grid},
    }
    labels = list(plans)[2:]
    found = {(name, gpus): each for name, gpus, each in runs(there(), plans, progress)}
    rows: list[list[Cell]] = []
    for (name, gpus), each in found.items():
        others = [other for (known, _), other in found.items() if family(known) != family(name)]
        label = chosen(others, labels)
        tail = each[label]["jct_s_p95"] / each["published"]["jct_s_p95"]
        rows.append([name, gpus, label, _of_published(each, label), _of_published(each, "covey"), tail])
    averages, shipped, tails = ([float(str(row[at])) for row in rows] for at in (3, 4, 5))
    rows.append(["geometric mean", None, None, mean(averages), mean(shipped), mean(tails)])
    rows.append(["worst", None, None, max(averages), max(shipped), max(tails)])
    columns = ["trace", "GPUs", "chosen on the others", "average", "average, covey as it is", "95th"]
    notes = [
        "as multiples of Tiresias-L as published; chosen: the least geometric mean of averages over the other traces, "
        f"of those that are over {WORST_MAX} on none of them and whose 95th percentile is no worse in the mean",
        "seeds of one generator and sizes of one cluster are left out together",
    ]
    data = {"average_geometric": mean(averages), "average_max": max(averages), "p95_geometric": mean(tails)}
    return Report("jobs-held-out", data, [Table("constants chosen without the trace", columns, rows, notes)])


def chosen(seen: Sequence[Found], labels: Sequence[str]) -> str:
    """The settings that are best on these traces and make none of them worse; the least worse when all do."""

    def of(label: str, what: str) -> list[float]:
        return [each[label][what] / each["published"][what] for each in seen]

    def key(label: str) -> tuple[float, float]:
        averages = of(label, "jct_s_mean")
        over = max(0.0, max(averages) - WORST_MAX) + max(0.0, mean(of(label, "jct_s_p95")) - 1.0)
        return over, mean(averages)

    return min(labels, key=key)


def stopping(progress: Progress) -> Report:
    """Measure what stopping a job costs, from nothing to ten minutes."""
    costs = (0, 10, 30, 60, 120, 300)
    policies_ = ("covey", "las-published", "dlas")
    plans = {
        f"{policy}/{cost}": plan_of(policy, {"preempt": f"{cost}", "restore": f"{cost}"})
        for policy in policies_
        for cost in costs
    }
    plans["fjf"] = plan_of("fjf", {})
    found = [each for _, _, each in runs(there(), plans, progress)]
    ratios = {
        policy: [mean([e[f"{policy}/{cost}"]["jct_s_mean"] / e["fjf"]["jct_s_mean"] for e in found]) for cost in costs]
        for policy in policies_
    }
    rows: list[list[Cell]] = [[cost, *(ratios[policy][at] for policy in policies_)] for at, cost in enumerate(costs)]
    series = [Series(SHOWN[policy], costs, ratios[policy]) for policy in policies_]
    figure = Figure(
        "jobs-stopping", "what stopping a job costs", "checkpoint and restore (s each)",
        "average completion time / best effort", series,
    )  # fmt: skip
    columns = ["checkpoint and restore (s each)", *(SHOWN[policy] for policy in policies_)]
    notes = ["average completion time as a multiple of best effort, which never stops a job; geometric mean of traces"]
    return Report("jobs-stopping", {"rows": rows}, [Table("cost of stopping", columns, rows, notes)], [figure])


# ---- where gangs are ----

HOSTS = (("muri_cluster400", 8), ("muri_trace3", 8), ("muri_trace1", 16), ("chronus_philly_mix1_first_half", 128))
"""Traces that say the model of a job, with numbers of hosts of eight GPUs."""
PHILLY_HOSTS = (64, 80, 96, 128)
"""Numbers of hosts of eight GPUs for the trace that says no models: from more work than they can do to room enough."""


def places(progress: Progress) -> Report:
    """Measure what packing skewed gangs is worth, by how much they lose when they are spread (Gu 2021, §3.3.3)."""
    losses, rules = ("0", "0.25", "0.5", "1"), {"skewed packed": "0.3", "never packed": "1"}
    cases = [(name, hosts, file) for name, hosts in HOSTS for known, _, file in there() if known == name]
    total, done = len(cases) * len(losses) * len(rules), 0
    rows: list[list[Cell]] = []
    data: Found = {}
    for name, hosts, file in cases:
        for rule, limit in rules.items():
            averages: list[Cell] = []
            found: Found = {}
            for loss in losses:
                said = part(progress, done, total, f"{rule}, {loss} on {name}")
                done += 1
                plan = plan_of("covey", {"packlimit": limit, "spread_slowdown": loss})
                found = simulator.simulate(loaded(file), hosts * 8, plan, said, hosts).data
                data[f"{name}/{rule}/{loss}"] = found
                averages.append(found["jct_s_mean"] / data[f"{name}/{rule}/0"]["jct_s_mean"])
            spread = 100 * found["gangs_skewed_spread"] / max(1, found["gangs_skewed"])
            needed = found["nodes_per_gang_fewest_mean"]
            rows.append([name, f"{hosts}x8", rule, found["nodes_per_gang_mean"], needed, spread, *averages[1:]])
    columns = ["trace", "hosts", "rule", "hosts per gang", "needed", "skewed spread (%)"]
    columns += [f"average, {float(loss):.0%} slower" for loss in losses[1:]]
    notes = [
        "covey; average completion time as a multiple of the same without loss; hosts and spread: of the last column",
        "skewed: skew over 0.3 by the model's name (Gu 2021, table 3.3); a spread gang is on more hosts than it needs",
        "a gang never waits for better places: it starts where GPUs are free",
    ]
    worth = Table("what packing is worth", columns, rows, notes)
    return Report("jobs-places", {"runs": data}, [worth, _unknown(progress, data)])


def _unknown(progress: Progress, data: Found) -> Table:
    """Gangs whose models are not known, by how full the hosts are."""
    rows: list[list[Cell]] = []
    for file in [file for name, _, file in there() if name == "philly_2017-09_10"][:1]:
        for hosts in PHILLY_HOSTS:
            for rule, given in (("into gaps", {"skew": "0"}), ("packed", {})):
                plan = plan_of("covey", given)
                found = simulator.simulate(loaded(file), hosts * 8, plan, progress, hosts).data
                data[f"philly/{hosts}/{rule}"] = found
                gangs = found["gang_starts"]
                spread, needless = 100 * found["gangs_spread"] / gangs, 100 * found["gangs_spread_needlessly"] / gangs
                of_spread, average = found["nodes_per_spread_gang_mean"], found["jct_s_mean"]
                held = 100 * found["gpu_held"]
                rows.append(
                    [f"{hosts}x8", held, rule, found["nodes_per_gang_mean"], spread, of_spread, needless, average]
                )
    columns = ["hosts", "GPUs held (%)", "rule", "hosts per gang", "spread (%)", "hosts of those", "needlessly (%)"]
    notes = ["philly_2017-09_10, which names no model; needlessly: fewer hosts had room when it started"]
    return Table("gangs of which nothing is known", [*columns, "average completion (s)"], rows, notes)


EXPERIMENTS: dict[str, Callable[[Progress], Report]] = {
    "jobs-gain": gain,
    "jobs-table-3-1": table_31,
    "jobs-table-3-6": table_36,
    "jobs-fidelity": fidelity,
    "jobs-policies": policies,
    "jobs-sensitivity": sensitivity,
    "jobs-held-out": held_out,
    "jobs-stopping": stopping,
    "jobs-places": places,
}
