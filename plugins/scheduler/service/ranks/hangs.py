"""Ranks that are stuck, or late again and again: at the host that sums their job, at its first one, and where they run.

each host      --GangNow--> the first host of a gang that is alive asks all of them, as often as its ranks say how
                            they get on, and tells whoever is to do something about it
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from covey.core.errors import Refused
from covey.core.events import Send
from covey.core.ids import HostId, JobId
from covey.core.units import format_seconds
from covey.wire.job import heartbeat_s
from plugins.base import Host
from plugins.facts import HeartbeatHeard, RanksAwaited
from plugins.gossiped import LateNow
from plugins.scheduler.machine.gang.hangs import Hangs
from plugins.scheduler.machine.gang.late_hosts import LateHosts
from plugins.scheduler.machine.gang.rank_signs import RankAge, RankSigns, is_beside
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.wire import GangNow, GangNowAnswer, GangStands, RankHangs, StacksWanted
from plugins.scheduler.policy.hang import StuckGang, StuckRank, learnt_s

STACKS_S = 1.0
"""Seconds from asking for stacks to ending the rank, in which to write them."""
LATE_MAX = 4
"""The most late hosts that gossip names, the worst."""
GOSSIP_BYTES_MAX = 120
"""The most bytes that they take of the 960 bytes that a host gossips."""
STACKS_AGAIN_S = 5.0
"""Seconds between two requests for the stacks of the same ranks."""
ANSWER_S = 2.0
"""Seconds that a host may take to say how its ranks are doing."""


class StuckRanks:
    """Stuck and late ranks, as this host knows them. `send`: sends to another host, whatever becomes of it: what still
    holds is told again."""

    def __init__(self, name: str, host: Host, queue: JobTable, send: Callable[[Send], None]) -> None:
        """`name`: the plugin's name."""
        self.name, self.host, self.queue, self._send = name, host, queue, send
        self.machine, self.late, self.signs = Hangs(queue), LateHosts(queue), RankSigns(queue, host.id)
        self._told = LateNow()
        self._asked_s: dict[tuple[JobId, int], float] = {}
        """When the stacks of these ranks were last asked for."""
        self._looked_s: dict[tuple[JobId, int], float] = {}
        """When the hosts of a gang were last asked how its ranks are doing."""
        self.named: dict[tuple[JobId, int], str] = {}
        """Gangs that this host looks after, of which nobody said `--hang`, and that make no progress: who, in words."""
        self.step_s: Callable[[JobId, int], float | None] = lambda job, epoch: None
        """How long the steps of a grant take on this host, the median in seconds; None: too few are known."""

    # ---- what is known here ----

    def awaited(self, fact: RanksAwaited) -> None:
        self.late.second(fact)
        self._send_all(self.machine.handle(fact, self.host.env.clock.now_s()))

    def heartbeat(self, fact: HeartbeatHeard) -> None:
        self.signs.heard(fact, self.host.env.clock.now_s())

    def second(self) -> None:
        """Take note, once a second, since when each process runs here, how gangs are doing that this host looks after,
        and which hosts are late."""
        now_s, running = self.host.env.clock.now_s(), self.host.runner.running()
        self.signs.second(now_s, running, self.host.log.leader is not None)
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if key in running}
        self._looked_s = {key: self._looked_s.get(key, now_s) for key in running}
        self.named = {key: who for key, who in self.named.items() if key in running}
        for key, looked_s in self._looked_s.items():
            job = self.queue.as_it_runs(key[0])
            if job is not None and self._looks_after(job, key[1]) and now_s - looked_s >= heartbeat_s(job.spec.hang_s):
                self._looked_s[key] = now_s
                self.host.env.spawn(f"progress of {job.id}", self._look(job))
        late = LateNow(tuple(self.late.late()[:LATE_MAX]))
        while len(msgspec.msgpack.encode(late)) > GOSSIP_BYTES_MAX:
            late = LateNow(late.hosts[:-1])
        if late != self._told:
            self._told = late
            self.host.spread("late", late)

    def gang_now(self, id: JobId, epoch: int) -> GangNowAnswer:
        job = self.queue.as_it_runs(id)
        if job is None or job.grant.epoch != epoch or self.host.runner.is_ending(id, epoch):
            return GangNowAnswer(False)
        connected = {peer.rank for peer in self.host.peers(id) if peer.epoch == epoch}
        return self.signs.now(job, connected, self.host.env.clock.now_s())

    # ---- the gang's first host ----

    def _looks_after(self, job: Job, epoch: int) -> bool:
        """Whether this host is the first of the gang that is alive, as far as is known here."""
        if self._limit_s(job) is None or job.grant.epoch != epoch or job.state != "running":
            return False
        alive = {view.host for view in self.host.hosts() if view.state == "alive"} | {self.host.id}
        hosts = [place.host for place in job.start.places if place.host in alive and place.host not in job.ending.codes]
        return hosts[:1] == [self.host.id]

    async def _look(self, job: Job) -> None:
        epoch = job.grant.epoch
        hosts = [place.host for place in job.start.places if place.host not in job.ending.codes]
        answers = await asyncio.gather(*(self._ask(host, job.id, epoch) for host in hosts))
        known = {host: answer for host, answer in zip(hosts, answers, strict=True) if answer is not None}
        now_s, limit_s = self.host.env.clock.now_s(), self._limit_s(job)
        self._send_all(self.machine.answered(job.id, epoch, known, now_s))
        if job.spec.hang_s is None and limit_s is not None:
            self._name(job, self.machine.unasked(job.id, epoch, known, limit_s, now_s))

    def _limit_s(self, job: Job) -> float | None:
        """Seconds for which the job may make no progress: as was said, else as its steps here tell; None: not known."""
        return job.spec.hang_s if job.spec.hang_s is not None else learnt_s(self.step_s(job.id, job.grant.epoch))

    def _name(self, job: Job, found: StuckRank | StuckGang | None) -> None:
        """Say who makes no progress, once in the job's story, with the stacks of all in their output. It is left at
        that: nobody said `--hang`."""
        key = job.id, job.grant.epoch
        if found is None:
            if self.named.pop(key, None) is not None:
                self.host.note(job.id, "progress again", "its ranks make steps, or give other signs of life")
            return
        if isinstance(found, StuckRank):
            place = next((place for place in job.start.places if found.rank in place.ranks), None)
            where = "" if place is None else f" on {place.host}"
            who = f"the others waited {format_seconds(found.waits_s)} for {_named(job, found.rank)}{where}: {found.why}"
        else:
            who = f"{found.why}; no single rank is at fault"
        usual = format_seconds(self.step_s(*key) or 0.0)
        words, is_new = f"{who} (its steps take {usual}; submit --hang ends such a rank)", key not in self.named
        self.named[key] = words
        if is_new:
            stacks = f"; their stacks, where ranks could write them, are in agentctl logs {job.id}"
            self.host.note(job.id, "no progress", f"{words}{stacks}")
            self.host.env.spawn(f"stacks of {job.id}", self._keep_stacks(job))
            hosts = [place.host for place in job.start.places if place.host != self.host.id]
            self._send_all([Send(host, StacksWanted(*key), STACKS_AGAIN_S) for host in hosts])

    async def _ask(self, host: HostId, id: JobId, epoch: int) -> GangNowAnswer | None:
        if host == self.host.id:
            return self.gang_now(id, epoch)
        try:
            answer = await self.host.ask(self.name, host, GangNow(id, epoch), ANSWER_S)
        except (TimeoutError, Refused):
            return None
        return answer if isinstance(answer, GangNowAnswer) else None

    def _send_all(self, sends: Sequence[Send]) -> None:
        for send in sends:
            self._send(send)

    # ---- a host of its ranks ----

    def on_message(self, sender: HostId, message: RankHangs | GangStands | StacksWanted) -> None:
        """A host that sums what runs here, or looks after it, says that ranks hang: what is done about it is decided by
        what is known here."""
        job = self.queue.as_it_runs(message.job)
        if job is None or job.grant.epoch != message.epoch or not job.awaits(self.host.id):
            return
        if isinstance(message, StacksWanted):
            self.host.env.spawn(f"stacks of {job.id}", self._keep_stacks(job))
        elif is_beside(job) or job.spec.hang_s is None:
            return
        elif isinstance(message, RankHangs):
            self.host.env.spawn(f"{job.id} hangs", self._end(sender, job, message))
        else:
            self.host.env.spawn(f"{job.id} makes no progress", self._end_all(sender, job, message))

    async def _end(self, sender: HostId, job: Job, said: RankHangs) -> None:
        key, now_s = (job.id, job.grant.epoch, said.rank), self.host.env.clock.now_s()
        age, hang_s = self.signs.ages.get(key), job.spec.hang_s
        if age is None or not age.pid or hang_s is None or min(said.waits_s, now_s - age.since_s) < hang_s:
            return
        if self._is_alive(job, hang_s, said.rank) or self._waits_itself(job, said.rank):
            return
        self.signs.ages[key] = RankAge(age.pid, now_s)  # what ends it is on its way
        waited = format_seconds(said.waits_s)
        known = f", and {said.why}" if said.why else ""
        stacks = f"their stacks, where ranks could write them, are in agentctl logs {job.id}"
        named = f"{_named(job, said.rank)} (--hang {format_seconds(hang_s)})"
        why = f"the others waited {waited} for {named}{known}; {stacks}"
        who = "coordinates it" if said.why else "sums its tensors"
        self.host.note(job.id, "rank stuck", f"{why}; process {age.pid} is ended, as told by {sender}, which {who}")
        await self._keep_stacks(job)
        await asyncio.sleep(STACKS_S)
        await self.host.runner.end_stuck(job.id, job.grant.epoch, said.rank, age.pid, why)

    async def _end_all(self, sender: HostId, job: Job, said: GangStands) -> None:
        hang_s = job.spec.hang_s
        if hang_s is None or said.quiet_s < hang_s or self._is_alive(job, hang_s):
            return
        if not self.gang_now(job.id, job.grant.epoch).known:
            return
        stacks = f"their stacks, where ranks could write them, are in agentctl logs {job.id}"
        why = f"{said.why}; no single rank is at fault (--hang {format_seconds(hang_s)}); {stacks}"
        self.host.note(job.id, "job stuck", f"{why}; the job is ended, as told by {sender}, which coordinates it")
        await self._keep_stacks(job)
        await asyncio.sleep(STACKS_S)
        await self.host.runner.stop(job.id, job.grant.epoch, 0.0, why)

    def _is_alive(self, job: Job, hang_s: float, rank: int | None = None) -> bool:
        """Whether this rank here, or any, has given a sign of life since."""
        ranks = self.gang_now(job.id, job.grant.epoch).ranks
        each = [found for found in ranks if rank in (None, found.rank) and found.says]
        return any(found.quiet_s is not None and found.quiet_s < hang_s for found in each)

    def _waits_itself(self, job: Job, rank: int) -> bool:
        """Whether this rank here says that it waits for another one."""
        return any(found.rank == rank and found.waits_s > 0 for found in self.gang_now(job.id, job.grant.epoch).ranks)

    async def _keep_stacks(self, job: Job) -> None:
        now_s = self.host.env.clock.now_s()
        if now_s - self._asked_s.get((job.id, job.grant.epoch), -STACKS_AGAIN_S) >= STACKS_AGAIN_S:
            self._asked_s[job.id, job.grant.epoch] = now_s
            await self.host.runner.keep_stacks(job.id, job.grant.epoch)


def _named(job: Job, process: int) -> str:
    """The rank for which others wait, for people; in an elastic job its process, and the ranks that this carries."""
    ranks = job.carried_by([process])
    if len(ranks) < 2:
        return f"rank {process}"
    return f"process {process}, which carries ranks {', '.join(map(str, ranks))}"
