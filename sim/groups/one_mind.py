"""Groups by one mind that knows everything at once, as in the paper: for comparisons in virtual time (Harmony §4.3.2).

A rack has no such mind (`plugins/interleave/policy/decide.py`): there each host knows what it heard, every job that the
log placed runs, and whoever decides asks for an arrangement that may be refused. This one may pause jobs, and what it
decides is so. Both use the same policies: how fast a group runs, which jobs belong together, what is worth a change.

    submitted -> profiling -> running -> ended
                     `------> paused <-> running        (profiled, and waits for a place)

Nothing is known of a job when it comes, so it runs first and is timed: its COMP and COMM subtasks are alone in their
lanes, so their times are valid beside other jobs. With `timings_min` of each it is profiled. While jobs are
profiled that were there at the start, nothing is arranged; then all are at once. Afterwards a new job joins
where it helps, and an ended one is replaced (`policy/regroup`). All are arranged anew when that is worth it: for a new
job that has no place where it helps, and from time to time, since what is left of each job changes which jobs a
grouping should let run (`policy/order`). The jobs of a group are named in the order of their turns, the one that
should end first before others.

Each group has an epoch that grows with every change of its jobs or hosts; `SetGroup` names it, so that a late order is
known for what it is. A host is in at most one group.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from covey.tensors.turns.rules import Need
from plugins.interleave.machine.timed import JobTimings
from plugins.interleave.policy import regroup
from plugins.interleave.policy.model import Group, JobProfile, iteration_s, score_of
from plugins.interleave.policy.order import ALONE_ON, Waiting, alone_s, ordered, weighted
from plugins.interleave.policy.rules import OURS, REVIEW_WORTH, GroupRules
from plugins.interleave.policy.schedule import Grouping, schedule

TIMINGS_MIN = 3
"""Subtasks of each sort that are timed before a job counts as profiled. Ours; the paper takes "average execution
times"."""
PROFILING_HOSTS = 16
"""Hosts of a group in which jobs are tried out. Ours: in turns on many hosts all are timed in minutes; with each on the
fewest, as in the paper (§4.3.2), the longest iteration takes an hour."""
PATIENCE_S = 6 * 3600.0
"""Seconds after which a waiting job goes before all others, whatever it needs."""


# ---- events ----------------------------------------------------------------------------------------------------------


class JobSubmitted(msgspec.Struct, frozen=True):
    job: JobId
    iterations: int | None = None
    """Iterations that it will do, when it says so: epochs times batches are in most scripts."""


class JobEnded(msgspec.Struct, frozen=True):
    job: JobId


class SubtaskReported(msgspec.Struct, frozen=True):
    job: JobId
    need: Need
    took_s: float
    hosts: int
    """Number of hosts of its group while it ran."""


class Progressed(msgspec.Struct, frozen=True):
    """The job has done `done` iterations."""

    job: JobId
    done: int


class GroupHostsChanged(msgspec.Struct, frozen=True):
    """These hosts, and no others, exist now."""

    hosts: tuple[HostId, ...]


class ReviewDue(msgspec.Struct, frozen=True):
    """`REVIEW_S` have passed since the last review."""


GroupsEvent = JobSubmitted | JobEnded | SubtaskReported | Progressed | GroupHostsChanged | ReviewDue

# ---- actions ---------------------------------------------------------------------------------------------------------


class SetGroup(msgspec.Struct, frozen=True):
    """Action: these jobs share these hosts from this epoch on; no jobs: the group is over."""

    group: int
    epoch: int
    jobs: tuple[JobId, ...]
    hosts: tuple[HostId, ...]


GroupsAction = SetGroup | LogEvent


class Shared(msgspec.Struct):
    """One group of jobs and its hosts."""

    jobs: tuple[JobId, ...]
    hosts: tuple[HostId, ...]
    epoch: int = 1


class Groups:
    """The groups of one set of hosts."""

    def __init__(
        self,
        hosts: Sequence[HostId],
        manner: GroupRules = OURS,
        timings_min: int = TIMINGS_MIN,
        group_max: int | None = None,
    ) -> None:
        self.hosts = tuple(sorted(hosts))
        self.manner, self.weights = manner, manner.weights
        self.timings_min, self.group_max = timings_min, group_max
        self.jobs: dict[JobId, JobTimings] = {}
        """Jobs that have not ended, in the order in which they came."""
        self.groups: dict[int, Shared] = {}
        self.ran_s: list[float] = []
        """Seconds that each ended job would have run, alone on `ALONE_ON` hosts."""
        self.made = 0
        self.now_s = 0.0
        self.waits_from_s: dict[JobId, float] = {}
        self.arranged = False
        """Has everything been arranged once?"""

    def handle(self, event: GroupsEvent, now_s: float) -> Sequence[GroupsAction]:
        self.now_s = now_s
        actions = [*self._handle(event), *self._unplaced()]
        placed = self._placed()
        self.waits_from_s = {job: self.waits_from_s.get(job, now_s) for job in self.jobs if job not in placed}
        return actions

    def _unplaced(self) -> list[GroupsAction]:
        """Keep trying out jobs that are not profiled and that no grouping took."""
        actions: list[GroupsAction] = []
        for job in self._unprofiled() if self.hosts else []:
            if job not in self._placed():
                actions += self._try_out(job)
        return actions

    def _handle(self, event: GroupsEvent) -> Sequence[GroupsAction]:
        match event:
            case JobSubmitted(job, iterations):
                return self._submitted(job, iterations)
            case Progressed(job, done):
                if job in self.jobs:
                    self.jobs[job].done = max(done, self.jobs[job].done)
                return []
            case SubtaskReported():
                return self._timed(event)
            case JobEnded(job):
                return self._ended(job)
            case GroupHostsChanged(hosts):
                return self._hosts(hosts)
            case ReviewDue():
                return self._reviewed()
            case _:
                assert_never(event)

    def check(self) -> None:
        hosts = [host for group in self.groups.values() for host in group.hosts]
        jobs = [job for group in self.groups.values() for job in group.jobs]
        assert len(hosts) == len(set(hosts)) and set(hosts) <= set(self.hosts), "no host is in two groups"
        assert len(jobs) == len(set(jobs)) and set(jobs) <= set(self.jobs), "no job is in two groups"
        assert all(group.jobs and group.hosts for group in self.groups.values()), "no group is without jobs or hosts"
        assert not self.jobs or not self.hosts or self.groups, "hosts do not idle while jobs are there"

    # ---- what is known of jobs ---------------------------------------------------------------------------------------

    def is_profiled(self, job: JobId) -> bool:
        return self.jobs[job].is_profiled(self.timings_min)

    def profile(self, job: JobId) -> JobProfile:
        return self.jobs[job].profile(job, self.manner.lean)

    def waiting(self) -> list[JobId]:
        """Jobs that are profiled and in no group, in the order in which they should run."""
        placed = self._placed()
        return [job for job in self._ordered() if job not in placed]

    def _ordered(self) -> list[JobId]:
        """All profiled jobs: those that have waited too long first, then as `policy/order` says."""
        if not self.manner.by_left:
            return [job for job in self.jobs if self.is_profiled(job)]
        return sorted(ordered(self._lefts(), len(self.hosts)), key=lambda job: not self._is_impatient(job))

    def _weighted(self) -> dict[JobId, JobProfile]:
        """Profiles of all profiled jobs, with bonuses where our rules hold."""
        if self.manner.by_left:
            return weighted(self._lefts(), len(self.hosts))
        return {job: self.profile(job) for job in self.jobs if self.is_profiled(job)}

    def _is_impatient(self, job: JobId) -> bool:
        return self.now_s - self.waits_from_s.get(job, self.now_s) >= PATIENCE_S

    def _lefts(self) -> list[Waiting]:
        lean = self.manner.lean
        return [timed.waiting(job, self.ran_s, lean) for job, timed in self.jobs.items() if self.is_profiled(job)]

    @property
    def _look(self) -> int:
        return len(self.jobs) if self.manner.look is None else max(self.manner.look, len(self.hosts) // 3)

    def _placed(self) -> dict[JobId, int]:
        return {job: at for at, group in self.groups.items() for job in group.jobs}

    def _unprofiled(self) -> list[JobId]:
        return [job for job in self.jobs if not self.is_profiled(job)]

    # ---- events ------------------------------------------------------------------------------------------------------

    def _submitted(self, job: JobId, iterations: int | None) -> list[GroupsAction]:
        if job in self.jobs:
            return []
        self.jobs[job] = JobTimings(declared=iterations)
        return self._try_out(job)

    def _try_out(self, job: JobId) -> list[GroupsAction]:
        """Try out a job. Before everything is arranged all jobs run at once, in turns. Later, as printed: into the
        group that profiles already, else the one with the fewest hosts (§4.3.2). Ours: where the fewest are tried out,
        and of those where turns come soonest. As printed, 42 jobs that came went to one host, one after another, where
        an iteration took four hours, and of all other hosts half idled."""
        if not self.hosts:
            return []
        if not self.arranged or not self.groups:
            self.arranged = False
            note = _note(job, "Profiled", "with all that are there")
            if len(self.groups) < max(1, len(self.hosts) // PROFILING_HOSTS):
                return [*self._naive(), note]
            at = min(self.groups, key=lambda g: (len(self.groups[g].jobs), g))
            return [self._set(at, (*self.groups[at].jobs, job), self.groups[at].hosts), note]
        unknown = set(self._unprofiled()) - {job}

        def place(g: int) -> tuple[float, float, int]:
            group = self.groups[g]
            tried = len(unknown & set(group.jobs))
            if not self.manner.by_left:
                return not tried, len(group.hosts), g
            return tried, iteration_s([self.profile(other) for other in group.jobs], len(group.hosts)), g

        at = min(self.groups, key=place)
        group = self.groups[at]
        return [self._set(at, (*group.jobs, job), group.hosts), _note(job, "Profiled", f"with group {at}")]

    def _timed(self, event: SubtaskReported) -> list[GroupsAction]:
        timed = self.jobs.get(event.job)
        if timed is None or event.took_s < 0 or event.hosts < 1:
            return []
        was = self.is_profiled(event.job)
        timed.add(event.need, event.took_s, event.hosts)
        return self._profiled(event.job) if not was and self.is_profiled(event.job) else []

    def _profiled(self, job: JobId) -> list[GroupsAction]:
        if not self.arranged:
            return [] if self._unprofiled() else self._arrange_all()
        at = self._placed().get(job)
        bonuses = self._weighted()
        rest = self._known(bonuses, {job})
        places = list(rest)
        hosts = len(self.hosts)
        others = [other for other in self.waiting() if other != job]
        change = None if others else regroup.arrival([rest[g] for g in places], bonuses[job], hosts, self.weights)
        if change is None and self.manner.by_left:
            anew = self._anew(bonuses, regroup.WORTH)
            if anew:
                return anew
        if change is None:
            if at is None or len(self.groups[at].jobs) == 1:
                return []
            left = tuple(other for other in self.groups[at].jobs if other != job)
            why = "others wait already" if others else "no group would be busier with it"
            return [self._set(at, left, self.groups[at].hosts), _note(job, "Paused", why)]
        to = places[change.replaces[0]]
        if to == at:
            return [_note(job, "Grouped", f"stays in group {at}")]
        actions: list[GroupsAction] = []
        if at is not None:
            if len(self.groups[at].jobs) == 1:
                return []
            left = tuple(other for other in self.groups[at].jobs if other != job)
            actions.append(self._set(at, left, self.groups[at].hosts))
        actions.append(self._set(to, (*self.groups[to].jobs, job), self.groups[to].hosts))
        return [*actions, _note(job, "Grouped", f"group {to}: score {change.score:.3f}")]

    def _ended(self, job: JobId) -> list[GroupsAction]:
        if job not in self.jobs:
            return []
        at = self._placed().get(job)
        known = self.profile(job) if self.is_profiled(job) else None
        if known is not None:
            self.ran_s.append((self.jobs[job].done + 1) * alone_s(known, ALONE_ON))
        del self.jobs[job]
        if at is None:
            return []
        left = tuple(other for other in self.groups[at].jobs if other != job)
        self.groups[at].jobs = left
        if not self.arranged:
            return self._after_loss(at)
        bonuses = self._weighted()
        groups = self._known(bonuses, set())
        places = list(groups)
        waiting = [bonuses[other] for other in self.waiting()]
        change = regroup.repaired(
            [groups[g] for g in places],
            places.index(at),
            known,
            waiting[: self._look],
            len(self.hosts),
            self.weights,
            self.group_max,
            regroup.STARTS if self.manner.polish else 0,
        )
        if change is None:
            return self._after_loss(at)
        return self._replace([places[each] for each in change.replaces], change.groups, change.score)

    def _reviewed(self) -> list[GroupsAction]:
        if not self.manner.by_left or not self.arranged or self._unprofiled():
            return []
        return self._anew(self._weighted(), REVIEW_WORTH)

    def _after_loss(self, at: int) -> list[GroupsAction]:
        """Group `at` keeps the jobs that it has; without any the smallest other group gets its hosts."""
        group = self.groups[at]
        if group.jobs:
            return [self._set(at, group.jobs, group.hosts)]
        over: list[GroupsAction] = [SetGroup(at, group.epoch + 1, (), ())]
        del self.groups[at]
        if self.groups:
            smallest = min(self.groups, key=lambda g: (len(self.groups[g].hosts), g))
            more = tuple(sorted((*self.groups[smallest].hosts, *group.hosts)))
            return [*over, self._set(smallest, self.groups[smallest].jobs, more)]
        if self.jobs:
            self.arranged = False
            return [*over, *self._naive()]
        self.arranged = False
        return over

    def _hosts(self, hosts: Sequence[HostId]) -> list[GroupsAction]:
        """Hosts came or went: groups lose the lost hosts; then everything is arranged anew, since every balance is
        off."""
        self.hosts = tuple(sorted(set(hosts)))
        there = set(self.hosts)
        if not self.hosts:
            over: list[GroupsAction] = [SetGroup(at, g.epoch + 1, (), ()) for at, g in self.groups.items()]
            self.groups = {}
            return over
        if self._unprofiled():
            self.arranged = False
            return self._naive()
        for group in self.groups.values():
            group.hosts = tuple(host for host in group.hosts if host in there)
        return self._arrange_all() if self.jobs else []

    # ---- arranging ---------------------------------------------------------------------------------------------------

    def _naive(self) -> list[GroupsAction]:
        """Put all jobs into groups of `PROFILING_HOSTS` hosts or a few more: all that can be done while nothing is
        known (§4.3.2)."""
        jobs = list(self.jobs)
        count = min(len(jobs), max(1, len(self.hosts) // PROFILING_HOSTS))
        return self._put(list(self.groups), [(tuple(jobs[n::count]), self.hosts[n::count]) for n in range(count)])

    def _scheduled(self, bonuses: Mapping[JobId, JobProfile]) -> Grouping:
        """The grouping that would be best if nothing ran yet."""
        return schedule(
            [bonuses[job] for job in self._ordered()[: self._look]],
            len(self.hosts),
            self.weights,
            group_max=self.group_max,
            starts_max=None if self.manner.polish else 0,
        )

    def _anew(self, bonuses: Mapping[JobId, JobProfile], worth: float) -> list[GroupsAction]:
        """Replace all groups by the best grouping if its score is better by the relative gain `worth`; else do
        nothing."""
        found = self._scheduled(bonuses)
        now = score_of(list(self._known(bonuses, set()).values()), len(self.hosts), self.weights)
        return self._replace(list(self.groups), found.groups, found.score) if found.score > (1 + worth) * now else []

    def _arrange_all(self) -> list[GroupsAction]:
        found = self._scheduled(self._weighted())
        self.arranged = True
        return self._replace(list(self.groups), found.groups, found.score)

    def _known(self, profiles: Mapping[JobId, JobProfile], without: set[JobId]) -> dict[int, Group]:
        """The groups, with these profiles of their jobs where there are any."""
        return {
            at: Group(
                tuple(profiles.get(job) or self.profile(job) for job in group.jobs if job not in without),
                len(group.hosts),
            )
            for at, group in self.groups.items()
        }

    def _replace(self, old: Sequence[int], new: Sequence[Group], score: float) -> list[GroupsAction]:
        """Replace groups. Groups by numbers of hosts become groups of hosts: each new one keeps the hosts that its jobs
        have, as far as it can."""
        free = set(self.hosts) - {host for at, group in self.groups.items() if at not in old for host in group.hosts}
        home = {job: self.groups[at].hosts for at in old for job in self.groups[at].jobs}
        wanted: list[tuple[tuple[JobId, ...], tuple[HostId, ...]]] = []
        for group in sorted(new, key=lambda each: (-each.hosts, [job.job for job in each.jobs])):
            near: dict[HostId, int] = {}
            for job in group.jobs:
                for host in home.get(job.job, ()):
                    near[host] = near.get(host, 0) + 1
            chosen = sorted(free, key=lambda host: (-near.get(host, 0), host))[: group.hosts]
            free -= set(chosen)
            wanted.append((tuple(job.job for job in group.jobs), tuple(sorted(chosen))))
        actions = self._put(old, wanted)
        return [*actions, *(_note(job, "Grouped", f"score {score:.3f}") for jobs, _ in wanted for job in jobs)]

    def _put(
        self, old: Sequence[int], wanted: Sequence[tuple[tuple[JobId, ...], tuple[HostId, ...]]]
    ) -> list[GroupsAction]:
        actions: list[GroupsAction] = []
        same: set[int] = set()
        for at in old:
            group = self.groups[at]
            match_ = [n for n, (jobs, hosts) in enumerate(wanted) if n not in same and _equal(group, jobs, hosts)]
            if match_:
                same.add(match_[0])
                continue
            actions.append(SetGroup(at, group.epoch + 1, (), ()))
            del self.groups[at]
        return [*actions, *(self._new(jobs, hosts) for n, (jobs, hosts) in enumerate(wanted) if n not in same)]

    def _sorted(self, jobs: tuple[JobId, ...]) -> tuple[JobId, ...]:
        """Jobs in the order of their turns: as they should run, unprofiled ones before all."""
        rank = {job: at for at, job in enumerate(self._ordered())}
        return tuple(sorted(jobs, key=lambda job: (rank.get(job, -1), job)))

    def _new(self, jobs: tuple[JobId, ...], hosts: tuple[HostId, ...]) -> SetGroup:
        jobs = self._sorted(jobs)
        self.made += 1
        self.groups[self.made] = Shared(jobs, hosts)
        return SetGroup(self.made, 1, jobs, hosts)

    def _set(self, at: int, jobs: tuple[JobId, ...], hosts: tuple[HostId, ...]) -> SetGroup:
        jobs = self._sorted(jobs)
        self.groups[at] = Shared(jobs, hosts, self.groups[at].epoch + 1)
        return SetGroup(at, self.groups[at].epoch, jobs, hosts)


def _equal(group: Shared, jobs: Sequence[JobId], hosts: Sequence[HostId]) -> bool:
    return set(group.jobs) == set(jobs) and set(group.hosts) == set(hosts)


def _note(job: JobId, event: str, reason: str) -> LogEvent:
    return LogEvent(subject=job, event=event, reason=reason)
