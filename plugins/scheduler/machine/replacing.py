"""A gang that goes on without some of its hosts: what the log remembers of that.

    running, whole --PlacesLost (a host is lost)--> running, `missing` --Replaced--> running, whole
                   --MoveAsked (it is alive)------> running, `moving`  --Replaced--> running, `leaving` --its report-->

It stays one grant under one epoch: the ranks that are left go on where they are, and wait for those that are to come.
Where no place is found the whole gang stops and is queued again, as one does that cannot heal; one that only was to
move stays where it is.
"""

from collections.abc import Collection, Container, Mapping

from covey.core import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.answers import wrong_gpus
from plugins.scheduler.machine.job_table import Drain
from plugins.scheduler.machine.jobs import Job
from plugins.scheduler.messages.commands import JobHeals, MoveAsked, NotApplied, Replaced

LOSSES_MAX = 5
"""Hosts that one gang may lose without a step between them: then it is the job that takes its hosts along."""


def heals(job: Job, host: HostId, said: JobHeals) -> None:
    """A host says whether its ranks may be lost."""
    place = job.place_on(host)
    if place is None or not job.placed or (job.epoch, place.since) != (said.epoch, said.since):
        return
    known = [other for other in job.healing if other != host]
    job.healing = (*known, host) if said.may_be_lost else tuple(known)


def lose(job: Job, hosts: Collection[HostId]) -> bool:
    """Of a gang that heals without them. False: it has lost too many without getting on."""
    step, count = job.step or 0, len(hosts)
    job.losses = (step, count + (job.losses[1] if job.losses[0] >= step else 0))
    job.missing = (*job.missing, *sorted(hosts))
    job.healing = tuple(host for host in job.healing if host not in hosts)
    job.moving = {host: to for host, to in job.moving.items() if host not in hosts}
    job.timings = {host: timing for host, timing in job.timings.items() if host not in hosts}
    if not _stays(job, job.moving):
        job.moving = {}  # the last ones that have what all others need stay where they are
    return job.losses[1] <= LOSSES_MAX


def _stays(job: Job, hosts: Container[HostId]) -> bool:
    """Whether something of the gang is left where it is, beside what is lost and what is on these hosts."""
    return any(place.host not in hosts and place.host not in job.missing for place in job.places)


def whole_again(job: Job) -> None:
    """Nothing is looked for any more: it stopped, or was placed anew."""
    job.missing, job.moving = (), {}


def refused_move(job: Job, command: MoveAsked, drained: Mapping[HostId, Drain]) -> NotApplied | None:
    """Why these ranks cannot move; None: they can."""
    what, next = f"{job.id} was not moved", f"see agentctl job {job.id}"
    if job.place_on(command.host) is None:
        where = ", ".join(place.host for place in job.places)
        return NotApplied(4, what, f"no rank of it is on {command.host}", f"its hosts are {where}")
    if any(command.to == place.host for place in (*job.places, *job.leaving)):
        why = f"ranks of it are on {command.to} already, and a host has one place of a job"
        return NotApplied(4, what, why, "name another host, or none")
    if command.to is not None and command.to in drained:
        return NotApplied(
            4, what, f"{command.to} is drained, by {drained[command.to].by}", "name another host, or none"
        )
    if command.host in job.missing:
        return NotApplied(4, what, f"{command.host} is lost, and another host is looked for already", next)
    if not job.heals_without((command.host,)):
        return NotApplied(4, what, why_not(job), "it can only be cancelled, or run to its end")
    if not _stays(job, (command.host, *job.moving)):
        why = f"its ranks on {', '.join(sorted(job.moving))} are about to move, and nobody else has what they need"
        return NotApplied(75, what, why, "try again once they run")
    return None


def why_not(job: Job) -> str:
    """Why it cannot go on when a host of it is lost."""
    if job.spec.on_lost != "stop":
        return f"it was submitted with --on-lost {job.spec.on_lost}"
    if len(job.places) - len(job.missing) < 2:
        return "all its ranks are on one host: nobody would have what they need"
    if job.codes:
        return f"{', '.join(sorted(job.codes))} reported the end of ranks already"
    lacking = [place.host for place in job.places if place.host not in (*job.healing, *job.missing)]
    return f"its ranks on {', '.join(lacking)} have not said that they may be lost (job.state)"


def leaves_to(job: Job, host: HostId, alive: Container[HostId]) -> HostId | None:
    """Who looks for another place for its ranks on this host; None: it cannot go on without them."""
    if not job.heals_without((host,)):
        return None
    rest = [place.host for place in job.places if place.host != host and place.host not in job.missing]
    return next((other for other in rest if other in alive), None)


def move_asked(
    job: Job,
    host: HostId,
    to: HostId | None,
    coordinator: HostId,
    by: str,
    wall_s: float = 0.0,
    gang: JobId | None = None,
) -> MoveAsked:
    """The command that has its ranks on this host go on elsewhere; `gang`: one that waits for it."""
    return MoveAsked(
        wall_s=wall_s, job=job.id, epoch=job.epoch, host=host, to=to, coordinator=coordinator, by=by, gang=gang
    )


def wrong_replacement(
    job: Job, command: Replaced, jobs: Mapping[JobId, Job], holders: Mapping[HostId, Mapping[str, JobId]]
) -> str:
    """Why these places are not those that are looked for; empty when they are. `holders`: as of `wrong_places`."""
    taken = {place.host for place in (*job.places, *job.leaving)}
    hosts = [place.host for place in command.places.values()]
    for host, place in command.places.items():
        before = job.place_on(host)
        if before is None or host not in (*job.missing, *job.moving):
            return f"nothing of it is to leave {host}"
        if place.host in taken or hosts.count(place.host) > 1:
            return f"{place.host} has ranks of it"
        if not _stays(job, command.places):
            return "nothing of it would be left that has what they need"
        if place.ranks != before.ranks or place.since != job.healed + 1:
            return f"the place on {place.host} is not the one that {host} had"
        if wrong := wrong_gpus(job, place, jobs, holders):
            return wrong
    return ""


def was_replaced(job: Job, command: Replaced) -> bool:
    """It was heard before."""
    return job.placed and job.epoch == command.epoch and all(place in job.places for place in command.places.values())


def replace(job: Job, command: Replaced) -> str:
    """In words, what goes on where."""
    said = []
    for host, place in sorted(command.places.items()):
        before = job.place_on(host)
        assert before is not None
        if host in job.missing:
            said.append(f"{place.host} takes {_ranks(place)} over from {host}, which is lost")
        else:
            said.append(f"{place.host} takes {_ranks(place)} over from {host}")
            job.leaving = (*job.leaving, before)
    places = {place.host: place for place in job.places}
    job.places = tuple(command.places.get(host, place) for host, place in places.items())
    if command.master_addr and any(0 in place.ranks for place in command.places.values()):
        job.master_addr, job.master_port = command.master_addr, command.master_port
    job.missing = tuple(host for host in job.missing if host not in command.places)
    job.moving = {host: to for host, to in job.moving.items() if host not in command.places}
    job.healing = tuple(host for host in job.healing if host not in command.places)
    job.timings = {host: timing for host, timing in job.timings.items() if host not in command.places}
    job.healed += 1
    return "; ".join(said)


def left(job: Job, host: HostId) -> None:
    """What it had there is over."""
    job.leaving = tuple(place for place in job.leaving if place.host != host)


def began_anew(job: Job) -> None:
    """Another grant, or none."""
    whole_again(job)
    job.healing, job.leaving, job.healed, job.sought, job.losses = (), (), 0, 0, (0, 0)


def waits_for(job: Job, place: Place) -> HostId | None:
    """The host where these ranks have to end before they start in `place`."""
    return next((before.host for before in job.leaving if before.ranks == place.ranks), None)


def _ranks(place: Place) -> str:
    numbers = ", ".join(map(str, place.ranks))
    return f"ranks {numbers}" if len(place.ranks) > 1 else f"rank {numbers}"


def sought_places(job: Job) -> tuple[tuple[Place, HostId | None], ...]:
    """Places that its coordinator is to find anew, and where somebody wants them; None: anywhere."""
    lost = [(place, None) for place in job.places if place.host in job.missing]
    return (*lost, *((place, job.moving[place.host] or None) for place in job.places if place.host in job.moving))
