"""Spares of jobs: what waits here for jobs of this host and of others, and which hosts are asked to keep some."""

from collections.abc import Callable, Mapping

from covey.core.events import Send
from covey.core.ids import HostId, JobId
from plugins.base import Host
from plugins.facts import Place, SparesReady
from plugins.scheduler.machine.gang.spares import SparesOfOthers, destination
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.wire import SparesWanted, SparesWarm
from plugins.scheduler.service.ranks.envs import Envs
from plugins.scheduler.service.ranks.rankspec import spares_spec

HEARD_S = 5.0
"""Seconds within which a host is to hear a message about spares."""
MOVE_ASKS_S = 1.0
"""Seconds between two requests to the host where ranks of this one continue."""
TOLD_MAX = 16
"""The number of hosts of a job, the first ones, that hear how many processes wait elsewhere: those that would look for
a stand-in."""


class JobSpares:
    """Spares on this host, and those that it asks for. `send`: sends to another host, whatever becomes of it; `free`:
    GPUs that a job may have, of each host that takes jobs; `look`: called when ranks may now move."""

    def __init__(
        self,
        host: Host,
        queue: JobTable,
        envs: Envs,
        send: Callable[[Send], None],
        free: Callable[[Job], Mapping[HostId, int]],
        look: Callable[[], None],
    ) -> None:
        self.host, self.queue, self.envs = host, queue, envs
        self._send, self._free, self._look = send, free, look
        self.machine = SparesOfOthers(host.id)
        self._here: dict[tuple[JobId, int], SparesReady] = {}
        envs.keeps_spares = lambda job, host: self.machine.chosen.get(job.id) == host

    # ---- what waits here ----

    def ready(self, fact: SparesReady) -> None:
        key = fact.job, fact.epoch
        self._here[key] = fact
        if fact.why or fact.warm:
            those = "1 process waits" if fact.warm == 1 else f"{fact.warm} processes wait"
            what = (
                f"{those} to become one of its ranks, and have imported what it "
                f"imports{fact.why and f'; no more: {fact.why}'}"
            )
            once = f"{self.host.id}/{fact.epoch}/spares {fact.warm} {fact.why}"
            self.host.note(fact.job, "spares here", f"epoch {fact.epoch}: {what}", once)
        self._say(fact)

    def _say(self, fact: SparesReady) -> None:
        """Tell the hosts of the job how many spares wait here."""
        job, asked = self.queue.jobs.get(fact.job), self.machine.asked.get((fact.job, fact.epoch))
        if job is None or asked is None:
            return
        said = SparesWarm(fact.job, fact.epoch, fact.warm, fact.why[:200])
        hosts = [place.host for place in (*job.healing.leaving, *job.start.places) if place.host != self.host.id]
        for host in dict.fromkeys([asked.by, *hosts[:TOLD_MAX]]):
            self._send(Send(host, said, HEARD_S))

    # ---- once a second ----

    async def second(self) -> None:
        now_s = self.host.env.clock.now_s()
        for id, epoch in self.machine.over(self.queue.jobs, now_s):
            self.host.runner.end_spares(id, epoch)
            self._here.pop((id, epoch), None)
        self._here = {key: fact for key, fact in self._here.items() if key[0] in self.queue.jobs}
        for id, epoch in list(self.host.runner.running()):
            job = self.queue.jobs.get(id)
            if job is not None and job.grant.epoch == epoch and job.state == "running":
                self._ask_for(job, now_s)
        for key, asked in list(self.machine.asked.items()):
            job = self.queue.jobs.get(key[0])
            if job is not None and key not in self._here:
                await self._keep(job, asked.count, asked.modules)

    def _ask_for(self, job: Job, now_s: float) -> None:
        modules, place = self.host.runner.modules(job.id, job.grant.epoch), job.left_on(self.host.id)
        if not modules:
            return
        if place is not None:
            to = destination(job, place)
            if to is not None and self.machine.is_due(job.id, to, now_s, MOVE_ASKS_S):
                self._send(Send(to, SparesWanted(job.id, job.grant.epoch, len(place.ranks), modules), HEARD_S))
        if self.machine.chooses(job):
            to = self.machine.choose(job, self._free(job))
            if to is not None and self.machine.is_due(job.id, to, now_s):
                self._send(Send(to, SparesWanted(job.id, job.grant.epoch, job.spec.spares, modules), HEARD_S))

    def may_leave(self, job: Job, place: Place) -> bool:
        """Whether the job's ranks, which continue elsewhere, may end here now."""
        now_s, modules = self.host.env.clock.now_s(), self.host.runner.modules(job.id, job.grant.epoch)
        self._ask_for(job, now_s)
        return self.machine.may_leave(job, place, modules, now_s)

    # ---- what hosts say to one another ----

    async def on_message(self, sender: HostId, message: SparesWanted | SparesWarm) -> None:
        job = self.queue.jobs.get(message.job)
        if job is None or job.grant.epoch != message.epoch or job.state != "running":
            return
        if isinstance(message, SparesWarm):
            self.machine.heard(sender, message)
            self._look()
            return
        widest = max(len(place.ranks) for place in (*job.start.places, *job.healing.leaving))
        theirs = any(place.host == sender for place in (*job.start.places, *job.healing.leaving))
        if not theirs or message.count > max(widest, job.spec.spares):
            return
        key, now_s = (job.id, job.grant.epoch), self.host.env.clock.now_s()
        self.machine.keep(sender, key, message.count, message.modules, now_s)
        await self._keep(job, message.count, message.modules)
        if key in self._here:
            self._say(self._here[key])

    async def _keep(self, job: Job, count: int, modules: tuple[str, ...]) -> None:
        env = await self.envs.here(job)
        if env is None:
            self.envs.fetch_soon(job)
            return
        gpus = tuple(gpu.uuid for gpu in self.host.env.probes.gpus())[: job.spec.gpus_per_worker]
        await self.host.runner.keep_spares(spares_spec(job, env, gpus, count), modules)
