"""Vectors of the aggregator: `autops_assign` (assignment only) and `parameters/autops` (cycles, pools, late sums).

Numbers in the files are rationals in any unit; a case's numbers are multiplied to whole ones first, as the policies
count whole microseconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.pool import (
    Action,
    Exited,
    Pool,
    PoolJobArrived,
    PoolMove,
    PoolPlace,
    PoolRules,
    PoolStop,
)
from plugins.aggregator.policy.assign import AggregationProfile, Tensor, assign, flaw, largest_first
from plugins.aggregator.policy.cycle import Cycle, Share, cycle_of, loss, runs_late, stretched
from sim.vectors.types import Handler, answers, beside, differs, each, per_unit, rational

WITHIN = 1e-6


def assigned(cases: Any, traces: Sequence[Path]) -> Iterable[tuple[str, list[str]]]:
    return each(cases, _assigned)


def planned(cases: Any, traces: Sequence[Path]) -> Iterable[tuple[str, list[str]]]:
    return each(cases, _planned)


HANDLERS: dict[str, Handler] = {"autops_assign": assigned, "parameters/autops": planned}


class Ticks:
    """Whole numbers for a case's rationals."""

    def __init__(self, numbers: Iterable[Any]) -> None:
        self.per_unit = per_unit(numbers)

    def of(self, number: Any) -> int:
        return int(rational(number) * self.per_unit)

    def back(self, ticks: int | Fraction) -> Fraction:
        return Fraction(ticks) / self.per_unit


def _profile(job: str, period: int, works: Mapping[str, int]) -> AggregationProfile:
    """Profile of a job; raises ValueError when no aggregator could take it."""
    profile = AggregationProfile(JobId(job), period, tuple(Tensor(name, work) for name, work in works.items()))
    why = flaw(profile)
    if why:
        raise ValueError(f"job {job}: {why}")
    return profile


# ---- autops_assign ---------------------------------------------------------------------------------------------------


def _assigned(case: Any) -> list[str]:
    steps = case["steps"]
    ticks = Ticks(number for step in steps for number in [step["D"], *step["tasks"]])
    cycles: Sequence[Cycle] = ()
    held: list[dict[str, list[Any]]] = []
    found: list[str] = []
    for step in steps:
        works = {str(at): ticks.of(work) for at, work in enumerate(step["tasks"])}
        result = assign(_profile(step["job"], ticks.of(step["D"]), works), cycles)
        if result is None:
            raise ValueError("no aggregator was found although new ones are without end")
        cycles = result.cycles
        found += differs(f"{step['job']} on aggregators", list(result.on), step["expect"])
        held += [{} for _ in range(len(cycles) - len(held))]
        for at, work in zip(result.on, step["tasks"], strict=True):
            held[at].setdefault(step["job"], []).append(work)
    final = [
        {
            "C": ticks.back(cycle.us),
            "jobs": {
                job: [ticks.back(cycle.shares[JobId(job)].period_us), works] for job, works in sorted(there.items())
            },
        }
        for cycle, there in zip(cycles, held, strict=True)
    ]
    return found + answers({"final": final}, beside(case, ["final"]))


# ---- parameters/autops -----------------------------------------------------------------------------------------------


def _planned(case: Any) -> list[str]:
    kinds = {"cycle": _cycle, "schedule": _schedule, "late": _late}
    if case["kind"] not in kinds:
        raise ValueError(f"unknown kind {case['kind']!r}; known: {', '.join(sorted(kinds))}")
    return kinds[case["kind"]](case)


def _cycle(case: Any) -> list[str]:
    tasks = case["tasks"]
    ticks = Ticks([*case["D"].values(), *(work for _, _, work in tasks)])
    works = dict.fromkeys(case["D"], 0)
    for job, _, work in tasks:
        works[str(job)] += ticks.of(work)
    shares = {JobId(job): Share(ticks.of(case["D"][job]), work) for job, work in works.items()}
    cycle = cycle_of(shares)
    ours = {
        "C": ticks.back(cycle.us),
        "W": ticks.back(cycle.used_us),
        "free": ticks.back(cycle.free_us),
        "d": {job: ticks.back(stretched(cycle.us, share.period_us)) for job, share in shares.items()},
        "loss": {job: loss(cycle.us, share.period_us) for job, share in shares.items()},
    }
    return answers(ours, case["out"], WITHIN)


def _schedule(case: Any) -> list[str]:
    """Replay a schedule. Cycles have the length of the longest iteration: `hold_cycles` is ours, and off here."""
    jobs = case["jobs"]
    ticks = Ticks(number for job in jobs.values() for number in [job["D"], *job["t"].values()])
    pool = Pool(PoolRules(hold_cycles=False))
    found: list[str] = []
    for number, (event, expected) in enumerate(zip(case["events"], case["out"], strict=True), 1):
        what, name = event
        actions: Sequence[Action]
        match what:
            case "arrive":
                works = {tensor: ticks.of(work) for tensor, work in jobs[name]["t"].items()}
                profile = _profile(name, ticks.of(jobs[name]["D"]), works)
                tensors = tuple(largest_first(profile.tensors))
                actions = pool.handle(PoolJobArrived(AggregationProfile(profile.job, profile.period_us, tensors)), 0.0)
            case "exit":
                actions = pool.handle(Exited(JobId(name)), 0.0)
            case _:
                raise ValueError(f"unknown event {what!r}; known: arrive, exit")
        pool.check()
        ours = {"event": event, **_said(what, actions), **_holds(pool)}
        found += [f"event {number} ({what} {name}): {line}" for line in answers(ours, _plain(expected), WITHIN)]
    return found


def _said(what: str, actions: Sequence[Action]) -> dict[str, Any]:
    if what == "arrive":
        return {"placed": {action.tensor: action.host for action in actions if isinstance(action, PoolPlace)}}
    moves = [action for action in actions if isinstance(action, PoolMove)]
    return {
        "freed": sorted(action.host for action in actions if isinstance(action, PoolStop)),
        "moves": sorted([move.job, move.tensor, move.source, move.host] for move in moves),
    }


def _holds(pool: Pool) -> dict[str, Any]:
    held: dict[HostId, list[str]] = {host: [] for host in pool.cycles}
    for job, tensors in pool.on.items():
        for tensor, host in tensors.items():
            held[host].append(str((str(job), tensor)))
    aggregators = {str(host): sorted(tensors) for host, tensors in held.items()}
    return {"aggs": aggregators, "loss": {str(job): pool.loss(job) for job in pool.jobs}}


def _plain(expected: Mapping[str, Any]) -> dict[str, Any]:
    """What is expected after an event; lists of what is freed and moved at once, and of what an aggregator holds, are
    sorted, since they have no order."""
    plain: dict[str, Any] = {
        name: sorted(value) if name in ("freed", "moves") else value for name, value in expected.items()
    }
    if "aggs" in plain:
        plain["aggs"] = {host: sorted(tensors) for host, tensors in plain["aggs"].items()}
    return plain


def _late(case: Any) -> list[str]:
    found: list[str] = []
    for number, one in enumerate(case["cases"], 1):
        ticks = Ticks([one["t0"], one["C"], one["now"], one["e"], *one["pending"]])
        due = [ticks.of(work) for work in one["pending"]]
        ours = runs_late(ticks.of(one["t0"]), ticks.of(one["C"]), ticks.of(one["now"]), due, ticks.of(one["e"]))
        found += differs(f"late {number}", ours, one["run_now"])
    return found
