"""Who shares a cluster, and how: a TOML file for `covey-sim jobs --tenants FILE`.

    demote_after_s = 300             # an auto job that waited this long becomes opportunistic; inf: never (default 300)

    [tenants.vision]
    quota = 128                      # GPUs; without it the tenant is not limited
    class = "auto"                   # of its jobs: guaranteed (default), auto or opportunistic
    of = ["ee9e8c", "103959"]        # the trace's tenants that are this one; default: its own name

    [tenants."*"]                    # every tenant of the trace not named above, each by itself
    quota = 16

    [classes]
    "103959" = "opportunistic"       # jobs of this tenant of the trace, whatever its tenant here says

The trace says in its column `tenant` whose job is whose. What runs is the scheduler of agents (`sim/jobs/live.py`).
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from plugins.scheduler.messages.spec import JobClass
from plugins.scheduler.policy.settings import SchedulerSettings
from sim.jobs.engine import SimJob
from sim.jobs.live import Asks
from sim.jobs.trace import GPUS_MAX
from sim.report import Wrong

OTHERS = "*"
NAME_MAX = 63
BYTES_MAX = 1 << 20
CLASSES: tuple[JobClass, ...] = get_args(JobClass)


@dataclass(frozen=True)
class Tenant:
    """A tenant that shares the cluster."""

    name: str
    quota: int | None = None
    """GPUs of the tenant's quota; None: not limited."""
    job_class: JobClass = "guaranteed"


@dataclass(frozen=True)
class Tenancy:
    """The content of a file of tenants."""

    path: str
    tenants: dict[str, Tenant]
    named: dict[str, str]
    """Tenant of the trace -> the tenant of this file that it is."""
    classes: dict[str, JobClass] = field(default_factory=dict)
    demote_after_s: float | None = SchedulerSettings().demote_after_s

    def quotas(self) -> dict[str, int]:
        return {name: each.quota for name, each in self.tenants.items() if each.quota is not None and name != OTHERS}

    def default_quota(self) -> int | None:
        others = self.tenants.get(OTHERS)
        return None if others is None else others.quota

    def asks(self, jobs: Sequence[SimJob]) -> list[Asks]:
        """Tenant and class of each job. Raises Wrong when the file does not say whose a job is."""
        if not any(job.tenant for job in jobs):
            what = f"--tenants {self.path}: the trace names no tenants"
            raise Wrong(what, "its column tenant is not there, or empty", "add it, or leave --tenants out")
        return [self._of(job.tenant) for job in jobs]

    def _of(self, name: str) -> Asks:
        tenant = self.named.get(name, name)
        known = self.tenants.get(tenant) or self.tenants.get(OTHERS)
        if known is None:
            what = f"--tenants {self.path}: nothing is said of tenant {name!r} of the trace"
            why = f"it names {', '.join(sorted(self.named))}"
            raise Wrong(what, why, f'add [tenants."{name}"], or [tenants."*"] for all that are not named')
        return Asks(tenant or "(none)", self.classes.get(name, known.job_class))


def read_tenants(path: Path) -> Tenancy:
    """Read a file of tenants. Raises Wrong, with the place and what was expected there, when it cannot be used."""
    given = _parsed(path)
    _check_keys(path, "at the top", given, ("tenants", "classes", "demote_after_s"))
    tables = _table(path, "tenants", given.get("tenants"))
    if not tables:
        raise Wrong(f"{path}: no tenant", "it has no table [tenants.NAME]", "add one with a quota for each tenant")
    tenants: dict[str, Tenant] = {}
    named: dict[str, str] = {}
    for name, value in tables.items():
        tenants[name], theirs = _tenant(path, name, value)
        for each in theirs:
            if each in named:
                what = f"{path}, tenants.{name}: {each!r} of the trace is {named[each]} already"
                raise Wrong(what, "a tenant of the trace is one tenant here", "name it once")
            named[each] = name
    classes = {
        name: _class(path, f"classes.{name}", value)
        for name, value in _table(path, "classes", given.get("classes", {})).items()
    }
    return Tenancy(str(path), tenants, named, classes, _demote_after(path, given))


def _parsed(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > BYTES_MAX:
            raise Wrong(f"{path}: it is too long", f"at most {BYTES_MAX} bytes are read", "name the file of tenants")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Wrong(f"{path} cannot be read", error.strerror or str(error), "name a file of tenants") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise Wrong(f"{path}: this is no TOML", why, "see covey-sim jobs --help for the format") from None


def _tenant(path: Path, name: str, value: Any) -> tuple[Tenant, list[str]]:
    where = f"tenants.{name}"
    table = _table(path, where, value)
    _check_keys(path, where, table, ("quota", "class", "of"))
    if name != OTHERS and (not name.strip() or len(name) > NAME_MAX or not name.isprintable()):
        raise _wrong(path, where, name, f"a name of 1 to {NAME_MAX} printable characters")
    quota = table.get("quota")
    if quota is not None and (type(quota) is not int or not 0 <= quota <= GPUS_MAX):
        raise _wrong(path, f"{where}.quota", quota, f"a whole number of GPUs from 0 to {GPUS_MAX}")
    theirs = table.get("of", [] if name == OTHERS else [name])
    if not isinstance(theirs, list) or not all(isinstance(each, str) for each in theirs) or (name == OTHERS and theirs):
        expected = "no such key: it stands for all others" if name == OTHERS else "a list of tenants of the trace"
        raise _wrong(path, f"{where}.of", theirs, expected)
    return Tenant(name, quota, _class(path, f"{where}.class", table.get("class", "guaranteed"))), theirs


def _class(path: Path, where: str, value: Any) -> JobClass:
    if value not in CLASSES:
        raise _wrong(path, where, value, f"one of {', '.join(CLASSES)}")
    return cast(JobClass, value)


def _demote_after(path: Path, given: Mapping[str, Any]) -> float | None:
    value = given.get("demote_after_s", SchedulerSettings().demote_after_s)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise _wrong(path, "demote_after_s", value, "seconds, 0 or more, or inf for never")
    return None if value == math.inf else float(value)


def _table(path: Path, where: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(path, where, value, f"a table [{where}]")
    return value


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            place = f"{path}, {where}" if where != "at the top" else f"{path}"
            raise Wrong(f"{place}: {key} is no setting", f"known: {', '.join(known)}", "correct or remove it")


def _wrong(path: Path, where: str, found: Any, expected: str) -> Wrong:
    shown = repr(found)
    return Wrong(
        f"{path}, {where}: {shown if len(shown) <= 60 else shown[:57] + '...'}", f"expected {expected}", "correct it"
    )
