"""Cases of the scheduler: order, Gittins index, placement, classes and quotas."""

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, assert_never

from cli.sim.engine import Engine, Outcome, SimJob
from cli.sim.trace import read_services, read_trace
from cli.vectors.types import Handler, differs, each
from covey.core import HostId
from plugins.scheduler.machine import pool
from plugins.scheduler.policy.history import History, best_gittins_index, gittins_index
from plugins.scheduler.policy.place import place
from plugins.scheduler.policy.rules import Rules


def rules_of(policy: str, params: dict[str, Any]) -> Rules:
    """The rules that a case names. ValueError for a parameter that is not known."""
    unknown = set(params) - {"thresholds", "quantum", "samples", "knob", "starve", "p_ovh", "r_ovh", "intra"}
    if unknown:
        raise ValueError(f"unknown parameter {sorted(unknown)[0]}")
    knob = params.get("knob")
    return Rules(
        discipline=policy,  # type: ignore[arg-type]
        thresholds_gpu_s=tuple(params.get("thresholds") or ()),
        inside=params.get("intra", "sticky"),
        quantum_s=params.get("quantum"),
        knob=None if knob in (None, "inf") else fraction(knob),
        starve_limit_s=None if params.get("starve") in (None, "inf") else params["starve"],
        preempt_s=params.get("p_ovh", 0),
        restore_s=params.get("r_ovh", 0),
    )


def fraction(value: Any) -> tuple[int, int]:
    """`[8, 1]`, `8` or `0.5` as a fraction."""
    if isinstance(value, (list, tuple)):
        value = Fraction(value[0], value[1])
    return Fraction(value).limit_denominator(10**9).as_integer_ratio()


def small(case: dict[str, Any]) -> list[str]:
    params, expect = case["params"], case["expect"]
    jobs = [SimJob(id=job[0], submit_s=job[1], gpus=job[2], duration_s=job[3]) for job in case["jobs"]]
    watch = "timeline" in expect
    history = History(params.get("samples") or ())
    out = Engine(jobs, case["capacity"], rules_of(case["policy"], params), history, watch).run()
    ours: dict[str, Any] = {
        "end": by_job(jobs, out.end_s),
        "preempt": by_job(jobs, out.preempted),
        "promote": by_job(jobs, out.promoted),
        "wait": by_job(jobs, out.wait_s),
        "avg_jct": Fraction(sum(out.end_s) - sum(job.submit_s for job in jobs), len(jobs)),
        "timeline": [[second, list(holding)] for second, holding in out.timeline],
    }
    return [line for name, expected in expect.items() for line in differs(name, ours[name], expected)]


def by_job(jobs: Sequence[SimJob], values: Sequence[int]) -> dict[str | int, int]:
    return {job.id: value for job, value in zip(jobs, values, strict=True)}


def traced(case: dict[str, Any], traces: Path | None) -> list[str]:
    if traces is None:
        raise ValueError("the case names a trace: say with --traces where it lies")
    params = case["params"]
    jobs = read_trace(traces / case["trace"]).jobs
    samples = params.get("samples") or ()
    history = History(read_services(traces / samples) if isinstance(samples, str) else samples)
    out = Engine(jobs, case["capacity"], rules_of(case["policy"], params), history).run()
    ours = sums(jobs, out)
    return [line for name, expected in case["expect"].items() for line in differs(name, ours[name], expected)]


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
    history, found = History(case["samples"]), []
    for point in case["points"]:
        attained, delta = point["a"], point["delta"]
        if delta == "sup":
            ours = best_gittins_index(history, attained)
        else:
            ours = gittins_index(history, attained, None if delta == "inf" else delta)
        found += differs(f"G({attained}, {delta})", ours, point["G"])
    return found


def placement(case: dict[str, Any]) -> list[str]:
    free = {HostId(host): gpus for host, gpus in case["free"].items()}
    return differs("place", place(free, case["gpus"], 1, case["skew"], case["packlimit"]), case["expect"])


def quota(case: dict[str, Any]) -> list[str]:
    config, found = case["config"], []
    machine = pool.Pool(
        config["n"],
        config["per_node"],
        config["quota"],
        demote_after_s=config.get("demote_after"),
        opportunistic_max=config.get("ot_per_gpu", 1),
        busy=config.get("M", pool.BUSY),
    )
    if len(case["events"]) != len(case["expect"]):
        raise ValueError(f"{len(case['events'])} events and {len(case['expect'])} expected answers")
    for number, (event, expected) in enumerate(zip(case["events"], case["expect"], strict=True), 1):
        ours = [action(each) for each in machine.handle(event_of(event), event[1])]
        machine.check()
        found += differs(f"event {number}", ours, expected)
    return found


def event_of(event: Sequence[Any]) -> pool.Event:
    kind, what = event[0], event[2] if len(event) > 2 else None
    if kind == "submit":
        assert isinstance(what, dict)
        return pool.Submitted(
            pool.PoolJob(
                id=what["id"],
                tenant=what["tenant"],
                gpus=what["W"],
                job_class=what["cls"],
                queue=what.get("q", 0),
                same_host=what.get("same_node", False),
            )
        )
    if kind == "finish":
        return pool.Ended(str(what))
    if kind == "util":
        assert isinstance(what, dict)
        return pool.Measured({int(gpu): share for gpu, share in what.items()})
    if kind == "tick":
        return pool.Looked()
    raise ValueError(f"unknown event {kind!r}")


def action(of: pool.Action) -> list[Any]:
    match of:
        case pool.Start():
            return ["START_RG" if of.guaranteed else "START_OT", of.job, list(of.gpus)]
        case pool.Reserve():
            return ["RESERVE", of.job, list(of.gpus)]
        case pool.Demote():
            return ["DEMOTE", of.job]
        case pool.Upgrade():
            return ["UPGRADE", of.job]
        case _:
            assert_never(of)


def traces_handler(cases: Any, traces: Path | None) -> Iterator[tuple[str, list[str]]]:
    return each(cases, lambda case: traced(case, traces))


HANDLERS: dict[str, Handler] = {
    "2das_small": lambda cases, _: each(cases, small),
    "2das_traces": traces_handler,
    "gittins_index": lambda cases, _: each(cases, index),
    "placement": lambda cases, _: each(cases, placement),
    "quota": lambda cases, _: each(cases, quota),
}
