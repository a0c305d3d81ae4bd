"""What people and programs see of starts to come: `agentctl submit --dry-run`, `jobs`, `job`, `why`, and the page;
and what they start with."""

import msgspec


class StartView(msgspec.Struct, frozen=True):
    """When a job that waits will start, as the leader run ahead says."""

    id: str
    """The job; empty: one that was not submitted (`agentctl submit --dry-run`)."""
    p50_s: float | None
    """Seconds until its start with a chance of one half; None: not known."""
    p90_s: float | None
    """... with nine chances in ten."""
    basis: str
    """What that is drawn from, in words; or why it is not known."""


class StartsView(msgspec.Struct, frozen=True):
    """Answer of `starts`."""

    starts: list[StartView]
    whole: bool
    """Whether it names every job that waits and was asked about; if not, more is being worked out."""
    age_s: float = 0.0
    """Seconds since the moment from which its times count."""


class TurnView(msgspec.Struct, frozen=True):
    """The turn of a job that waits for GPUs among the jobs of its kind, guaranteed or opportunistic."""

    place: int
    """The job's place among those that wait; 1: nobody is ahead."""
    ahead: str = ""
    """Who is ahead, in words: `j3 (alice, 2 GPUs) and 4 more, since jobs with fewer GPUs go first`."""


class EnvView(msgspec.Struct, frozen=True):
    """The environment that a job was submitted with, without its secrets."""

    id: str
    variables: dict[str, str]
    """By name. A value that is, or has in it, what looks like a secret says `(hidden)` there."""
    host: str
    """The host that had it."""
