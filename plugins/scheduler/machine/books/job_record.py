"""The record of a job as the log has it, the same on every host."""

from collections.abc import Sequence

from covey.core.job_records import GPUS_MAX, HOSTS_MAX, OTHERS, REASON_MAX, JobRecord
from covey.core.units import format_size
from plugins.facts import StepTiming
from plugins.scheduler.machine.log.jobs import Job

NAME_MAX = 64


def record_of(job: Job, rack_s: float, wall_s: float) -> JobRecord:
    """The record of a job that has ended, or, of one that has not, what would be recorded now. `rack_s`, `wall_s`: the
    rack's clock, and the time, of a job that has not ended."""
    spec, times, tally = job.spec, job.times, job.tally
    ended_s = rack_s if times.ended_rack_s is None else times.ended_rack_s
    began_s = ended_s if times.started_rack_s is None else times.started_rack_s
    timing = slowest(list(job.start.timings.values()))
    owner, again = spec.owner, tally.attempt > 1
    return JobRecord(
        number=job.number,
        submitted_wall_s=times.submitted_wall_s,
        ended_wall_s=max(0.0, wall_s) if times.ended_wall_s is None else times.ended_wall_s,
        name=spec.called[:NAME_MAX],
        tenant=spec.tenant[:NAME_MAX],
        user="" if owner is None else owner.user[:NAME_MAX],
        uid=None if owner is None else owner.uid,
        job_class=spec.job_class,
        state=job.state,
        ended_as=ended_as(job),
        reason=job.reason[:REASON_MAX],
        exit_code=job.ending.exit_code or 0,
        workers=spec.workers,
        gpus=spec.gpus,
        started_wall_s=times.started_wall_s,
        waited_s=round(max(0.0, began_s - times.submitted_rack_s), 3),
        took_s=round(max(0.0, ended_s - began_s), 3),
        attempts=tally.attempt,
        preemptions=tally.preemptions,
        hosts_lost=tally.hosts_lost,
        failures=tally.failures,
        requeues=tally.requeues,
        hosts=tuple(place.host for place in job.start.places[:HOSTS_MAX]),
        seconds=job.bill.now(again, job.attained_gpu_s, rack_s),
        by_gpu=_most(job.bill.by_gpu(rack_s)),
        oom_bytes=job.ending.oom_bytes,
        gpu_bytes=max(job.bill.gpu_bytes, 0 if timing is None else timing.memory_bytes),
        host_bytes=job.bill.host_bytes,
        steps=job.start.step,
        step_s=job.start.step_s if timing is None else timing.step_s,
        input_s=0.0 if timing is None else timing.input_s,
        communicate_s=0.0 if timing is None else timing.communicate_s,
        turns_s=0.0 if timing is None else timing.turns_s,
        time_limit_s=spec.time_limit_s,
    )


def ended_as(job: Job) -> str:
    """How a job ended, in a word or two: `done`, `cancelled`, `timeout`, `oom, peak 31 GiB`, `node-lost`, `preempted`,
    `failed 3`; empty: it has not ended."""
    if job.state != "failed":
        return job.state if job.over else ""
    code = job.ending.exit_code
    match job.ending.cause:
        case "time limit":
            return "timeout"
        case "preempted" | "unfit":
            return "preempted"
        case "host lost":
            return "node-lost"
        case _:
            peak = job.ending.oom_bytes
            return f"oom, peak {format_size(peak)}" if peak else f"failed {code}"


def slowest(timings: Sequence[StepTiming]) -> StepTiming | None:
    """The step times of a gang, which is as fast as its slowest host; None: none is known."""
    return max(timings, key=lambda timing: timing.step_s, default=None)


def _most(by_gpu: dict[str, float]) -> dict[str, float]:
    """The GPUs that were held longest, as many as are recorded, and all others together."""
    if len(by_gpu) <= GPUS_MAX:
        return by_gpu
    ranked = sorted(by_gpu.items(), key=lambda held: (held[0] == OTHERS, -held[1], held[0]))
    rest = sum(held for _, held in ranked[GPUS_MAX:])
    return {**dict(ranked[:GPUS_MAX]), OTHERS: rest}
