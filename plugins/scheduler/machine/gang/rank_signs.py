"""Signs of life of this host's ranks: since when each process runs, and the last sign of life that it gave.

    HeartbeatHeard --> newest step, quiet since, waits since      each second: processes that are new begin anew

Signs from before the last disturbance of a gang do not count. A disturbance is: this agent began, the log had no leader
(ranks that may be lost are suspended then), this machine stood still, or ranks of the gang moved.
"""

from collections.abc import Collection, Mapping

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import HeartbeatHeard
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.wire import GangNowAnswer, RankNow
from plugins.scheduler.policy.shared import is_part

STOOD_S = 5.0
"""The most seconds between two ticks of an agent that was not suspended."""
SILENT_S = 60.0
"""Seconds for which a rank that said that it waits is believed, where nobody said `--hang`."""
Grant = tuple[JobId, int]
Rank = tuple[JobId, int, int]
"""A rank: job, epoch, number."""


class RankAge(msgspec.Struct, frozen=True):
    """The age of a rank's newest process: since when it runs on this host, as far as this agent knows. Pid 0: since
    when no process does."""

    pid: int
    since_s: float


class Signs(msgspec.Struct, frozen=True):
    """The last heartbeat of one process."""

    step: int | None
    sign_s: float
    waits_since_s: float | None
    heard_s: float
    begun: bool


def is_beside(job: Job) -> bool:
    """Whether the job may be stopped for others on its GPUs: then it proves nothing that it stands still."""
    return any(is_part(gpu) for place in job.start.places for gpu in place.gpus) and job.job_class == "opportunistic"


class RankSigns:
    """Signs of life of the ranks on this host, `here`."""

    def __init__(self, queue: JobTable, here: HostId) -> None:
        self.queue, self.here = queue, here
        self.ages: dict[Rank, RankAge] = {}
        self.signs: dict[Rank, dict[int, Signs]] = {}
        """The signs of each rank, by process."""
        self._calm: dict[Grant, tuple[int, float]] = {}
        """How often the places of a grant were exchanged, and since when nothing disturbed the grant."""
        self._calm_s: float | None = None
        """The time since when nothing disturbed all grants here; None: it is not known yet."""
        self._last_s = 0.0

    def heard(self, fact: HeartbeatHeard, now_s: float) -> None:
        waits_since_s = now_s - fact.waits_s if fact.waits_s > 0 else None
        signs = Signs(fact.step, now_s - fact.quiet_s, waits_since_s, now_s, fact.begun)
        self.signs.setdefault((fact.job, fact.epoch, fact.rank), {})[fact.pid] = signs

    def second(self, now_s: float, running: Mapping[Grant, Mapping[int, int]], led: bool) -> None:
        """Take note of one second. `running`: processes by rank. `led`: whether the log has a leader, as far as is
        known here."""
        if not led or self._calm_s is None or now_s - self._last_s > STOOD_S:
            self._calm_s = now_s
        self._last_s = now_s
        ages: dict[Rank, RankAge] = {}
        for (id, epoch), pids in running.items():
            job = self.queue.as_it_runs(id)
            place = job.place_on(self.here) if job is not None and job.grant.epoch == epoch else None
            for rank in {*pids, *(place.ranks if place is not None else ())}:
                known, pid = self.ages.get((id, epoch, rank)), pids.get(rank, 0)
                ages[id, epoch, rank] = known if known is not None and known.pid == pid else RankAge(pid, now_s)
        self.signs = {rank: each for rank, each in self.signs.items() if self._same(rank, ages)}
        self.ages = ages
        self._calm = {grant: self._calm_of(grant, now_s) for grant in running}

    def _same(self, rank: Rank, ages: Mapping[Rank, RankAge]) -> bool:
        """Whether the rank's process is the one that gave these signs. A process that gave some before it was seen is
        new."""
        return rank in ages and self.ages.get(rank, ages[rank]) == ages[rank]

    def _calm_of(self, grant: Grant, now_s: float) -> tuple[int, float]:
        job, known = self.queue.as_it_runs(grant[0]), self._calm.get(grant)
        if job is None or known is None or known[0] != job.healing.healed or not steady(job, grant[1]):
            return (job.healing.healed if job is not None else 0, now_s)
        return known

    def now(self, job: Job, connected: Collection[int], now_s: float) -> GangNowAnswer:
        """What this host says of the job's ranks here. `connected`: its ranks with a process that has joined. A rank
        that said that it waits is believed for as long as it may stand still: on a busy machine heartbeats are late,
        and a process that is suspended while it waits says no more."""
        place, calm = job.place_on(self.here), self._calm.get((job.id, job.grant.epoch))
        if place is None or calm is None or self._calm_s is None or not steady(job, job.grant.epoch):
            return GangNowAnswer(False)
        since_s, silent_s = max(calm[1], self._calm_s), job.spec.hang_s or SILENT_S
        found = []
        for rank in place.ranks:
            key = job.id, job.grant.epoch, rank
            age = self.ages.get(key)
            if age is None:
                return GangNowAnswer(False)
            signs, says = list(self.signs.get(key, {}).values()), rank in connected
            new_s = max(since_s, age.since_s)
            quiet_s = now_s - max(new_s, *(each.sign_s for each in signs)) if signs and says else None
            steps = [each.step for each in signs if each.step is not None]
            waits = [
                now_s - max(new_s, each.waits_since_s)
                for each in signs
                if each.waits_since_s is not None and now_s - each.heard_s < silent_s and says
            ]
            found.append(
                RankNow(
                    rank=rank,
                    runs=age.pid != 0,
                    age_s=max(0.0, now_s - new_s),
                    says=says,
                    step=max(steps, default=None),
                    quiet_s=None if quiet_s is None else max(0.0, quiet_s),
                    waits_s=max(0.0, *waits) if waits else 0.0,
                    begun=any(each.begun for each in signs),
                )
            )
        return GangNowAnswer(True, tuple(found))


def steady(job: Job, epoch: int) -> bool:
    """Whether this grant runs, whole, and none of its ranks is moving or looked for: then it should make progress."""
    return job.grant.epoch == epoch and job.state == "running" and not (job.seeks or job.healing.leaving)
