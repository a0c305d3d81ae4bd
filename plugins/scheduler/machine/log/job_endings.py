"""Commands of the log that end a job or its ranks, and the steps that they share: a job is stopped, waits for the
reports of its hosts, is queued again, or is over."""

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.ids import HostId, JobId
from covey.tensors.numbers.blocks import tables_of
from covey.tensors.owner.leaving import who
from covey.wire.job import GoneRank
from plugins.scheduler.machine.log import replacing
from plugins.scheduler.machine.log.job_table import ENDED_MAX, JobTable
from plugins.scheduler.machine.log.jobs import (
    HOLDING,
    TRANSITIONS,
    After,
    Cause,
    FirstFailure,
    Job,
    JobEnding,
    State,
    StopCause,
)
from plugins.scheduler.machine.log.kept_bytes import ENDED_BYTES_MAX
from plugins.scheduler.machine.log.waiting import array_tasks, dependents
from plugins.scheduler.messages.commands import (
    Applied,
    CancelAsked,
    NotApplied,
    RanksDone,
    RanksReported,
    Result,
    TakenBack,
)
from plugins.scheduler.messages.spec import SealedEnv
from plugins.scheduler.policy import explain

HARMS_MAX = 16
"""The number of guaranteed jobs, the newest, that one opportunistic job is known to harm."""
CAUSES: Mapping[str, Cause] = {"preempted": "preempted", "unfit": "unfit"}
"""Why a running job was taken back, where that was not for a lost host."""
LOST_TO: Mapping[StopCause, str] = {
    "preempted": "preempted",
    "unfit": "preempted",
    "host lost": "failed",
    "failed": "failed",
    "time limit": "failed",
    "requeued": "preempted",
}
"""To what the time since the newest checkpoint is lost (`machine/log/bills.py`), by why the ranks were told to stop; a
job that asks to be started again, or is cancelled, loses none."""


def ranks_reported(queue: JobTable, job: Job, command: RanksReported) -> Result:
    _stay_as_sure(queue, job, command)
    place = job.left_on(command.host) or job.place_on(command.host)
    if place is None or place.since != command.since:
        return NotApplied(4, f"no rank of {job.id} is on {command.host}", "the report was not accepted", "nothing")
    if not job.awaits(command.host):
        return Applied(job.id)
    if place in job.healing.leaving:
        left(queue, job, command.host)
        queue.note(job.id, "ranks ended", f"no rank of it is left on {command.host}")
        end_when_all_reported(queue, job, command.wall_s)
        return Applied(job.id)
    if job.spec.elastic:  # others carry the ranks of those that are not in its place any more
        stayed = {process: code for process, code in command.codes.items() if process in place.ranks}
        command = msgspec.structs.replace(command, codes=stayed)
    job.ending.codes = {**job.ending.codes, command.host: dict(command.codes)}
    over = job.carried_by(process for process, code in command.codes.items() if code == 0)
    job.healing.gone = {**{rank: GoneRank(command.host, command.step) for rank in over}, **job.healing.gone}
    replacing.ended(job, command.host)
    job.ending.asked = job.ending.asked or command.asked or command.lost
    if command.step is not None and (job.start.step is None or command.step >= job.start.step):
        job.start.step = command.step
        job.start.metrics = dict(list({**job.start.metrics, **command.metrics}.items())[-16:])
    if command.step_s is not None:
        job.start.step_s = max(command.step_s, job.start.step_s or 0.0)
    queue.free(job, command.host)
    queue.touch(job)
    _weigh(queue, job, command)
    end_when_all_reported(queue, job, command.wall_s)
    return Applied(job.id)


def ranks_done(queue: JobTable, job: Job, command: RanksDone) -> Result:
    """Note the ranks on a host that have ended, and for which others may wait in vain."""
    _stay_as_sure(queue, job, command)
    place = job.place_on(command.host)
    if place is None or not set(command.steps) <= set(place.ranks):
        return NotApplied(4, f"{command.host} has no such ranks of {job.id}", "others run there", "nothing")
    said = {rank: step for process, step in command.steps.items() for rank in job.carried_by([process])}
    new = {rank: GoneRank(command.host, step) for rank, step in said.items() if rank not in job.healing.gone}
    job.healing.gone = {**job.healing.gone, **new}
    if new:
        each = "; ".join(who(rank, gone.host, gone.step, True) for rank, gone in sorted(new.items()))
        queue.touch(job)
        queue.note(job.id, "ranks ended early", f"{each}, and others keep running")
    return Applied(job.id)


def _stay_as_sure(queue: JobTable, job: Job, command: RanksReported | RanksDone) -> None:
    """Let an elastic job stay as its hosts have it, one of which says that processes ended by themselves: none that is
    yet to begin would get the state, and those that were to end come to their end, too. Not where another job has GPUs
    of these by now."""
    was = job.as_sure()
    place = was.place_on(command.host)
    if was is job or place is None:
        return
    if isinstance(command, RanksReported):
        ended = place.since == command.since and not command.lost and not any(command.codes.values())
    else:
        ended = set(command.steps) <= set(place.ranks)
    if ended:
        stay_as_was(queue, job, f"processes on {command.host} ended by themselves before others could begin")


def stay_as_was(queue: JobTable, job: Job, why: str) -> None:
    """Let an elastic job stay as its hosts have it, instead of a change that waits; where another job has GPUs of these
    by now, nobody waits any more."""
    was = job.as_sure()
    held = [queue.holders.get(each.host, {}).get(gpu, job.id) for each in was.start.places for gpu in each.gpus]
    if was is job or any(holder != job.id for holder in held):
        job.healing.sure = None
        return
    for each in job.awaited:
        queue.release(job, each.host, each.gpus)
    was.healing.healed = job.healing.healed + 1
    job.start, job.healing = was.start, was.healing
    replacing.whole_again(job)
    for each in job.awaited:
        queue.hold(job, each)
    queue.say(job, "arranged as before", why)


def _weigh(queue: JobTable, job: Job, command: RanksReported) -> None:
    """Decide what one host's report means for the job: the first failure decides, unless something decided before."""
    failure = explain.first_failure(command.codes)
    if command.lost:
        _weigh_loss(queue, job, command, failure)
        return
    if failure is None:
        queue.note(job.id, "ranks ended", f"{all_ranks(len(command.codes))} on {command.host} exited with 0")
        return
    rank, code = failure
    said = explain.ended_words(rank, command.host, code, explain.SIGNALS.get(-code))
    said = f"{said}: {command.reason}" if command.reason else said
    if job.ending.blame is None:
        job.ending.blame, job.ending.oom_bytes = FirstFailure(command.host, rank, code, said), command.oom_bytes
    if job.ending.after is not None:
        queue.note(job.id, "ranks ended", said)
        return
    if code == explain.EXIT_AGAIN:
        job.tally.requeues += 1
        again(queue, job, "exit 75", f"{said}; it asked to be started again")
    elif cut_off := sorted({host for host in command.unreachable if host != command.host and job.awaits(host)}):
        job.tally.hosts_lost += 1
        again(queue, job, "host lost", f"{said}; {', '.join(cut_off)} did not answer {command.host} then")
    else:
        job.tally.failures += 1
        again(queue, job, "failed", said)


def _weigh_loss(queue: JobTable, job: Job, command: RanksReported, failure: tuple[int, int] | None) -> None:
    """Count a loss: ranks that a host lost did not fail, whatever their codes, and a gang that lost some of its ranks
    is not done. This is decided here: the host itself may know too little of the job to tell."""
    said = f"{command.host} lost the ranks of the job"
    said = f"{said}: {command.reason}" if command.reason else said
    if failure is not None and job.ending.blame is None:
        job.ending.blame = FirstFailure(command.host, *failure, said)
    if job.ending.after is not None:
        queue.note(job.id, "ranks ended", said)
        return
    job.tally.hosts_lost += 1
    again(queue, job, "host lost", said)


def cancel_asked(queue: JobTable, job: Job, command: CancelAsked) -> Result:
    by = f"by {command.by}" if command.by else "by a person"
    if job.state in ("queued", "placing"):
        end(queue, job, "cancelled", f"cancelled {by} before it started", command.wall_s, explain.EXIT_CANCELLED)
    elif job.state == "running" or (job.state == "stopping" and job.ending.after == "queued"):
        stop(queue, job, "cancelled", f"cancelled {by}", "cancelled")
    return Applied(job.id)


def time_limit_reached(queue: JobTable, job: Job) -> Result:
    limit, before = f"its time limit of {job.spec.time_limit_s or 0:g} s", job.spec.signal_before_s
    why = f"{before:g} s before {limit} it was asked to end" if before else f"it reached {limit}"
    stop(queue, job, "failed", why, "time limit")
    return Applied(job.id)


def taken_back(queue: JobTable, job: Job, command: TakenBack) -> Result | None:
    if command.term not in (0, queue.leading_term):
        return None
    if job.state == "placing":
        queue.use(job, -1)
        enter(queue, job, "queued", "taken back", f"{command.cause}: {command.reason}")
        return Applied(job.id)
    lost = lose(queue, job, command.lost)
    if job.state == "running":
        cause = CAUSES.get(command.cause, "host lost")
        job.tally.preemptions += cause == "preempted"
        job.tally.hosts_lost += cause == "host lost"
        job.tally.unfit += cause == "unfit"
        if command.harms is not None and command.harms not in job.measured.harms:
            job.measured.harms = (*job.measured.harms, command.harms)[-HARMS_MAX:]
            _do_not_pair(queue, job, command.harms, command.wall_s)
        again(queue, job, cause, f"taken back ({command.cause}): {command.reason}")
    elif lost:
        queue.note(job.id, "hosts lost", command.reason)
    end_when_all_reported(queue, job, command.wall_s)
    return Applied(job.id)


def _do_not_pair(queue: JobTable, job: Job, harmed: JobId, wall_s: float) -> None:
    """Keep later jobs with the same two names apart as well."""
    if harmed in queue.jobs:
        queue.models.saw_harm(job.spec, queue.jobs[harmed].spec, wall_s)


def again(queue: JobTable, job: Job, cause: Cause, said: str) -> None:
    """Stop the job for this cause, which is counted, and queue it again unless that happened too often."""
    count, allowed = job.happened(cause)
    if allowed is None or count <= allowed:
        stop(queue, job, "queued", said, cause)
    else:
        stop(queue, job, "failed", f"{said}{explain.too_often(cause, count, allowed)}", cause)


def stop(queue: JobTable, job: Job, after: After, reason: str, cause: StopCause) -> None:
    job.bill.stopping(job.attained_gpu_s, queue.rack_s)
    job.ending.cause = cause
    if job.ending.told_rack_s is None:
        job.ending.told_rack_s = queue.rack_s
    job.ending.lost = (*job.ending.lost, *job.healing.missing)
    replacing.whole_again(job)
    job.ending.after = after
    enter(queue, job, "stopping", "stopping", reason)


def end_when_all_reported(queue: JobTable, job: Job, wall_s: float) -> None:
    if job.awaited:
        return
    if job.healing.missing:
        job.tally.hosts_lost += 1
        again(queue, job, "host lost", f"{', '.join(job.healing.missing)} was lost, and no rank is left")
    start, ending = job.start, job.ending
    as_it_began = not job.healing.healed if job.spec.elastic else tables_of(len(start.places)) == start.tables
    if start.step_s is not None and as_it_began:  # else it stepped on more hosts, or with more processes, too
        queue.models.saw_steps(job.spec, len(start.places), start.step_s)
    codes = [code for reported in ending.codes.values() for code in reported.values()]
    done = (not ending.lost and not ending.asked and not any(codes)) or ending.after is None
    lost_to = "" if done else LOST_TO.get(ending.cause, "")
    held = sum(len(place.gpus) for place in start.places)
    job.bill.end(lost_to, job.tally.attempt > 1, job.attained_gpu_s, queue.rack_s, held)
    if done or ending.after is None:
        end(queue, job, "done", f"{all_ranks(job.spec.world_size)} exited with 0", wall_s, 0)
        return
    unblamed = explain.EXIT_LOST if ending.lost else explain.EXIT_CANCELLED
    code = explain.job_code(ending.blame.code) if ending.blame else unblamed
    match ending.after:
        case "failed":
            end(queue, job, "failed", job.reason, wall_s, code)
        case "cancelled":
            end(queue, job, "cancelled", job.reason, wall_s, code)
        case "queued":
            queue.use(job, -1)
            job.priority.queued_s = queue.clock_s
            if ending.cause in ("requeued", "time limit"):
                job.times.limit_from_s = job.ran_s(queue.rack_s)
            job.times.ran_s, job.times.began_rack_s = job.ran_s(queue.rack_s) if job.spec.elastic else 0.0, None
            enter(queue, job, "queued", "queued again", job.reason)
        case _:
            assert_never(ending.after)


def end(queue: JobTable, job: Job, state: State, reason: str, wall_s: float, code: int) -> None:
    if job.state in HOLDING:
        queue.use(job, -1)
    queue.give_back(job)
    job.ending.exit_code, job.times.ended_wall_s, job.times.ended_rack_s = code, wall_s, queue.rack_s
    job.spec = msgspec.structs.replace(job.spec, env={})
    job.env = SealedEnv(job.env.digest) if job.env is not None else None
    enter(queue, job, state, state, reason)
    queue.ended.append(job.id)
    queue.kept_bytes.over(job)
    for after in job.holds.after:
        queue.dependents.get(dependents.parts_of(after)[1], {}).pop(job.id, None)
    dependents.told(queue, job)
    if (whole := array_tasks.task_over(queue, job)) is not None:
        end(queue, whole.array, whole.state, whole.reason, wall_s, whole.code)
    while len(queue.ended) > ENDED_MAX or queue.kept_bytes.ended > ENDED_BYTES_MAX:
        gone = queue.jobs.pop(queue.ended.pop(0))
        queue.drop(gone)
        queue.keys.pop(gone.key, None)
        if gone.task is not None:
            queue.tasks.pop((gone.task.array, gone.task.index), None)
        queue.kept_bytes.forgotten(gone.id)


def enter(queue: JobTable, job: Job, state: State, event: str, reason: str) -> None:
    if state in ("queued", "placing"):
        replacing.began_anew(job)
        job.ending = JobEnding()
    job.state = TRANSITIONS.next(job.state, state)
    queue.say(job, event, reason)


def lose(queue: JobTable, job: Job, hosts: Sequence[HostId]) -> list[HostId]:
    """Wait for these hosts no more, and return those that were awaited."""
    lost = sorted({host for host in hosts if job.awaits(host)})
    job.ending.lost = (*job.ending.lost, *(host for host in lost if job.left_on(host) is None))
    for host in lost:
        left(queue, job, host)
    return lost


def left(queue: JobTable, job: Job, host: HostId) -> None:
    queue.free(job, host)
    replacing.left(job, host)
    queue.touch(job)


def all_ranks(ranks: int) -> str:
    return "its rank" if ranks == 1 else f"all {ranks} ranks"
