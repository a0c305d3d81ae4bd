"""Which jobs somebody wants to see: the one rule of lists (`GET /v1/jobs`), and of those that are watched, whose
stream has all jobs (`agentctl jobs -w`)."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

HELD = "held"
"""What a queued job is called, beside its state, that somebody has to release."""


class JobsWanted(NamedTuple):
    """What somebody wants to see of the jobs. An empty filter takes all."""

    everything: bool = False
    """Ended jobs too."""
    mine: bool = False
    users: Sequence[str] = ()
    states: Sequence[str] = ()
    tenants: Sequence[str] = ()
    names: Sequence[str] = ()
    """Patterns, with `*` and `?`."""


class ListedJob(NamedTuple):
    """What the rule looks at of a job."""

    user: str
    """The user whose job it is; empty: the agent's own."""
    tenant: str
    state: str
    is_held: bool
    is_over: bool
    is_own: bool
    """Whether it is a job of whoever asks; all are of root and of the agent's own user."""
    name: str | None
    """None: whoever asks may not see it, so no pattern finds it."""


def is_wanted(job: ListedJob, wish: JobsWanted) -> bool:
    """Whether a list shows this job."""
    if (job.is_over and not wish.everything) or (wish.mine and not job.is_own):
        return False
    if (wish.users and job.user not in wish.users) or (wish.tenants and job.tenant not in wish.tenants):
        return False
    if wish.states and job.state not in wish.states and not (HELD in wish.states and job.is_held):
        return False
    name = job.name
    return not wish.names or (name is not None and any(fnmatchcase(name, pattern) for pattern in wish.names))


def words_of(said: str | None) -> tuple[str, ...]:
    """The values of a filter, which commas separate."""
    return tuple(word for word in (said or "").split(",") if word)
