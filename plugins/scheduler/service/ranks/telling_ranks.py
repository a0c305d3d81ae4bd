"""What this host's ranks tell of themselves while they run: what they compute with, their tensors, who sums these."""

from collections.abc import Callable

from covey.core.ids import JobId
from plugins.base import Host
from plugins.facts import HeartbeatHeard, JobJoined, RanksHeal, TensorsAssigned, TensorsSeen
from plugins.scheduler.messages.commands import JobHeals
from plugins.scheduler.messages.wire import JobNowAnswer
from plugins.scheduler.service.ranks.step_times import StepTimes

STUCK_MAX = 400
"""The most characters of what is said of a rank that makes no progress."""
PROGRESS_MAX = 2000
"""The most ranks whose kernel is kept in memory."""


class TellingRanks:
    """What ranks here tell of themselves. `steps`: how far they are."""

    def __init__(self, host: Host, steps: StepTimes) -> None:
        self.host, self.steps = host, steps
        self.tensors: dict[JobId, tuple[int, int]] = {}
        """The tensors of each job that runs here: bytes of the largest, and of all."""
        self.sums_at: dict[JobId, TensorsAssigned] = {}
        """The assignment of the aggregator that sums the tensors of each job that runs here."""
        self.heals: dict[JobId, JobHeals] = {}
        """Whether this host may be lost, for each job that runs here."""
        self._heals_told: dict[JobId, JobHeals] = {}
        """The part of `heals` that the log knows."""
        self.seen: dict[JobId, None] = {}
        """Jobs whose ranks did a step, or waited for one another in tensors, as they say themselves."""
        self.kernels: dict[tuple[JobId, int, int], str] = {}
        """What each rank computes with, by job, epoch and rank."""
        self.devices_of: Callable[[JobId], str] = lambda _job: ""
        """What is wrong with the GPUs of a job here, in words."""
        self.codes_of: Callable[[JobId, int], dict[int, int]] = lambda _job, _epoch: {}
        """The exit status of each rank of a grant that ended while others of this host run."""
        self.stuck_of: Callable[[JobId, int], str] = lambda _job, _epoch: ""
        """Which rank of a grant makes no progress, in words, where nobody said `--hang`."""

    def forget(self, id: JobId) -> None:
        """Forget a job that is over and of which nothing is here."""
        self.tensors.pop(id, None)
        self.sums_at.pop(id, None)
        self.heals.pop(id, None)
        self._heals_told.pop(id, None)
        self.seen.pop(id, None)

    def may_be_lost(self, fact: RanksHeal) -> None:
        self.heals[fact.job] = JobHeals(fact.epoch, fact.since, fact.may_be_lost, fact.have)

    def heals_news(self, only: JobId | None) -> dict[JobId, JobHeals]:
        """Whether hosts may be lost, of all jobs or of this one, as far as the log does not know it yet."""
        return {id: said for id, said in self.heals.items() if only in (None, id) and self._heals_told.get(id) != said}

    def heals_told(self, news: dict[JobId, JobHeals]) -> None:
        self._heals_told |= news

    def heartbeat(self, fact: HeartbeatHeard) -> None:
        if fact.waits_s > 0 or fact.step is not None:
            self.seen[fact.job] = None

    def joined(self, fact: JobJoined) -> None:
        if fact.kernel:
            key = fact.job, fact.epoch, fact.rank
            self.kernels.pop(key, None)
            self.kernels[key] = fact.kernel
            while len(self.kernels) > PROGRESS_MAX:
                del self.kernels[next(iter(self.kernels))]

    def tensors_seen(self, fact: TensorsSeen) -> None:
        if 0 < fact.largest_bytes <= fact.total_bytes:
            self.tensors[fact.job] = (fact.largest_bytes, fact.total_bytes)

    def assigned(self, fact: TensorsAssigned) -> None:
        known = self.sums_at.get(fact.job)
        if known is None or (fact.epoch, fact.assignment) >= (known.epoch, known.assignment):
            self.sums_at[fact.job] = fact

    def job_now(self, job: JobId) -> JobNowAnswer:
        pids = {epoch: ranks for (id, epoch), ranks in self.host.runner.running().items() if id == job}
        epoch = max(max(pids, default=0), self.steps.newest_epoch(job))
        steps = self.steps.of(job, epoch)
        sums = self.sums_at.get(job)
        return JobNowAnswer(
            epoch=epoch,
            pids=dict(pids.get(epoch, {})),
            step=steps.step,
            metrics=steps.metrics,
            aggregator=sums.aggregator if sums is not None and sums.epoch == epoch else None,
            kernels={rank: kernel for (id, of, rank), kernel in self.kernels.items() if (id, of) == (job, epoch)},
            timing=steps.timing(),
            hooked=dict(steps.hooked),
            joined=any(peer.epoch == epoch for peer in self.host.peers(job)),
            reports=steps.step is not None or job in self.tensors or job in self.seen,
            memory=steps.memory,
            limited=self.host.runner.limited(job, epoch),
            devices=self.devices_of(job),
            codes=self.codes_of(job, epoch),
            stuck=self.stuck_of(job, epoch)[:STUCK_MAX],
        )
