"""A rank for which all others wait, or a gang that stands still: who is told, and how often.

    host that sums, or the gang's first host --RankHangs--> its host: stacks are kept, its process is ended, a successor
                                                            takes its place
                                             --StacksWanted--> hosts of the other ranks: stacks are kept
                    the gang's first host    --GangStands--> host of its lowest rank: its ranks end, and with them the
                                                            whole gang, which fails, or runs again with `--retries`

Ranks are told of one at a time: a successor of each needs others that live. The host of a rank knows since when its
process runs, and leaves one alone that is younger than what its job allows: the round that waits may be older than a
successor.
"""

from collections.abc import Mapping, Sequence

from covey.core.events import Send
from covey.core.ids import HostId, JobId
from plugins.facts import RanksAwaited
from plugins.scheduler.machine.gang.rank_signs import is_beside, steady
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.models import gang_of
from plugins.scheduler.messages.wire import GangNowAnswer, GangStands, RankHangs, RankNow, StacksWanted
from plugins.scheduler.policy.hang import StuckGang, StuckRank, judged, stuck

NEXT_S = 10.0
"""Seconds between two ranks of one job."""
HEARD_S = 5.0
"""Seconds within which a host is to hear that a rank is stuck."""

Asked = dict[int, float]
"""Which ranks were told of: rank -> when its host was told."""


class Hangs:
    """Stuck ranks of the jobs whose tensors this host sums, or whose first host it is."""

    def __init__(self, queue: JobTable) -> None:
        self.queue = queue
        self.asked: dict[tuple[JobId, int, bool], Asked] = {}
        """Ranks asked about, by job, epoch, and whether ranks themselves show it: an aggregator takes a rank that waits
        for a neighbour before its push for a stuck one, and the rank's host knows better."""
        self.over_s: dict[tuple[JobId, int, HostId], float] = {}
        """When each host was first known to have reported the end of its ranks."""

    def handle(self, event: RanksAwaited, now_s: float) -> Sequence[Send]:
        job = self._looked_after(event.job, event.epoch)
        if job is None or job.spec.hang_s is None:
            return ()
        recent = self._recent(job, False, now_s)
        rank = stuck(job.carriers(event.ranks), job.processes, event.waits_s, job.spec.hang_s, recent)
        return () if rank is None else self._told(job, StuckRank(rank, event.waits_s, ""), now_s)

    def answered(self, id: JobId, epoch: int, answers: Mapping[HostId, GangNowAnswer], now_s: float) -> Sequence[Send]:
        """Judge what the hosts of a gang say of its ranks. Nothing is decided while one host has not answered, or
        cannot say."""
        job = self._looked_after(id, epoch)
        if job is None or job.spec.hang_s is None:
            return ()
        found = self._judged(job, answers, job.spec.hang_s, gang_of(job.spec) in self.queue.models.steps, now_s)
        match found:
            case StuckRank():
                return self._told(job, found, now_s)
            case StuckGang():
                return self._all_told(job, found, now_s)
            case None:
                return ()

    def unasked(
        self, id: JobId, epoch: int, answers: Mapping[HostId, GangNowAnswer], limit_s: float, now_s: float
    ) -> StuckRank | StuckGang | None:
        """Who is stuck of a gang of which nobody said what to do then, by a limit that its steps tell; None: nobody, or
        nothing can be said."""
        job = self._runs_undisturbed(id, epoch)
        return None if job is None else self._judged(job, answers, limit_s, False, now_s)

    def _judged(
        self, job: Job, answers: Mapping[HostId, GangNowAnswer], limit_s: float, steps_before: bool, now_s: float
    ) -> StuckRank | StuckGang | None:
        ranks = [rank for answer in answers.values() if answer.known for rank in answer.ranks]
        return judged([*ranks, *self._over(job, now_s)], job.processes, limit_s, steps_before)

    def _over(self, job: Job, now_s: float) -> list[RankNow]:
        """Ranks of hosts that have reported the end of their ranks."""
        since = {host: self.over_s.setdefault((job.id, job.grant.epoch, host), now_s) for host in job.ending.codes}
        return [
            RankNow(rank, False, now_s - since[place.host], False)
            for place in job.start.places
            if place.host in since
            for rank in place.ranks
        ]

    def _looked_after(self, id: JobId, epoch: int) -> Job | None:
        self.asked = {key: asked for key, asked in self.asked.items() if self._runs(*key[:2])}
        self.over_s = {key: at_s for key, at_s in self.over_s.items() if self._runs(*key[:2])}
        job = self._runs_undisturbed(id, epoch)
        return None if job is None or job.spec.hang_s is None else job

    def _runs_undisturbed(self, id: JobId, epoch: int) -> Job | None:
        job = self.queue.as_it_runs(id)
        return None if job is None or not steady(job, epoch) or is_beside(job) else job

    def _recent(self, job: Job, shown: bool, now_s: float) -> Asked:
        known = self.asked.get((job.id, job.grant.epoch, shown), {})
        return {rank: at_s for rank, at_s in known.items() if now_s - at_s < (job.spec.hang_s or 0.0)}

    def _told(self, job: Job, found: StuckRank, now_s: float) -> Sequence[Send]:
        """Tell the rank's host that it is stuck. `why` is empty when the host that sums says so."""
        rank, waits_s, why = found
        shown = bool(why)
        recent = self._recent(job, shown, now_s)
        if rank in recent or any(now_s - at_s < NEXT_S for at_s in recent.values()):
            return ()
        place = next((place for place in job.start.places if rank in place.ranks), None)
        if place is None:
            return ()
        self.asked[job.id, job.grant.epoch, shown] = {**recent, rank: now_s}
        hangs = RankHangs(job.id, job.grant.epoch, rank, waits_s, why)
        return [*self._stacks(job, place.host), Send(place.host, hangs, HEARD_S)]

    def _all_told(self, job: Job, found: StuckGang, now_s: float) -> Sequence[Send]:
        if self._recent(job, True, now_s):
            return ()
        place = min(
            (place for place in job.start.places if place.host not in job.ending.codes), key=lambda place: place.ranks
        )
        self.asked[job.id, job.grant.epoch, True] = {place.ranks[0]: now_s}
        stands = GangStands(job.id, job.grant.epoch, found.quiet_s, found.why)
        return [*self._stacks(job, place.host), Send(place.host, stands, HEARD_S)]

    @staticmethod
    def _stacks(job: Job, but: HostId) -> list[Send]:
        wanted = StacksWanted(job.id, job.grant.epoch)
        return [Send(other.host, wanted, HEARD_S) for other in job.start.places if other.host != but]

    def _runs(self, id: JobId, epoch: int) -> bool:
        job = self.queue.jobs.get(id)
        return job is not None and job.grant.epoch == epoch and job.state == "running"
