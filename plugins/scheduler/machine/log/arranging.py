"""Elastic jobs: how the number of their processes changes while they run.

    running, 4 processes --ScaleAsked(7)--> `wanted` 7 --Arranged--> 7 processes, or fewer where there is no room
                         --ScaleAsked(2), a host is lost, a drained host-----------> others carry the ranks at once

A change ends processes, begins processes, or both, in one entry of the log: which process carries which rank follows
from that (`policy/carrying.py`). Each change is a new configuration, `JobHealing.healed`, and a command that proposes
places, a move or a number of processes names the one on which it was decided: of two at once one is refused, and looks
again.

An arrangement may also say which *share* of the ranks the processes of each host carry, and which host is to own each
table; then processes may stay as they are. Shares hold for one configuration: after the next change that says none all
processes carry equally many ranks again. Owners hold until somebody says others, also where the job has no process
(a host that only sums); nobody is said any more for the tables of a host that is drained, that is lost with processes
of the job, or whose last process of it was given back, and those of processes that move go along. A host that only sums
keeps them when it is away: they go elsewhere meanwhile, and return with it. Another start begins without both.

A host that has no process of the job any more is in `JobHealing.leaving` until it has reported that; a host where some
are left ends the others by itself, and gives nobody their GPUs before it has.

No process ends, and none begins or carries other ranks, before a host has said that a process that stays has the job's
state now (`JobHealing.sure`): all of those may have died since the log last heard of them. Meanwhile the job goes on as
it was, and one that was started again takes the state from those that are to end. When a host is lost meanwhile, or
processes end by themselves, the change is undone (`job_endings.stay_as_was`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.log.answers import barred_place, wrong_gpus
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.replacing import not_sure
from plugins.scheduler.messages.commands import (
    Applied,
    Arranged,
    Arrangement,
    NotApplied,
    Result,
    ScaleAsked,
    TuneAsked,
)
from plugins.scheduler.policy import eligible, explain
from plugins.scheduler.policy.carrying import (
    Carried,
    carried_by_shares,
    carriers_of,
    ending,
    is_equal,
    shares_of,
    without,
)

LEADER = "the leader"
"""Who asked, where it is not a person (`ScaleAsked.by`)."""
NOBODY = "none: whoever proposed it looks again"
NOBODY_SAID = HostId("")
"""The owner of a table for which nobody said one (`JobStart.owners`)."""
EQUAL: Mapping[HostId, int] = {}
"""Shares where all processes carry equally many ranks."""


class ProcessPlace(NamedTuple):
    """Where one process of a job is."""

    host: HostId
    gpus: tuple[str, ...]


# ---- what people, the leader and coordinators ask ----


def scale_asked(queue: JobTable, job: Job, command: ScaleAsked) -> Result:
    if stale := _stale_scale(job, command):
        if (job.healing.wanted or job.processes) == command.workers:  # as was heard before, or another one asked
            if command.by != LEADER:
                job.healing.at_most = command.workers
            return Applied(job.id)
        return NotApplied(4, f"{job.id} was not scaled", stale, f"look again: agentctl job {job.id}")
    refused = refused_scale(job, command.workers)
    if refused is not None:
        return refused
    now, by = job.processes, _said_by(command.by, command.why)
    job.healing.wanted, job.healing.wanted_by = 0, ""
    if command.by != LEADER:
        job.healing.at_most = command.workers
    queue.touch(job)
    if command.workers > now:
        job.healing.wanted, job.healing.wanted_by = command.workers, by
        job.grant.coordinator, job.healing.sought = command.coordinator, job.healing.sought + 1
        queue.note(job.id, "to grow", f"{by}: from {now} to {explain.processes(command.workers)}")
    elif command.workers < now:
        ends = _ending(job, now - command.workers)
        forget_owners(job, _vacated(job, ends))
        queue.say(job, "shrank", f"{by}: {_changed(queue, job, without(job.start.places, ends, _each(job)))}")
    return Applied(job.id)


def _stale_scale(job: Job, command: ScaleAsked) -> str:
    """What became of the job since this was decided, in words; empty: nothing that matters."""
    now, healing = job.processes, job.healing
    if command.replaces not in (None, healing.healed):
        return f"it has {explain.processes(now)} by now: its configuration is {healing.healed}, not {command.replaces}"
    if command.sought not in (None, healing.sought):
        wanted = f"it is to grow to {healing.wanted} ({healing.wanted_by})" if healing.wanted else "its places changed"
        return f"somebody else was faster: {wanted}"
    most = max(healing.at_most, job.spec.workers)
    if command.by == LEADER and healing.at_most and command.workers > max(now, most):
        return f"no more than {explain.processes(most)} were asked for since"
    return ""


def tune_asked(queue: JobTable, job: Job, command: TuneAsked) -> Result:
    if not job.spec.elastic:
        what = f"{job.id} is not tuned"
        return NotApplied(4, what, explain.not_elastic(job.spec), "agentctl submit --workers 4..16 -- COMMAND")
    if command.on and job.spec.share_host:
        what, why = f"{job.id} is not tuned", "it shares hosts in turns, and the hosts of its group arrange it"
        return NotApplied(4, what, why, "see agentctl groups; or submit it without --share-host")
    by = command.by or "somebody"
    if not command.on and not job.healing.tuned[1]:
        return Applied(job.id)
    job.healing.tuned = (by, queue.index) if command.on else ("", 0)
    queue.touch(job)
    queue.note(job.id, "tuner on" if command.on else "tuner off", f"asked by {by}")
    return Applied(job.id)


def refused_scale(job: Job, workers: int) -> NotApplied | None:
    """Why the job cannot have so many processes; None: it can, or its coordinator is to look for room."""
    spec, what, next = job.spec, f"{job.id} was not scaled", f"see agentctl job {job.id}"
    if not spec.elastic:
        return NotApplied(4, what, explain.not_elastic(spec), "agentctl submit --workers 4..16 -- COMMAND")
    if not spec.workers <= workers <= spec.workers_max:
        why = f"it was submitted with --workers {explain.workers(spec)}, and {workers} is out of that range"
        return NotApplied(4, what, why, f"agentctl scale {job.id} {min(max(workers, spec.workers), spec.workers_max)}")
    if why := ended_in_part(job):
        return NotApplied(4, what, why, next)
    ends = _ending(job, job.processes - workers)
    if why := lacks_state(job, _vacated(job, ends), ends):
        return NotApplied(75, what, why, "try again once they have")
    return None


def ended_in_part(job: Job) -> str:
    """Why nobody can carry the ranks of other processes any more, in words; empty: somebody can."""
    if job.ending.codes or job.healing.gone:
        hosts = sorted({*job.ending.codes, *(gone.host for gone in job.healing.gone.values())})
        return f"its processes on {', '.join(hosts)} have ended already"
    return ""


def lacks_state(job: Job, hosts: Collection[HostId] = (), ends: Collection[int] = ()) -> str:
    """Which of its processes cannot take ranks over yet, or give them to others, when there is none on `hosts` any
    more and those in `ends` have ended, in words; empty: all can."""
    if job.heals_without(hosts, ends):
        return ""
    lacking = [
        place.host for place in job.start.places if not place.since and place.host not in job.healing.may_be_lost
    ]
    if lacking:
        return f"its processes on {', '.join(lacking)} have not registered their state (job.state)"
    return "the processes that would be left have not received the state of the others"


def arranged(queue: JobTable, command: Arranged) -> Result:
    """Arrange all these jobs anew, or none of them."""
    if all(_was_arranged(queue.jobs.get(id), new) for id, new in command.jobs.items()):
        return Applied()
    given: dict[HostId, dict[str, JobId]] = {}
    for id, new in sorted(command.jobs.items()):
        job = queue.jobs.get(id)
        wrong = wrong_arrangement(queue, job, new, given) if job is not None else "there is no such job"
        if wrong:
            return NotApplied(4, "no job was arranged anew", f"{id}: {wrong}", NOBODY)
    for id, new in sorted(command.jobs.items()):
        job = queue.jobs[id]
        by = _said_by(command.by, command.why) if command.by else job.healing.wanted_by or _said_by("", command.why)
        before = job.processes
        said = _changed(queue, job, new.places, shares=new.shares)
        if command.by and job.processes != before:
            job.healing.at_most = job.processes
        if new.owners is not None:
            owners = _owners_said(job, new.owners)
            said = f"{said}; {owners}" if owners else said
        event = "grew" if job.processes > before else "shrank" if job.processes < before else "arranged anew"
        queue.say(job, event, f"{by}: {said}")
    return Applied()


def not_grown(queue: JobTable, job: Job, why: str) -> None:
    """Leave the job as it is: no room was found for more processes."""
    wanted, by = job.healing.wanted, job.healing.wanted_by
    job.healing.wanted, job.healing.wanted_by = 0, ""
    queue.say(job, "not grown", f"{by}: it keeps {job.processes} of {explain.processes(wanted)}: {why}")


# ---- hosts that are lost, or drained ----


def lost(queue: JobTable, job: Job, hosts: Collection[HostId]) -> str:
    """Let others carry the ranks of lost hosts, whose GPUs are free already; a job that has fewer processes than its
    gang then wants to grow again. Returns what became of it, in words."""
    if not hosts:
        return ""
    said = _changed(queue, job, [place for place in job.start.places if place.host not in hosts], hosts)
    forget_owners(job, hosts)
    if job.processes < job.spec.workers and not job.healing.wanted:
        job.healing.wanted, job.healing.wanted_by = job.spec.workers, f"{', '.join(sorted(hosts))} was lost"
        said = f"{said}; {job.grant.coordinator} looks for {job.spec.workers - job.processes} more"
    return said


def vacate(queue: JobTable, job: Job) -> str:
    """End the processes on drained hosts that no other host had room for, as far as enough others are left to carry
    their ranks. Returns what became of it, in words; empty: nothing did."""
    if not job.spec.elastic:
        return ""
    first = job.carriers([0])
    hosts = [
        place.host
        for place in job.start.places
        if place.host in job.healing.moving
        and eligible.leaves(place.host, queue.drained)
        and not set(first) & set(place.ranks)
    ]
    left = [place for place in job.start.places if place.host not in hosts]
    if not hosts or sum(len(place.ranks) for place in left) < job.spec.workers:
        return ""
    if ended_in_part(job) or lacks_state(job, hosts):
        return ""
    forget_owners(job, hosts)
    return _changed(queue, job, left)


# ---- the owners of tables ----


def _said(owners: tuple[HostId, ...]) -> tuple[HostId, ...]:
    """The owners of all tables as the log has them: none, where nobody is said for any table."""
    return owners if any(owners) else ()


def forget_owners(job: Job, hosts: Collection[HostId]) -> None:
    """Let nobody be said for the tables that are to be on these hosts."""
    owners = tuple(NOBODY_SAID if host in hosts else host for host in job.start.owners)
    job.start.owners = _said(owners)


def owners_move(job: Job, hosts: Mapping[HostId, HostId]) -> None:
    """Let the tables that are to be on a host, which the job's processes leave, be where these go. `hosts`: from where
    to where."""
    job.start.owners = tuple(hosts.get(host, host) for host in job.start.owners)


def owners_lost(queue: JobTable, host: HostId) -> None:
    """Let nobody be said for tables that are to be on this host, which is drained."""
    for job in queue.live():
        if host in job.start.owners:
            forget_owners(job, [host])
            job.healing.healed += 1
            job.healing.sought += job.seeks  # what was looked for before belongs to the earlier configuration
            queue.touch(job)
            queue.note(job.id, "owners forgotten", f"{host} is drained: its tables there are where each is by itself")


def _owners_said(job: Job, owners: tuple[HostId, ...]) -> str:
    """Note the owners that somebody said, and return what changed, in words."""
    before, job.start.owners = job.start.owners, _said(owners)
    job.start.owners_since = job.healing.healed
    if before == job.start.owners:
        return ""
    return explain.owners(job.start.owners) if job.start.owners else "each table is where it is by itself"


def _wrong_owners(queue: JobTable, job: Job, owners: Sequence[HostId]) -> str:
    """Why these hosts cannot own the job's tables, for all that the log knows, in words; empty: they can."""
    if owners and len(owners) != job.start.tables:
        return f"the owners of {len(owners)} tables are said, and it has {job.start.tables}"
    bars = eligible.bars(job.spec, queue.drained)
    new = {host for host in owners if host not in job.start.owners or eligible.leaves(host, queue.drained)}
    return next((f"a table is to be on {host}: {bars[host]}" for host in owners if host in bars and host in new), "")


# ---- what may be ----


def wrong_arrangement(queue: JobTable, job: Job, new: Arrangement, given: dict[HostId, dict[str, JobId]]) -> str:
    """Why this arrangement cannot be, in words; empty: it can. `given`: GPUs of jobs that come before it in the
    command; those of this one are added."""
    if not job.spec.elastic or job.state != "running" or new.epoch != job.grant.epoch:
        return f"it is {job.state} under epoch {job.grant.epoch}, and not an elastic job that runs under {new.epoch}"
    if new.replaces != job.healing.healed:
        return f"its configuration is {job.healing.healed} by now, and not {new.replaces}"
    if wrong := ended_in_part(job) or _wrong_places(job, new.places):
        return wrong
    before, after = _where(job, job.start.places), _where(job, new.places)
    ends = before.keys() - after.keys()
    if ends & set(job.carriers([0])):
        return "the process that carries rank 0 ends only with its host"
    if len(after) > job.spec.workers_max or (len(after) < job.spec.workers and len(after) < len(before)):
        return f"it has {explain.workers(job.spec)} processes, and would have {len(after)}"
    if wrong := _wrong_owners(queue, job, new.owners or ()):
        return wrong
    try:
        carried = _carried(job, new.places, new.shares)
    except ValueError as error:
        return str(error)
    if wrong := _wrong_names(job, new, carried):
        return wrong
    if carried == job.start.carried:
        stay = new.owners is None or _said(new.owners) == job.start.owners
        return "its processes stay as they are, what they carry, and who owns its tables" if stay else ""
    if wrong := lacks_state(job, _vacated(job, ends), ends):
        return wrong
    return _wrong_gpus(queue, job, _new_parts(job, new.places), given)


def _wrong_places(job: Job, places: Sequence[Place]) -> str:
    """Why these are not places of the job whose processes that stay are where they were; empty when they are."""
    hosts = [place.host for place in places]
    names = [process for place in places for process in place.ranks]
    if len(set(hosts)) < len(hosts) or len(set(names)) < len(names) or not all(place.ranks for place in places):
        return "a host has two places, or none, or a process is in two"
    stays, config = {process: place.host for place in job.start.places for process in place.ranks}, job.healing.healed
    for place in places:
        kept = [process for process in place.ranks if process in stays]
        new = place.ranks[len(kept) :]
        old = job.place_on(place.host) or Place(place.host, (), ())
        if job.left_on(place.host) is not None:
            return f"its processes on {place.host} are about to end"
        if place.host in job.healing.moving and new:
            return f"its processes are to leave {place.host}"
        if kept != [process for process in old.ranks if process in kept] or place.ranks[: len(kept)] != tuple(kept):
            return f"processes {kept} do not stay on {place.host}"
        if len(place.gpus) != len(place.ranks) * _each(job):
            return f"{place.host} gives {explain.gpus(len(place.gpus))} to {explain.processes(len(place.ranks))}"
        if place.since != (config + 1 if new else old.since):
            return f"the place on {place.host} is of configuration {place.since}"
        if any(_where(job, [place])[process] != _where(job, [old])[process] for process in kept):
            return f"processes {kept} on {place.host} do not keep their GPUs"
    return ""


def _wrong_names(job: Job, new: Arrangement, carried: Carried) -> str:
    """Why these are not the names of the job's processes, in words; empty when they are."""
    names = {process for place in new.places for process in place.ranks}
    if carried.keys() != names:
        return f"its processes would be {sorted(carried)}, and not {sorted(names)}"
    if new.shares and (found := shares_of(carried, new.places)) != new.shares:
        return f"its processes would carry {found} ranks by host, and not {new.shares}: they are in other places"
    return ""


def _wrong_gpus(queue: JobTable, job: Job, parts: Sequence[Place], given: dict[HostId, dict[str, JobId]]) -> str:
    holders = {place.host: queue.holders.get(place.host, {}) | given.get(place.host, {}) for place in parts}
    wrong = barred_place(job.spec, parts, queue.drained)
    wrong = wrong or next(filter(None, (wrong_gpus(job, place, queue.jobs, holders) for place in parts)), "")
    for place in parts:
        given.setdefault(place.host, {}).update(dict.fromkeys(place.gpus, job.id))
    return wrong


def _was_arranged(job: Job | None, new: Arrangement) -> bool:
    """Whether the arrangement was applied before."""
    if job is None or not job.placed or job.grant.epoch != new.epoch:
        return False
    if job.healing.healed != new.replaces + 1 or job.start.places != new.places:
        return False
    found = shares_of(job.start.carried, job.start.places)
    as_said = found == new.shares if new.shares else is_equal(job.start.carried)
    return as_said and (new.owners is None or _said(new.owners) == job.start.owners)


# ---- the change ----


def _changed(
    queue: JobTable,
    job: Job,
    places: Iterable[Place],
    lost: Collection[HostId] = (),
    shares: Mapping[HostId, int] = EQUAL,
) -> str:
    """Give the job these places, and say in words what that changes. On `lost` hosts nothing of it runs any more.
    `shares`: how many ranks the processes of each host carry."""
    before, places = job.start.places, tuple(places)
    carried, shared = job.start.carried, shares_of(job.start.carried, job.start.places)
    new = {part.host: len(part.ranks) for part in _new_parts(job, places)}
    was, is_now = _where(job, before), _where(job, places)
    ends = was.keys() - is_now.keys()
    if any(was[process].host not in lost for process in ends):
        not_sure(job)
    job.start.carried = _carried(job, places, shares)
    moved = carriers_of(job.start.carried).items() - carriers_of(carried).items()
    job.start.came = job.start.came | {rank: job.healing.healed + 1 for rank, _ in moved}
    have = {process for processes in job.healing.have.values() for process in processes}
    awaited = (is_now.keys() - have if ends else set()) | set(job.healing.awaited)
    job.healing.awaited = tuple(sorted(awaited & is_now.keys()))
    job.start.places = places
    job.healing.healed += 1
    hosts = {place.host for place in places}
    job.healing.leaving = (
        *job.healing.leaving,
        *(place for place in before if place.host not in hosts and place.host not in lost),
    )
    for process in sorted(ends):
        if was[process].host in hosts:
            queue.release(job, was[process].host, was[process].gpus)
    for place in places:
        queue.hold(job, place)
    told = hosts - new.keys()
    job.healing.may_be_lost = tuple(host for host in job.healing.may_be_lost if host in told)
    job.healing.have = {
        host: tuple(process for process in have if process in is_now and is_now[process].host == host)
        for host, have in job.healing.have.items()
        if host in hosts
    }
    job.start.timings = {host: timing for host, timing in job.start.timings.items() if host in told}
    job.healing.moving = {host: to for host, to in job.healing.moving.items() if host in hosts}
    if job.processes >= job.healing.wanted:
        job.healing.wanted, job.healing.wanted_by = 0, ""
    if job.seeks:
        job.healing.sought += 1  # what was looked for before belongs to the earlier configuration
    queue.touch(job)
    gone: dict[HostId, int] = {}
    for process in sorted(ends):
        gone[was[process].host] = gone.get(was[process].host, 0) + 1
    said = [f"{count} more on {host}" for host, count in sorted(new.items())]
    said += [f"{count} less on {host}" for host, count in sorted(gone.items())]
    now = shares_of(job.start.carried, places)
    if shares or not is_equal(carried):
        by_host = ", ".join(f"{host} {share}" for host, share in now.items())
        ranks = f"ranks by host are {by_host}" if now != shared else ""
    else:
        ranks = ""
    if not said:
        return ranks or f"{explain.processes(len(is_now))} as before"
    changed = f"from {len(was)} to {explain.processes(len(is_now))}: {', '.join(said)}"
    return f"{changed}; {ranks}" if ranks else changed


def _carried(job: Job, places: Sequence[Place], shares: Mapping[HostId, int]) -> dict[int, tuple[int, ...]]:
    """What each process carries in these places. ValueError when these shares cannot be."""
    where = {process: place.host for place in job.start.places for process in place.ranks}
    now = {process for place in places for process in place.ranks}
    begins = sorted(place.host for place in places for process in place.ranks if process not in where)
    return carried_by_shares(job.start.carried, where.keys() - now, begins, where, shares)[0]


def _each(job: Job) -> int:
    return job.spec.gpus_per_worker


def _where(job: Job, places: Iterable[Place]) -> dict[int, ProcessPlace]:
    """The host and the GPUs of each process in these places."""
    each = _each(job)
    return {
        process: ProcessPlace(place.host, place.gpus[at * each : (at + 1) * each])
        for place in places
        for at, process in enumerate(place.ranks)
    }


def _new_parts(job: Job, places: Iterable[Place]) -> list[Place]:
    """The parts of these places that the job does not have yet."""
    known, found = {process for place in job.start.places for process in place.ranks}, []
    for place in places:
        kept = sum(process in known for process in place.ranks)
        if kept < len(place.ranks):
            found.append(Place(place.host, place.ranks[kept:], place.gpus[kept * _each(job) :], place.since))
    return found


def _ending(job: Job, count: int) -> list[int]:
    """The processes that end when the job gives `count` of them back."""
    return ending(job.start.places, job.carriers([0]), count)


def _vacated(job: Job, ends: Collection[int]) -> list[HostId]:
    """Hosts of the job on which no process of it is left when these have ended."""
    return [place.host for place in job.start.places if set(place.ranks) <= set(ends)]


def _said_by(by: str, why: str) -> str:
    return f"{by or 'a person'}, {why}" if why else by or "a person"
