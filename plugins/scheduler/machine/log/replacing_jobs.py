"""Commands of the log about a gang that goes on without some of its hosts (`machine/replacing.py`)."""

from covey.core import HostId
from plugins.scheduler.machine.log import replacing
from plugins.scheduler.machine.log.answers import on_drained
from plugins.scheduler.machine.log.job_endings import JobEndings
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import (
    Applied,
    MoveAsked,
    NotApplied,
    PlaceFailed,
    PlacesLost,
    Replaced,
    Result,
)


class ReplacingJobs(JobEndings):
    """The part of the queue that exchanges places of a running gang."""

    def _places_lost(self, job: Job, command: PlacesLost) -> Result | None:
        """Said again with hosts that are missing already, it names another coordinator."""
        if command.term not in (0, self.leading_term):
            return None
        lost = sorted({host for host in command.hosts if job.awaits(host) and job.left_on(host) is None})
        if lost and not job.heals_without(lost):
            return self._stops(job, f"{command.reason}; {replacing.why_not(job)}", command.wall_s, command.hosts)
        for host in command.hosts:
            self._left(job, host)
        job.coordinator, job.sought = command.coordinator, job.sought + 1
        if not replacing.lose(job, lost):
            said = f"{command.reason}; it lost {job.losses[1]} hosts without a step between them"
            return self._stops(job, said, command.wall_s)
        if lost:
            self._say(job, "hosts lost", f"{command.reason}; {job.coordinator} looks for others, and the rest waits")
        return Applied(job.id)

    def _move_asked(self, job: Job, command: MoveAsked) -> Result:
        refused = replacing.refused_move(job, command, self.drained)
        if refused is not None:
            return refused
        job.moving = {**job.moving, command.host: command.to or HostId("")}
        job.coordinator, job.sought = command.coordinator, job.sought + 1
        by = command.by or "a person"
        self._changed[job.id] = None
        self._note(job.id, "to move", f"{by} wants its ranks on {command.host} on {command.to or 'another host'}")
        if command.gang is not None and command.gang in self.jobs:
            said = f"{by} has ranks of {job.id} go from {command.host} to {command.to or 'another host'} first"
            self._note(command.gang, "others move for it", said)
        return Applied(job.id)

    def _replaced(self, job: Job, command: Replaced) -> Result:
        wrong = on_drained(command.places.values(), self.drained)
        wrong = wrong or replacing.wrong_replacement(job, command, self.jobs, self.holders)
        if wrong:
            return NotApplied(4, f"{job.id} was not placed anew", wrong, "nothing: its coordinator tries again")
        said = replacing.replace(job, command)
        for place in command.places.values():
            self.holders.setdefault(place.host, {}).update(dict.fromkeys(place.gpus, job.id))
        self._say(job, "replaced", f"{said}; the rest of the gang goes on where it is")
        return Applied(job.id)

    def _not_replaced(self, job: Job, command: PlaceFailed) -> Result | None:
        if not job.seeks:
            return None
        if job.missing:
            said = f"no place for its ranks of {', '.join(job.missing)}: {command.reason}"
            return self._stops(job, said, command.wall_s)
        replacing.whole_again(job)
        self._say(job, "not moved", command.reason)
        return Applied(job.id)

    def _stops(self, job: Job, said: str, wall_s: float, hosts: tuple[HostId, ...] = ()) -> Result:
        """It does not go on without the hosts that it lost."""
        self._lose(job, hosts)
        job.hosts_lost += 1
        self._again(job, "host lost", said)
        self._end_when_all_reported(job, wall_s)
        return Applied(job.id)
