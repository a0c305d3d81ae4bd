"""Jobs in virtual time under the scheduler that agents run: `Queue` and `Leader` decide, this performs.

A cluster is hosts of equal GPUs. It makes what happens (a job comes, has run for as long as it takes, has written its
checkpoint, has attained enough to sink) into commands of the log, lets the leader look whenever something happened or
the leader itself has something to do, and does what the log then says: a granted gang starts where its coordinator
would put it, a gang that is taken back holds its GPUs for a checkpoint and then waits, a gang that starts again
restores first. Whole seconds; everything of one second comes before the leader's looks at it, and gangs granted at one
second start in the order of their numbers.

`sim/jobs/engine.py` does the same many times faster for one tenant, without a log;
`tests/sim/test_live_like_engine.py` ties the two.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from covey.core.ids import HostId, JobId
from covey.core.job_records import GpuSeconds
from plugins.facts import Place, SavedAt
from plugins.scheduler.machine.leader.admission import packlimit
from plugins.scheduler.machine.leader.capacity import Capacity
from plugins.scheduler.machine.leader.leader import Leader, RackHost, ScheduleTick
from plugins.scheduler.machine.log.job_starts import LIVE_MAX
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Attained,
    Command,
    Demoted,
    GpusKept,
    Granted,
    JobUse,
    NotApplied,
    Placed,
    PlaceFailed,
    Promoted,
    RanksReported,
    Result,
    Submitted,
    TakenBack,
    Upgraded,
)
from plugins.scheduler.messages.spec import JobClass, JobSpec
from plugins.scheduler.policy.order import queue_of
from plugins.scheduler.policy.rules import OrderRules
from plugins.scheduler.policy.settings import SchedulerSettings
from sim.jobs.engine import Outcome, SimJob
from sim.kernel import Kernel

COMPLETE, READY, ARRIVE, SINK, SAVE = 2, 3, 4, 5, 6
"""Kinds of events of a job, in their order within one second."""
OFTEN_S = 1e-6
"""Seconds between checkpoints of the log's clock: it is as exact as the simulation."""
LOOKS_MAX = 10_000
"""Most looks of the leader within one second; one that needs more would never stop."""


@dataclass(frozen=True)
class Asks:
    """What one job asks for when it is submitted."""

    tenant: str = "default"
    job_class: JobClass = "guaranteed"


@dataclass
class Life:
    """The state of one job on the cluster."""

    remaining: int
    """Productive seconds still to come when it was last looked at."""
    ran: int = 0
    ran_before: int = 0
    """Productive seconds before its present start."""
    holds: bool = False
    """Whether the job has GPUs."""
    runs: bool = False
    """Whether it makes progress on them."""
    counts: bool = False
    """Whether they count against its tenant's quota."""
    since: int = 0
    """Second at which the job was last looked at."""
    event: int = 0
    """Number of the job's next event in the kernel; 0: nothing was posted yet."""
    starts: int = 0
    went: int = 0
    """Second at which the job began to make progress on the GPUs that it has."""
    saves: int = 0
    """How often it saved."""


@dataclass
class Used:
    """GPU-seconds that the jobs of one tenant held."""

    guaranteed_gpu_s: int = 0
    opportunistic_gpu_s: int = 0
    held_max: int = 0
    """Most GPUs against the tenant's quota at once."""
    over_s: int = 0
    """Seconds in which these were more than the quota."""


@dataclass
class Tally:
    """What became of classes and quotas; a job is its index in the given list."""

    demoted: set[int] = field(default_factory=set)
    upgraded: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    """Jobs that the log refused: they ask for more than their tenant's quota."""
    kept: set[int] = field(default_factory=set)
    """Gangs that kept GPUs until they were whole."""
    late: int = 0
    """Submissions put off because the log had its most waiting jobs."""
    used: dict[str, Used] = field(default_factory=dict)


def settings_of(
    rules: OrderRules, quotas: dict[str, int], default: int | None, demote_after_s: float | None
) -> SchedulerSettings:
    """The settings of agents for these rules. Raises ValueError for rules that they do not have."""
    if rules.discipline != "dlas" or rules.inside != "sticky" or rules.quantum_s is not None:
        raise ValueError("agents have 2D-LAS in which running gangs stay, without a quantum")
    return SchedulerSettings(
        queue_thresholds_gpu_s=tuple(float(limit) for limit in rules.thresholds_gpu_s),
        narrow_first=rules.narrow_first,
        promote_knob=None if rules.knob is None else rules.knob[0] / rules.knob[1],
        starve_limit_s=rules.starve_limit_s,
        gang_patience_s=rules.gang_patience_s,
        restart_s=rules.preempt_s + rules.restore_s,
        unsaved_stops=None if rules.checkpoint_every_s is None else rules.unsaved_stops,
        demote_after_s=demote_after_s,
        checkpoint_s=OFTEN_S,
        quotas=quotas,
        default_quota=default,
    )


class Live:
    """One run. `asks`: tenant and class of each job, in the order of `jobs`; None: all are one tenant's."""

    def __init__(
        self,
        jobs: Sequence[SimJob],
        hosts: int,
        gpus_each: int,
        rules: OrderRules,
        settings: SchedulerSettings,
        asks: Sequence[Asks] | None = None,
    ) -> None:
        self.given = sorted(range(len(jobs)), key=lambda at: (jobs[at].submit_s, jobs[at].id))
        self.jobs, self.asks = jobs, asks or [Asks()] * len(jobs)
        self.preempt_s, self.restore_s = rules.preempt_s, rules.restore_s
        self.every_s = rules.checkpoint_every_s
        self.queue = JobTable()
        self.leader = Leader(self.queue, settings)
        names = [HostId(f"h{at:0{len(str(hosts))}}") for at in range(hosts)]
        self.rack = tuple(RackHost(host, gpus_each) for host in names)
        self.gpus = {host: [str(gpu) for gpu in range(gpus_each)] for host in names}
        self.capacity = Capacity(self.queue, dict.fromkeys(names, gpus_each))
        """The pool in which coordinators look for places."""
        self.dispatch = self.queue.follow()
        self.lives = [Life(job.duration_s) for job in jobs]
        self.at: dict[JobId, int] = {}
        self.ids: dict[int, JobId] = {}
        self.bills: dict[int, GpuSeconds] = {}
        """What became of the GPU·s of each job that has ended."""
        self.granted: list[JobId] = []
        """Granted gangs that have no place yet."""
        self.kernel: Kernel[int, Callable[[], None]] = Kernel(min((job.submit_s for job in jobs), default=0))
        for at in self.given:
            self.kernel.post(jobs[at].submit_s, partial(self._arrive, at), ARRIVE)
        self.outside: deque[int] = deque()
        """Jobs that come when the log takes them."""
        self.left = count = len(jobs)
        self.out = Outcome([0] * count, [0] * count, [0] * count, [0] * count, [0] * count)
        self.tally = Tally(used={ask.tenant: Used() for ask in self.asks})
        self.held = dict.fromkeys(self.tally.used, 0)
        """GPUs that each tenant's jobs hold and that count against its quota."""

    # ---- the run ----

    @property
    def now(self) -> int:
        return self.kernel.now

    def run(self, progress: Callable[[float, str], None] | None = None) -> Outcome:
        """Run until every job has ended, or was refused."""
        steps, total = 0, max(1, len(self.jobs))
        self._decide()
        while self.left:
            self._pass_until(self._next())
            for command in self.leader.elapsed(self.now, self.now):
                self._say(command)
            self.kernel.run_until(self.now, lambda happens: happens())
            self._decide()
            steps += 1
            if progress is not None and steps % 1024 == 0:
                done = total - self.left
                progress(done / total, f"{done} of {total} jobs ended, {self.now / 86400:.1f} days of virtual time")
        return self.out

    def _next(self) -> int:
        """The next second at which something happens, or the leader has something to do."""
        at = self.kernel.next_at()
        times = [] if at is None else [at]
        wakes_s = self.leader.wakes_s()
        if wakes_s is not None:
            times.append(max(self.now + 1, math.ceil(wakes_s - OFTEN_S)))
        assert times, f"{self.left} jobs never end"
        return min(times)

    def _pass_until(self, now: int) -> None:
        for tenant, used in self.tally.used.items():
            quota = self.queue.quota(tenant)
            if quota is not None and self.held[tenant] > quota:
                used.over_s += now - self.now
        self.kernel.advance(now)

    def _decide(self) -> None:
        """Let the leader look until it proposes nothing more and every granted gang has its places."""
        self.out.decisions += 1
        for _ in range(LOOKS_MAX):
            if not self._look() and not self._place_all():
                break
        else:
            raise AssertionError(f"the leader does not stop deciding at second {self.now}")
        for tenant, used in self.tally.used.items():
            used.held_max = max(used.held_max, self.held[tenant])

    def _look(self) -> bool:
        """Perform everything that the leader proposes; returns whether the log took any of it."""
        proposed = self.leader.handle(ScheduleTick(self.rack, self.now), self.now)
        return sum(self._perform(action.command) for action in proposed) > 0

    # ---- the log ----

    def _say(self, command: Command) -> Result:
        self.queue.rack_s = float(self.now)
        return apply(self.queue, self.queue.index + 1, command)[0]

    def _perform(self, command: Command) -> bool:
        """Perform one command of the leader; returns whether the log takes it."""
        if isinstance(command, TakenBack | Upgraded):
            self._report(self.at[command.job])
        if isinstance(self._say(command), NotApplied):
            return False
        match command:
            case Granted():
                self.granted.append(command.job)
            case TakenBack():
                self._stopped(self.at[command.job])
            case Promoted():
                self.out.promoted[self.at[command.job]] += 1
            case Demoted():
                self.tally.demoted.add(self.at[command.job])
            case Upgraded():
                self.tally.upgraded.add(self.at[command.job])
                self._counts(self.at[command.job], True)
            case GpusKept() if command.gpus:
                self.tally.kept.add(self.at[command.job])
            case _:
                pass
        return True

    def _job(self, at: int) -> Job:
        return self.queue.jobs[self.ids[at]]

    def _report(self, at: int) -> None:
        """Report to the log what a job attained, as its hosts do."""
        self._accrue(at)
        life, id, gpus = self.lives[at], self.ids[at], self.jobs[at].gpus
        used = float((life.ran - life.ran_before) * gpus)
        uses = {id: JobUse(self._job(at).grant.epoch, used, used)}
        served = {id: float(life.ran * gpus)}
        self._say(Attained(wall_s=self.now, host=self.rack[0].host, service_gpu_s=served, uses=uses))

    def _ranks_end(self, at: int, asked: bool) -> None:
        job = self._job(at)
        if asked and self.every_s is None:  # it continues where it was
            saved = SavedAt(step=self.lives[at].starts, wall_s=self.now, path="the simulator's")
            self._say(Attained(wall_s=self.now, host=self.rack[0].host, service_gpu_s={}, saved={job.id: saved}))
        self._counts(at, False)
        self.lives[at].holds, self.lives[at].since = False, self.now
        for place in job.start.places:
            codes = dict.fromkeys(place.ranks, 0)
            epoch, host = job.grant.epoch, place.host
            self._say(RanksReported(wall_s=self.now, job=job.id, epoch=epoch, host=host, codes=codes, asked=asked))

    # ---- what happens to a job ----

    def _post(self, at: int, second: int, kind: int, happens: Callable[[int], None]) -> None:
        """Post the job's next event in place of the one that was posted before."""
        self.kernel.cancel(self.lives[at].event)
        self.lives[at].event = self.kernel.post(second, partial(happens, at), kind)

    def _accrue(self, at: int) -> None:
        life, gpus = self.lives[at], self.jobs[at].gpus
        passed = self.now - life.since
        if life.runs:
            life.remaining -= passed
            life.ran += passed
        if life.holds:
            used = self.tally.used[self.asks[at].tenant]
            self.out.held_gpu_s += passed * gpus
            used.guaranteed_gpu_s += passed * gpus * life.counts
            used.opportunistic_gpu_s += passed * gpus * (not life.counts)
            life.since = self.now

    def _counts(self, at: int, counts: bool) -> None:
        """From now on the job's GPUs count against its tenant's quota, or do not."""
        life = self.lives[at]
        self.held[self.asks[at].tenant] += self.jobs[at].gpus * (counts - life.counts)
        life.counts = counts

    def _arrive(self, at: int) -> None:
        self.lives[at].since = self.jobs[at].submit_s
        if self.outside or self._is_full():
            self.outside.append(at)
            self.tally.late += 1
        else:
            self._submit(at)

    def _is_full(self) -> bool:
        return len(self.queue.jobs) - len(self.queue.ended) >= LIVE_MAX

    def _spec(self, at: int) -> JobSpec:
        """What a job asks for when it is submitted."""
        job, asks = self.jobs[at], self.asks[at]
        return JobSpec(
            name=f"job-{at}",
            tenant=asks.tenant,
            job_class=asks.job_class,
            workers=job.gpus,
            argv=("train",),
            skew=job.skew or 0.0,
        )

    def _submit(self, at: int) -> None:
        spec = self._spec(at)
        may_demote = self.leader.settings.demote_after_s is not None
        said = self._say(Submitted(wall_s=self.now, key=f"job-{at:08}", spec=spec, may_demote=may_demote))
        if isinstance(said, NotApplied) or said.job is None:
            self.tally.refused.add(at)
            self.left -= 1
        else:
            self.ids[at], self.at[said.job] = said.job, at

    def _place_all(self) -> bool:
        """Find places for the granted gangs, in the order of their numbers, as coordinators do; returns whether there
        were any."""
        granted = sorted([self.queue.jobs[id] for id in self.granted], key=lambda job: job.number)
        self.granted = []
        for job in granted:
            self._place(job)
        return bool(granted)

    def _place(self, job: Job) -> None:
        self._bring_ground_up_to_date()
        skew = self.queue.models.shown_skew(job.spec, job.measured.tensors)
        limit = packlimit(self.queue, self.leader.settings)
        plan = self.capacity.plan(job, self.capacity.free_for(job), skew, limit)
        if not plan:
            self._say(PlaceFailed(wall_s=self.now, job=job.id, epoch=job.grant.epoch, reason="no room"))
            return
        places, rank = [], 0
        for host, count in plan.items():
            held = self.queue.holders.get(host, {})
            free = [gpu for gpu in self.gpus[host] if gpu not in held]
            places.append(Place(host, tuple(range(rank, rank + count)), tuple(free[:count])))
            rank += count
        epoch = job.grant.epoch
        placed = Placed(wall_s=self.now, job=job.id, epoch=epoch, places=tuple(places), master_addr="", master_port=1)
        result = self._say(placed)
        assert not isinstance(result, NotApplied), result
        self._start(self.at[job.id], job.counts)

    def _bring_ground_up_to_date(self) -> None:
        changed = self.dispatch.take()
        for id in self.queue.jobs if changed is None else changed:
            job = self.queue.jobs.get(id)
            if job is None or job.over:
                self.capacity.drop(id)
            else:
                self.capacity.put(job)
        self.capacity.keep(self.queue.keeper, self.queue.kept)

    def _start(self, at: int, counts: bool) -> None:
        life = self.lives[at]
        self.out.wait_s[at] += self.now - life.since
        life.holds, life.since, life.starts = True, self.now, life.starts + 1
        life.ran_before = life.ran
        self._counts(at, counts)
        if life.starts == 1:
            self.out.first_s[at] = self.now
        self.out.restarts_gpu_s += self.restore_s * self.jobs[at].gpus * (life.starts > 1)
        if life.starts > 1 and self.restore_s:
            self._post(at, self.now + self.restore_s, READY, self._ready)
        else:
            self._go(at)

    def _go(self, at: int) -> None:
        self.lives[at].runs, self.lives[at].went = True, self.now
        self._await_save(at)
        self._watch(at)

    def _await_save(self, at: int) -> None:
        if self.every_s:
            self.kernel.post(self.now + self.every_s, partial(self._save, at, self.lives[at].starts), SAVE)

    def _save(self, at: int, start: int) -> None:
        """Say that a checkpoint is complete, if the job still runs as it did when that was foreseen."""
        life = self.lives[at]
        if not life.runs or life.starts != start:
            return
        self._report(at)
        life.saves += 1
        saved = {self.ids[at]: SavedAt(life.saves, self.now, "checkpoint")}
        self._say(Attained(wall_s=self.now, host=self.rack[0].host, service_gpu_s={}, saved=saved))
        self._await_save(at)

    def _watch(self, at: int) -> None:
        """Post what comes first for the job: its end, or enough service to sink into the next queue. At one second it
        ends."""
        life, gpus, job = self.lives[at], self.jobs[at].gpus, self._job(at)
        thresholds = self.leader.settings.queue_thresholds_gpu_s
        attained = life.ran * gpus - job.priority.base_gpu_s
        queue = queue_of(attained, thresholds)
        end = self.now + life.remaining
        if queue < len(thresholds):
            sinks = self.now + math.ceil((thresholds[queue] - attained) / gpus)
            if sinks < end:
                self._post(at, sinks, SINK, self._sink)
                return
        self._post(at, end, COMPLETE, self._complete)

    def _sink(self, at: int) -> None:
        self._report(at)
        self._watch(at)

    def _stopped(self, at: int) -> None:
        """Stop a job that the log says has to stop: it writes a checkpoint."""
        life, gpus = self.lives[at], self.jobs[at].gpus
        self._report(at)
        if life.runs and self.every_s is not None:
            ran_s = self.now - life.went
            lost_s = ran_s % self.every_s if self.every_s else ran_s
            life.remaining += lost_s
            self.out.restarts_gpu_s += lost_s * gpus
        self.out.restarts_gpu_s += self.preempt_s * gpus
        life.runs = False
        self.out.preempted[at] += 1
        if self.preempt_s:
            self._post(at, self.now + self.preempt_s, READY, self._ready)
        else:
            self._ranks_end(at, asked=True)
            self.kernel.cancel(life.event)

    def _ready(self, at: int) -> None:
        """Continue with a job whose checkpoint is written, or read."""
        self._accrue(at)
        if self._job(at).state == "stopping":
            self._ranks_end(at, asked=True)
        else:
            self._go(at)

    def _complete(self, at: int) -> None:
        self._report(at)
        self.lives[at].runs = False
        self.out.end_s[at] = self.now
        job = self._job(at)
        self._ranks_end(at, asked=False)
        self.bills[at] = job.bill.over
        self.left -= 1
        while self.outside and not self._is_full():
            self._submit(self.outside.popleft())
