"""One job as its coordinator knows it; only `JobCoordinator` changes it."""

from collections.abc import Collection, Sequence
from typing import Literal

from covey.core import HostId, JobId
from plugins.aggregator import policy
from plugins.aggregator.machine.events import GangPlaced
from plugins.aggregator.machine.profiler import Profiler
from plugins.aggregator.messages import Assigned
from plugins.aggregator.policy import Candidate

TRIES_MAX = 16
"""Hosts asked for room; then somebody sums the job without a promise."""

State = Literal["away", "surveying", "offering", "assigned", "nobody"]


class TrackedJob:
    def __init__(self, placed: GangPlaced, gauge: Profiler) -> None:
        self.placed, self.gauge = placed, gauge
        self.state: State = "away"
        self.epoch = 0
        """Highest epoch seen or used."""
        self.assigned: Assigned | None = None
        self.asked: list[HostId] = []
        """Hosts of the survey that have not answered."""
        self.offered_to: HostId | None = None
        self.secret = b""
        self.moving = False
        """An owner that can go on is there while another one is looked for."""
        self.wanted: HostId | None = None
        """The only host to offer it to: it holds room."""
        self.promised = True
        """The present offer, or the present owner, is with what the job needs."""
        self.quiet = False
        """Only to aggregators with little to do: it hurt, or was hurt."""
        self.again_s = 0.0
        """When to look for room again, if not promised."""
        self.refused = ""
        """The last refusal, for people."""
        self.seen = (0, 0)
        """Bytes of its largest tensor, and of all, as told to other plugins."""
        self.declined: dict[HostId, str] = {}
        self.avoid: HostId | None = None
        self.complaints: tuple[float, float] | None = None
        """First and last of the present series, seconds."""
        self.checking = False
        self.superseded: dict[HostId, int] = {}
        """Former owners that may not know it yet -> their epoch."""

    @property
    def job(self) -> JobId:
        return self.placed.job

    def settle(self) -> None:
        """The search for an owner is over, or begins anew."""
        self.declined, self.avoid, self.moving, self.wanted, self.quiet = {}, None, False, None, False

    def hosts_to_ask(self, candidates: Sequence[Candidate], gone: Collection[HostId]) -> Sequence[HostId]:
        """Best first. Who moves asks only those that by gossip have room; who has no owner asks everybody."""
        usable = [c for c in candidates if c.host not in self.declined and c.host not in gone]
        if self.wanted is not None:
            return [c.host for c in usable if c.host == self.wanted]
        if self.gauge.demand is None or not self.promised:
            return policy.ranked(self.job, usable, () if self.avoid is None else (self.avoid,))
        likely, rest = policy.ranked_for(self.job, self.gauge.demand, usable, self.quiet)
        if self.moving:
            return likely
        hosts = [*likely, *rest] if len(self.declined) < TRIES_MAX else []
        return sorted(hosts, key=lambda host: host == self.avoid)
