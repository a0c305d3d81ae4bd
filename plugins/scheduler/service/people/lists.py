"""Which jobs a list shows, and in which order: whose, which states, tenants and names; what of it is asked for is
checked here, and no name is compared that the asker may not see."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from covey.core.errors import Refused
from plugins.askers import Asker, OwnerUser
from plugins.listed_jobs import HELD, JobsWanted, ListedJob, is_wanted, words_of
from plugins.scheduler.machine.log.jobs import OVER, STATES, Job

LIMIT_MAX = 100_000
SORTS: Mapping[str, Callable[[Job, float], Any]] = {
    "id": lambda job, _: job.number,
    "name": lambda job, _: job.spec.called,
    "user": lambda job, _: job.spec.owner.user if job.spec.owner is not None else "",
    "tenant": lambda job, _: job.spec.tenant,
    "state": lambda job, _: STATES.index(job.state),
    "gpus": lambda job, _: job.spec.gpus,
    "workers": lambda job, _: job.spec.workers,
    "submitted": lambda job, _: job.times.submitted_wall_s,
    "started": lambda job, _: job.times.started_wall_s or 0.0,
    "ended": lambda job, _: job.times.ended_wall_s or 0.0,
    "time": lambda job, rack_s: _for_s(job, rack_s),
    "queue": lambda job, _: job.turn,
}
"""What a list can be sorted by -> the key of a job, by what the rack's clock shows."""
FIELDS = ("all", "mine", "user", "state", "name", "tenant", "sort", "limit")
"""What a list can be asked for."""


class ListWish(NamedTuple):
    """What somebody wants to see of the jobs, and in which order."""

    jobs: JobsWanted
    sort: str = ""
    descending: bool = False
    limit: int | None = None

    @property
    def is_personal(self) -> bool:
        """Whether the answer depends on who asks."""
        return self.jobs.mine or bool(self.jobs.names)


def wish_of(given: Mapping[str, Any]) -> ListWish:
    """The wish of a request. Refused names a wrong value, and the nearest right one."""
    states = _words(given, "state")
    for state in states:
        if state not in (*STATES, HELD):
            raise _no_such("state", state, (*STATES, HELD))
    text = str(given.get("sort") or "")
    if text and text.removeprefix("-") not in SORTS:
        raise _no_such("sort", text.removeprefix("-"), tuple(SORTS))
    limit = given.get("limit")
    if limit is not None and not (str(limit).isascii() and str(limit).isdigit() and 0 < int(limit) <= LIMIT_MAX):
        why = f"expected a whole number from 1 to {LIMIT_MAX:,}"
        raise Refused(2, f"invalid limit: {str(limit)[:40]!r}", why, "agentctl jobs --limit 20")
    jobs = JobsWanted(
        everything=bool(given.get("all")) or any(state in OVER for state in states),
        mine=bool(given.get("mine")),
        users=_words(given, "user"),
        states=states,
        tenants=_words(given, "tenant"),
        names=_words(given, "name"),
    )
    return ListWish(jobs, text.removeprefix("-"), text.startswith("-"), None if limit is None else int(limit))


def _words(given: Mapping[str, Any], field: str) -> tuple[str, ...]:
    return words_of(str(given.get(field) or ""))


def _no_such(field: str, value: str, known: Sequence[str]) -> Refused:
    near = difflib.get_close_matches(value, known, 1, 0.5)
    step = f"did you mean {near[0]}?" if near else f"agentctl jobs --{field} {known[0]}"
    return Refused(2, f"invalid {field}: {value[:40]!r}", f"expected one of {', '.join(known)}", step)


def wanted(jobs: Iterable[Job], wish: ListWish, asker: Asker | None, rack_s: float) -> list[Job]:
    """The jobs that somebody wants to see, in the order that was asked for; without one, in order of admission.
    `asker`: None where the wish is not personal, or where this agent itself asks: then nobody has own jobs."""
    found = [job for job in jobs if is_wanted(listed(job, asker), wish.jobs)]
    if wish.sort:
        key = SORTS[wish.sort]
        found.sort(key=lambda job: (key(job, rack_s), job.number), reverse=wish.descending)
    return found if wish.limit is None else found[: wish.limit]


def listed(job: Job, asker: Asker | None) -> ListedJob:
    """What the rule of lists looks at of a job, for whoever asks."""
    owner, spec = job.spec.owner, job.spec
    own = OwnerUser() if owner is None else OwnerUser(owner.user, owner.uid)
    is_own = asker is not None and own.is_user(asker)
    sees = asker is not None and (is_own or asker.role == "operator" or asker.reads_all)
    return ListedJob(
        user=own.user,
        tenant=spec.tenant,
        state=job.state,
        is_held=bool(job.holds.held),
        is_over=job.over,
        is_own=is_own or (asker is not None and (asker.is_agent or asker.uid < 0)),
        name=spec.called if sees else None,
    )


def _for_s(job: Job, rack_s: float) -> float:
    times = job.times
    began_s = times.submitted_rack_s if times.started_rack_s is None else times.started_rack_s
    return (rack_s if times.ended_rack_s is None else times.ended_rack_s) - began_s
