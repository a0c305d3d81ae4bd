"""Commands of the log about a gang that continues without some of its hosts (`machine/log/replacing.py`)."""

from covey.core.ids import HostId
from plugins.scheduler.machine.log import arranging, job_endings, replacing
from plugins.scheduler.machine.log.answers import barred_place
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import (
    Applied,
    MoveAsked,
    NotApplied,
    PlaceFailed,
    PlacesLost,
    RanksReported,
    Replaced,
    Result,
)


def places_lost(queue: JobTable, job: Job, command: PlacesLost) -> Result | None:
    """Note that hosts are lost; with hosts that are missing already, the command names another coordinator."""
    if command.term not in (0, queue.leading_term):
        return None
    if any(map(job.awaits, command.hosts)):  # whoever is yet to end may be the last with the state
        job_endings.stay_as_was(queue, job, f"{command.reason} before a process that stays was seen to have its state")
    lost = sorted({host for host in command.hosts if job.awaits(host) and job.left_on(host) is None})
    if lost and not job.heals_without(lost):
        return _stop_for_lost_hosts(
            queue, job, f"{command.reason}; {replacing.why_not(job)}", command.wall_s, command.hosts
        )
    for host in command.hosts:
        job_endings.left(queue, job, host)
    job.grant.coordinator, job.healing.sought = command.coordinator, job.healing.sought + 1
    said = arranging.lost(queue, job, lost) if job.spec.elastic else ""
    if not replacing.lose(job, lost):
        too_many = f"{command.reason}; it lost {job.healing.losses[1]} hosts without finishing a step in between"
        return _stop_for_lost_hosts(queue, job, too_many, command.wall_s)
    if lost:
        said = said or f"{job.grant.coordinator} searches for other hosts, and the other ranks wait"
        queue.say(job, "hosts lost", f"{command.reason}; {said}")
    return Applied(job.id)


def lost_by_report(queue: JobTable, job: Job, command: RanksReported) -> Result | None:
    """A host says that it lost the processes of an elastic job, since its machine began anew before anybody missed it:
    others carry their ranks. None: this is for `job_endings.ranks_reported`."""
    was = job.as_sure()
    place = was.place_on(command.host)
    if not command.lost or not job.spec.elastic or job.state != "running":
        return None
    if place is None or place.since != command.since or not job.awaits(command.host):
        return None
    if was.left_on(command.host) is not None or not was.heals_without((command.host,)):
        return None
    others = [other.host for other in was.start.places if other.host != command.host]
    coordinator = job.grant.coordinator if job.grant.coordinator in others else others[0]
    return places_lost(
        queue,
        job,
        PlacesLost(
            wall_s=command.wall_s,
            job=job.id,
            epoch=command.epoch,
            hosts=(command.host,),
            coordinator=coordinator or others[0],
            reason=f"{command.host} lost its processes: {command.reason}"[:1000],
        ),
    )


def move_asked(queue: JobTable, job: Job, command: MoveAsked) -> Result:
    refused = replacing.refused_move(job, command, queue.drained)
    if refused is not None:
        return refused
    job.healing.moving = {**job.healing.moving, command.host: command.to or HostId("")}
    job.grant.coordinator, job.healing.sought = command.coordinator, job.healing.sought + 1
    by = command.by or "a person"
    queue.touch(job)
    queue.note(job.id, "to move", f"{by} moves its ranks on {command.host} to {command.to or 'another host'}")
    if command.gang is not None and command.gang in queue.jobs:
        said = f"{by} first moves ranks of {job.id} from {command.host} to {command.to or 'another host'}"
        queue.note(command.gang, "other jobs move for it", said)
    return Applied(job.id)


def replaced(queue: JobTable, job: Job, command: Replaced) -> Result:
    wrong = barred_place(job.spec, command.places.values(), queue.drained)
    wrong = wrong or replacing.wrong_replacement(job, command, queue.jobs, queue.holders)
    if wrong:
        return NotApplied(4, f"{job.id} was not placed again", wrong, "none: its coordinator tries again")
    said = replacing.replace(job, command)
    arranging.owners_move(job, {host: place.host for host, place in command.places.items()})
    for place in command.places.values():
        queue.hold(job, place)
    queue.say(job, "replaced", f"{said}; the other ranks stay where they are")
    return Applied(job.id)


def not_replaced(queue: JobTable, job: Job, command: PlaceFailed) -> Result | None:
    if not job.seeks:
        return None
    if job.healing.missing:
        said = f"no host for its ranks of {', '.join(job.healing.missing)}: {command.reason}"
        return _stop_for_lost_hosts(queue, job, said, command.wall_s)
    if job.healing.moving:
        left = arranging.vacate(queue, job)
        job.healing.moving = {}
        queue.say(job, "not moved", f"{command.reason}; {left}" if left else command.reason)
    else:
        arranging.not_grown(queue, job, command.reason)
    return Applied(job.id)


def _stop_for_lost_hosts(queue: JobTable, job: Job, said: str, wall_s: float, hosts: tuple[HostId, ...] = ()) -> Result:
    """Stop a job that cannot continue without the hosts that it lost."""
    job_endings.lose(queue, job, hosts)
    job.tally.hosts_lost += 1
    job_endings.again(queue, job, "host lost", said)
    job_endings.end_when_all_reported(queue, job, wall_s)
    return Applied(job.id)
