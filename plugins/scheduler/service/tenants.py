"""Tenants: what people ask of them, and for which tenant and as whose a job is submitted."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec

from covey.core.errors import Refused
from plugins.askers import Asker
from plugins.base import Host
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.tenants import tenant_for
from plugins.scheduler.messages.commands import TenantSet
from plugins.scheduler.messages.spec import JobOwner, JobSpec
from plugins.scheduler.policy.explain import Never
from plugins.scheduler.service import asked, views
from plugins.scheduler.service.log import QueueLog
from plugins.views import QuotaView

SHOWN_S = 2.0
"""Seconds for which a change waits to be seen in this host's own copy of the log."""
EXAMPLE = "agentctl tenant add ml --users ann,bob --quota 16"


class TenantView(msgspec.Struct, frozen=True):
    """One line of `agentctl tenant list`."""

    tenant: str
    users: tuple[str, ...]
    """The users who may submit jobs for the tenant, by name."""
    gpus: int | None
    """The tenant's quota of GPUs; None: not limited."""
    used: int
    """GPUs that the tenant's guaranteed jobs hold, or are owed."""


class Tenants:
    """The tenants of the rack: their quotas and users."""

    def __init__(self, host: Host, queue: JobTable, log: QueueLog) -> None:
        self.host, self.queue, self.log = host, queue, log

    # ---- submitting ----

    def owned(self, spec: JobSpec, wanted: str | None, asker: Asker) -> JobSpec:
        """The job as its asker may submit it: whose it is, and which tenant's. `wanted`: the tenant that the submission
        names. What the agent's own user and root submit is the agent's, for any tenant, and an operator may submit for
        any tenant. Refused where a user may not submit for the tenant."""
        if asker.is_agent:
            return spec
        try:
            owner = msgspec.convert({"user": asker.user, "uid": asker.uid}, JobOwner)
        except msgspec.ValidationError as error:
            why = f"{asker.name} has no name that other hosts could know it by"
            raise Refused(4, f"{spec.called} was not accepted", why, "submit as a user with a name") from error
        if asker.role == "operator":
            return msgspec.structs.replace(spec, owner=owner)
        tenant = tenant_for(asker.user, wanted, self.queue.tenants)
        if isinstance(tenant, Never):
            raise Refused(tenant.code, tenant.what, tenant.why, tenant.next)
        return msgspec.structs.replace(spec, owner=owner, tenant=tenant)

    @staticmethod
    def key(given: str, spec: JobSpec) -> str:
        """The key of a submission in the log, where all users' keys are together: an owner's is made of the owner and
        the key that was given, so that no two users have the same one, and nobody can foresee another's."""
        if spec.owner is None:
            return given
        return sha256(msgspec.json.encode((spec.owner.user, spec.owner.uid, given))).hexdigest()

    # ---- quotas ----

    async def set_quota(self, given: Mapping[str, Any]) -> QuotaView:
        """Set a tenant's quota, or its weight among tenants without one."""
        if "weight" in given:
            return await self._set_weight(given)
        command = msgspec.structs.replace(asked.quota_set(given), by=asked.by(given))
        await self.log.change(command, f"set the quota of {command.tenant}")
        await self.log.until(lambda: self.queue.quotas.get(command.tenant, -1) == command.gpus, SHOWN_S)
        return self._quota(command.tenant)

    async def _set_weight(self, given: Mapping[str, Any]) -> QuotaView:
        if "gpus" in given:
            why = "a quota and a weight were given: the weight counts among tenants without a quota"
            raise Refused(2, "the tenant was not changed", why, "agentctl quota alice --weight 2")
        command = msgspec.structs.replace(asked.weight_set(given), by=asked.by(given))
        await self.log.change(command, f"set the weight of {command.tenant}")
        await self.log.until(lambda: self.queue.weights.get(command.tenant, 1.0) == command.weight, SHOWN_S)
        return self._quota(command.tenant)

    def _quota(self, tenant: str) -> QuotaView:
        queue = self.queue
        unknown = QuotaView(tenant, queue.quota(tenant), queue.used(tenant), 0, weight=queue.weights.get(tenant, 1.0))
        return next((view for view in views.quota_views(queue) if view.tenant == tenant), unknown)

    # ---- users ----

    def rows(self) -> list[TenantView]:
        """Every tenant that has users or a quota of its own."""
        named = {tenant for tenant in self.queue.quotas if tenant != "*"}
        return [self._row(tenant) for tenant in sorted(named | self.queue.tenants.keys())]

    def _row(self, tenant: str) -> TenantView:
        queue = self.queue
        return TenantView(tenant, queue.tenants.get(tenant, ()), queue.quota(tenant), queue.used(tenant))

    async def set_users(self, given: Mapping[str, Any]) -> TenantView:
        """Set, add or remove users of a tenant. `given`: `tenant`; `users`, all of them, or `add` and `remove`;
        `is_new`: whether the tenant must have none yet; `gpus`, its quota, where that is to change. Refused where a
        user that is to be in it is unknown on this host, and where somebody else changed it meanwhile."""
        tenant, now = given.get("tenant"), self.queue.tenants.get(str(given.get("tenant")), ())
        all_users, add, remove = (_names(given, field) for field in ("users", "add", "remove"))
        users = now if all_users is None else all_users
        users = tuple(sorted({*users, *(add or ())} - {*(remove or ())}))
        before = () if given.get("is_new") is True else now if all_users is None else None
        limits = {"sets_quota": True, "gpus": given["gpus"]} if "gpus" in given else {}
        asks = {"tenant": tenant, "users": users, "before": before, "by": asked.by(given)}
        try:
            command = msgspec.convert({"wall_s": 0.0, **asks, **limits}, TenantSet)
        except msgspec.ValidationError as error:
            why = f"expected a tenant (a-z, 0-9, '.', '-'), names of users and a whole number of GPUs: {error}"
            raise Refused(2, f"tenant {str(tenant)[:80]!r} was not changed", why, EXAMPLE) from error
        await self._refuse_unknown(command, now)
        await self.log.change(command, f"change tenant {command.tenant}")
        await self.log.until(lambda: self.queue.tenants.get(command.tenant, ()) == command.users, SHOWN_S)
        return self._row(command.tenant)

    async def _refuse_unknown(self, command: TenantSet, now: tuple[str, ...]) -> None:
        """Refuse users whom this host does not know; one who is in the tenant already may have been deleted since."""
        for user in command.users:
            if user not in now and await self.host.env.users.named(user) is None:
                why = f"{self.host.id} knows no user {user!r}"
                step = f"create the user on every host first (getent passwd {user}), or correct the name"
                raise Refused(4, f"tenant {command.tenant} was not changed", why, step)


def _names(given: Mapping[str, Any], field: str) -> tuple[str, ...] | None:
    """The names of users under this field; None: the field is not given."""
    found = given.get(field)
    if found is None:
        return None
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        return tuple(found)
    raise Refused(2, f"invalid {field}: {str(found)[:80]!r}", "expected a list of names of users", EXAMPLE)
