"""The groups of a rack as one host sees them: what it measures, what it was told, and what it wants (Harmony §4.3.2).

    StepTimed --> StepsMeasured to the job's coordinator --> ProfilesTold among those who may decide
    JobPlaced, JobUnplaced, hosts that come and go --> what nobody has looked at since (`came`, `went`)
    SecondPassed --> for each pool: policy/decide --> ArrangementsWanted --> in force, or refused: back off, look again

Every host notes what came and went, so when the one that should propose dies, the next one has it too. A note is
dropped once this host has decided about it, once any job of its pool was arranged anew, and after `NOTED_S` in any
case. Nothing here is kept on disk: after a restart a review comes in its time, and profiles are told again.
"""

import random
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from covey.core.events import Heard, LogEvent, Message, Publish, Send
from covey.core.ids import HostId, JobId
from plugins.facts import (
    ArrangementsAnswered,
    ArrangementsWanted,
    JobPlaced,
    JobUnplaced,
    StepTimed,
    SumsWorked,
    WantedArrangement,
)
from plugins.interleave.machine.measured import TIMINGS_MIN, StepsHere, profile_of
from plugins.interleave.messages import JOBS_MAX, ProfilesTold, ProfileTold, StepsMeasured
from plugins.interleave.policy.decide import Decision, EndedJob, GroupWish, PoolView, decide
from plugins.interleave.policy.groups import PlacedJob, arranger_of, coordinator_of, groups_of, pool_of
from plugins.interleave.policy.model import JobProfile
from plugins.interleave.policy.order import ALONE_ON, Waiting, alone_s, left_of
from plugins.interleave.policy.regroup import WORTH
from plugins.interleave.policy.rules import LEAN, REVIEW_WORTH
from plugins.interleave.policy.turn_order import numbered

BY = "groups"
"""Who wants an arrangement, as people read it (`ArrangementsWanted.by`)."""
REPORT_S = 2.0
"""Seconds between two reports of a host to a job's coordinator."""
TELL_S = 5.0
"""Seconds between two tellings of profiles."""
AGE_S = 60.0
"""Seconds for which a profile counts that is not told again: a job whose coordinator says nothing is not known."""
SETTLE_S = 15.0
"""Seconds after a change of a pool in which this host wants no other one: what was just decided is measured first."""
WHOLE_AFTER_S = 10.0
"""Seconds that a whole rearrangement leaves to the smaller changes, after a job came or went."""
LOOK_S = 3.0
"""Seconds between two looks at a pool where something came or went."""
NOTED_S = 120.0
"""Seconds for which a host remembers that a job came or went, at most."""
ANSWER_S = 60.0
"""Seconds after which a wish that nobody answered counts as refused."""
BACK_OFF_S, BACK_OFF_MAX_S = 10.0, 600.0
"""Seconds until a host wants something again that was refused once; twice that after each further refusal."""
IDLE_REFUSALS = 2
"""Refusals in a row after which a wish takes no hosts that the pool does not have: they may be out of bounds for its
jobs, which only the scheduler knows."""
CHECK_S = 600.0
"""Seconds within which a prediction is compared with what was measured."""
ENDED_MAX = 64
"""Jobs that ended of which it is remembered how long they ran."""


class HostsNow(msgspec.Struct, frozen=True):
    """The hosts that are alive, and those of them on which new processes may begin."""

    live: frozenset[HostId]
    usable: frozenset[HostId]


class SecondBegan(msgspec.Struct, frozen=True):
    """A second has passed."""


PoolsEvent = JobPlaced | JobUnplaced | StepTimed | SumsWorked | ArrangementsAnswered | HostsNow | SecondBegan | Heard
PoolsAction = Send | Publish | LogEvent


class _Heard(msgspec.Struct):
    told: ProfileTold
    at_s: float


class _Noted(msgspec.Struct):
    hosts: frozenset[HostId]
    at_s: float


class _Asked(msgspec.Struct):
    ask: str
    wish: GroupWish
    at_s: float


class _Predicted(msgspec.Struct):
    config: int
    iteration_s: float
    at_s: float


class _Pool(msgspec.Struct):
    """What this host remembers of one pool."""

    jobs: set[JobId] = set()
    ran_s: list[float] = []
    """How long each of the last jobs that ended had run, in seconds alone."""
    came: dict[JobId, float] = {}
    went: dict[JobId, _Noted] = {}
    changed_s: float = -1e9
    review_s: float = 0.0
    """When all groups are looked at next."""
    wait_s: float = 0.0
    """Until when nothing is wanted after a refusal."""
    refusals: int = 0
    asked: _Asked | None = None
    looked_s: float = -1e9
    words: str = ""
    """What was decided last."""


class Pools:
    """All pools of a rack, as one host sees them."""

    def __init__(
        self, me: HostId, rng: random.Random, review_s: float, decides: Callable[[PoolView], Decision] = decide
    ) -> None:
        self.me, self.rng, self.review_s, self._decides = me, rng, review_s, decides
        self.jobs: dict[JobId, PlacedJob] = {}
        """Jobs that share hosts, as the log has them."""
        self.pools: dict[str, _Pool] = {}
        self.profiles: dict[JobId, _Heard] = {}
        """The newest profile of each job, and when it was told."""
        self.live: frozenset[HostId] = frozenset()
        self._usable: frozenset[HostId] = frozenset()
        self._others: dict[JobId, frozenset[HostId]] = {}
        """Hosts of the jobs that share none."""
        self._here: dict[JobId, StepsHere] = {}
        self._measured: dict[JobId, dict[HostId, StepsMeasured]] = {}
        """What hosts measured, of jobs whose coordinator this host is."""
        self._reported_s = self._told_s = -1e9
        self._predicted: dict[JobId, _Predicted] = {}
        self._asks = 0

    def handle(self, event: PoolsEvent, now_s: float) -> Sequence[PoolsAction]:
        match event:
            case JobPlaced():
                self._placed(event, now_s)
            case JobUnplaced():
                self._unplaced(event, now_s)
            case StepTimed() | SumsWorked():
                self._worked(event)
            case HostsNow(live, usable):
                self.live, self._usable = live, usable
            case Heard(sender, message):
                self._heard(sender, message, now_s)
            case ArrangementsAnswered():
                return self._answered(event, now_s)
            case SecondBegan():
                return self._second(now_s)
            case _:
                assert_never(event)
        return []

    def check(self) -> None:
        assert set(self._here) <= set(self.jobs), "only jobs that share hosts are measured"
        assert set(self._measured) <= set(self.jobs), "only jobs that share hosts are profiled"
        assert set(self.profiles) <= set(self.jobs), "no profile is kept of a job that is over"
        for name, pool in self.pools.items():
            assert pool.jobs == {job.job for job in self.jobs.values() if job.pool == name}, "a pool knows its jobs"
            assert pool.jobs, "a pool lives as long as its jobs"
        assert all(pool.asked is None or pool.asked.wish.jobs for pool in self.pools.values()), "wishes name jobs"

    # ---- what the log says -------------------------------------------------------------------------------------------

    def _placed(self, fact: JobPlaced, now_s: float) -> None:
        name = pool_of(fact.tenant, fact.share_host)
        hosts = frozenset(place.host for place in fact.places)
        if not name:
            self._others[fact.job] = hosts
            return
        before = self.jobs.get(fact.job)
        first = next((process for process, ranks in fact.carried.items() if 0 in ranks), 0)
        most = fact.world_size if fact.workers else 0
        of = fact.epoch, fact.config, fact.places, fact.workers, most, first
        self.jobs[fact.job] = PlacedJob(fact.job, name, *of)
        pool = self.pools.setdefault(name, _Pool(review_s=now_s + self.rng.uniform(0.5, 1.0) * self.review_s))
        pool.jobs.add(fact.job)
        if before is None or before.epoch != fact.epoch:
            self.profiles.pop(fact.job, None)
            pool.came[fact.job] = now_s
        elif before.config != fact.config:
            self._changed(pool, before, hosts, now_s)
        if before is None or (before.epoch, before.config) != (fact.epoch, fact.config):
            self._here[fact.job] = StepsHere(fact.job, fact.epoch, fact.config)
            self._measured.pop(fact.job, None)

    def _changed(self, pool: _Pool, before: PlacedJob, hosts: frozenset[HostId], now_s: float) -> None:
        """A job has another configuration: what was noted is dealt with, unless it lost a host."""
        if lost := before.hosts - hosts - self.live:
            pool.went[before.job] = _Noted(before.hosts - lost, now_s)
            return
        pool.changed_s = now_s
        pool.came = {job: at_s for job, at_s in pool.came.items() if job not in self.profiles}
        pool.went = {}

    def _unplaced(self, fact: JobUnplaced, now_s: float) -> None:
        self._others.pop(fact.job, None)
        job = self.jobs.get(fact.job)
        if job is None or job.epoch > fact.epoch:
            return
        del self.jobs[fact.job]
        heard = self.profiles.pop(fact.job, None)
        pool = self.pools[job.pool]
        if fact.ended and heard is not None:
            each_s = alone_s(_profile(heard.told), ALONE_ON)
            pool.ran_s = [*pool.ran_s, (heard.told.step + 1) * each_s][-ENDED_MAX:]
        for kept in (self._here, self._measured, self._predicted):
            kept.pop(fact.job, None)
        pool.came.pop(fact.job, None)
        pool.went[fact.job] = _Noted(job.hosts, now_s)
        pool.jobs.remove(fact.job)
        if not pool.jobs:
            del self.pools[job.pool]

    # ---- what is measured, and told ----------------------------------------------------------------------------------

    def _worked(self, fact: StepTimed | SumsWorked) -> None:
        job, here = self.jobs.get(fact.job), self._here.get(fact.job)
        if job is None or here is None or fact.epoch != job.epoch:
            return
        if isinstance(fact, StepTimed):
            here.stepped(fact)
        else:
            here.summed(fact)

    def _heard(self, sender: HostId, message: Message, now_s: float) -> None:
        match message:
            case StepsMeasured():
                job = self.jobs.get(JobId(message.job))
                if job is None or sender not in job.hosts or message.epoch != job.epoch:
                    return
                self._measured.setdefault(job.job, {})[sender] = message
            case ProfilesTold():
                for told in message.profiles:
                    job = self.jobs.get(JobId(told.job))
                    if job is not None and sender in job.hosts:
                        self._learn(told, now_s)
            case _:
                pass

    def _learn(self, told: ProfileTold, now_s: float) -> None:
        """Take a profile, unless a newer one is known."""
        job, known = JobId(told.job), self.profiles.get(JobId(told.job))
        if told.epoch != self.jobs[job].epoch or told.config > self.jobs[job].config:
            return
        if known is None or (known.told.config, known.told.step) <= (told.config, told.step):
            self.profiles[job] = _Heard(told, now_s)

    def _report(self, now_s: float) -> list[PoolsAction]:
        """Tell coordinators what was measured here."""
        if now_s - self._reported_s < REPORT_S:
            return []
        self._reported_s = now_s
        actions: list[PoolsAction] = []
        for job in sorted(self._here, key=numbered):
            if (told := self._here[job].told()) is None or self.me not in self.jobs[job].hosts:
                continue
            to = coordinator_of(self.jobs[job], self.live)
            if to is None:
                continue
            if to == self.me:
                self._heard(self.me, told, now_s)
            else:
                actions.append(Send(to, told, REPORT_S))
        return actions

    def _tell(self, now_s: float) -> list[PoolsAction]:
        """Tell the profiles of jobs whose coordinator this host is to all that may have to decide."""
        if now_s - self._told_s < TELL_S:
            return []
        self._told_s = now_s
        actions: list[PoolsAction] = []
        for name in sorted(self.pools):
            members = self.members(name)
            mine = sorted((j.job for j in members if coordinator_of(j, self.live) == self.me), key=numbered)
            told = [heard.told for job in mine if (heard := self._own_profile(job, now_s)) is not None]
            to: set[HostId | None] = {coordinator_of(job, self.live) for job in members}
            to |= {arranger_of(members, self.live)}
            for group in groups_of(members):  # the order of turns goes by profiles
                to |= set(group.hosts) if set(mine) & set(group.jobs) else set()
            parts = [ProfilesTold(tuple(told[at : at + JOBS_MAX])) for at in range(0, len(told), JOBS_MAX)]
            hosts = sorted(host for host in to if host is not None and host != self.me)
            actions += [Send(host, part, TELL_S) for host in hosts for part in parts]
        return actions

    def _own_profile(self, job: JobId, now_s: float) -> _Heard | None:
        """The profile of a job whose coordinator this host is: as measured now, else the newest one known."""
        if (told := profile_of(self.jobs[job], list(self._measured.get(job, {}).items()))) is not None:
            self._learn(told, now_s)
        heard = self.profiles.get(job)
        if heard is not None:
            heard.at_s = now_s
        return heard

    # ---- what is wanted ----------------------------------------------------------------------------------------------

    def members(self, name: str) -> list[PlacedJob]:
        """The jobs of a pool, as the log has them, in the order of their numbers."""
        return [self.jobs[job] for job in sorted(self.pools[name].jobs, key=numbered)]

    def known(self, name: str, now_s: float) -> dict[JobId, Waiting]:
        """The profiles of a pool's jobs that count now, and the mini-batches that each has left."""
        found, pool = {}, self.pools[name]
        for job in sorted(pool.jobs & self.profiles.keys(), key=numbered):
            heard = self.profiles[job]
            if now_s - heard.at_s < AGE_S:
                profile = _profile(heard.told)
                each_s = alone_s(profile, ALONE_ON)
                left = left_of(None, heard.told.step, each_s, pool.ran_s)
                found[job] = Waiting(profile, left)
        return found

    def left_s(self, now_s: float) -> dict[JobId, float]:
        """What each profiled job has left, in seconds alone."""
        each = (waiting for pool in self.pools for waiting in self.known(pool, now_s).values())
        return {job.profile.job: job.left * alone_s(job.profile, ALONE_ON) for job in each}

    def view(self, name: str, now_s: float) -> PoolView:
        """What this host knows of a pool now."""
        pool, members = self.pools[name], self.members(name)
        profiles = self.known(name, now_s)
        taken = {host for job in self.jobs.values() for host in job.hosts}
        taken |= {host for hosts in self._others.values() for host in hosts}
        idle = sorted(self._usable - taken) if pool.refusals < IDLE_REFUSALS else []
        ready = [at_s for job, at_s in pool.came.items() if job in profiles]
        ready += [noted.at_s for noted in pool.went.values()]
        whole = REVIEW_WORTH if now_s >= pool.review_s else None
        if whole is None and ready and now_s - min(ready) >= WHOLE_AFTER_S:
            whole = WORTH
        return PoolView(
            me=self.me,
            pool=name,
            jobs=tuple(sorted(members, key=lambda job: numbered(job.job))),
            profiles=profiles,
            live=self.live,
            idle=tuple(idle),
            came=frozenset(job for job in pool.came if job in profiles),
            went=tuple(EndedJob(job, noted.hosts) for job, noted in sorted(pool.went.items())),
            whole=whole,
        )

    def words(self, name: str, now_s: float) -> str:
        """What was decided last about a pool, or what is awaited, in words."""
        pool = self.pools[name]
        if pool.asked is not None:
            return f"asked for, and not in force yet: {pool.asked.wish.why}"
        if now_s < pool.wait_s:
            return f"{pool.words}; looks again in {pool.wait_s - now_s:.0f} s"
        return pool.words or f"nothing was decided yet; all groups are looked at in {pool.review_s - now_s:.0f} s"

    def _second(self, now_s: float) -> list[PoolsAction]:
        actions = [*self._report(now_s), *self._tell(now_s), *self._compare(now_s)]
        for name in sorted(self.pools):
            pool = self.pools[name]
            if pool.asked is not None and now_s - pool.asked.at_s >= ANSWER_S:
                actions += self._refused(pool, "nobody answered", now_s)
            if pool.asked is None and now_s >= max(pool.wait_s, pool.changed_s + SETTLE_S):
                actions += self._look(name, now_s)
            self._forget(pool, now_s)
        return actions

    def _look(self, name: str, now_s: float) -> list[PoolsAction]:
        pool = self.pools[name]
        something = pool.went or now_s >= pool.review_s or any(job in self.profiles for job in pool.came)
        if not something or now_s - pool.looked_s < LOOK_S:
            return []
        view = self.view(name, now_s)
        if not view.came and not view.went and view.whole is None:
            return []
        pool.looked_s = now_s
        decision = self._decides(view)
        if view.whole == REVIEW_WORTH:
            pool.review_s = now_s + self.rng.uniform(0.75, 1.25) * self.review_s
        pool.words = decision.words
        if decision.wish is None:
            if decision.mine and view.whole is not None:  # all that this host could propose was looked at
                pool.came = {job: at_s for job, at_s in pool.came.items() if job not in view.came}
                pool.went = {}
            return []
        self._asks += 1
        ask = f"groups/{self.me}/{now_s:.0f}/{self._asks}"
        pool.asked = _Asked(ask, decision.wish, now_s)
        jobs = {
            job: WantedArrangement(new.epoch, new.replaces, new.processes) for job, new in decision.wish.jobs.items()
        }
        return [Publish(ArrangementsWanted(ask, jobs, BY, decision.wish.why))]

    def _forget(self, pool: _Pool, now_s: float) -> None:
        """Forget what was noted long ago, from when on everybody could decide about it."""
        waits = {job for job in pool.came if job not in self.profiles}
        pool.came = {j: now_s if j in waits else at_s for j, at_s in pool.came.items() if now_s - at_s < NOTED_S}
        pool.went = {job: noted for job, noted in pool.went.items() if now_s - noted.at_s < NOTED_S}

    def _answered(self, fact: ArrangementsAnswered, now_s: float) -> list[PoolsAction]:
        pool = next((p for p in self.pools.values() if p.asked is not None and p.asked.ask == fact.ask), None)
        if pool is None or pool.asked is None:
            return []
        if fact.refused:
            return self._refused(pool, fact.refused, now_s)
        wish, pool.asked, pool.refusals = pool.asked.wish, None, 0
        pool.words = f"in force: {wish.why}"
        pool.changed_s = now_s
        pool.went, pool.came = {}, {job: at_s for job, at_s in pool.came.items() if job not in self.profiles}
        for job, each_s in wish.predicted.items():
            if job in self.jobs:
                new = wish.jobs.get(job)
                config = new.replaces + 1 if new is not None else self.jobs[job].config
                self._predicted[job] = _Predicted(config, each_s, now_s)
        return [LogEvent(job, "regrouped", wish.why) for job in sorted(wish.predicted, key=numbered)]

    def _refused(self, pool: _Pool, why: str, now_s: float) -> list[PoolsAction]:
        """Back off, then look again with what is known by then."""
        assert pool.asked is not None
        wish, pool.asked = pool.asked.wish, None
        pause_s = min(BACK_OFF_MAX_S, BACK_OFF_S * 2**pool.refusals)
        pool.refusals += 1
        pool.wait_s = now_s + self.rng.uniform(0.5, 1.0) * pause_s
        pool.words = f"{wish.why}: refused: {why}"
        return [LogEvent(job, "not regrouped", pool.words) for job in sorted(wish.jobs, key=numbered)]

    def _compare(self, now_s: float) -> list[PoolsAction]:
        """Say how long iterations take that were predicted, once they are measured."""
        actions: list[PoolsAction] = []
        for job, predicted in sorted(self._predicted.items()):
            heard = self.profiles.get(job)
            if now_s - predicted.at_s > CHECK_S:
                del self._predicted[job]
            elif (
                heard is not None
                and heard.told.config == predicted.config
                and heard.told.timings >= TIMINGS_MIN
                and now_s - predicted.at_s >= SETTLE_S
            ):
                del self._predicted[job]
                off = heard.told.step_s / predicted.iteration_s - 1 if predicted.iteration_s > 0 else 0.0
                words = f"predicted {predicted.iteration_s:.3g} s, measured {heard.told.step_s:.3g} s ({off:+.0%})"
                actions.append(LogEvent(job, "iteration measured", words))
        return actions


def _profile(told: ProfileTold) -> JobProfile:
    return JobProfile(JobId(told.job), told.work_s, told.net_s * LEAN)
