"""Ranks that are stuck, or late again and again: at the host that sums their job, and at the one that they run on."""

import asyncio
from collections.abc import Callable

import msgspec

from covey.core import HostId, JobId, Send
from covey.units import format_seconds
from plugins.base import Host
from plugins.facts import LateNow, RanksAwaited
from plugins.scheduler.machine.hangs import Hangs, RankAge
from plugins.scheduler.machine.job_table import JobTable
from plugins.scheduler.machine.jobs import Job
from plugins.scheduler.machine.late_hosts import LateHosts
from plugins.scheduler.messages.wire import RankHangs, StacksWanted

STACKS_S = 1.0
"""From asking for stacks to ending the rank: to write them."""
LATE_MAX = 4
"""Hosts that gossip names, the worst."""
GOSSIP_BYTES_MAX = 120
"""What they may take of the 960 bytes that a host gossips."""
STACKS_AGAIN_S = 5.0
"""Between two askings of the same ranks."""


class StuckRanks:
    """`send`: to another host, whatever becomes of it: what is still so is told again."""

    def __init__(self, host: Host, queue: JobTable, send: Callable[[Send], None]) -> None:
        self.host, self.queue, self._send = host, queue, send
        self.machine, self.late = Hangs(queue), LateHosts(queue)
        self._told = LateNow()
        self._ages: dict[tuple[JobId, int, int], RankAge] = {}
        """Job, epoch and rank -> its process."""
        self._asked_s: dict[tuple[JobId, int], float] = {}
        """When the stacks of these ranks were last asked for."""

    def awaited(self, fact: RanksAwaited) -> None:
        self.late.second(fact)
        for action in self.machine.handle(fact, self.host.env.clock.now_s()):
            self._send(action)

    def second(self) -> None:
        """Since when each process runs here; which hosts are late."""
        now_s, running = self.host.env.clock.now_s(), self.host.runner.running()
        found = {(id, epoch, rank): pid for (id, epoch), pids in running.items() for rank, pid in pids.items()}
        known = self._ages
        self._ages = {
            key: known[key] if _same(known.get(key), pid) else RankAge(pid, now_s) for key, pid in found.items()
        }
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if key in running}
        late = LateNow(tuple(self.late.late()[:LATE_MAX]))
        while len(msgspec.msgpack.encode(late)) > GOSSIP_BYTES_MAX:
            late = LateNow(late.hosts[:-1])
        if late != self._told:
            self._told = late
            self.host.spread("late", late)

    def on_message(self, sender: HostId, message: RankHangs | StacksWanted) -> None:
        """Of a host that sums what runs here, or says so: what is done about it is decided by what is known here."""
        job = self.queue.jobs.get(message.job)
        if job is None or job.spec.hang_s is None or job.epoch != message.epoch or not job.awaits(self.host.id):
            return
        if isinstance(message, RankHangs):
            self.host.env.spawn(f"{job.id} hangs", self._end(sender, job, message))
        else:
            self.host.env.spawn(f"stacks of {job.id}", self._keep_stacks(job))

    async def _end(self, sender: HostId, job: Job, said: RankHangs) -> None:
        key, now_s = (job.id, job.epoch, said.rank), self.host.env.clock.now_s()
        age, hang_s = self._ages.get(key), job.spec.hang_s
        if age is None or hang_s is None or min(said.waits_s, now_s - age.since_s) < hang_s:
            return
        self._ages[key] = RankAge(age.pid, now_s)  # what ends it is on its way
        waited = format_seconds(said.waits_s)
        stacks = f"stacks of ranks that could write them: agentctl logs {job.id}"
        why = f"the others waited {waited} for rank {said.rank} (--hang {format_seconds(hang_s)}); {stacks}"
        self.host.note(job.id, "rank stuck", f"{why}; process {age.pid} is ended, as {sender} says, which sums for it")
        await self._keep_stacks(job)
        await asyncio.sleep(STACKS_S)
        await self.host.runner.end_stuck(job.id, job.epoch, said.rank, age.pid, why)

    async def _keep_stacks(self, job: Job) -> None:
        now_s = self.host.env.clock.now_s()
        if now_s - self._asked_s.get((job.id, job.epoch), -STACKS_AGAIN_S) >= STACKS_AGAIN_S:
            self._asked_s[job.id, job.epoch] = now_s
            await self.host.runner.keep_stacks(job.id, job.epoch)


def _same(age: RankAge | None, pid: int) -> bool:
    return age is not None and age.pid == pid
