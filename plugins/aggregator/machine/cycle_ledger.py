"""The promises of one aggregator: work of jobs it sums, and room held for jobs that may come.

Every promise is checked exactly before it is made (`policy.assign.refusal_of`), so the work promised never exceeds the
cycle and no job is promised a loss at its limit. A job in its trial iterations has no entry here: what it needs is not
known yet. A cycle stays when a job leaves if a shorter one would hurt those that stay.
"""

from collections.abc import Mapping

import msgspec

from covey.core.ids import HostId, JobId
from plugins.aggregator.messages import Demand
from plugins.aggregator.policy.assign import refusal_of
from plugins.aggregator.policy.cycle import FILL, Cycle, grown, loss, sound, used, without
from plugins.aggregator.policy.profile import share_of

RESERVE_S = 20.0
"""Seconds for which room is held for a job that another aggregator wants to hand over."""


class Reservation(msgspec.Struct, frozen=True):
    """Room for a job that another aggregator wants to hand over.

    If there are two for one job the one with the higher epoch counts, and of one epoch that of the later attempt: the
    other was ordered by a former owner, or by an attempt that is over, and comes too late.
    """

    by: HostId
    epoch: int
    """Epoch of the assignment that would end; the assignment that uses the room has a higher one."""
    attempt: int
    """Number of the attempt of `by` to empty itself."""
    until_s: float

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.attempt


class CycleLedger:
    def __init__(self, cycles_max: int = 1, jobs: Mapping[JobId, Demand] = {}, lanes: int = 1) -> None:
        """`lanes`: additions that the process does at a time; a cycle C has lanes * C of work."""
        self.cycle = Cycle({}, lanes, cycles_max, fill=FILL)
        self.demands: dict[JobId, Demand] = {}
        """Demands of the jobs summed here and of those that room is held for."""
        self.reserved: dict[JobId, Reservation] = {}
        for job, demand in sorted(jobs.items()):
            if not self.refusal(job, demand):
                self._enter(job, demand)

    def refusal(self, job: JobId, demand: Demand) -> str:
        """Why there is no room for the job, not counting what it has here already; empty when there is."""
        return refusal_of(self._others(job), job, share_of(demand))

    def take(self, job: JobId, demand: Demand) -> str:
        """Promise the demand, in place of what the job was promised or what was held for it. Returns why not, otherwise
        empty; if not, nothing changes."""
        why = self.refusal(job, demand)
        if not why:
            self.leave(job)
            self._enter(job, demand)
        return why

    def leave(self, job: JobId) -> None:
        self.reserved.pop(job, None)
        if self.demands.pop(job, None) is not None:
            self.cycle = without(self.cycle, job)

    def reserve(self, job: JobId, demand: Demand | None, reservation: Reservation) -> str:
        """Hold room, in place of what was held for the job. Returns why not, otherwise empty; if not, nothing
        changes."""
        held = self.reserved.get(job)
        if held is not None and reservation.order < held.order:
            return f"it has reserved room for it already, asked for later by {held.by}"
        why = self.take(job, demand) if demand is not None else ""
        if not why:
            self.reserved[job] = reservation
        return why

    def release(self, job: JobId, by: HostId, attempt: int) -> None:
        """Release the room of this attempt; room held for another attempt stays."""
        held = self.reserved.get(job)
        if held is not None and (held.by, held.attempt) == (by, attempt):
            self.leave(job)

    def let_go(self, job: JobId) -> None:
        """Release the room that is held for this job; a promise to a job that is here stays."""
        if job in self.reserved:
            self.leave(job)

    def expire(self, now_s: float) -> None:
        for job in [job for job, held in self.reserved.items() if held.until_s <= now_s]:
            self.leave(job)

    def loss(self, job: JobId) -> float:
        """Part of its speed that the cycle takes from this job."""
        return float(loss(self.cycle.us, self.demands[job].period_us))

    def load(self, job: JobId) -> float:
        """Part of this aggregator that is promised to the job."""
        demand = self.demands[job]
        return demand.work_us * (self.cycle.us // demand.period_us) / (self.cycle.lanes * self.cycle.us)

    def check(self) -> None:
        """Check that no job is hurt, the cycle is not overfull, and it is the one that follows from the demands."""
        assert sound(self.cycle), self.cycle
        assert self.cycle.used_us == used(self.cycle.us, self.cycle.shares.values())
        assert {job: share_of(demand) for job, demand in self.demands.items()} == dict(self.cycle.shares)

    def _others(self, job: JobId) -> Cycle:
        return without(self.cycle, job) if job in self.demands else self.cycle

    def _enter(self, job: JobId, demand: Demand) -> None:
        self.demands[job] = demand
        self.cycle = grown(self.cycle, job, share_of(demand))
