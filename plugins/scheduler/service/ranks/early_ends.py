"""Ranks that end with 0 while others of their gang run: the log is told, and so are the ranks that may wait for them.

    RankEndedHere(0) --a while--> RanksDone, in the log --> each host: RanksHaveLeft to its ranks,
    all of a host's ranks, RanksReported -----------^                  RanksLeft to its aggregator, which may sum for it

Ranks that end well end a moment apart. So nothing is said for a while, and of a job that is over by then never.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import assert_never

from covey.core.ids import JobId
from covey.tensors.owner.leaving import who
from covey.wire.job import RanksHaveLeft
from plugins.base import Host
from plugins.facts import JobJoined, RankEndedHere, RankLeavesHere, RanksLeft, RankWaitsInVain, StepTimed
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import RanksDone
from plugins.scheduler.service.log import QueueLog

SOON_S = 0.3
"""The least seconds between the end of a rank and the word of it."""
Grant = tuple[JobId, int]


class EarlyEnds:
    """Early ends of ranks here, and of gangs that have ranks here, or whose tensors this host may sum."""

    def __init__(self, host: Host, queue: JobTable, log: QueueLog) -> None:
        self._host, self._queue, self._log = host, queue, log
        self._steps: dict[Grant, dict[int, int]] = {}
        """The newest step of each rank here."""
        self._ended: dict[Grant, dict[int, float]] = {}
        """When each rank here that ended with 0 was heard to have ended."""
        self._gone_s: dict[JobId, float] = {}
        """Gangs that keep running without some of their ranks, and since when this host knows."""
        self._told: dict[JobId, tuple[int, frozenset[int]]] = {}
        """Gangs in `_gone_s` -> what the ranks here were told, under which epoch."""
        self._codes: dict[Grant, dict[int, int]] = {}
        """The exit status of each rank here that ended for good while others of this host run."""
        self._vain: dict[Grant, dict[int, str]] = {}
        """Ranks here that gave up waiting for one that has left, and why."""

    # ---- what is heard ----

    def on_fact(self, fact: StepTimed | RankEndedHere | RankLeavesHere | JobJoined | RankWaitsInVain) -> None:
        match fact:
            case StepTimed():
                self._steps.setdefault((fact.job, fact.epoch), {})[fact.rank] = fact.step
            case RankEndedHere():
                self._codes.setdefault((fact.job, fact.epoch), {})[fact.rank] = fact.code
                if fact.code == 0:
                    self._has_ended(fact)
            case RankLeavesHere():
                self._has_ended(fact)
            case JobJoined():
                if self._told.pop(fact.job, None) is not None:  # a process that was not told yet
                    self._look_soon(fact.job)
            case RankWaitsInVain():
                self._vain.setdefault((fact.job, fact.epoch), {})[fact.rank] = fact.why
                said = f"rank {fact.rank} on {self._host.id} gives up waiting, with an error: {fact.why}"
                self._host.note(fact.job, "a rank gave up waiting", said)
            case _:
                assert_never(fact)

    def _has_ended(self, fact: RankEndedHere | RankLeavesHere) -> None:
        known = self._ended.setdefault((fact.job, fact.epoch), {})
        known.setdefault(fact.rank, self._host.env.clock.now_s())
        self._look_soon(fact.job)

    def look(self, changed: Iterable[JobId]) -> None:
        """Look at the jobs that changed in the log."""
        for id in changed:
            job = self._queue.jobs.get(id)
            if job is not None and job.state == "running" and job.healing.gone:
                if id not in self._gone_s:
                    self._gone_s[id] = self._host.env.clock.now_s()
                    self._look_soon(id)
            else:
                self._gone_s.pop(id, None)
                self._told.pop(id, None)

    # ---- what is known here ----

    def codes(self, job: JobId, epoch: int) -> dict[int, int]:
        """The exit status of each rank of this grant that ended while others of this host run."""
        return dict(self._codes.get((job, epoch), {}))

    def why_failed(self, job: JobId, epoch: int, codes: Mapping[int, int]) -> str:
        """Why the first of these ranks that failed did so, for people: it waited for a rank that has left. Empty: it is
        not known. `codes`: the exit status of each rank, in the order of their ends."""
        rank = next((rank for rank, code in codes.items() if code != 0), None)
        why = "" if rank is None else self._vain.get((job, epoch), {}).get(rank, "")
        return " ".join(why.split("; next: ")[0].split())

    # ---- once a second, and soon after something was heard ----

    def _look_soon(self, job: JobId) -> None:
        self._host.env.spawn(f"ranks of {job} ended", self._look_after(SOON_S))

    async def _look_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.second()

    def second(self) -> None:
        now_s, running = self._host.env.clock.now_s(), self._host.runner.running()
        self._steps = {grant: steps for grant, steps in self._steps.items() if grant in running}
        self._ended = {grant: ranks for grant, ranks in self._ended.items() if grant in running}
        self._codes = {grant: codes for grant, codes in self._codes.items() if grant in running}
        self._vain = {grant: whys for grant, whys in self._vain.items() if not self._queue.over(*grant)}
        for grant, ranks in self._ended.items():
            job = self._queue.as_it_runs(grant[0])
            place = job.place_on(self._host.id) if job is not None and job.spec.elastic else None
            here = [rank for rank in ranks if place is None or rank in place.ranks]  # others carry what those had
            done = [rank for rank in here if now_s - ranks[rank] >= SOON_S]
            if (
                job is not None
                and job.grant.epoch == grant[1]
                and job.state == "running"
                and set(done) - job.healing.gone.keys()
            ):
                self._host.env.spawn(f"ranks of {job.id} ended early", self._say(job, done))
        for id, since_s in self._gone_s.items():
            job = self._queue.jobs.get(id)
            if job is not None and now_s - since_s >= SOON_S:
                self._tell(job)

    async def _say(self, job: Job, ranks: Iterable[int]) -> None:
        steps = self._steps.get((job.id, job.grant.epoch), {})
        done = {rank: steps.get(rank) for rank in ranks}
        await self._log.insist(RanksDone(wall_s=0.0, job=job.id, epoch=job.grant.epoch, host=self._host.id, steps=done))

    def _tell(self, job: Job) -> None:
        self._host.publish(RanksLeft(job.id, job.grant.epoch, dict(job.healing.gone)))
        told = job.grant.epoch, frozenset(job.healing.gone)
        peers = [
            peer
            for peer in self._host.peers(job.id)
            if peer.epoch == job.grant.epoch and peer.rank not in job.healing.gone
        ]
        if not peers or self._told.get(job.id) == told:
            return
        self._told[job.id] = told
        for peer in peers:
            peer.send(RanksHaveLeft(dict(job.healing.gone)))
        left = "; ".join(who(rank, gone.host, gone.step, True) for rank, gone in sorted(job.healing.gone.items()))
        here = ", ".join(str(rank) for rank in sorted({peer.rank for peer in peers}))
        said = f"{left}: rank {here}, which keeps running here, is told"
        self._host.note(job.id, "ranks left", said, key=f"{job.grant.epoch} {sorted(job.healing.gone)}")
