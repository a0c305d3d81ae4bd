"""`covey-sim jobs --tenants FILE`: the run under the agents' own scheduler, and what each tenant got."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cli.table import plural
from plugins.scheduler.policy.rules import OrderRules
from sim.jobs.engine import Outcome, SimJob
from sim.jobs.live import Asks, Live, Tally, settings_of
from sim.jobs.tenants import Tenancy
from sim.report import Cell, Progress, Report, Table, Wrong, duration, quantile


@dataclass(frozen=True)
class Shared:
    """One run, without the jobs that were refused."""

    jobs: list[SimJob]
    asks: list[Asks]
    out: Outcome
    refused: list[SimJob]
    tally: Tally
    """Counts of the run; a job is its index in `given`."""
    given: list[Asks]


def run_shared(
    jobs: Sequence[SimJob], capacity: int, hosts: int | None, rules: OrderRules, tenancy: Tenancy, progress: Progress
) -> Shared:
    """Run the trace under the agents' scheduler. Raises Wrong for rules that agents do not have, and when the log
    takes no job at all."""
    try:
        settings = settings_of(rules, tenancy.quotas(), tenancy.default_quota(), tenancy.demote_after_s)
    except ValueError as error:
        raise Wrong(
            f"--tenants {tenancy.path} with this policy", str(error), "use --policy covey as it is, without --set"
        ) from None
    asks = tenancy.asks(jobs)
    live = Live(jobs, hosts or 1, capacity // (hosts or 1), rules, settings, asks)
    out = live.run(progress)
    taken = [at for at in range(len(jobs)) if at not in live.tally.refused]
    if not taken:
        why = "every job asks for more GPUs than the quota of its tenant"
        raise Wrong(f"--tenants {tenancy.path}: no job can run", why, "raise the quotas")
    columns: dict[str, Any] = {name: [getattr(out, name)[at] for at in taken] for name in COLUMNS}
    return Shared(
        [jobs[at] for at in taken],
        [asks[at] for at in taken],
        replace(out, **columns),
        [jobs[at] for at in sorted(live.tally.refused)],
        live.tally,
        asks,
    )


COLUMNS = ("end_s", "first_s", "wait_s", "preempted", "promoted")


def with_tenants(found: Report, shared: Shared, tenancy: Tenancy) -> Report:
    """The report with what each tenant got."""
    names = sorted({ask.tenant for ask in shared.given})
    told = {name: _told(name, shared, tenancy) for name in names}
    rows: list[Sequence[Cell]] = [_row(name, tenant) for name, tenant in told.items()]
    columns = ("tenant", "quota", "jobs", "JCT mean", "JCT 95 %", "waiting mean", "waiting 95 %", "GPU-h guaranteed",
               "GPU-h opportunistic", "most at once", "over quota")  # fmt: skip
    tally = shared.tally
    kinds = f"{plural(len(tally.demoted), 'auto job')} demoted, {len(tally.upgraded)} of them upgraded, "
    notes = [
        kinds + f"{plural(len(tally.kept), 'gang')} kept GPUs until they were whole",
        "run by the queue and the leader of agents; GPU-h: held, checkpoints and restores among them",
    ]
    warnings = [*found.warnings]
    if shared.refused:
        warnings.append(f"{plural(len(shared.refused), 'job')} wider than the quota of their tenant refused")
    if tally.late:
        warnings.append(f"{plural(tally.late, 'job')} came later: as many as a log holds were waiting")
    data = {**found.data, "tenants": told, "refused_over_quota": len(shared.refused), "demoted": len(tally.demoted)}
    data |= {"upgraded": len(tally.upgraded), "gangs_that_reserved": len(tally.kept), "submitted_late": tally.late}
    data["settings"] = {
        **found.data["settings"],
        "demote_after_s": "inf" if tenancy.demote_after_s is None else tenancy.demote_after_s,
    }
    table = Table("tenants", columns, rows, notes)
    return replace(found, data=data, tables=(*found.tables, table), warnings=warnings)


def _told(name: str, shared: Shared, tenancy: Tenancy) -> dict[str, Any]:
    own = [at for at, ask in enumerate(shared.asks) if ask.tenant == name]
    spans = sorted(shared.out.end_s[at] - shared.jobs[at].submit_s for at in own)
    waits = sorted(shared.out.wait_s[at] for at in own)
    used = shared.tally.used[name]
    return {
        "quota_gpus": tenancy.quotas().get(name, tenancy.default_quota()),
        "jobs": len(own),
        "jct_s_mean": _mean(spans),
        "jct_s_p95": _p95(spans),
        "wait_s_mean": _mean(waits),
        "wait_s_p95": _p95(waits),
        "guaranteed_gpu_h": used.guaranteed_gpu_s / 3600,
        "opportunistic_gpu_h": used.opportunistic_gpu_s / 3600,
        "held_gpus_max": used.held_max,
        "over_quota_s": used.over_s,
        "preemptions": sum(shared.out.preempted[at] for at in own),
    }


TIMES = ("jct_s_mean", "jct_s_p95", "wait_s_mean", "wait_s_p95")


def _row(name: str, told: dict[str, Any]) -> list[Cell]:
    quota, over_s = told["quota_gpus"], told["over_quota_s"]
    return [
        name, "-" if quota is None else quota, told["jobs"],
        *("-" if told[key] is None else duration(told[key]) for key in TIMES),
        round(told["guaranteed_gpu_h"], 1), round(told["opportunistic_gpu_h"], 1), told["held_gpus_max"],
        f"{over_s} s" if over_s else "never",
    ]  # fmt: skip


def _mean(numbers: Sequence[int]) -> float | None:
    """The mean of these numbers; None if there are none."""
    return sum(numbers) / len(numbers) if numbers else None


def _p95(ascending: Sequence[int]) -> int | None:
    return quantile(ascending, 0.95) if ascending else None
