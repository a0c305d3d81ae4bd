"""Which jobs a list shows, and in which order: whose, which states, tenants and names; what of it is asked for is
checked here, and no name is compared that the asker may not see."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from covey.core.errors import Refused
from plugins.askers import Asker, OwnerUser
from plugins.scheduler.machine.log.jobs import OVER, STATES, Job

HELD = "held"
"""What a queued job is called, beside its state, that somebody has to release."""
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


class ListWish(msgspec.Struct, frozen=True):
    """What somebody wants to see of the jobs."""

    everything: bool = False
    """Ended jobs too."""
    mine: bool = False
    users: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Patterns, with `*` and `?`."""
    sort: str = ""
    descending: bool = False
    limit: int | None = None

    @property
    def is_personal(self) -> bool:
        """Whether the answer depends on who asks."""
        return self.mine or bool(self.names)


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
    return ListWish(
        everything=bool(given.get("all")) or any(state in OVER for state in states),
        mine=bool(given.get("mine")),
        users=_words(given, "user"),
        states=states,
        tenants=_words(given, "tenant"),
        names=_words(given, "name"),
        sort=text.removeprefix("-"),
        descending=text.startswith("-"),
        limit=None if limit is None else int(limit),
    )


def _words(given: Mapping[str, Any], field: str) -> tuple[str, ...]:
    return tuple(word for word in str(given.get(field) or "").split(",") if word)


def _no_such(field: str, value: str, known: Sequence[str]) -> Refused:
    near = difflib.get_close_matches(value, known, 1, 0.5)
    step = f"did you mean {near[0]}?" if near else f"agentctl jobs --{field} {known[0]}"
    return Refused(2, f"invalid {field}: {value[:40]!r}", f"expected one of {', '.join(known)}", step)


def wanted(jobs: Iterable[Job], wish: ListWish, asker: Asker | None, rack_s: float) -> list[Job]:
    """The jobs that somebody wants to see, in the order that was asked for; without one, in order of admission.
    `asker`: None where the wish is not personal, or where this agent itself asks: then nobody has own jobs."""
    found = [job for job in jobs if _is_wanted(job, wish, asker)]
    if wish.sort:
        key = SORTS[wish.sort]
        found.sort(key=lambda job: (key(job, rack_s), job.number), reverse=wish.descending)
    return found if wish.limit is None else found[: wish.limit]


def _is_wanted(job: Job, wish: ListWish, asker: Asker | None) -> bool:
    owner = job.spec.owner
    user = "" if owner is None else owner.user
    own = OwnerUser() if owner is None else OwnerUser(owner.user, owner.uid)
    if wish.mine and not (asker is not None and (asker.is_agent or asker.uid < 0 or own.is_user(asker))):
        return False
    if wish.users and user not in wish.users:
        return False
    if wish.tenants and job.spec.tenant not in wish.tenants:
        return False
    if wish.states and job.state not in wish.states and not (HELD in wish.states and bool(job.holds.held)):
        return False
    if not wish.names:
        return True
    sees = asker is not None and (asker.role == "operator" or asker.reads_all or own.is_user(asker))
    return sees and any(fnmatchcase(job.spec.called, pattern) for pattern in wish.names)


def _for_s(job: Job, rack_s: float) -> float:
    times = job.times
    began_s = times.submitted_rack_s if times.started_rack_s is None else times.started_rack_s
    return (rack_s if times.ended_rack_s is None else times.ended_rack_s) - began_s
