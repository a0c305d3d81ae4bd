"""Tenants: whose jobs count against which quota, and which users may submit for which tenant.

A user of a host is in the table by name. A name that stands for different numbers on different hosts is refused where
ranks start (`JobOwner.uid`), not here.
"""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.events import LogEvent
from plugins.scheduler.machine.log.job_table import TENANTS_MAX, JobTable
from plugins.scheduler.messages.commands import Applied, NotApplied, QuotaSet, Result, TenantSet, WeightSet
from plugins.scheduler.policy import explain
from plugins.scheduler.policy.explain import Never

NAMED_MAX = 8
"""The most users that one event names."""


def tenant_for(user: str, wanted: str | None, tenants: Mapping[str, Sequence[str]]) -> str | Never:
    """The tenant that a job of this user counts against: the one that is wanted, if the user is in it; else the user's
    only one."""
    own = sorted(tenant for tenant, users in tenants.items() if user in users)
    what = f"{user} cannot submit this job"
    if not own:
        return Never(4, what, f"{user} is in no tenant", f"ask an operator: agentctl tenant set TENANT --add {user}")
    if wanted is not None and wanted not in own:
        why = f"{user} is in {few(own)}, and not in tenant {wanted}"
        return Never(4, what, why, f"agentctl submit --tenant {own[0]} ...")
    if wanted is None and len(own) > 1:
        why = f"{user} is in several tenants, {few(own)}, and the job's quota is one tenant's"
        return Never(4, what, why, f"name one of them: agentctl submit --tenant {own[0]} ...")
    return wanted or own[0]


def few(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are: `ann, bob and 3 more`."""
    rest = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")


def quota_set(queue: JobTable, command: QuotaSet) -> Result:
    if command.if_absent and command.tenant in queue.quotas:
        return Applied()
    if command.tenant in queue.quotas and queue.quotas[command.tenant] == command.gpus:
        return Applied()
    queue.limit(command.tenant, command.gpus)
    queue.notes.append(_quota_note(queue, command))
    return Applied()


def _quota_note(queue: JobTable, command: QuotaSet | TenantSet) -> LogEvent:
    what = "not limited" if command.gpus is None else explain.gpus(command.gpus)
    by = f", by {command.by}" if command.by else ""
    return LogEvent(f"tenant/{command.tenant}", "quota set", f"{what}{by}", f"log/{queue.index}")


def weight_set(queue: JobTable, command: WeightSet) -> Result:
    """Set the weight of a tenant; a repeated command changes nothing."""
    tenant, weight = command.tenant, command.weight
    if queue.weights.get(tenant, 1.0) == weight:
        return Applied()
    if weight != 1.0 and tenant not in queue.weights and len(queue.weights) >= TENANTS_MAX:
        why = f"{TENANTS_MAX} tenants have a weight already, which is the limit"
        what = f"the weight of tenant {tenant} was not changed"
        return NotApplied(4, what, why, "agentctl quota TENANT --weight 1, for tenants that are not used")
    rest = {other: each for other, each in queue.weights.items() if other != tenant}
    queue.weights = rest if weight == 1.0 else {**rest, tenant: weight}
    by = f", by {command.by}" if command.by else ""
    queue.notes.append(LogEvent(f"tenant/{tenant}", "weight set", f"{weight:g}{by}", f"log/{queue.index}"))
    return Applied()


def tenant_set(queue: JobTable, command: TenantSet) -> Result:
    """Set the users of a tenant, and its quota where that is said; a repeated command changes nothing. Jobs of users
    who are not named any more continue."""
    tenant, users, before = command.tenant, tuple(sorted(set(command.users))), queue.tenants.get(command.tenant, ())
    same_quota = not command.sets_quota or (tenant in queue.quotas and queue.quotas[tenant] == command.gpus)
    if users == before and same_quota:
        return Applied()
    what = f"tenant {tenant} was not changed"
    if command.before not in (None, before):
        why = f"its users are {few(before) or 'nobody'} by now, and not {few(command.before or ()) or 'nobody'}"
        return NotApplied(4, what, why, f"look again: agentctl tenant list, agentctl tenant set {tenant} ...")
    if not before and users and len(queue.tenants) >= TENANTS_MAX:
        why = f"{TENANTS_MAX} tenants have users already, which is the limit"
        return NotApplied(4, what, why, "agentctl tenant remove TENANT, for tenants that are not used")
    rest = {other: members for other, members in queue.tenants.items() if other != tenant}
    queue.tenants = dict(sorted({**rest, tenant: users}.items())) if users else rest
    if users != before:
        by = f", by {command.by}" if command.by else ""
        said = f"{few(users) or 'nobody'} may submit for it{by}"
        queue.notes.append(LogEvent(f"tenant/{tenant}", "users set", said, f"log/{queue.index}"))
    if not same_quota:
        queue.limit(tenant, command.gpus)
        note = _quota_note(queue, command)
        queue.notes.append(msgspec.structs.replace(note, key=f"log/{queue.index}.{len(queue.notes)}"))
    return Applied()
