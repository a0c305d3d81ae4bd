"""One pool of aggregators: which of them sums each tensor of each of its jobs, and how many of them there are.

A pool is what a controller of a cluster of aggregators is in AutoPS (§4.3.3.4), seen by the one that decides for it: a
job's coordinator, or a simulation. It proposes; each aggregator checks again by itself and may refuse (`PoolRefused`).

    a job arrives        its tensors, largest first, where they fit best; new aggregators for the rest
    a job leaves         aggregators without work stop; the least loaded one is emptied into the others if all of its
                         work fits, and so on until one cannot be
    100 iterations       of a job at its loss limit or above: the newest assignment beside it goes elsewhere;
                         a job that is alone on its own gets one more
    a period ends        (hybrid scaling) what leaving jobs left behind is cleared up only now, and jobs that had to
                         wait for an aggregator get it
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, assert_never

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from plugins.aggregator.policy import assign, scale
from plugins.aggregator.policy.assign import AggregationProfile
from plugins.aggregator.policy.cycle import Cycle, grown, loss, sound, used, without
from plugins.aggregator.policy.measured import ITERATIONS, MeasuredIterations, is_hurt, loss_measured, reverted
from plugins.aggregator.policy.owners import QUIET
from plugins.aggregator.policy.scale import OrphanedTensor, least_loaded


class PoolRules(msgspec.Struct, frozen=True, kw_only=True):
    scaling: Literal["at once", "hybrid"] = "at once"
    """When aggregators are given back: as jobs leave, or once a period (AutoPS §4.3.3.3, §4.3.3.4)."""
    lacking_min: int = 1
    """With hybrid scaling a job that lacks fewer new aggregators than this waits for the end of the period."""
    iterations: int = ITERATIONS
    lanes: int = 1
    """Sums that an aggregator runs at a time."""
    times: int = 1
    """How many of its longest iterations a cycle may cover, where one would hurt a job (1: the thesis)."""
    quiet: Fraction = QUIET
    """Load, W / C, up to which an aggregator may get tensors that hurt elsewhere; 0: only new ones may (the thesis).
    With a third, 12 jobs settle on fewer aggregators (docs/results/aggregator.md)."""
    fill: Fraction = Fraction(1)
    """Part of its cycle that an aggregator promises (1: the thesis; agents: `policy.cycle.FILL`)."""
    hold_cycles: bool = True
    """Keep the cycle of an aggregator that a job left where a shorter one would hurt the others."""


NO_HOST = "no host is left to sum on"

# ---- events ----------------------------------------------------------------------------------------------------------


class PoolJobArrived(msgspec.Struct, frozen=True):
    """The trial iterations of a job are over; tensors are placed in the order of the profile."""

    profile: AggregationProfile


class Exited(msgspec.Struct, frozen=True):
    job: JobId


class PoolJobTimed(msgspec.Struct, frozen=True):
    """The job finished an iteration."""

    job: JobId
    period_us: int


class PeriodPassed(msgspec.Struct, frozen=True):
    """A scaling period is over."""


class PoolRefused(msgspec.Struct, frozen=True):
    """The aggregator refused a job's tensors by its own check."""

    host: HostId
    job: JobId
    why: str


class PoolJobEnded(msgspec.Struct, frozen=True):
    """A host is gone with all the tensors it held."""

    host: HostId


class Back(msgspec.Struct, frozen=True):
    """A host that was gone may aggregate again."""

    host: HostId


# ---- actions ---------------------------------------------------------------------------------------------------------


class PoolStart(msgspec.Struct, frozen=True):
    """Action: begin to aggregate on this host."""

    host: HostId


class PoolStop(msgspec.Struct, frozen=True):
    """Action: stop aggregating on this host."""

    host: HostId


class PoolPlace(msgspec.Struct, frozen=True):
    """Action: sum this tensor on this host, from nothing."""

    job: JobId
    tensor: str
    host: HostId


class PoolMove(msgspec.Struct, frozen=True):
    """Action: hand this tensor over between two rounds."""

    job: JobId
    tensor: str
    source: HostId
    host: HostId


Event = PoolJobArrived | Exited | PoolJobTimed | PeriodPassed | PoolRefused | PoolJobEnded | Back
Action = PoolStart | PoolStop | PoolPlace | PoolMove | LogEvent


class Pool:
    def __init__(self, rules: PoolRules = PoolRules(), hosts: Sequence[HostId] | None = None) -> None:
        self.rules = rules
        self._empty = Cycle({}, rules.lanes, rules.times, fill=rules.fill)
        self.cycles: dict[HostId, Cycle] = {}
        """Aggregators, oldest first."""
        self.jobs: dict[JobId, AggregationProfile] = {}
        self.on: dict[JobId, dict[str, HostId]] = {}
        """Job -> tensor -> aggregator."""
        self.waiting: dict[JobId, AggregationProfile] = {}
        """Jobs that lack an aggregator; their trial servers keep running."""
        self._hosts = hosts
        """Hosts that may aggregate, in the order to use them; None: a1, a2, ... without end."""
        self._down: set[HostId] = set()
        self._named = 0
        self._order: dict[HostId, int] = {}
        self._assigned: dict[JobId, int] = {}
        self._assignments = 0
        self._measured: dict[JobId, MeasuredIterations] = {}
        self._barred: dict[JobId, frozenset[HostId]] = {}
        """Job -> aggregators that hurt it or refused it."""
        self._least: dict[JobId, int] = {}
        """Job -> number of aggregators that it needs, since it was too slow on fewer."""

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case PoolJobArrived():
                return self._arrived(event.profile)
            case Exited():
                return self._exited(event.job)
            case PoolJobTimed():
                return self._timed(event.job, event.period_us)
            case PeriodPassed():
                return [*self._scaled_down(), *self._let_in()]
            case PoolRefused():
                return self._refused(event)
            case PoolJobEnded():
                return self._gone(event.host)
            case Back():
                self._down.discard(event.host)
                return self._let_in()
            case _:
                assert_never(event)

    def check(self) -> None:
        """Check that each tensor is on one aggregator, which knows of it, that no job is hurt, and no aggregator
        overfull."""
        assert self.on.keys() == self.jobs.keys() and not self.waiting.keys() & self.jobs.keys()
        held: dict[HostId, dict[JobId, int]] = {host: {} for host in self.cycles}
        for job, profile in self.jobs.items():
            assert self.on[job].keys() == {tensor.name for tensor in profile.tensors}
            for tensor in profile.tensors:
                there = held[self.on[job][tensor.name]]
                there[job] = there.get(job, 0) + tensor.work_us
        for host, cycle in self.cycles.items():
            assert {job: share.work_us for job, share in cycle.shares.items()} == held[host]
            assert cycle.used_us == used(cycle.us, cycle.shares.values())
            assert sound(cycle) or not self.rules.hold_cycles

    def loss(self, job: JobId) -> float:
        """Part of its speed that the present cycles take from a job: that of its slowest aggregator."""
        period_us, hosts = self.jobs[job].period_us, set(self.on[job].values())
        return max((float(loss(self.cycles[host].us, period_us)) for host in hosts), default=0.0)

    # ---- jobs come and go ----

    def _arrived(self, profile: AggregationProfile) -> Sequence[Action]:
        if profile.job in self.jobs or profile.job in self.waiting:
            return ()
        flaw = assign.flaw(profile)
        if flaw:
            return (LogEvent(profile.job, "tensors not assigned", flaw),)
        return self._placed(profile, hurry=self.rules.scaling == "at once")

    def _placed(self, profile: AggregationProfile, hurry: bool) -> Sequence[Action]:
        """Place a whole job, or nothing of it: it waits when there are too few hosts, or (hybrid) when it lacks too few
        new aggregators to be worth one before the period ends."""
        names = list(self.cycles)
        barred = [at for at, name in enumerate(names) if name in self._barred.get(profile.job, ())]
        found = assign.assign(profile, list(self.cycles.values()), self._spare(), self._empty, barred)
        lacking = len(found.cycles) - len(names) if found is not None else 0
        if found is None or (0 < lacking < self.rules.lacking_min and not hurry):
            self.waiting[profile.job] = profile
            why = f"it needs {lacking} more, which wait for the end of the period" if found is not None else NO_HOST
            return (LogEvent(profile.job, "tensors wait for an aggregator", why),)
        self.waiting.pop(profile.job, None)
        started = [self._started() for _ in range(lacking)]
        names += started
        self.cycles = dict(zip(names, found.cycles, strict=True))
        self.jobs[profile.job] = profile
        before = self.on.get(profile.job, {})
        self.on[profile.job] = {one.name: names[at] for one, at in zip(profile.tensors, found.on, strict=True)}
        self._assigned_now(profile.job)
        return [*(PoolStart(host) for host in started), *self._told(profile.job, before)]

    def _told(self, job: JobId, before: dict[str, HostId]) -> Sequence[Action]:
        actions: list[Action] = []
        for tensor, host in self.on[job].items():
            source = before.get(tensor)
            if source is None:
                actions.append(PoolPlace(job, tensor, host))
            elif source != host:
                actions.append(PoolMove(job, tensor, source, host))
        return actions

    def _exited(self, job: JobId) -> Sequence[Action]:
        self.waiting.pop(job, None)
        if job not in self.jobs:
            return ()
        self._taken_off(job)
        for known in (self.jobs, self.on, self._assigned, self._measured, self._barred, self._least):
            known.pop(job, None)
        if self.rules.scaling == "hybrid":
            return ()
        return [*self._scaled_down(), *self._let_in()]

    def _taken_off(self, job: JobId) -> None:
        """Take a job off its aggregators. Jobs that were hurt beside it may come back there."""
        left = frozenset(self.on[job].values())
        for host in sorted(left & self.cycles.keys()):
            self._changed(host)
            self.cycles[host] = without(self.cycles[host], job, self.rules.hold_cycles)
        for name, hosts in list(self._barred.items()):
            self._barred[name] = hosts - left

    def _let_in(self) -> Sequence[Action]:
        return [action for profile in list(self.waiting.values()) for action in self._placed(profile, hurry=True)]

    # ---- aggregators come and go ----

    def _spare(self) -> int | None:
        return None if self._hosts is None else len(self._unused())

    def _unused(self) -> list[HostId]:
        return [host for host in self._hosts or () if host not in self.cycles and host not in self._down]

    def _started(self) -> HostId:
        self._named += 1
        host = HostId(f"a{self._named}") if self._hosts is None else self._unused()[0]
        self.cycles[host] = self._empty
        self._order[host] = self._named
        return host

    def _stopped(self, host: HostId) -> PoolStop:
        del self.cycles[host], self._order[host]
        for job, hosts in list(self._barred.items()):
            self._barred[job] = hosts - {host}
        return PoolStop(host)

    def _scaled_down(self) -> Sequence[Action]:
        """Free empty aggregators; then empty the least loaded into the others, again and again."""
        actions: list[Action] = [self._stopped(host) for host in list(self.cycles) if not self.cycles[host].shares]
        while (host := least_loaded(self._spared(), self._order)) is not None:
            found = scale.emptied(host, self._works(host), self.cycles, self.jobs, self._barred)
            if found is None:
                break
            for work, to in found.moves:
                self._changed(host)
                self.on[work.job][work.tensor] = to
                actions.append(PoolMove(work.job, work.tensor, host, to))
            for to in {to for _, to in found.moves}:
                self._changed(to)
            self.cycles.update(found.cycles)
            actions.append(self._stopped(host))
        return actions

    def _spared(self) -> dict[HostId, Cycle]:
        """Aggregators that may be emptied: not those of a job that needs all that it has."""
        few = {job for job, least in self._least.items() if len(set(self.on[job].values())) <= least}
        return {host: cycle for host, cycle in self.cycles.items() if not few & cycle.shares.keys()}

    def _works(self, host: HostId) -> list[OrphanedTensor]:
        """Every tensor summed on this host."""
        return [
            OrphanedTensor(job, tensor.name, tensor.work_us)
            for job in self.cycles[host].shares
            for tensor in self.jobs[job].tensors
            if self.on[job][tensor.name] == host
        ]

    def _gone(self, host: HostId) -> Sequence[Action]:
        """Place anew what a lost host summed, with new aggregators if need be; the tensors' values come from the ranks.
        A job for which there is no room leaves its other aggregators too, and waits."""
        self._down.add(host)
        if host not in self.cycles:
            return ()
        jobs = sorted(self.cycles[host].shares)
        self._changed(host)
        self._stopped(host)
        return [action for job in jobs for action in self._placed_again(job, host)]

    def _placed_again(self, job: JobId, gone: HostId) -> Sequence[Action]:
        actions = self._moved(job, frozenset({gone}), frozenset(), f"{gone} is gone")
        if actions is not None:
            return actions
        profile = self.waiting[job] = self.jobs[job]
        self._taken_off(job)
        del self.jobs[job], self.on[job]
        return (LogEvent(profile.job, "tensors wait for an aggregator", NO_HOST),)

    # ---- what was wrong with a plan ----

    def _refused(self, event: PoolRefused) -> Sequence[Action]:
        """Move only the tensors that the aggregator refused; the rest of the job stays."""
        if event.host not in self.on.get(event.job, {}).values():
            return ()
        return self._moved_off(event.job, frozenset({event.host}), frozenset(), f"{event.host} refused: {event.why}")

    def _timed(self, job: JobId, period_us: int) -> Sequence[Action]:
        profile = self.jobs.get(job)
        if profile is None or period_us <= 0:
            return ()
        measured = self._measured[job] = self._measured.get(job, MeasuredIterations()).plus(period_us)
        if measured.count < self.rules.iterations:
            return ()
        self._measured[job] = MeasuredIterations()
        if not is_hurt(measured, profile.period_us, profile.limit, self.rules.iterations):
            return ()
        lost = float(loss_measured(measured, profile.period_us))
        return self._reverted(job, f"{job} lost {lost:.0%} of its speed over {measured.count} iterations")

    def _reverted(self, hurt: JobId, why: str) -> Sequence[Action]:
        """Move what the newest job has where it hurts to quiet aggregators, else to new ones (AutoPS §4.5.2.3)."""
        mixed = {host for host in set(self.on[hurt].values()) if len(self.cycles[host].shares) > 1}
        beside = {name for host in mixed for name in self.cycles[host].shares}
        if not beside:
            return self._spread(hurt, why)
        newest = reverted(hurt, sorted(beside), self._assigned)
        busy = frozenset(host for host, cycle in self.cycles.items() if cycle.load > self.rules.quiet)
        leaves = frozenset(host for host in mixed if newest in self.cycles[host].shares)
        return self._moved_off(newest, leaves, busy, why)

    def _spread(self, job: JobId, why: str) -> Sequence[Action]:
        """Give one more aggregator to a job that is alone on its aggregators and slower than on its trial servers,
        since it waits for its own sums: up to as many as it had servers, with its tensors balanced over them
        (§4.3.3.3)."""
        profile, before = self.jobs[job], dict(self.on[job])
        hosts = [host for host in self.cycles if host in before.values()]
        if len(hosts) >= profile.servers or self._spare() == 0:
            told = f"{why}, alone on its aggregators: measure it again"
            return (LogEvent(job, "slower than profiled", told),)
        self._taken_off(job)
        hosts.append(self._started())
        loads = dict.fromkeys(hosts, 0)
        for tensor in profile.tensors:
            host = min(hosts, key=lambda one: (loads[one], self._order[one]))
            loads[host] += tensor.work_us
            self.on[job][tensor.name] = host
        for host in hosts:
            if any(to == host for to in self.on[job].values()):
                self.cycles[host] = grown(self.cycles[host], job, profile.share(loads[host]))
        self._least[job] = len(hosts)
        self._assigned_now(job)
        return [PoolStart(hosts[-1]), LogEvent(job, "tensors spread", why), *self._told(job, before)]

    def _moved_off(self, job: JobId, hosts: frozenset[HostId], avoid: frozenset[HostId], why: str) -> Sequence[Action]:
        """Move the job's tensors off these aggregators; they may come back once one of the jobs there has left."""
        barred = self._barred.get(job, frozenset()) | hosts
        actions = self._moved(job, hosts, barred | avoid, why)
        if actions is None:
            return (LogEvent(job, "tensors stay although they slow others", f"{why}; {NO_HOST}"),)
        self._barred[job] = barred
        return actions

    def _moved(
        self, job: JobId, hosts: frozenset[HostId], avoid: frozenset[HostId], why: str
    ) -> Sequence[Action] | None:
        """Move what the job has on `hosts`, alive or gone, to where it fits best outside `avoid`, or to new
        aggregators. None, and nothing happens, when there are too few of those."""
        on, after = self.on[job], dict(self.cycles)
        leaving = tuple(tensor for tensor in self.jobs[job].tensors if on[tensor.name] in hosts)
        for host in sorted(hosts & after.keys()):
            after[host] = without(after[host], job, self.rules.hold_cycles)
        names = list(after)
        part = msgspec.structs.replace(self.jobs[job], tensors=leaving)
        barred = [at for at, name in enumerate(names) if name in avoid]
        found = assign.assign(part, list(after.values()), self._spare(), self._empty, barred)
        if found is None:
            return None
        before = {tensor: host for tensor, host in on.items() if host in self.cycles}
        started = [self._started() for _ in range(len(found.cycles) - len(names))]
        names += started
        for host in sorted(hosts | {names[at] for at in found.on}):
            self._changed(host)
        self.cycles = dict(zip(names, found.cycles, strict=True))
        on.update({one.name: names[at] for one, at in zip(leaving, found.on, strict=True)})
        self._assigned_now(job)
        return [*(PoolStart(host) for host in started), LogEvent(job, "tensors moved", why), *self._told(job, before)]

    def _assigned_now(self, job: JobId) -> None:
        self._assignments += 1
        self._assigned[job] = self._assignments
        for host in set(self.on[job].values()):
            self._changed(host)

    def _changed(self, host: HostId) -> None:
        """Measure the jobs on this aggregator anew."""
        for job in self.cycles[host].shares if host in self.cycles else ():
            self._measured.pop(job, None)
