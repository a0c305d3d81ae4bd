"""The replicated state machine: tenants' quotas, jobs, grants and attained service.

`apply` is deterministic: the same commands in the same order give the same state and the same answers on every host.
What must never happen is refused here and nowhere else, because here a leader that was cut off cannot get past:

- no tenant ever holds more GPUs than its quota (one lowered under what is held lets that run out and grants nothing);
- a grant's epoch grows by one each time, and a command of another epoch changes nothing;
- a gang is placed whole, and no GPU belongs to two gangs.

Ended jobs are kept for the list, the newest `ENDED_MAX` of them; their keys and environments go with them.
"""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from covey.core import HostId, JobId, Note
from plugins.scheduler.machine.jobs import HOLDING, OVER, After, Blame, Job, State
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    CancelAsked,
    Command,
    Granted,
    NotApplied,
    Placed,
    PlaceFailed,
    Promoted,
    QuotaSet,
    RanksReported,
    Result,
    Submitted,
    TakenBack,
    TimeUp,
)
from plugins.scheduler.policy import words

ENDED_MAX = 1000
"""Ended jobs kept."""
LIVE_MAX = 10_000
"""Jobs that are not over; more are refused at submit, so that no tenant can fill every host's memory."""
SNAPSHOT_VERSION = 1


class Snapshot(msgspec.Struct, frozen=True):
    version: int
    index: int
    next_number: int
    quotas: dict[str, int | None]
    overshoot: dict[str, int]
    jobs: list[Job]
    """In order of admission."""
    ended: list[JobId]
    """In order of ending."""


_snapshots = msgspec.msgpack.Decoder(Snapshot)


class Queue:
    """Every job, as the log tells it."""

    def __init__(self) -> None:
        self.index = 0
        self.next_number = 1
        self.jobs: dict[JobId, Job] = {}
        self.quotas: dict[str, int | None] = {}
        self.overshoot: dict[str, int] = {}
        self.ended: list[JobId] = []
        self._notes: list[Note] = []
        self._changed: dict[JobId, None] = {}
        self._rebuild()

    def _rebuild(self) -> None:
        """What follows from the rest: keys, usage per tenant, and who holds which GPU."""
        self.keys: dict[str, JobId] = {job.key: job.id for job in self.jobs.values()}
        self.holders: dict[HostId, dict[str, JobId]] = {}
        self._used: dict[str, int] = {}
        self._changed |= dict.fromkeys(self.jobs)
        for job in self.jobs.values():
            if job.state in HOLDING:
                self._use(job, 1)
            if job.placed:
                for place in job.places:
                    if job.awaits(place.host):
                        self.holders.setdefault(place.host, {}).update(dict.fromkeys(place.gpus, job.id))

    # ---- reading ----

    def live(self) -> list[Job]:
        """Jobs that are not over, in order of admission."""
        return [job for job in self.jobs.values() if job.state not in OVER]

    def quota(self, tenant: str) -> int | None:
        """GPUs a tenant may hold; None: not limited."""
        return self.quotas.get(tenant, self.quotas.get("*"))

    def used(self, tenant: str) -> int:
        """GPUs a tenant holds against its quota."""
        return self._used.get(tenant, 0)

    def was(self, job: JobId) -> bool:
        """Whether this id was given once, to a job that may be forgotten by now."""
        number = job[1:]
        return number.isascii() and number.isdigit() and len(number) < 19 and 0 < int(number) < self.next_number

    def over(self, job: JobId, epoch: int) -> bool:
        """Whether the log says that this grant is over for good. False also when the log does not know it (yet)."""
        known = self.jobs.get(job)
        if known is None:
            return self.was(job)
        return known.epoch > epoch or known.state in OVER or (known.epoch == epoch and known.state == "queued")

    def changed(self) -> list[JobId]:
        """Jobs whose state changed since this was last asked, in order; each once."""
        found = list(self._changed)
        self._changed = {}
        return found

    # ---- applying ----

    def apply(self, index: int, command: Command) -> tuple[Result, Sequence[Note]]:
        """The command at `index` of the log. Each change is noted once in the story of its job."""
        self.index = index
        self._notes = []
        result = self._dispatch(command)
        return result, self._notes

    def _dispatch(self, command: Command) -> Result:
        match command:
            case Submitted():
                return self._submitted(command)
            case Granted():
                return self._granted(command)
            case Placed():
                return self._placed(command)
            case PlaceFailed():
                return self._place_failed(command)
            case RanksReported():
                return self._ranks_reported(command)
            case CancelAsked():
                return self._cancel_asked(command)
            case TimeUp():
                return self._time_up(command)
            case TakenBack():
                return self._taken_back(command)
            case Promoted():
                return self._promoted(command)
            case QuotaSet():
                return self._quota_set(command)
            case Attained():
                return self._attained(command)
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
        never = words.over_quota(spec, self.quota(spec.tenant))
        if never is not None:
            return NotApplied(never.code, never.what, never.why, never.next)
        id = JobId(f"j{self.next_number}")
        job = Job(id=id, number=self.next_number, key=command.key, spec=spec, submitted_wall_s=command.wall_s)
        self.next_number += 1
        self.jobs[id] = job
        self.keys[command.key] = id
        asks = f"{spec.workers} x {words.gpus(spec.gpus_per_worker)}" if spec.gpus else f"{spec.workers} without GPUs"
        self._enter(job, "queued", "submitted", f"{spec.name} of tenant {spec.tenant}, {spec.job_class}: {asks}")
        return Applied(id)

    def _granted(self, command: Granted) -> Result:
        job = self.jobs.get(command.job)
        if job is None:
            return self._unknown(command.job)
        if job.state != "queued" or command.epoch != job.epoch + 1:
            return self._stale(job, command.epoch)
        quota = self.quota(job.spec.tenant)
        if job.counts and quota is not None and self.used(job.spec.tenant) + job.spec.gpus > quota:
            why = f"tenant {job.spec.tenant} holds {self.used(job.spec.tenant)} of {words.gpus(quota)}"
            return NotApplied(4, f"{job.id} was not granted", why, "wait until one of its jobs ends")
        job.epoch, job.home, job.granted = command.epoch, command.home, self.index
        self._use(job, 1)
        self._enter(job, "placing", "granted", f"epoch {job.epoch}; {job.home} looks for {words.gpus(job.spec.gpus)}")
        return Applied(job.id)

    def _placed(self, command: Placed) -> Result:
        job = self.jobs.get(command.job)
        if job is None:
            return self._unknown(command.job)
        if job.placed and job.epoch == command.epoch and job.places == command.places:
            return Applied(job.id)
        if job.state != "placing" or job.epoch != command.epoch:
            return self._stale(job, command.epoch)
        wrong = self._wrong_places(job, command)
        if wrong:
            return NotApplied(4, f"{job.id} was not placed", wrong, "nothing: its home tries again")
        job.places, job.granted = command.places, self.index
        job.master_addr, job.master_port = command.master_addr, command.master_port
        job.attempt += 1
        job.place_failures = 0
        job.first = self.index if job.first is None else job.first
        job.started_wall_s = command.wall_s if job.started_wall_s is None else job.started_wall_s
        for place in job.places:
            self.holders.setdefault(place.host, {}).update(dict.fromkeys(place.gpus, job.id))
        where = ", ".join(f"{place.host} ({len(place.ranks)})" for place in job.places)
        self._enter(job, "running", "placed", f"start {job.attempt} under epoch {job.epoch}, workers by host: {where}")
        return Applied(job.id)

    def _wrong_places(self, job: Job, command: Placed) -> str:
        """Why these places are no whole gang of its own; empty when they are."""
        spec = job.spec
        hosts = {place.host for place in command.places}
        ranks = [rank for place in command.places for rank in place.ranks]
        whole = len(hosts) == len(command.places) and all(place.ranks for place in command.places)
        if not whole or ranks != list(range(spec.workers)):
            return "the places do not hold each rank once"
        for place in command.places:
            distinct = len(set(place.gpus))
            if distinct != len(place.gpus) or distinct != len(place.ranks) * spec.gpus_per_worker:
                return f"{place.host} gives {words.gpus(len(place.gpus))} to {len(place.ranks)} workers"
            for gpu in place.gpus:
                holder = self.holders.get(place.host, {}).get(gpu)
                if holder is not None:
                    return f"GPU {gpu} on {place.host} belongs to {holder}"
        return ""

    def _place_failed(self, command: PlaceFailed) -> Result:
        job = self.jobs.get(command.job)
        if job is None:
            return self._unknown(command.job)
        if job.state != "placing" or job.epoch != command.epoch:
            return self._stale(job, command.epoch)
        job.place_failures += 1
        self._use(job, -1)
        self._enter(job, "queued", "not placed", command.reason)
        return Applied(job.id)

    def _ranks_reported(self, command: RanksReported) -> Result:
        job = self.jobs.get(command.job)
        if job is None:
            return self._unknown(command.job)
        if not job.placed or job.epoch != command.epoch:
            return self._stale(job, command.epoch)
        if job.place_on(command.host) is None:
            return NotApplied(4, f"no rank of {job.id} is on {command.host}", "the report was not taken", "nothing")
        if not job.awaits(command.host):
            return Applied(job.id)
        job.codes = {**job.codes, command.host: dict(command.codes)}
        job.asked = job.asked or command.asked
        if command.step is not None and (job.step is None or command.step >= job.step):
            job.step = command.step
            job.metrics = dict(list({**job.metrics, **command.metrics}.items())[-16:])
        self._free(job, command.host)
        self._changed[job.id] = None
        self._weigh(job, command)
        self._end_when_all_reported(job, command.wall_s)
        return Applied(job.id)

    def _weigh(self, job: Job, command: RanksReported) -> None:
        """What one host's report means for the job: the first failure decides, unless something decided before."""
        failure = words.first_failure(command.codes)
        if failure is None:
            self._note(job.id, "ranks ended", f"{_all(len(command.codes))} on {command.host} exited with 0")
            return
        rank, code = failure
        said = words.ended_words(rank, command.host, code, words.SIGNALS.get(-code))
        said = f"{said}: {command.reason}" if command.reason else said
        if job.blame is None:
            job.blame = Blame(command.host, rank, code, said)
        if job.after is not None:
            self._note(job.id, "ranks ended", said)
            return
        again = code == words.EXIT_AGAIN
        job.requeues += again
        self._stop(job, "queued" if again else "failed", f"{said}; it wants to be started again" if again else said)

    def _cancel_asked(self, command: CancelAsked) -> Result:
        job = self.jobs.get(command.job)
        if job is None:
            return self._unknown(command.job)
        by = f"by {command.by}" if command.by else "by a person"
        if job.state in ("queued", "placing"):
            self._end(job, "cancelled", f"cancelled {by} before it started", command.wall_s, words.EXIT_CANCELLED)
        elif job.state == "running" or (job.state == "stopping" and job.after == "queued"):
            self._stop(job, "cancelled", f"cancelled {by}")
        return Applied(job.id)

    def _time_up(self, command: TimeUp) -> Result:
        job = self.jobs.get(command.job)
        if job is None:
            return self._unknown(command.job)
        if job.state != "running" or job.epoch != command.epoch:
            return self._stale(job, command.epoch)
        self._stop(job, "failed", f"it ran past its limit of {job.spec.time_limit_s or 0:g} s")
        return Applied(job.id)

    def _taken_back(self, command: TakenBack) -> Result:
        job = self.jobs.get(command.job)
        if job is None:
            return self._unknown(command.job)
        if job.state not in HOLDING or job.epoch != command.epoch:
            return self._stale(job, command.epoch)
        if job.state == "placing":
            self._use(job, -1)
            self._enter(job, "queued", "taken back", f"{command.cause}: {command.reason}")
            return Applied(job.id)
        lost = [host for host in command.lost if job.awaits(host)]
        job.lost = (*job.lost, *sorted(set(lost)))
        for host in lost:
            self._free(job, host)
        if job.state == "running":
            job.preemptions += command.cause == "preempted"
            self._stop(job, "queued", f"taken back ({command.cause}): {command.reason}")
        elif lost:
            self._note(job.id, "hosts lost", command.reason)
        self._end_when_all_reported(job, command.wall_s)
        return Applied(job.id)

    def _promoted(self, command: Promoted) -> Result:
        job = self.jobs.get(command.job)
        if job is None:
            return self._unknown(command.job)
        if job.state != "queued" or job.epoch != command.epoch:
            return self._stale(job, command.epoch)
        job.promoted, job.base_gpu_s = self.index, job.attained_gpu_s
        self._note(job.id, "promoted", "it waited so long that it begins again in the highest queue")
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
        what = "not limited" if command.gpus is None else words.gpus(command.gpus)
        self._notes.append(Note(f"tenant/{command.tenant}", "quota set", what, f"log/{self.index}"))
        return Applied()

    def _attained(self, command: Attained) -> Result:
        for id, service in sorted(command.service_gpu_s.items()):
            job = self.jobs.get(id)
            if job is not None and service > job.attained.get(command.host, 0.0):
                job.attained = {**job.attained, command.host: service}
        return Applied()

    # ---- steps that several commands share ----

    def _stop(self, job: Job, after: After, reason: str) -> None:
        job.after = after
        self._enter(job, "stopping", "stopping", reason)

    def _end_when_all_reported(self, job: Job, wall_s: float) -> None:
        if any(job.awaits(place.host) for place in job.places):
            return
        codes = [code for reported in job.codes.values() for code in reported.values()]
        if (not job.lost and not job.asked and not any(codes)) or job.after is None:
            self._end(job, "done", f"{_all(job.spec.workers)} exited with 0", wall_s, 0)
            return
        code = words.job_code(job.blame.code) if job.blame else words.EXIT_CANCELLED
        match job.after:
            case "failed":
                self._end(job, "failed", job.reason, wall_s, code)
            case "cancelled":
                self._end(job, "cancelled", job.reason, wall_s, code)
            case "queued":
                self._use(job, -1)
                self._enter(job, "queued", "queued again", job.reason)
            case _:
                assert_never(job.after)

    def _end(self, job: Job, state: State, reason: str, wall_s: float, code: int) -> None:
        if job.state in HOLDING:
            self._use(job, -1)
        job.exit_code, job.ended_wall_s = code, wall_s
        job.spec = msgspec.structs.replace(job.spec, env={})
        self._enter(job, state, state, reason)
        self.ended.append(job.id)
        while len(self.ended) > ENDED_MAX:
            gone = self.jobs.pop(self.ended.pop(0))
            del self.keys[gone.key]

    def _enter(self, job: Job, state: State, event: str, reason: str) -> None:
        if state == "queued" or state == "placing":
            job.codes, job.lost, job.asked, job.after, job.blame = {}, (), False, None, None
        job.state, job.reason = state, reason
        self._changed[job.id] = None
        self._note(job.id, event, reason)

    def _use(self, job: Job, sign: int) -> None:
        """Take the job's GPUs from its tenant's quota, or give them back."""
        if not job.counts:
            return
        tenant = job.spec.tenant
        self._used[tenant] = self._used.get(tenant, 0) + sign * job.spec.gpus
        if not self._used[tenant]:
            del self._used[tenant]
        self._trim_overshoot()

    def _trim_overshoot(self) -> None:
        for tenant, allowed in sorted(self.overshoot.items()):
            quota, used = self.quota(tenant), self.used(tenant)
            if quota is None or used <= quota:
                del self.overshoot[tenant]
            else:
                self.overshoot[tenant] = min(allowed, used)

    def _free(self, job: Job, host: HostId) -> None:
        """The GPUs of one of its hosts are the job's no longer."""
        place = job.place_on(host)
        held = self.holders.get(host, {})
        for gpu in place.gpus if place else ():
            if held.get(gpu) == job.id:
                del held[gpu]
        if not held:
            self.holders.pop(host, None)

    def _note(self, job: JobId, event: str, reason: str) -> None:
        key = f"log/{self.index}.{len(self._notes)}" if self._notes else f"log/{self.index}"
        self._notes.append(Note(job, event, reason, key))

    def _unknown(self, job: JobId) -> NotApplied:
        why = "it ended too long ago to be kept" if self.was(job) else "no job was ever given this id"
        return NotApplied(3, f"there is no job {job}", why, "see agentctl jobs --all")

    def _stale(self, job: Job, epoch: int) -> NotApplied:
        why = f"the command is about epoch {epoch}; the job is {job.state} under epoch {job.epoch}"
        return NotApplied(4, f"nothing was changed about {job.id}", why, f"see agentctl why {job.id}")

    # ---- keeping ----

    def snapshot(self) -> bytes:
        kept = list(self.jobs.values())
        state = Snapshot(SNAPSHOT_VERSION, self.index, self.next_number, self.quotas, self.overshoot, kept, self.ended)
        return msgspec.msgpack.encode(state)

    def restore(self, data: bytes) -> None:
        """Become what `snapshot` wrote. ValueError when it is of a newer version or damaged."""
        state = _snapshots.decode(data)
        if state.version != SNAPSHOT_VERSION:
            raise ValueError(f"the queue's snapshot has version {state.version}; this agent reads {SNAPSHOT_VERSION}")
        self.index, self.next_number = state.index, state.next_number
        self.quotas, self.overshoot, self.ended = dict(state.quotas), dict(state.overshoot), list(state.ended)
        self.jobs = {job.id: job for job in state.jobs}
        self._rebuild()

    def check(self) -> None:
        """Raise AssertionError when quota, epochs or GPUs are not as promised at the top."""
        used: dict[str, int] = {}
        holders: dict[tuple[HostId, str], JobId] = {}
        for job in self.jobs.values():
            if job.state in HOLDING and job.counts and job.spec.gpus:
                used[job.spec.tenant] = used.get(job.spec.tenant, 0) + job.spec.gpus
            for place in job.places if job.placed else ():
                for gpu in place.gpus if job.awaits(place.host) else ():
                    assert (place.host, gpu) not in holders, f"GPU {gpu} on {place.host} is held twice"
                    holders[place.host, gpu] = job.id
            assert (job.state in OVER) == (job.exit_code is not None), f"{job.id} is {job.state} with {job.exit_code}"
        assert used == self._used, f"usage {self._used} is not {used}"
        assert holders == {(h, g): j for h, held in self.holders.items() for g, j in held.items()}
        for tenant, count in used.items():
            quota = self.quota(tenant)
            allowed = None if quota is None else max(quota, self.overshoot.get(tenant, 0))
            assert allowed is None or count <= allowed, f"{tenant} holds {count} of {allowed}"
        assert len(self.ended) <= ENDED_MAX


def _all(ranks: int) -> str:
    return "its rank" if ranks == 1 else f"all {ranks} ranks"
