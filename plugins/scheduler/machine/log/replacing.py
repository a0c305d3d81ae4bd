"""A gang that continues without some of its hosts, or on fewer: what the log remembers of that.

    running, whole --PlacesLost (a host is lost)--> running, `missing` --Replaced--> running, whole
                   --MoveAsked (it is alive)------> running, `moving`  --Replaced--> running, `leaving` --its report-->

It stays one grant under one epoch: the ranks that are left stay where they are, and wait for those that are to come.
Where no place is found the whole gang stops and is queued again, like a gang that cannot heal; a gang that only was to
move stays where it is.

A place is taken over by a host without ranks of the gang, or by one that has some and whose place grows:

    gpu1 (0 1), gpu2 (2 3)  --Replaced(gpu1 -> gpu2 (2 3 0 1))-->  gpu2 (2 3 0 1), leaving: gpu1 (0 1)

The ranks that were there keep running, and the others join them (`plugins.facts.Place.ranks`).
"""

from collections.abc import Collection, Container, Mapping

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.log.answers import wrong_gpus
from plugins.scheduler.machine.log.jobs import Job, JobHealing, SureStart
from plugins.scheduler.messages.commands import JobHeals, MoveAsked, NotApplied, Replaced, StateStays
from plugins.scheduler.policy import eligible
from plugins.scheduler.policy.eligible import Drain

LOSSES_MAX = 5
"""The number of hosts that one gang may lose without a step between them; beyond it the job itself is taken to bring
its hosts down."""


def heals(job: Job, host: HostId, said: JobHeals) -> None:
    """Note whether a host says that its ranks may be lost."""
    if not job.placed or job.grant.epoch != said.epoch:
        return
    before, place, sure = job.as_sure().place_on(host), job.place_on(host), job.healing.sure
    if sure is not None and before is not None and before.since == said.since:
        may_be_lost, have = _heard(sure, before, said)
        job.healing.sure = msgspec.structs.replace(sure, may_be_lost=may_be_lost, have=have)
    if place is not None and place.since == said.since:
        job.healing.may_be_lost, job.healing.have = _heard(job.healing, place, said)


def _heard(
    known: JobHealing | SureStart, place: Place, said: JobHeals
) -> tuple[tuple[HostId, ...], dict[HostId, tuple[int, ...]]]:
    """The hosts that may be lost, and the processes that have the state, once the host of this place has said so."""
    others = [host for host in known.may_be_lost if host != place.host]
    have = tuple(process for process in said.have if process in place.ranks)
    may_be_lost = (*others, place.host) if said.may_be_lost else tuple(others)
    return may_be_lost, {**known.have, place.host: have}


def not_sure(job: Job) -> None:
    """Let the hosts of an elastic job, some of whose processes are to end, leave it as it is until one of them says
    that a process that stays has the job's state."""
    start, healing = job.start, job.healing
    if healing.sure is None:
        now = healing.healed, start.places, healing.leaving, dict(start.carried), dict(start.came)
        said = start.owners, start.owners_since, healing.may_be_lost, dict(healing.have)
        healing.sure = SureStart(*now, *said)


def state_stays(job: Job, host: HostId, said: StateStays) -> bool:
    """Let processes end that were to, since one that stays on this host has the job's state. False: none waits for
    that, or not in this configuration."""
    is_so = (job.grant.epoch, job.healing.healed) == (said.epoch, said.config) and job.place_on(host) is not None
    if job.healing.sure is None or not is_so:
        return False
    job.healing.sure = None
    return True


def lose(job: Job, hosts: Collection[HostId]) -> bool:
    """Note the hosts that a gang has lost and heals without. False: it has lost too many without making a step."""
    step, count = job.start.step or 0, len(hosts)
    job.healing.losses = (step, count + (job.healing.losses[1] if job.healing.losses[0] >= step else 0))
    if not job.spec.elastic:  # others carry its ranks
        job.healing.missing = (*job.healing.missing, *sorted(hosts))
    job.healing.may_be_lost = tuple(host for host in job.healing.may_be_lost if host not in hosts)
    job.healing.moving = {host: to for host, to in job.healing.moving.items() if host not in hosts}
    job.start.timings = {host: timing for host, timing in job.start.timings.items() if host not in hosts}
    if not _stays(job, job.healing.moving):
        job.healing.moving = {}  # the last ones that have what all others need stay where they are
    return job.healing.losses[1] <= LOSSES_MAX


def _stays(job: Job, hosts: Container[HostId]) -> bool:
    """Whether some place of the gang stays where it is, beside what is lost and what is on these hosts."""
    return any(place.host not in hosts and place.host not in job.healing.missing for place in job.start.places)


def whole_again(job: Job) -> None:
    """Look for no places any more: the gang stopped, or was placed anew."""
    job.healing.missing, job.healing.moving = (), {}
    job.healing.wanted, job.healing.wanted_by = 0, ""
    job.healing.sure = None


def refused_move(job: Job, command: MoveAsked, drained: Mapping[HostId, Drain]) -> NotApplied | None:
    """Why these ranks cannot move; None: they can."""
    what, next = f"{job.id} was not moved", f"see agentctl job {job.id}"
    if job.place_on(command.host) is None:
        where = ", ".join(place.host for place in job.start.places)
        return NotApplied(4, what, f"no rank of it is on {command.host}", f"its hosts are {where}")
    if command.replaces not in (None, job.healing.healed):
        why = f"its ranks moved meanwhile: its configuration is {job.healing.healed} by now, and not {command.replaces}"
        return NotApplied(4, what, why, f"look again: agentctl job {job.id}")
    if command.to is not None and (why := _not_there(job, command.host, command.to)):
        return NotApplied(4, what, why, "name another host, or none")
    if command.to is not None and (why := eligible.bars(job.spec, drained).get(command.to, "")):
        return NotApplied(4, what, why, "name another host, or none")
    if command.host in job.healing.missing:
        return NotApplied(4, what, f"{command.host} is lost, and another host is being searched for already", next)
    if not job.heals_without((command.host,)):
        return NotApplied(4, what, why_not(job), "it can only be cancelled, or run to its end")
    if not job.heals_without((command.host, *job.healing.moving)):
        where = ", ".join(sorted(job.healing.moving))
        why = f"its ranks on {where} are about to move, and no other rank has their state"
        return NotApplied(75, what, why, "try again once they run")
    return None


def _not_there(job: Job, host: HostId, to: HostId) -> str:
    """Why ranks of this host cannot continue on that one; empty when they can, for all that the log knows."""
    if to == host:
        return "its ranks are there already"
    if job.left_on(to) is not None:
        return f"ranks of it on {to} are about to end"
    if job.place_on(to) is None or to in (place.host for place in joinable(job)):
        return ""
    if job.spec.pack == "apart":
        return f"a rank of it is on {to}, and each of its ranks needs a host of its own"
    return f"its ranks on {to} are about to move to another host, or are lost"


def joinable(job: Job) -> list[Place]:
    """Places that other ranks of the job may join."""
    if job.spec.pack == "apart":
        return []
    healing = job.healing
    gone = {*healing.missing, *healing.moving, *job.ending.codes, *(place.host for place in healing.leaving)}
    return [place for place in job.start.places if place.host not in gone]


def taken_over(place: Place, joined: Place | None) -> Place:
    """The place in the log once these ranks are in `place`, beside those that were there. Each of them keeps its GPUs
    and its number on the host."""
    if joined is None:
        return place
    return Place(place.host, (*joined.ranks, *place.ranks), (*joined.gpus, *place.gpus), place.since)


def why_not(job: Job) -> str:
    """Why the job cannot continue when one of its hosts is lost."""
    if job.spec.on_lost != "heal":
        return f"it was submitted with --on-lost {job.spec.on_lost}"
    if len(job.start.places) - len(job.healing.missing) < 2:
        return "all its ranks are on one host, so no other rank has their state"
    if job.ending.codes:
        return f"{', '.join(sorted(job.ending.codes))} reported the end of ranks already"
    if job.spec.elastic and job.healing.gone:
        return "some of its processes have ended already"
    lacking = [
        place.host
        for place in job.start.places
        if place.host not in (*job.healing.may_be_lost, *job.healing.missing) and not place.since
    ]
    if not lacking:
        return "ranks that took over from others have not received their state yet"
    return f"its ranks on {', '.join(lacking)} have not registered their state (job.state)"


def leaves_to(job: Job, host: HostId, alive: Container[HostId]) -> HostId | None:
    """The host that looks for another place for the job's ranks on `host`; None: the job cannot continue without
    them."""
    if not job.heals_without((host,)):
        return None
    rest = [place.host for place in job.start.places if place.host != host and place.host not in job.healing.missing]
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
    """The command that moves the job's ranks on this host elsewhere; `gang`: the one that waits for that."""
    return MoveAsked(
        wall_s=wall_s,
        job=job.id,
        epoch=job.grant.epoch,
        host=host,
        to=to,
        coordinator=coordinator,
        by=by,
        gang=gang,
        replaces=job.healing.healed,
    )


def wrong_replacement(
    job: Job, command: Replaced, jobs: Mapping[JobId, Job], holders: Mapping[HostId, Mapping[str, JobId]]
) -> str:
    """Why these places are not those that are looked for; empty when they are. `holders`: as in `wrong_places`."""
    if job.spec.elastic and (job.ending.codes or job.healing.gone):
        return "some of its processes have ended already"  # whoever takes over would find nobody with the state
    taken = {place.host for place in (*job.start.places, *job.healing.leaving)}
    stays = {place.host: place for place in joinable(job)}
    hosts = [place.host for place in command.places.values()]
    for host, place in command.places.items():
        before = job.place_on(host)
        if before is None or host not in (*job.healing.missing, *job.healing.moving):
            return f"no rank of it is to leave {host}"
        joined = stays.get(place.host)
        if hosts.count(place.host) > 1 or (place.host in taken and joined is None):
            return f"{place.host} has ranks of it"
        if not _stays(job, command.places):
            return "no rank with their state would be left"
        new = _beside(place, joined)
        if new is None or new.ranks != before.ranks or new.since != job.healing.healed + 1:
            return f"the placement on {place.host} does not match the one on {host}"
        if wrong := wrong_gpus(job, new, jobs, holders):
            return wrong
    return ""


def _beside(place: Place, joined: Place | None) -> Place | None:
    """The part of this place that is not there yet; None: the place lacks something of what is. It is the inverse of
    `taken_over`."""
    if joined is None:
        return place
    ranks, gpus = len(joined.ranks), len(joined.gpus)
    new = Place(place.host, place.ranks[ranks:], place.gpus[gpus:], place.since)
    return new if taken_over(new, joined) == place else None


def was_replaced(job: Job, command: Replaced) -> bool:
    """Whether the command was applied before."""
    return (
        job.placed
        and job.grant.epoch == command.epoch
        and all(place in job.start.places for place in command.places.values())
    )


def replace(job: Job, command: Replaced) -> str:
    """Exchange the places, and say in words what continues where."""
    said, moved = [], list[int]()
    if job.spec.elastic:
        not_sure(job)
    for host, place in sorted(command.places.items()):
        before = job.place_on(host)
        assert before is not None
        moved += before.ranks
        beside = ", beside the ranks that it has" if job.place_on(place.host) is not None else ""
        lost = ", which is lost" if host in job.healing.missing else ""
        said.append(f"{place.host} takes over {_ranks(before)} from {host}{lost}{beside}")
        if host not in job.healing.missing:
            job.healing.leaving = (*job.healing.leaving, before)
        if command.master_addr and 0 in before.ranks:
            job.start.master_addr, job.start.master_port = command.master_addr, command.master_port
    grown = {place.host for place in command.places.values()}
    job.start.places = tuple(
        command.places.get(place.host, place)
        for place in job.start.places
        if place.host in command.places or place.host not in grown
    )
    job.healing.missing = tuple(host for host in job.healing.missing if host not in command.places)
    job.healing.moving = {host: to for host, to in job.healing.moving.items() if host not in command.places}
    job.healing.may_be_lost = tuple(host for host in job.healing.may_be_lost if host not in (*command.places, *grown))
    job.healing.have = {host: have for host, have in job.healing.have.items() if host not in command.places}
    job.start.timings = {
        host: timing for host, timing in job.start.timings.items() if host not in (*command.places, *grown)
    }
    job.healing.healed += 1
    job.start.came = job.start.came | dict.fromkeys(job.carried_by(moved), job.healing.healed)
    return "; ".join(said)


def ended(job: Job, host: HostId) -> None:
    """Move ranks from this host no more: they have ended."""
    job.healing.moving = {leaves: to for leaves, to in job.healing.moving.items() if leaves != host}


def left(job: Job, host: HostId) -> None:
    """Forget the place that the job had on this host: it is over."""
    if job.healing.sure is not None and any(place.host == host for place in job.healing.sure.places):
        job.healing.sure = None
    job.healing.leaving = tuple(place for place in job.healing.leaving if place.host != host)


def began_anew(job: Job) -> None:
    """Forget all healing: there is another grant, or none."""
    job.healing = JobHealing(tuned=job.healing.tuned)


def waits_for(job: Job, place: Place) -> HostId | None:
    """The host where these ranks have to end before they start in `place`."""
    return next((before.host for before in job.healing.leaving if set(before.ranks) <= set(place.ranks)), None)


def _ranks(place: Place) -> str:
    numbers = ", ".join(map(str, sorted(place.ranks)))
    return f"ranks {numbers}" if len(place.ranks) > 1 else f"rank {numbers}"


def sought_places(job: Job) -> tuple[tuple[Place, HostId | None], ...]:
    """Places that the job's coordinator is to find anew, each with the host that somebody wants for it; None: any
    host."""
    lost = [(place, None) for place in job.start.places if place.host in job.healing.missing]
    return (
        *lost,
        *(
            (place, job.healing.moving[place.host] or None)
            for place in job.start.places
            if place.host in job.healing.moving
        ),
    )
