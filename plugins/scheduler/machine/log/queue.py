"""The replicated state machine: tenants' quotas, jobs, grants and attained service.

`apply` is deterministic: the same commands in the same order give the same state and the same answers on every host.
What must never happen is refused here and nowhere else, because no command of a leader that was cut off gets past
this place:

- no tenant ever holds more GPUs than its quota (one lowered under what is held lets that run out and grants nothing);
- a grant's epoch grows by one each time, and a command of another epoch changes nothing;
- a gang is placed whole, and no GPU belongs to two gangs; where GPUs are shared, none to two guaranteed ones;
- at most one gang keeps GPUs that do not suffice for it yet.

No clock is read here. How long jobs wait comes through the log too: the leader counts the time during which any job
waits (`Elapsed`), and a job remembers what that clock showed when its wait began.

Ended jobs are kept for the list, the newest `ENDED_MAX` of them; their keys and environments go with them.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

from covey.core import JobId, LogEvent
from covey.job.leaving import who
from covey.tensors.numbers.blocks import tables_of
from covey.wire.job import GoneRank
from plugins.scheduler.machine.log import answers, replacing
from plugins.scheduler.machine.log.beside import beside, guaranteed_beside
from plugins.scheduler.machine.log.job_endings import all_ranks
from plugins.scheduler.machine.log.job_table import DRAINED_MAX, Drain
from plugins.scheduler.machine.log.jobs import HOLDING, Cause, FirstFailure, Job, State
from plugins.scheduler.machine.log.kept_bytes import LIVE_BYTES_MAX, size_of
from plugins.scheduler.machine.log.replacing_jobs import ReplacingJobs
from plugins.scheduler.messages.commands import (
    AboutJob,
    Applied,
    Attained,
    CancelAsked,
    Command,
    Demoted,
    Elapsed,
    GpusKept,
    Granted,
    HostDrained,
    Leads,
    MoveAsked,
    NotApplied,
    Placed,
    PlaceFailed,
    PlacesLost,
    Promoted,
    QuotaSet,
    RanksDone,
    RanksReported,
    Replaced,
    Result,
    Submitted,
    TakenBack,
    TimeLimitReached,
    Upgraded,
)
from plugins.scheduler.policy import classes, explain

LIVE_MAX = 10_000
"""Jobs that are not over; more are refused at submit, so that no tenant can fill every host's memory."""


HARMS_MAX = 16
"""Guaranteed jobs that one opportunistic job is known to harm."""
CAUSES: Mapping[str, Cause] = {"preempted": "preempted", "unfit": "unfit"}
"""Why a running job was taken back, if not for a host that is lost."""
FINDS: Mapping[type[AboutJob], tuple[State, ...]] = {
    Granted: ("queued",),
    Placed: ("placing",),
    PlaceFailed: ("placing", "running"),
    PlacesLost: ("running",),
    MoveAsked: ("running",),
    Replaced: ("running",),
    RanksReported: ("running", "stopping"),
    RanksDone: ("running",),
    TimeLimitReached: ("running",),
    TakenBack: HOLDING,
    Promoted: ("queued",),
    Demoted: ("queued",),
    Upgraded: ("running",),
    GpusKept: ("queued",),
}
"""In which states a command may find its job, which must be under the command's epoch as well; one before it when the
command is a grant."""


class Queue(ReplacingJobs):
    """Every job, as the log tells it."""

    # ---- applying ----

    def apply(self, index: int, command: Command) -> tuple[Result, Sequence[LogEvent]]:
        """The command at `index` of the log. Each change is noted once in the event log of its job."""
        self.index, self.rack_s = index, max(self.rack_s, command.rack_s)
        self._notes = []
        result = self._dispatch(command)
        touched = answers.touched(command, result)
        for feed in self._feeds:
            feed.note(touched)
        return result, self._notes

    def _dispatch(self, command: Command) -> Result:
        match command:
            case Submitted():
                return self._submitted(command)
            case QuotaSet():
                return self._quota_set(command)
            case HostDrained():
                return self._host_drained(command)
            case Attained():
                return self._attained(command)
            case Elapsed():
                self.clock_s = max(self.clock_s, command.clock_s)
                return Applied()
            case Leads():
                return self._leads(command)
            case _:
                job = self.jobs.get(command.job)
                if job is None:
                    return answers.unknown(command.job, self.was(command.job))
                return self._about_job(job, command) or answers.stale(job, command)

    def _about_job(self, job: Job, command: AboutJob) -> Result | None:
        """None: the job is not, or no more, where this command takes it to be. Nothing changes then."""
        if isinstance(command, CancelAsked):
            return self._cancel_asked(job, command)
        if isinstance(command, Placed) and job.placed and (job.epoch, job.places) == (command.epoch, command.places):
            return Applied(job.id)  # it was heard before
        if isinstance(command, Replaced) and replacing.was_replaced(job, command):
            return Applied(job.id)
        grants = isinstance(command, Granted)
        if job.state not in FINDS[type(command)] or command.epoch != job.epoch + grants:
            return None
        match command:
            case Granted():
                return self._granted(job, command)
            case Placed():
                return self._placed(job, command)
            case PlaceFailed():
                return self._place_failed(job, command)
            case PlacesLost():
                return self._places_lost(job, command)
            case MoveAsked():
                return self._move_asked(job, command)
            case Replaced():
                return self._replaced(job, command)
            case RanksReported():
                return self._ranks_reported(job, command)
            case RanksDone():
                return self._ranks_done(job, command)
            case TimeLimitReached():
                return self._time_limit_reached(job)
            case TakenBack():
                return self._taken_back(job, command)
            case Promoted():
                return self._promoted(job)
            case Demoted():
                return self._demoted(job, command)
            case Upgraded():
                return self._upgraded(job)
            case GpusKept():
                return self._gpus_kept(job, command)
            case _:
                assert_never(command)

    def _submitted(self, command: Submitted) -> Result:
        if command.key in self.keys:
            return Applied(self.keys[command.key])
        spec = command.spec
        if len(self.jobs) - len(self.ended) >= LIVE_MAX:
            why = f"{LIVE_MAX} jobs wait or run already"
            next = "wait until some end (agentctl jobs), then submit again"
            return NotApplied(4, f"{spec.name} was not taken", why, next)
        live, size = self.kept_bytes.live, size_of(spec)
        if live + size > LIVE_BYTES_MAX:
            why = (
                f"its {size} bytes and the {live} of the jobs that wait or run are over the {LIVE_BYTES_MAX} of the log"
            )
            next = "submit with less environment and fewer arguments (--no-env), or wait until some jobs end"
            return NotApplied(4, f"{spec.name} was not taken", why, next)
        never = explain.over_quota(spec, self.quota(spec.tenant), command.may_demote)
        if never is not None:
            return NotApplied(never.code, never.what, never.why, never.next)
        self.next_number = max(self.next_number, command.numbers)
        id = JobId(f"j{self.next_number}")
        job = Job(id=id, number=self.next_number, key=command.key, spec=spec, submitted_wall_s=command.wall_s)
        job.queued_s, job.env, job.submitted_rack_s = self.clock_s, command.env, self.rack_s
        self.next_number += 1
        self.models.time_passed(command.wall_s)
        self.jobs[id] = job
        self.keys[command.key] = id
        self.kept_bytes.submitted(job)
        asks = f"{spec.workers} x {explain.gpus(spec.gpus_per_worker)}" if spec.gpus else f"{spec.workers} without GPUs"
        self._say(job, "submitted", f"{spec.name} of tenant {spec.tenant}, {spec.job_class}: {asks}")
        return Applied(id)

    def _granted(self, job: Job, command: Granted) -> Result:
        quota = self.quota(job.spec.tenant)
        if job.counts and quota is not None and self.used(job.spec.tenant) + job.spec.gpus > quota:
            return answers.over_quota(job, self.used(job.spec.tenant), quota, "granted")
        job.epoch, job.coordinator, job.granted = command.epoch, command.coordinator, self.index
        self._use(job, 1)
        self._enter(
            job, "placing", "granted", f"epoch {job.epoch}; {job.coordinator} looks for {explain.gpus(job.spec.gpus)}"
        )
        return Applied(job.id)

    def _placed(self, job: Job, command: Placed) -> Result:
        wrong = answers.on_drained(command.places, self.drained)
        wrong = wrong or answers.wrong_places(job, command, self.jobs, self.holders)
        if wrong:
            return NotApplied(4, f"{job.id} was not placed", wrong, "nothing: its coordinator tries again")
        job.places, job.granted = command.places, self.index
        job.tables = tables_of(len(command.places))
        job.master_addr, job.master_port = command.master_addr, command.master_port
        job.attempt += 1
        job.place_failures = 0
        job.waited_s += max(0.0, self.clock_s - job.queued_s)
        job.step, job.metrics, job.step_s, job.timings = None, {}, None, {}
        job.first = self.index if job.first is None else job.first
        if job.started_wall_s is None:
            job.started_wall_s, job.started_rack_s = command.wall_s, self.rack_s
        for place in job.places:
            self.holders.setdefault(place.host, {}).update(dict.fromkeys(place.gpus, job.id))
        self._give_back(job)
        where = ", ".join(f"{place.host} ({len(place.ranks)})" for place in job.places)
        self._enter(job, "running", "placed", f"start {job.attempt} under epoch {job.epoch}, workers by host: {where}")
        for other, hosts in beside(job, self.holders).items():
            self._note(job.id, "shares GPUs", explain.shares(other, self.jobs[other].job_class, hosts))
            self._note(other, "shares GPUs", explain.shares(job.id, job.job_class, hosts))
        return Applied(job.id)

    def _place_failed(self, job: Job, command: PlaceFailed) -> Result | None:
        if job.state == "running":
            return self._not_replaced(job, command)
        job.place_failures += 1
        self._use(job, -1)
        self._enter(job, "queued", "not placed", command.reason)
        return Applied(job.id)

    def _ranks_reported(self, job: Job, command: RanksReported) -> Result:
        place = job.left_on(command.host) or job.place_on(command.host)
        if place is None or place.since != command.since:
            return NotApplied(4, f"no rank of {job.id} is on {command.host}", "the report was not taken", "nothing")
        if not job.awaits(command.host):
            return Applied(job.id)
        if place in job.leaving:
            self._left(job, command.host)
            self._note(job.id, "ranks ended", f"{command.host} has none of it any more")
            self._end_when_all_reported(job, command.wall_s)
            return Applied(job.id)
        job.codes = {**job.codes, command.host: dict(command.codes)}
        ended = {rank: GoneRank(command.host, command.step) for rank, code in command.codes.items() if code == 0}
        job.gone = {**ended, **job.gone}
        replacing.ended(job, command.host)
        job.asked = job.asked or command.asked or command.lost
        if command.step is not None and (job.step is None or command.step >= job.step):
            job.step = command.step
            job.metrics = dict(list({**job.metrics, **command.metrics}.items())[-16:])
        if command.step_s is not None:
            job.step_s = max(command.step_s, job.step_s or 0.0)
        self._free(job, command.host)
        self._changed[job.id] = None
        self._weigh(job, command)
        self._end_when_all_reported(job, command.wall_s)
        return Applied(job.id)

    def _ranks_done(self, job: Job, command: RanksDone) -> Result:
        """Those of its ranks on a host that others may wait for in vain."""
        place = job.place_on(command.host)
        if place is None or not set(command.steps) <= set(place.ranks):
            return NotApplied(4, f"no such ranks of {job.id} are on {command.host}", "others run there", "nothing")
        new = {rank: GoneRank(command.host, step) for rank, step in command.steps.items() if rank not in job.gone}
        job.gone = {**job.gone, **new}
        if new:
            each = "; ".join(who(rank, gone.host, gone.step, True) for rank, gone in sorted(new.items()))
            self._changed[job.id] = None
            self._note(job.id, "ranks ended early", f"{each}; others of its ranks there run on")
        return Applied(job.id)

    def _weigh(self, job: Job, command: RanksReported) -> None:
        """What one host's report means for the job: the first failure decides, unless something decided before."""
        failure = explain.first_failure(command.codes)
        if command.lost:
            self._weigh_loss(job, command, failure)
            return
        if failure is None:
            self._note(job.id, "ranks ended", f"{all_ranks(len(command.codes))} on {command.host} exited with 0")
            return
        rank, code = failure
        said = explain.ended_words(rank, command.host, code, explain.SIGNALS.get(-code))
        said = f"{said}: {command.reason}" if command.reason else said
        if job.blame is None:
            job.blame = FirstFailure(command.host, rank, code, said)
        if job.after is not None:
            self._note(job.id, "ranks ended", said)
            return
        if code == explain.EXIT_AGAIN:
            job.requeues += 1
            self._again(job, "exit 75", f"{said}; it wants to be started again")
        elif cut_off := sorted({host for host in command.unreachable if host != command.host and job.awaits(host)}):
            job.hosts_lost += 1
            self._again(job, "host lost", f"{said}; {', '.join(cut_off)} did not answer {command.host} then")
        else:
            job.failures += 1
            self._again(job, "failed", said)

    def _weigh_loss(self, job: Job, command: RanksReported, failure: tuple[int, int] | None) -> None:
        """Ranks that a host lost did not fail, whatever their codes, and a gang that lost some of its ranks is not
        done. Decided here: the host itself may know too little of the job to tell."""
        said = f"{command.host} lost its ranks"
        said = f"{said}: {command.reason}" if command.reason else said
        if failure is not None and job.blame is None:
            job.blame = FirstFailure(command.host, *failure, said)
        if job.after is not None:
            self._note(job.id, "ranks ended", said)
            return
        job.hosts_lost += 1
        self._again(job, "host lost", said)

    def _cancel_asked(self, job: Job, command: CancelAsked) -> Result:
        by = f"by {command.by}" if command.by else "by a person"
        if job.state in ("queued", "placing"):
            self._end(job, "cancelled", f"cancelled {by} before it started", command.wall_s, explain.EXIT_CANCELLED)
        elif job.state == "running" or (job.state == "stopping" and job.after == "queued"):
            self._stop(job, "cancelled", f"cancelled {by}")
        return Applied(job.id)

    def _time_limit_reached(self, job: Job) -> Result:
        self._stop(job, "failed", f"it reached its time limit of {job.spec.time_limit_s or 0:g} s")
        return Applied(job.id)

    def _taken_back(self, job: Job, command: TakenBack) -> Result | None:
        if command.term not in (0, self.leading_term):
            return None
        if job.state == "placing":
            self._use(job, -1)
            self._enter(job, "queued", "taken back", f"{command.cause}: {command.reason}")
            return Applied(job.id)
        lost = self._lose(job, command.lost)
        if job.state == "running":
            cause = CAUSES.get(command.cause, "host lost")
            job.preemptions += cause == "preempted"
            job.hosts_lost += cause == "host lost"
            job.unfit += cause == "unfit"
            if command.harms is not None and command.harms not in job.harms:
                job.harms = (*job.harms, command.harms)[-HARMS_MAX:]
                self._do_not_pair(job, command.harms, command.wall_s)
            self._again(job, cause, f"taken back ({command.cause}): {command.reason}")
        elif lost:
            self._note(job.id, "hosts lost", command.reason)
        self._end_when_all_reported(job, command.wall_s)
        return Applied(job.id)

    def _do_not_pair(self, job: Job, harmed: JobId, wall_s: float) -> None:
        """Nor do others of their names."""
        if harmed in self.jobs:
            self.models.saw_harm(job.spec, self.jobs[harmed].spec, wall_s)

    def _promoted(self, job: Job) -> Result:
        job.promoted, job.base_gpu_s = self.index, job.attained_gpu_s
        job.queued_s, job.waited_s = self.clock_s, 0.0
        self._note(job.id, "promoted", "it waited so long that it begins again in the highest queue")
        return Applied(job.id)

    def _demoted(self, job: Job, command: Demoted) -> Result | None:
        if job.job_class != "auto":
            return None
        job.demoted = self.index
        self._give_back(job)
        self._changed[job.id] = None
        self._note(job.id, "demoted", explain.demoted(job.spec, command.waited_s))
        return Applied(job.id)

    def _upgraded(self, job: Job) -> Result | None:
        if job.demoted is None or job.upgraded is not None:
            return None
        quota = self.quota(job.spec.tenant)
        if not classes.may_upgrade(job.spec.gpus, self.free_quota(job.spec.tenant), closed=False):
            return answers.over_quota(job, self.used(job.spec.tenant), quota or 0, "upgraded")
        other = guaranteed_beside(job, self.jobs, self.holders)
        if other is not None:
            return answers.not_alone(job, *other)
        job.upgraded = self.index
        self._use(job, 1)
        self._changed[job.id] = None
        self._note(job.id, "upgraded", explain.upgraded(job.spec, self.used(job.spec.tenant), quota))
        return Applied(job.id)

    def _gpus_kept(self, job: Job, command: GpusKept) -> Result | None:
        if not job.counts:
            return None
        if not classes.may_keep(job.id, self.keeper):
            why = f"{self.keeper} keeps GPUs already, and only one gang of a rack may"
            return NotApplied(4, f"nothing is kept for {job.id}", why, f"see agentctl why {self.keeper}")
        if sum(command.gpus.values()) > job.spec.gpus:
            why = f"it asks for {explain.gpus(job.spec.gpus)}"
            return NotApplied(4, f"nothing is kept for {job.id}", why, "nothing: the leader looks again")
        self.keeper, self.kept = (job.id if command.gpus else None), dict(sorted(command.gpus.items()))
        self._changed[job.id] = None
        self._note(job.id, "keeps GPUs", explain.keeps(job.spec.gpus, self.kept))
        return Applied(job.id)

    def _quota_set(self, command: QuotaSet) -> Result:
        if command.if_absent and command.tenant in self.quotas:
            return Applied()
        if command.tenant in self.quotas and self.quotas[command.tenant] == command.gpus:
            return Applied()
        self.quotas[command.tenant] = command.gpus
        for tenant, used in sorted(self._used.items()):
            quota = self.quota(tenant)
            if quota is not None and used > quota:
                self.overshoot[tenant] = used
        self._trim_overshoot()
        what = "not limited" if command.gpus is None else explain.gpus(command.gpus)
        self._notes.append(LogEvent(f"tenant/{command.tenant}", "quota set", what, f"log/{self.index}"))
        return Applied()

    def _host_drained(self, command: HostDrained) -> Result:
        """The same said again changes nothing."""
        host, by = command.host, command.by or "a person"
        before = self.drained.get(host)
        now = Drain(by, command.stop_jobs, command.wall_s) if command.drained else None
        if (now and now.stop_jobs) == (before and before.stop_jobs):
            return Applied()
        rest = {other: drain for other, drain in self.drained.items() if other != host}
        if now is not None and len(rest) >= DRAINED_MAX:
            why = f"{DRAINED_MAX} hosts are drained already"
            return NotApplied(4, f"{host} was not drained", why, "agentctl hosts resume those that are back in use")
        self.drained = rest if now is None else dict(sorted({**rest, host: now}.items()))
        what = (
            ("host resumed", f"{by}: ranks may start there again") if now is None else ("host drained", _drained(now))
        )
        self._notes.append(LogEvent(f"host/{host}", *what, f"log/{self.index}"))
        return Applied()

    def _attained(self, command: Attained) -> Result:
        for id, service in sorted(command.service_gpu_s.items()):
            job = self.jobs.get(id)
            if job is not None and service > job.attained.get(command.host, 0.0):
                job.attained = {**job.attained, command.host: service}
        for id, (largest, total) in sorted(command.tensors.items()):
            job = self.jobs.get(id)
            if job is not None and (total, largest) > (job.tensors[1], job.tensors[0]):
                job.tensors = (largest, total)
                self.models.saw_tensors(job.spec, largest, total)
        for id, said in sorted(command.heals.items()):
            if (job := self.jobs.get(id)) is not None:
                replacing.heals(job, command.host, said)
        for id, steps in sorted(command.steps.items()):
            job = self.jobs.get(id)
            if job is not None and job.placed and job.epoch == steps.epoch and job.place_on(command.host) is not None:
                job.step = max(steps.step, job.step or 0)
                job.timings = {**job.timings, command.host: steps.timing}
        return Applied()

    def _leads(self, command: Leads) -> Result:
        if command.term < self.leading_term:
            why = f"the leader of term {self.leading_term} decides by now"
            return NotApplied(75, f"the leader of term {command.term} decides nothing", why, "nothing: it steps down")
        self.leading_term, self.leases_over_s = command.term, command.leases_over_s
        self.pauses_over_s = command.pauses_over_s
        return Applied()


def _drained(drain: Drain) -> str:
    stays = "others stop and are queued again" if drain.stop_jobs else "others stay until they end"
    return f"{drain.by}: no rank starts there; jobs that can go on elsewhere move, {stays}"
