"""What one host wants of the groups of a pool, from what it knows (Harmony §4.3.2, without a master).

Nobody knows everything, and nobody has to. Which host proposes follows from the log, so normally it is one:

    a small change     a job came and is profiled, one ended, or a host was lost: the coordinator of the lowest job of
                       that group proposes the smallest change that is worth 5 %
    all anew           from time to time, and when no small change helped: the lowest live host of the pool proposes
                       the best grouping if it is worth 2 % (5 % when a job came or ended)

A wish is a proposal: the log takes it whole or not at all, and only from the configurations that it names. So two that
propose at once, or one that knows too little, cost a refusal and a second look, never a host in two groups.

The paper may let jobs wait; here every job that the log placed runs, so every job is in a group. A group stays as it
is, with its hosts, while one of its jobs is not profiled yet (nothing is decided about the unknown), is not elastic, or
has a host that does not answer.
"""

from collections.abc import Mapping, Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.interleave.policy import regroup
from plugins.interleave.policy.groups import PlacedGroup, PlacedJob, arranger_of, groups_of, processes_on, proposer_of
from plugins.interleave.policy.hosts import best_groups, given_hosts
from plugins.interleave.policy.model import Group, JobProfile, iteration_s, score_of
from plugins.interleave.policy.order import Waiting, weighted
from plugins.interleave.policy.rules import REVIEW_WORTH, WEIGHTS

WHOLE_JOBS_MAX = 64
"""Jobs of a pool up to which all of them are arranged anew: more than take turns on the hosts of one rack."""


class EndedJob(msgspec.Struct, frozen=True):
    """A job that has ended, or lost hosts, and where it had run."""

    job: JobId
    hosts: frozenset[HostId]


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """What one host knows of one pool."""

    me: HostId
    pool: str
    jobs: tuple[PlacedJob, ...]
    """The jobs that the log has placed."""
    profiles: Mapping[JobId, Waiting]
    """Profile, and mini-batches left, of the jobs that are profiled."""
    live: frozenset[HostId]
    idle: tuple[HostId, ...] = ()
    """Live hosts on which no job of any sort runs: the pool may take them."""
    came: frozenset[JobId] = frozenset()
    """Jobs that nobody has looked at since they came."""
    went: tuple[EndedJob, ...] = ()
    """Jobs that ended, or lost hosts, and nobody has looked since."""
    whole: float | None = None
    """Relative gain for which all may be arranged anew now; None: not now."""


class NewHosts(msgspec.Struct, frozen=True):
    """The processes that a job is to have on each host, and the configuration that they replace."""

    epoch: int
    replaces: int
    """The configuration that this replaces."""
    processes: dict[HostId, int]


class GroupWish(msgspec.Struct, frozen=True):
    """An arrangement that this host wants."""

    jobs: dict[JobId, NewHosts]
    why: str
    predicted: dict[JobId, float]
    """Seconds of an iteration of each job whose group changes, as predicted."""


class Decision(msgspec.Struct, frozen=True):
    """What is wanted, and why it is that, or nothing."""

    wish: GroupWish | None
    words: str
    mine: bool = True
    """Whether it was for this host to decide anything."""


class _Known:
    """The part of a pool about which something can be decided."""

    def __init__(self, view: PoolView) -> None:
        self.view = view
        self.jobs = {job.job: job for job in view.jobs}
        self.profiles = weighted(list(view.profiles.values()), len(self._hosts(view)))
        self.all = groups_of(view.jobs)
        self.known = [group for group in self.all if all(job in view.profiles for job in group.jobs)]
        self.open = [group for group in self.known if all(self.movable(job) for job in group.jobs)]

    @staticmethod
    def _hosts(view: PoolView) -> set[HostId]:
        return {host for job in view.jobs for host in job.hosts} | set(view.idle)

    def movable(self, job: JobId) -> bool:
        placed = self.jobs[job]
        return placed.most > 0 and placed.hosts <= self.view.live

    def group(self, group: PlacedGroup) -> Group:
        """The group for the policies, on as many hosts as its computing has in effect."""
        return Group(tuple(self.profiles[job] for job in group.jobs), effective_hosts(group, self.jobs, self.profiles))

    def best(self, profiles: Sequence[JobProfile], hosts: int) -> tuple[Group, ...]:
        """The best grouping of these jobs on so many hosts."""
        return best_groups(profiles, self.jobs, hosts, WEIGHTS)

    def free(self, groups: Sequence[PlacedGroup]) -> list[HostId]:
        return sorted({host for group in groups for host in group.hosts} | set(self.view.idle))


def effective_hosts(group: PlacedGroup, jobs: Mapping[JobId, PlacedJob], profiles: Mapping[JobId, JobProfile]) -> int:
    """How many hosts, each with all jobs of the group, compute as fast as these: the busiest one sets the pace where
    not all jobs are on all hosts."""
    load: dict[HostId, float] = dict.fromkeys(group.hosts, 0.0)
    for job in group.jobs:
        for host in jobs[job].hosts:
            load[host] += profiles[job].work_s / len(jobs[job].hosts)
    busiest = max(load.values())
    return max(1, int(sum(load.values()) / busiest + 1e-6)) if busiest > 0 else len(group.hosts)


def decide(view: PoolView) -> Decision:
    """What this host wants to be arranged anew in the pool now."""
    known = _Known(view)
    tried: list[str] = []
    arranges = mine = arranger_of(view.jobs, view.live) == view.me
    for group in known.known:
        if proposer_of(group, known.jobs, view.live) != view.me:
            continue
        mine = True
        for decision in (_arrivals(known, group), _broken(known, group)):
            if decision is not None and decision.wish is not None:
                return decision
            tried += [decision.words] if decision is not None else []
    if view.whole is not None and arranges:
        decision = _whole(known, view.whole)
        if decision.wish is not None:
            return decision
        tried.append(decision.words)
    return Decision(None, "; ".join(dict.fromkeys(tried)) or _nothing(known), mine)


def _nothing(known: _Known) -> str:
    unknown = [job.job for job in known.view.jobs if job.job not in known.view.profiles]
    if unknown:
        return f"nothing is decided about {', '.join(unknown)} and what shares hosts with it: it is not profiled yet"
    return "nothing came or went since the last look"


# ---- a job came ------------------------------------------------------------------------------------------------------


def _arrivals(known: _Known, group: PlacedGroup) -> Decision | None:
    came = [job for job in group.jobs if job in known.view.came]
    words = []
    for job in came:
        if not known.movable(job):
            words.append(f"{job} came, and cannot be moved: {_fixed(known, job)}")
            continue
        decision = _arrival(known, group, job)
        if decision.wish is not None:
            return decision
        words.append(decision.words)
    return Decision(None, "; ".join(words)) if words else None


def _fixed(known: _Known, job: JobId) -> str:
    if not known.jobs[job].most:
        return "it is not elastic"
    return f"{', '.join(sorted(known.jobs[job].hosts - known.view.live))} does not answer"


def _arrival(known: _Known, home: PlacedGroup, job: JobId) -> Decision:
    """Put the job into the group that it raises most, if that is another one and worth it. Hosts may change places
    between the two groups, since each job keeps the host of its rank 0."""
    profile = known.profiles[job]
    if home not in known.open:
        return Decision(None, f"{job} came, and {home.name} has a job that cannot be moved")
    most = known.jobs[job].most
    others = [group for group in known.open if group != home and len(group.hosts) <= most]
    alone = home.jobs == (job,)
    places = others if alone else [home, *others]
    rest = [_without(known.group(group), job) for group in places]
    change = regroup.arrival(rest, profile, len(known.free(known.open)), WEIGHTS) if rest else None
    if change is None or places[change.replaces[0]] == home:
        return Decision(None, f"{job} came and stays where it is: no other group would be busier with it")
    to = places[change.replaces[0]]
    given = len(to.hosts) + (len(home.hosts) if alone else 0)
    joined = Group((*known.group(to).jobs, profile), min(given, *(known.jobs[each].most for each in (*to.jobs, job))))
    left = [] if alone else [Group(_without(known.group(home), job).jobs, len(home.hosts))]
    return _replaced(known, [home, to], [joined, *left], regroup.WORTH, f"{job} came")


def _without(group: Group, job: JobId) -> Group:
    return Group(tuple(each for each in group.jobs if each.job != job), group.hosts)


# ---- a job ended, or lost hosts --------------------------------------------------------------------------------------


def _broken(known: _Known, group: PlacedGroup) -> Decision | None:
    """Arrange this group anew, and as few others as are worth it."""
    gone = [ended for ended in known.view.went if ended.hosts & set(group.hosts)]
    if not gone:
        return None
    why = f"{', '.join(sorted({ended.job for ended in gone}))} went"
    if group not in known.open:
        return Decision(None, f"{why}, and {group.name} has a job that cannot be moved")
    groups = [known.group(each) for each in known.open]
    free = known.free(known.open)
    change = regroup.rearranged(groups, known.open.index(group), len(free), WEIGHTS, known.best)
    if change is None:
        return Decision(None, f"{why}, and no other grouping is {regroup.WORTH:.0%} better")
    old = [known.open[at] for at in change.replaces]
    return _replaced(known, old, change.groups, regroup.WORTH, why)


# ---- all anew --------------------------------------------------------------------------------------------------------


def _whole(known: _Known, worth: float) -> Decision:
    if not known.open:
        return Decision(None, "no group has only jobs that are profiled and can be moved")
    jobs = [known.profiles[job] for group in known.open for job in group.jobs]
    if len(jobs) > WHOLE_JOBS_MAX:
        return Decision(None, f"{len(jobs)} jobs are too many to be arranged anew at once")
    hosts = len(known.free(known.open))
    why = "a review of all groups" if worth == REVIEW_WORTH else "a job came or went"
    return _replaced(known, known.open, known.best(jobs, hosts), worth, why)


def _replaced(known: _Known, old: Sequence[PlacedGroup], new: Sequence[Group], worth: float, because: str) -> Decision:
    """Replace these groups of hosts by those, if they can be had and are worth it; idle hosts are taken too."""
    free, hosts = known.free(old), len(known.free(known.open))
    now = score_of([known.group(group) for group in known.open], hosts, WEIGHTS)
    score = score_of([*(known.group(group) for group in known.open if group not in old), *new], hosts, WEIGHTS)
    if score < now * (1 + worth):
        return Decision(None, f"{because}: {_too_little(now, score, worth)}")
    places = given_hosts(new, known.jobs, free)
    if isinstance(places, str):
        return Decision(None, f"{because}: a grouping with score {score:.3f} instead of {now:.3f} cannot be: {places}")
    jobs: dict[JobId, NewHosts] = {}
    changed: list[tuple[tuple[JobId, ...], int]] = []
    for group, given in zip(new, places, strict=True):
        members = tuple(job.job for job in group.jobs)
        moved = [job for job in members if known.jobs[job].hosts != set(given)]
        for job in moved:
            placed = known.jobs[job]
            jobs[job] = NewHosts(placed.epoch, placed.config, processes_on(placed, given))
        if moved:
            changed.append((members, len(given)))
    if not jobs:
        return Decision(None, f"{because}: the groups are the best that was found")
    predicted = _predicted(known, changed)
    why = f"{because}: score {now:.3f} to {score:.3f}, {_iterations(predicted)}"
    return Decision(GroupWish(jobs, why, predicted), why)


# ---- words -----------------------------------------------------------------------------------------------------------


def _predicted(known: _Known, groups: Sequence[tuple[tuple[JobId, ...], int]]) -> dict[JobId, float]:
    """Seconds of an iteration of each of these jobs, as groups on so many hosts."""
    return {
        job: iteration_s([known.profiles[each] for each in members], hosts)
        for members, hosts in groups
        for job in members
    }


def _iterations(predicted: Mapping[JobId, float]) -> str:
    by_s: dict[str, list[JobId]] = {}
    for job, each_s in sorted(predicted.items()):
        by_s.setdefault(f"{each_s:.3g} s", []).append(job)
    return "predicted iteration " + ", ".join(f"{each_s} of {' and '.join(jobs)}" for each_s, jobs in by_s.items())


def _too_little(now: float, after: float, worth: float) -> str:
    return f"the best grouping found has score {after:.3f}, now it is {now:.3f}: less than {worth:.0%} better"
