"""Run a trace of jobs under a scheduling policy, in virtual time.

policies   covey          ours: 2D-LAS with three queues, narrow gangs first, running gangs stay
           las-published  Tiresias-L as in the paper's testbed: two queues, 3200 GPU-s, FIFO by first start
           dlas dgittins  2D-LAS and 2D-Gittins with --set thresholds=..., starve=..., knob=...
           las gittins    the same without queues
           srsf srtf      shortest remaining service, or time, first; they use the durations of the trace
           sjf fjf fifo   fewest GPUs first; first come, best effort; first come, who does not fit blocks
           backfill       fifo with EASY backfill on requested time limits (time_limit_s of the trace)
           gandiva        turns of equal length

settings   thresholds=3200/51200  inside=sticky|first  quantum=60  knob=8 (or 1/2, inf)  starve=604800 (or inf)
           gang_patience=2700 (or inf)  checkpoint_every=30m (what a job ran since it saved is lost when it is stopped;
           never; stop: it saves then)  unsaved_stops=3 (how often a job that has not saved yet is stopped; inf)
           preempt=30  restore=30  narrow=on|off  limit_factor=1 (backfill: the limit of a job that names none, as a
           multiple of its duration)  samples=FILE (gittins, dgittins: totals of past jobs, one column service_gpu_s)
           sharing=on (covey: jobs run beside others on their GPUs; `sim/jobs/sharing_cluster.py` is the model) with
           interference=0.05 (how much slower the guaranteed job gets by that)  busy_low=0.1 busy_high=0.9 (jobs use
           their GPU for a share of the time between these)  memory_large=0.2 (share of them that need more than half
           of its memory)  draw=1 (the seed of both)

hosts      --gpus 64x8 also places every gang on hosts: packed when its model is skewed or not known, into the gaps
           otherwise. The columns `skew`, `model` and `spread_slowdown` of a trace say which is which, or --set skew=0.7
           (of jobs whose trace says nothing; 0: all of them into gaps), spread_slowdown=0.5 (a skewed gang on more
           hosts than needed takes 1.5 times as long) and packlimit=0.3 (the skew above which a gang is packed). Where
           no gang is slowed, hosts change no time.

starts     --eta asks at random moments when each job that waits will start, as agents say it (`agentctl why JOB`), and
           says how many started by then. The history is that of the trace until that moment

tenants    --tenants FILE runs quotas, classes, demotion, upgrade and reservations by the scheduler of agents itself
           (covey, or dlas with inside=sticky) and says what each tenant got. The file is shown at the end
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from cli.table import plural
from plugins.scheduler.policy.history import History
from plugins.scheduler.policy.rules import COVEY, LAS_PUBLISHED, NON_PREEMPTIVE, Discipline, OrderRules
from sim.jobs import tenants
from sim.jobs.engine import Outcome, SimJob
from sim.jobs.engine_baselines import engine_for
from sim.jobs.engine_places import Placing, Tally
from sim.jobs.foreseen.calibration import calibrated
from sim.jobs.sharing_cluster import Cluster, Sharing
from sim.jobs.tenants import Tenancy, read_tenants
from sim.jobs.tenants_report import run_shared, with_tenants
from sim.jobs.trace import SLOWDOWN_MAX, Trace, read_services, read_trace
from sim.report import Cell, Figure, Progress, Report, Series, Table, Wrong
from sim.report import duration as duration
from sim.report import quantile as quantile

HELP = "run a trace of jobs under a scheduling policy"
SWITCH_S = 30
"""Seconds of a checkpoint, and of a restart from it, unless set."""
TURN_S, TURN_SWITCH_S = 60, 1
"""Seconds of one of Gandiva's turns and of a change of turns, unless set: it keeps suspended jobs in host memory."""
TURNS_MAX = 10_000
"""Most turns between the first and the last submission of a trace; turns are longer where there would be more: a year
of jobs in turns of a minute would take hours to run, and its jobs take days anyway."""
GPUS_MAX = 1_000_000
POLICIES = ("covey", "las-published", *get_args(Discipline))


@dataclass(frozen=True)
class Plan:
    """A policy with everything that was set."""

    policy: str
    rules: OrderRules
    limit_factor: Fraction = Fraction(1)
    samples: Path | None = None
    sharing: Sharing | None = None
    draw: int = 1
    """Seed of what jobs need of their GPUs, when they share them."""
    placing: Placing = field(default_factory=Placing)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="CSV, plain or gzip")
    parser.add_argument("--gpus", required=True, metavar="N[xM]", help="N GPUs, or N hosts of M")
    parser.add_argument("--policy", default="covey", metavar="P", help="default: covey")
    parser.epilog = tenants.__doc__
    parser.add_argument("--tenants", type=Path, metavar="FILE", help="quotas and classes of the trace's tenants, TOML")
    parser.add_argument("--eta", action="store_true", help="ask when jobs will start, and compare it with when they do")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; may be repeated")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    plan = plan_of(options.policy, settings_of(options.set))
    capacity, hosts = gpus_of(options.gpus)
    unusable = sorted(set(settings_of(options.set)) & HOSTS_ONLY)
    if unusable and hosts is None:
        raise Wrong(f"--set {unusable[0]}", "it describes gangs on hosts", "give hosts x GPUs, such as --gpus 64x8")
    tenancy = None if options.tenants is None else _tenancy(options.tenants, plan, options.set)
    trace = read_trace(options.trace)
    if options.eta:
        return _foreseen(trace, capacity, hosts or 1, plan, tenancy, progress)
    return simulate(trace, capacity, plan, progress, hosts, tenancy)


def _foreseen(
    trace: Trace, capacity: int, hosts: int, plan: Plan, tenancy: Tenancy | None, progress: Progress
) -> Report:
    """What agents would say of starts, and what becomes of it (`sim/jobs/foreseen/calibration.py`)."""
    if tenancy is not None or plan.sharing is not None:
        raise Wrong("--eta with --tenants or sharing=on", "it is for one tenant, one job a GPU", "leave it out")
    fits = [at for at, job in enumerate(trace.jobs) if job.gpus <= capacity]
    if not fits:
        raise Wrong(f"{trace.name}: no job fits", f"all ask for more than {capacity} GPUs", "give more --gpus")
    names = [trace.extra["model"][at] for at in fits] if "model" in trace.extra else None
    jobs = [trace.jobs[at] for at in fits]
    return calibrated(trace.name, jobs, names, (hosts, capacity // hosts), plan.rules, progress)


def _tenancy(path: Path, plan: Plan, given: Sequence[str]) -> Tenancy:
    """Read the file of tenants; raises Wrong also for settings that mean nothing to the scheduler of agents."""
    if plan.sharing is not None:
        raise Wrong(f"--tenants {path} with --set sharing=on", "agents share no GPUs yet", "leave one of them out")
    for key in sorted(set(settings_of(given)) & HOSTS_ONLY):
        raise Wrong(
            f"--set {key} with --tenants {path}", "no gang is slowed there by its hosts", "leave one of them out"
        )
    return read_tenants(path)


# ---- what was asked for ----


def gpus_of(text: str) -> tuple[int, int | None]:
    """GPUs and, when they are given, hosts of `512` or `64x8`. Raises Wrong when the text is neither."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts):
        raise Wrong(f"--gpus {text}", "a number of GPUs, or hosts x GPUs such as 64x8, is expected", "correct it")
    total = math.prod(int(part) for part in parts)
    if not 1 <= total <= GPUS_MAX:
        raise Wrong(f"--gpus {text}", f"1 to {GPUS_MAX} GPUs can be simulated", "correct it")
    return total, int(parts[0]) if len(parts) == 2 else None


def settings_of(given: Sequence[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not value:
            raise Wrong(f"--set {each}", "KEY=VALUE is expected", "such as --set preempt=0")
        if key not in SETTINGS:
            raise Wrong(f"--set {each}", f"{key} is no setting", f"known: {', '.join(sorted(SETTINGS))}")
        settings[key] = value
    return settings


def plan_of(policy: str, settings: dict[str, str]) -> Plan:
    """The plan of a policy with these settings. Raises Wrong for an unknown policy, and for a setting that cannot be
    used or means nothing to the policy."""
    if policy not in POLICIES:
        raise Wrong(f"--policy {policy}", f"known: {', '.join(POLICIES)}", "name one of them")
    if policy == "covey":
        rules = COVEY
    elif policy == "las-published":
        rules = LAS_PUBLISHED
    else:
        rules = OrderRules(discipline=cast(Discipline, policy), thresholds_gpu_s=(3200,) if policy[0] == "d" else ())
    if policy == "gandiva":
        rules = msgspec.structs.replace(rules, restore_s=TURN_SWITCH_S)
    elif policy not in NON_PREEMPTIVE:
        rules = msgspec.structs.replace(rules, preempt_s=SWITCH_S, restore_s=SWITCH_S)
    unusable = sorted(set(settings) & SHARING_ONLY) if settings.get("sharing") != "on" else []
    if unusable:
        raise Wrong(f"--set {unusable[0]}", "it describes sharing, which is off", "add --set sharing=on")
    for key in settings:
        _check_meaning(policy, key, settings.get("sharing") == "on")
    plan = Plan(policy, rules)
    for key, value in settings.items():
        try:
            plan = SETTINGS[key](plan, value)
        except (ValueError, ZeroDivisionError, msgspec.ValidationError) as error:
            raise Wrong(f"--set {key}={value}", str(error) or "it cannot be used", EXPECTED[key]) from None
    if plan.sharing is not None and policy != "covey":
        raise Wrong(f"--set sharing=on with --policy {policy}", "only covey shares GPUs", "--policy covey")
    return plan


def _check_meaning(policy: str, key: str, shares: bool) -> None:
    if key in SHARING_ONLY or key in HOSTS_ONLY or key == "sharing":
        return
    meant = MEANT[policy] - ({"quantum", "knob"} if shares else set())
    if key not in meant:
        who = f"--policy {policy}{' with sharing=on' if shares else ''}"
        known = f"it looks at {', '.join(sorted(meant))}" if meant else "it has no such settings"
        others = [each for each in POLICIES if key in MEANT[each]]
        raise Wrong(f"--set {key} with {who}", f"it means nothing there; {known}", f"{key} is for {', '.join(others)}")


Setting = Callable[[Plan, str], Plan]


def _rule(name: str, parse: Callable[[str], Any]) -> Setting:
    return lambda plan, text: replace(plan, rules=_checked(msgspec.structs.replace(plan.rules, **{name: parse(text)})))


def _checked(rules: OrderRules) -> OrderRules:
    rules.__post_init__()
    return rules


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ValueError(f"{text} is not a whole number")
    return int(text)


def _whole_or_inf(text: str) -> int | None:
    return None if text == "inf" else _whole(text)


def _every(text: str) -> int | None:
    """Seconds of `90`, `90s`, `30m` or `2h`; 0 for `never`, None for `stop`."""
    if text in ("never", "stop"):
        return 0 if text == "never" else None
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    seconds = _whole(text[:-1]) * unit if unit else _whole(text)
    if not seconds:
        raise ValueError(f"{text} is no time between two checkpoints")
    return seconds


def _thresholds(text: str) -> tuple[int, ...]:
    return () if text in ("none", "inf") else tuple(_whole(part) for part in text.replace(",", "/").split("/"))


def _fraction_or_inf(text: str) -> tuple[int, int] | None:
    return None if text == "inf" else Fraction(text).limit_denominator(10**6).as_integer_ratio()


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(f"{text} is neither on nor off")
    return text == "on"


def _inside(text: str) -> str:
    if text not in ("sticky", "first"):
        raise ValueError(f"{text} is neither sticky nor first")
    return text


def _sharing(plan: Plan, text: str) -> Plan:
    return replace(plan, sharing=(plan.sharing or Sharing()) if _switch(text) else None)


def _assumed(change: Callable[[Sharing, float], Sharing]) -> Setting:
    def put(plan: Plan, text: str) -> Plan:
        share = float(Fraction(text))
        if not 0 <= share <= 1:
            raise ValueError(f"{text} is not from 0 to 1")
        sharing = change(plan.sharing or Sharing(), share)
        if not 0 < sharing.busy[0] <= sharing.busy[1]:
            raise ValueError("busy_low must be over 0 and at most busy_high")
        return replace(plan, sharing=sharing)

    return put


def _placing(name: str, parse: Callable[[Fraction], Any], high: int) -> Setting:
    def put(plan: Plan, text: str) -> Plan:
        number = Fraction(text).limit_denominator(10**6)
        if not 0 <= number <= high:
            raise ValueError(f"{text} is not from 0 to {high}")
        return replace(plan, placing=replace(plan.placing, **{name: parse(number)}))

    return put


def _factor(plan: Plan, text: str) -> Plan:
    factor = Fraction(text)
    if not 0 < factor <= 1000:
        raise ValueError(f"{text} is not over 0 and at most 1000")
    return replace(plan, limit_factor=factor)


SETTINGS: dict[str, Setting] = {
    "thresholds": _rule("thresholds_gpu_s", _thresholds),
    "inside": _rule("inside", _inside),
    "quantum": _rule("quantum_s", _whole),
    "knob": _rule("knob", _fraction_or_inf),
    "starve": _rule("starve_limit_s", _whole_or_inf),
    "preempt": _rule("preempt_s", _whole),
    "restore": _rule("restore_s", _whole),
    "narrow": _rule("narrow_first", _switch),
    "checkpoint_every": _rule("checkpoint_every_s", _every),
    "unsaved_stops": _rule("unsaved_stops", _whole_or_inf),
    "gang_patience": _rule("gang_patience_s", _whole_or_inf),
    "limit_factor": _factor,
    "samples": lambda plan, text: replace(plan, samples=Path(text)),
    "sharing": _sharing,
    "interference": _assumed(lambda sharing, share: replace(sharing, interference=share)),
    "busy_low": _assumed(lambda sharing, share: replace(sharing, busy=(share, sharing.busy[1]))),
    "busy_high": _assumed(lambda sharing, share: replace(sharing, busy=(sharing.busy[0], share))),
    "memory_large": _assumed(lambda sharing, share: replace(sharing, memory_large=share)),
    "draw": lambda plan, text: replace(plan, draw=_whole(text)),
    "skew": _placing("skew", float, 1),
    "packlimit": _placing("packlimit", float, 1),
    "spread_slowdown": _placing("slowdown", Fraction, SLOWDOWN_MAX),
}
SHARING_ONLY = {"interference", "busy_low", "busy_high", "memory_large", "draw"}
_STOPS = {"quantum", "preempt", "restore", "checkpoint_every"}
_QUEUES = {*_STOPS, "thresholds", "inside", "knob", "starve"}
MEANT: dict[str, set[str]] = {
    "covey": {*_QUEUES, "narrow", "gang_patience", "unsaved_stops"},
    "las-published": {*_QUEUES, "narrow", "gang_patience", "unsaved_stops"},
    "dlas": {*_QUEUES, "narrow", "gang_patience", "unsaved_stops"},
    "dgittins": {*_QUEUES, "samples"},
    "las": {*_STOPS, "starve"},
    "gittins": {*_STOPS, "starve", "samples"},
    "srsf": _STOPS,
    "srtf": _STOPS,
    "sjf": _STOPS,
    "gandiva": _STOPS,
    "backfill": {"quantum", "limit_factor"},
    "fjf": set(),
    "fifo": set(),
}
"""Settings that each policy uses; those of sharing and of hosts are checked apart."""
HOSTS_ONLY = {"skew", "packlimit", "spread_slowdown"}
EXPECTED = {
    "thresholds": "whole GPU-s, ascending, such as 3200/51200; none for one queue",
    "inside": "sticky or first",
    "quantum": "whole seconds, at least 1",
    "knob": "a number such as 8 or 1/2, or inf",
    "starve": "whole seconds, at least 1, or inf",
    "preempt": "whole seconds",
    "restore": "whole seconds",
    "narrow": "on or off",
    "gang_patience": "whole seconds, at least 1, or inf",
    "checkpoint_every": "a time such as 600, 30m or 2h, never, or stop: it saves when it is stopped",
    "unsaved_stops": "a whole number, or inf",
    "limit_factor": "a number over 0",
    "samples": "a file",
    "sharing": "on or off",
    "interference": "a number from 0 to 1: 0.05 is 5 % slower",
    "busy_low": "a number over 0 and at most busy_high (give busy_high first when both change)",
    "busy_high": "a number from busy_low to 1",
    "memory_large": "a number from 0 to 1",
    "draw": "a whole number",
    "skew": "a number from 0 to 1: bytes of the largest tensor over bytes of all",
    "packlimit": "a number from 0 to 1",
    "spread_slowdown": f"a number from 0 to {SLOWDOWN_MAX}: 0.5 is half as long again",
}


# ---- the run ----


def simulate(
    trace: Trace,
    capacity: int,
    plan: Plan,
    progress: Progress,
    hosts: int | None = None,
    tenancy: Tenancy | None = None,
) -> Report:
    """Run a trace once, on `hosts` equal hosts when they are given. Gangs wider than the cluster are left out, and
    counted."""
    jobs = [job for job in trace.jobs if job.gpus <= capacity]
    wide = len(trace.jobs) - len(jobs)
    if not jobs:
        raise Wrong(f"{trace.name}: no job fits", f"all ask for more than {capacity} GPUs", "give more --gpus")
    if tenancy is not None:
        given = run_shared(jobs, capacity, hosts, plan.rules, tenancy, progress)
        return with_tenants(report(trace, given.jobs, capacity, plan, given.out, wide), given, tenancy)
    jobs = [_limited(job, plan.limit_factor) for job in jobs] if plan.rules.discipline == "backfill" else jobs
    if plan.rules.discipline == "gandiva" and plan.rules.quantum_s is None:
        span = max(job.submit_s for job in jobs) - min(job.submit_s for job in jobs)
        turn = max(TURN_S, span // TURNS_MAX)
        plan = replace(plan, rules=msgspec.structs.replace(plan.rules, quantum_s=turn))
    history = history_of(plan, jobs)
    tally: Tally | None = None
    if plan.sharing is not None:
        cost_s = plan.rules.preempt_s + plan.rules.restore_s
        sharing = replace(plan.sharing, move_s=float(cost_s))
        shared = Cluster(jobs, capacity, sharing, plan.draw, plan.rules)
        shared.run(progress)
        out = shared.whole()
    else:
        engine = engine_for(plan.rules)(jobs, capacity, plan.rules, history)
        if hosts is not None:
            engine.on_hosts(hosts, plan.placing)
        out = engine.run(progress)
        tally = None if engine.floor is None else engine.floor.tally
    found = report(trace, jobs, capacity, plan, out, wide)
    return found if hosts is None else _with_hosts(found, plan, hosts, capacity // hosts, tally)


def _with_hosts(found: Report, plan: Plan, hosts: int, gpus_each: int, tally: Tally | None) -> Report:
    """The report with where gangs were."""
    data = {**found.data, "hosts": hosts, "gpus_per_host": gpus_each}
    if tally is None:
        said = f"with sharing, which of the {plural(hosts, 'host')} a gang is on is not looked at"
        return replace(found, data=data, warnings=[*found.warnings, said])
    placed = tally.found()
    data |= placed
    data["settings"] = {**found.data["settings"], **said_of_places(plan.placing)}
    share = f"{100 * tally.skewed_spread / max(1, tally.skewed):.1f} % of the skewed"
    rows: list[Sequence[Cell]] = [
        ("gangs placed", tally.gangs, "starts of more than one GPU"),
        (
            "hosts per gang",
            f"{placed['nodes_per_gang_mean']:.2f}",
            f"{placed['nodes_per_gang_fewest_mean']:.2f} needed",
        ),
        ("gangs on more hosts than needed", tally.spread, f"{100 * tally.spread / max(1, tally.gangs):.1f} %"),
        ("... of skewed models", tally.skewed_spread, share),
        ("lost to being spread", duration(float(tally.lost_gpu_s)), "GPU time"),
    ]
    notes = [f"{key}: {'packed' if value is None else value}" for key, value in said_of_places(plan.placing).items()]
    table = Table(f"places on {hosts} hosts of {gpus_each} GPUs", ("what", "value", "of which"), rows, notes)
    return replace(found, data=data, tables=(*found.tables, table))


def said_of_places(placing: Placing) -> dict[str, float | None]:
    """The settings that placement uses."""
    return {
        "packlimit": placing.packlimit,
        "skew_of_unknown": placing.skew,
        "spread_slowdown": float(placing.slowdown),
    }


def _limited(job: SimJob, factor: Fraction) -> SimJob:
    limit = job.limit_s if job.limit_s is not None else math.ceil(job.duration_s * factor)
    return replace(job, limit_s=max(1, limit))


def history_of(plan: Plan, jobs: Sequence[SimJob]) -> History:
    """What 2D-Gittins knows of the past: `samples`, or else what the jobs of this very trace will have attained, which
    is the most that a history could say."""
    if plan.rules.discipline not in ("gittins", "dgittins"):
        return History(())
    if plan.samples is not None:
        return History(read_services(plan.samples))
    return History(job.gpus * job.duration_s for job in jobs)


def measures(jobs: Sequence[SimJob], capacity: int, out: Outcome) -> dict[str, Any]:
    """Measures of a run; times in seconds."""
    spans = [end - job.submit_s for job, end in zip(jobs, out.end_s, strict=True)]
    ascending = sorted(spans)
    span = max(out.end_s) - min(job.submit_s for job in jobs)
    work = sum(job.gpus * job.duration_s for job in jobs)
    return {
        "jobs": len(jobs),
        "jct_s_mean": sum(spans) / len(spans),
        "jct_s_p50": quantile(ascending, 0.5),
        "jct_s_p95": quantile(ascending, 0.95),
        "jct_s_p99": quantile(ascending, 0.99),
        "jct_s_max": ascending[-1],
        "wait_s_mean": sum(out.wait_s) / len(jobs),
        "wait_s_p95": quantile(sorted(out.wait_s), 0.95),
        "makespan_s": span,
        "preemptions": sum(out.preempted),
        "promotions": sum(out.promoted),
        "gpu_utilization": work / (capacity * span) if span else 0.0,
        "gpu_held": out.held_gpu_s / (capacity * span) if span else 0.0,
        "restarts_of_held": out.restarts_gpu_s / max(1, out.held_gpu_s),
        "decisions": out.decisions,
    }


def report(trace: Trace, jobs: Sequence[SimJob], capacity: int, plan: Plan, out: Outcome, wide: int) -> Report:
    found = measures(jobs, capacity, out)
    data = {
        "policy": plan.policy,
        "trace": trace.name,
        "gpus": capacity,
        "left_out_too_wide": wide,
        "settings": said(plan),
        **found,
    }
    rows: list[Sequence[Cell]] = [
        ("jobs", found["jobs"], f"{wide} left out" if wide else ""),
        ("job completion time, mean", duration(found["jct_s_mean"]), f"{found['jct_s_mean']:.0f} s"),
        ("job completion time, median", duration(found["jct_s_p50"]), f"{found['jct_s_p50']} s"),
        ("job completion time, 95 %", duration(found["jct_s_p95"]), f"{found['jct_s_p95']} s"),
        ("waiting, mean", duration(found["wait_s_mean"]), f"{found['wait_s_mean']:.0f} s"),
        ("makespan", duration(found["makespan_s"]), f"{found['makespan_s']} s"),
        ("preemptions", found["preemptions"], ""),
        ("promotions", found["promotions"], ""),
        ("lost to restarts", f"{100 * found['restarts_of_held']:.1f} %", "of the time that GPUs were held"),
        ("GPU utilisation", f"{100 * found['gpu_utilization']:.1f} %", "work done / GPUs / makespan"),
    ]
    notes = [f"{key}: {value}" for key, value in said(plan).items()]
    warnings = []
    if wide:
        warnings.append(f"{plural(wide, 'job')} wider than {capacity} GPUs left out")
    if plan.policy == "backfill" and trace.limits < len(trace.jobs):
        missing = len(trace.jobs) - trace.limits
        assumed = f"{float(plan.limit_factor):g} x the duration is assumed"
        warnings.append(f"{plural(missing, 'job')} without a time limit: {assumed}")
    ascending = sorted(end - job.submit_s for job, end in zip(jobs, out.end_s, strict=True))
    shares = [(at + 1) / len(ascending) for at in range(len(ascending))]
    figure = Figure(
        "jct",
        f"{plan.policy} on {trace.name}, {capacity} GPUs",
        "job completion time (s)",
        "share of jobs",
        (Series(plan.policy, [max(1, value) for value in ascending], shares),),
        log_x=True,
        steps=True,
    )
    title = f"{plan.policy} on {trace.name}, {capacity} GPUs"
    return Report("jobs", data, (Table(title, ("what", "value", "exactly"), rows, notes),), (figure,), warnings)


def said(plan: Plan) -> dict[str, Any]:
    """The settings that the policy uses, in words and numbers."""
    rules = plan.rules
    found: dict[str, Any] = {}
    if rules.discipline in ("dlas", "dgittins"):
        found |= {"thresholds_gpu_s": list(rules.thresholds_gpu_s), "inside": rules.inside}
        found |= {"narrow_first": rules.narrow_first, "knob": "inf" if rules.knob is None else list(rules.knob)}
        found["starve_limit_s"] = "inf" if rules.starve_limit_s is None else rules.starve_limit_s
        found["gang_patience_s"] = "inf" if rules.gang_patience_s is None else rules.gang_patience_s
    if rules.discipline not in NON_PREEMPTIVE:
        found |= {"preempt_s": rules.preempt_s, "restore_s": rules.restore_s}
    if rules.checkpoint_every_s is not None:
        found["checkpoint_every_s"] = rules.checkpoint_every_s or "never"
        found["unsaved_stops"] = "inf" if rules.unsaved_stops is None else rules.unsaved_stops
    if rules.quantum_s is not None:
        found["quantum_s"] = rules.quantum_s
    if rules.discipline == "backfill":
        found["limit_factor"] = float(plan.limit_factor)
    if rules.discipline in ("gittins", "dgittins"):
        found["history"] = "this trace's own totals" if plan.samples is None else str(plan.samples)
    if plan.sharing is not None:
        low, high = plan.sharing.busy
        found |= {"sharing": "on", "interference": plan.sharing.interference, "busy_low": low, "busy_high": high}
        found |= {"memory_large": plan.sharing.memory_large, "draw": plan.draw}
    return found
