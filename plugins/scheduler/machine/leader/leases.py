"""Which hosts may still run ranks, as the elected leader knows it: what it answered, and when.

A new leader knows nothing of what earlier ones answered, so to it every host was confirmed at the moment of its own
election, by the longest lease that an earlier one may have given (it is in the log: `Leads`). A grant that the leader
decided to take back is confirmed no more: ranks that have not started yet will not.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import Command, PlacesLost, Replaced, TakenBack
from plugins.scheduler.policy.leases import Terms

Grant = tuple[JobId, int]
"""A grant: job and epoch."""
ENDS = (PlacesLost, Replaced, TakenBack)
"""Commands that may end ranks on some host, or let others take their place."""


class LeaseAsked(msgspec.Struct, frozen=True):
    """Event: this host asks to go on running these grants."""

    host: HostId
    grants: tuple[Grant, ...]


class Given(msgspec.Struct, frozen=True):
    """Action: answer the host that it may go on running these grants."""

    host: HostId
    grants: tuple[Grant, ...]


def over_there(
    jobs: Mapping[JobId, Job], undecided: Iterable[Command], host: HostId, grants: Iterable[Grant]
) -> tuple[Grant, ...]:
    """Grants that are over on this host, or may be, as far as one copy of the log tells. What was decided is in the
    copies of a majority of voters, though they may not know yet that it was (`undecided`), so each majority has one
    that tells. A copy that does not know a grant yet tells nothing of it."""
    about = {command.job for command in undecided if isinstance(command, ENDS)}
    return tuple(
        (id, epoch)
        for id, epoch in grants
        if id in about
        or (
            (job := jobs.get(id)) is not None
            and (job.grant.epoch > epoch or (job.grant.epoch == epoch and not job.awaits(host)))
        )
    )


class Leases:
    """The leases that this leader gave, and those that an earlier one may have given."""

    def __init__(self, queue: JobTable, terms: Terms) -> None:
        self.queue, self.terms = queue, terms
        self.given_s: dict[HostId, float] = {}
        """When each host was last given leases."""
        self.led_s: float | None = None
        """The time since when this host leads; None: it has not begun."""
        self.earlier_s = 0.0
        """The longest lease of earlier leaders in seconds, grace and margin included."""
        self.earlier_pause_s = 0.0
        """Seconds within which ranks that may be lost stand still without a lease from earlier leaders."""
        self.closed: dict[tuple[HostId, Grant], None] = {}

    def begin(self, now_s: float) -> None:
        """Take note that this host leads, the first time."""
        if self.led_s is None:
            self.led_s, self.earlier_s = now_s, max(self.queue.leases_over_s, self.terms.over_s)
            self.earlier_pause_s = self.pauses_over_s

    def handle(self, event: LeaseAsked, now_s: float) -> Sequence[Given]:
        """Answer a host; only while this host leads and knows all that was decided."""
        self.begin(now_s)
        given = tuple(grant for grant in event.grants if self._runs(event.host, grant))
        if given:
            self.given_s[event.host] = now_s
        return [Given(event.host, given)]

    def _runs(self, host: HostId, grant: Grant) -> bool:
        job = self.queue.jobs.get(grant[0])
        mine = job is not None and job.grant.epoch == grant[1] and job.awaits(host)
        return mine and (host, grant) not in self.closed

    @property
    def pauses_over_s(self) -> float:
        """The pause that a leader announces in the log, in seconds."""
        return max(self.queue.pauses_over_s, self.terms.paused_s)

    def over_in_s(self, host: HostId, now_s: float) -> float:
        """Seconds until no rank of any grant can be left on this host; 0 once that is so."""
        return self._in_s(host, now_s, self.earlier_s, self.terms.over_s)

    def still_in_s(self, host: HostId, now_s: float) -> float:
        """Seconds until every rank on this host that may be lost stands still, or is gone; 0 once that is so."""
        return self._in_s(host, now_s, self.earlier_pause_s, self.terms.paused_s)

    def _in_s(self, host: HostId, now_s: float, earlier_s: float, own_s: float) -> float:
        led_s = now_s if self.led_s is None else self.led_s
        until_s = led_s + earlier_s
        if host in self.given_s:
            until_s = max(until_s, self.given_s[host] + own_s)
        return max(0.0, until_s - now_s)

    def close(self, hosts: Iterable[HostId], grant: Grant) -> None:
        """Confirm the grant on these hosts no more: it is about to be taken back."""
        self.closed |= dict.fromkeys((host, grant) for host in hosts)

    def about_to_close(self) -> list[tuple[HostId, JobId]]:
        """Grants that were to be taken back and still run: the command did not reach the log."""
        self.closed = {key: None for key in self.closed if self._awaited(*key)}
        return [(host, job) for host, (job, _) in self.closed]

    def _awaited(self, host: HostId, grant: Grant) -> bool:
        job = self.queue.jobs.get(grant[0])
        return job is not None and job.grant.epoch == grant[1] and job.awaits(host)

    @property
    def earlier_are_over(self) -> bool:
        return self.queue.leases_over_s <= self.terms.over_s

    def check(self) -> None:
        assert self.led_s is not None or not self.given_s, "leases were given by somebody who does not lead"
