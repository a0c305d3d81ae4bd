"""Cases of the scheduler: order, Gittins index, placement, classes and quotas."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from covey.core.ids import HostId
from plugins.scheduler.policy.history import History, best_gittins_index, gittins_index
from plugins.scheduler.policy.place import place
from plugins.scheduler.policy.rules import OrderRules
from sim.jobs.engine import Engine, Outcome, SimJob
from sim.jobs.trace import GPUS_MAX, SECONDS_MAX, read_services, read_trace
from sim.vectors.classes import SharedPool
from sim.vectors.types import Handler, answers, differs, each, finite, per_unit, rational, whole_number


def rules_of(policy: str, params: Mapping[str, Any], scale: int = 1) -> OrderRules:
    """The rules that a case names; thresholds times `scale`. Raises ValueError for a parameter that is not known."""
    unknown = set(params) - {"thresholds", "quantum", "samples", "knob", "starve", "p_ovh", "r_ovh", "intra"}
    if unknown:
        raise ValueError(f"unknown parameter {sorted(unknown)[0]}")
    knob, starve = finite(params.get("knob")), finite(params.get("starve"))
    return OrderRules(
        discipline=policy,  # type: ignore[arg-type]
        thresholds_gpu_s=whole(params.get("thresholds") or (), scale),
        inside=params.get("intra") or "sticky",
        quantum_s=params.get("quantum") or None,
        knob=None if knob is None else rational(knob).as_integer_ratio(),
        starve_limit_s=None if starve is None else math.ceil(rational(starve)),
        preempt_s=params.get("p_ovh") or 0,
        restore_s=params.get("r_ovh") or 0,
    )


def whole(numbers: Sequence[Any], scale: int) -> tuple[int, ...]:
    """These numbers times `scale`; without those that are no limit."""
    return tuple(int(rational(number) * scale) for number in numbers if finite(number) is not None)


def simulated(
    jobs: Sequence[SimJob], capacity: int, policy: str, params: Mapping[str, Any], samples: Sequence[Any], watch: bool
) -> Outcome:
    """Simulate jobs. Service is counted in units in which thresholds and samples are whole: GPUs are multiplied, times
    are not."""
    scale = per_unit([each for each in (*(params.get("thresholds") or ()), *samples) if finite(each) is not None])
    scaled = [job if scale == 1 else replace(job, gpus=job.gpus * scale) for job in jobs]
    history = History(whole(samples, scale))
    return Engine(scaled, capacity * scale, rules_of(policy, params, scale), history, watch).run()


def fitting(jobs: Sequence[SimJob], capacity: int) -> list[SimJob]:
    """The jobs without gangs larger than the cluster: nothing can be said about them."""
    return [job for job in jobs if job.gpus <= capacity]


def job_of(row: Sequence[Any]) -> SimJob:
    id, submit, gpus, duration = row
    return SimJob(
        id=id,
        submit_s=whole_number(f"submit of job {id}", submit, 0, SECONDS_MAX),
        gpus=whole_number(f"W of job {id}", gpus, 1, GPUS_MAX),
        duration_s=whole_number(f"duration of job {id}", duration, 0, SECONDS_MAX),
    )


def small(case: dict[str, Any]) -> list[str]:
    params, expect = case["params"], case["expect"]
    capacity = whole_number("capacity", case["capacity"], 1, GPUS_MAX)
    jobs = fitting([job_of(row) for row in case["jobs"]], capacity)
    if not jobs:
        raise ValueError("no job fits")
    watch = "timeline" in expect
    out = simulated(jobs, capacity, case["policy"], params, params.get("samples") or (), watch)
    ours: dict[str, Any] = {
        "end": by_job(jobs, out.end_s),
        "preempt": by_job(jobs, out.preempted),
        "promote": by_job(jobs, out.promoted),
        "wait": by_job(jobs, out.wait_s),
        "avg_jct": Fraction(sum(out.end_s) - sum(job.submit_s for job in jobs), len(jobs)),
        "timeline": [[second, list(holding)] for second, holding in out.timeline],
    }
    return answers(ours, expect)


def by_job(jobs: Sequence[SimJob], values: Sequence[int]) -> dict[str | int, int]:
    return {job.id: value for job, value in zip(jobs, values, strict=True)}


def traced(case: dict[str, Any], traces: Sequence[Path]) -> list[str]:
    params = case["params"]
    jobs = fitting(read_trace(trace_path(traces, case["trace"])).jobs, case["capacity"])
    samples = params.get("samples") or ()
    if isinstance(samples, str):
        samples = read_services(trace_path(traces, samples))
    out = simulated(jobs, case["capacity"], case["policy"], params, samples, watch=False)
    return answers(sums(jobs, out), case["expect"])


def trace_path(traces: Sequence[Path], name: str) -> Path:
    """Path of a trace: in the first of the folders that has the file, below the folder that it names or not. Raises
    ValueError when none has."""
    for path in (folder / below for folder in traces for below in (name, Path(name).name)):
        if path.is_file():
            return path
    looked = ", ".join(str(folder) for folder in traces) or "nowhere"
    raise ValueError(f"there is no trace {name} (looked in: {looked}); --traces DIR says where traces lie")


def sums(jobs: Sequence[SimJob], out: Outcome) -> dict[str, Any]:
    by_id = "\n".join(
        f"{job.id},{end}" for job, end in sorted(zip(jobs, out.end_s, strict=True), key=lambda pair: pair[0].id)
    )
    return {
        "jobs": len(jobs),
        "sum_jct": sum(out.end_s) - sum(job.submit_s for job in jobs),
        "makespan": max(out.end_s, default=0) - min((job.submit_s for job in jobs), default=0),
        "preemptions": sum(out.preempted),
        "promotions": sum(out.promoted),
        "sum_wait": sum(out.wait_s),
        "end_sha256": hashlib.sha256(by_id.encode()).hexdigest(),
    }


def index(case: dict[str, Any]) -> list[str]:
    samples, points = case["samples"], case["points"]
    if not points:
        raise ValueError("it has no points")
    numbers = [number for point in points for number in (point["a"], point["delta"])]
    scale = per_unit([number for number in (*samples, *numbers) if finite(number) is not None and number != "sup"])
    history, found = History(whole(samples, scale)), []
    for point in points:
        attained, delta = int(rational(point["a"]) * scale), point["delta"]
        if delta == "sup":
            ours = best_gittins_index(history, attained)
        else:
            ours = gittins_index(history, attained, None if finite(delta) is None else int(rational(delta) * scale))
        found += differs(f"G({point['a']}, {delta})", ours * scale, point["G"])
    return found


def placement(case: dict[str, Any]) -> list[str]:
    free = {HostId(host): gpus for host, gpus in case["free"].items()}
    return differs("place", place(free, case["gpus"], 1, case["skew"], case["packlimit"]), case["expect"])


def quota(case: dict[str, Any]) -> list[str]:
    if len(case["events"]) != len(case["expect"]):
        raise ValueError(f"{len(case['events'])} events and {len(case['expect'])} expected answers")
    pool, found = SharedPool(case["config"], case["events"]), []
    for number, (event, expected) in enumerate(zip(case["events"], case["expect"], strict=True), 1):
        ours = pool.handle(event)
        pool.check()
        found += differs(f"event {number}", unordered(ours), unordered(expected))
    return found


def unordered(actions: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Actions in a fixed order: the GPUs of an action, and demotions, which come first, have none."""
    plain = [[what, job, *(sorted(gpus) for gpus in rest)] for what, job, *rest in actions]
    return sorted(action for action in plain if action[0] == "DEMOTE") + [a for a in plain if a[0] != "DEMOTE"]


def traces_handler(cases: Any, traces: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    return each(cases, lambda case: traced(case, traces))


HANDLERS: dict[str, Handler] = {
    "2das_small": lambda cases, _: each(cases, small),
    "2das_traces": traces_handler,
    "gittins_index": lambda cases, _: each(cases, index),
    "placement": lambda cases, _: each(cases, placement),
    "quota": lambda cases, _: each(cases, quota),
}
