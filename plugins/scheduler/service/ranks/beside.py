"""Ranks on GPUs that are shared: they start here when this host's sharing says so, and go when it says that they cannot
stay.

    the log placed them here --> RanksComing, again and again --> RanksMayStart --> they start
                                                              --> RanksUnfit    --> TakenBack(unfit): queued again
    they run, and this agent began anew --> RanksComing(running) --> RanksMayStart
    the log upgraded their job          --> KindChanged, on every host that has ranks of it
    PairHarms                           --> TakenBack(unfit, harms): the log remembers the pair, for a day by name

Nothing here outlives the agent: after a restart all is told again.
"""

from covey.core.events import Fact
from covey.core.ids import JobId
from plugins.base import Host
from plugins.facts import JobKind, KindChanged, PairHarms, Place, RanksComing, RanksMayStart, RanksUnfit
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import TakenBack
from plugins.scheduler.service.log import QueueLog

SILENT_S = 5.0
"""Seconds without an answer of this host's sharing after which the agent's log says so."""
GAP_S = 3.0
"""The most seconds between two measurements: after more, the sharing plugin may have begun anew, and forgotten which
ranks it was told of."""
Grant = tuple[JobId, int]


class RanksBeside:
    def __init__(self, host: Host, queue: JobTable, log: QueueLog, shares: bool) -> None:
        """`shares`: whether GPUs of this host are shared; if not, nothing here has an effect."""
        self.host, self.queue, self.log, self.shares = host, queue, log, shares
        self.settled: dict[Grant, None] = {}
        """Grants to which the sharing said yes."""
        self.waiting: dict[Grant, float] = {}
        """Grants that the sharing was told of and has not answered yet, and since when."""
        self._warned: dict[Grant, None] = {}
        self._kinds: dict[Grant, int] = {}
        """Index of the newest change of class that was told, by grant."""
        self._taking: dict[Grant, None] = {}
        self._measured_s: float | None = None

    def may_start(self, job: Job, place: Place) -> bool:
        """Whether the job's ranks here may start; if the sharing has not said so yet, it is told that they come."""
        return self._settle(job, place, running=False)

    def run(self, job: Job, place: Place) -> None:
        """Tell the sharing that the job's ranks run here."""
        self._settle(job, place, running=True)
        changed = job.priority.upgraded
        if self.shares and place.gpus and changed is not None and changed > max(job.grant.index, self._kind(job)):
            self._kinds[job.id, job.grant.epoch] = changed
            self.host.publish(KindChanged(job.id, job.grant.epoch, _kind_of(job), changed))

    def _kind(self, job: Job) -> int:
        return self._kinds.get((job.id, job.grant.epoch), 0)

    def _settle(self, job: Job, place: Place, running: bool) -> bool:
        key = (job.id, job.grant.epoch)
        if not self.shares or not place.gpus or key in self.settled:
            return True
        now_s = self.host.env.clock.now_s()
        since_s = self.waiting.setdefault(key, now_s)
        if now_s - since_s >= SILENT_S and key not in self._warned:
            self._warn(job)
        self.host.publish(_coming(job, place, running))
        return key in self.settled

    def _warn(self, job: Job) -> None:
        self._warned[job.id, job.grant.epoch] = None
        why = f"the plugin `sharing` of {self.host.id} has not said for {SILENT_S:g} s whether they may use its GPUs"
        next_step = "agentctl status says whether its plugin sharing is on"
        self.host.env.log.warning("ranks wait", job=job.id, epoch=job.grant.epoch, why=why, next=next_step)
        self.host.note(job.id, "ranks wait here", why)

    def on_fact(self, fact: Fact) -> bool:
        """Take the sharing's word; whether the ranks here should be looked at again."""
        match fact:
            case RanksMayStart():
                return self._said_yes((fact.job, fact.epoch))
            case RanksUnfit():
                why = f"it cannot use its GPUs of {self.host.id}: {fact.why}"
                self._take_back(fact.job, fact.epoch, why)
            case PairHarms():
                self._harms(fact)
            case _:
                pass
        return False

    def measured(self) -> None:
        """Note that this host's sharing measured its GPUs."""
        now_s = self.host.env.clock.now_s()
        if self._measured_s is not None and now_s - self._measured_s > GAP_S:
            self.settled.clear()
            self._kinds.clear()
        self._measured_s = now_s

    def forget(self, job: JobId, epoch: int) -> None:
        """Forget this grant: nothing of it is here any more."""
        for told in (self.settled, self.waiting, self._warned, self._kinds):
            told.pop((job, epoch), None)

    def _said_yes(self, key: Grant) -> bool:
        if self.waiting.pop(key, None) is None:
            return False
        self._warned.pop(key, None)
        self.settled[key] = None
        return True

    def _harms(self, fact: PairHarms) -> None:
        guest, job = self.queue.jobs.get(fact.beside), self.queue.jobs.get(fact.job)
        if guest is None or job is None or guest.counts or guest.state != "running" or job.over:
            return
        slowdown = f"{fact.slowdown:.1%} slower, give or take {fact.error:.1%}"
        why = f"beside {job.id} on {self.host.id} it slows that job by {slowdown}, more than is tolerated"
        self._take_back(guest.id, guest.grant.epoch, why, job.id)

    def _take_back(self, id: JobId, epoch: int, why: str, harms: JobId | None = None) -> None:
        """Take the job back, once at a time for each grant."""
        if (id, epoch) in self._taking:
            return
        self._taking[id, epoch] = None
        self.host.env.spawn(f"take back {id}.{epoch}", self._insist(id, epoch, why, harms))

    async def _insist(self, id: JobId, epoch: int, why: str, harms: JobId | None) -> None:
        command = TakenBack(wall_s=0.0, job=id, epoch=epoch, cause="unfit", reason=why[:1000], harms=harms)
        try:
            await self.log.insist(command)
        finally:
            del self._taking[id, epoch]


def _kind_of(job: Job) -> JobKind:
    return "guaranteed" if job.counts else "opportunistic"


def _coming(job: Job, place: Place, running: bool) -> RanksComing:
    each = job.spec.gpus_per_worker
    devices = place.devices
    gpus = {rank: devices[n * each : (n + 1) * each] for n, rank in enumerate(place.ranks)}
    return RanksComing(job.id, job.grant.epoch, _kind_of(job), gpus, job.spec.gpu_memory, running)
