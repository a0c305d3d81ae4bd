"""What really runs of all jobs, on every host of a simulated rack."""

from abc import ABC, abstractmethod

from chaos.faults import HEALERS
from chaos.rack_seen import RackSeen
from chaos.world.host import SimProcess
from chaos.world.world import World
from covey.core.ids import JobId
from covey.ports.processes import Command
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job


class Rank:
    """One rank that really runs; of an elastic job a process, by its first rank."""

    __slots__ = (
        "config",
        "elastic",
        "epoch",
        "gpus",
        "host",
        "job",
        "job_class",
        "process",
        "rank",
        "size",
        "still",
        "tenant",
    )

    def __init__(self, host: str, process: SimProcess, command: Command) -> None:
        env = command.env
        self.host, self.process = host, process
        self.job, self.epoch, self.rank = env["COVEY_JOB_ID"], int(env["COVEY_EPOCH"]), int(env["COVEY_RANK"])
        self.gpus = tuple(gpu for gpu in env["COVEY_GPUS"].split(",") if gpu)
        self.still = process.loop.paused and process.name.endswith(HEALERS)
        """Whether the rank may be lost and is suspended: then another one may run in its place."""
        self.elastic, self.config = env.get("COVEY_ELASTIC") == "1", int(env.get("COVEY_INCARNATION", "0")) >> 16
        self.size, self.tenant, self.job_class = int(env["COVEY_WORLD_SIZE"]), env["COVEY_TENANT"], env["COVEY_CLASS"]


def ranks_of(world: World) -> list[Rank]:
    """Every rank that runs anywhere, on hosts that are cut off too."""
    found: list[Rank] = []
    for host in world.hosts.values():
        for pid, process in host.processes.items():
            command = host.commands.get(pid)
            if command is not None and "COVEY_RANK" in command.env:
                found.append(Rank(host.name, process, command))
    return found


class RanksHeld(ABC):
    """An invariant that looks at all ranks whenever a process began or ended."""

    every_s, after = 0.0, "process_count"

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self._looked_at = -1

    def check(self, world: World) -> None:
        if world.process_count != self._looked_at:
            self._looked_at = world.process_count
            self.look(ranks_of(world))

    @abstractmethod
    def look(self, ranks: list[Rank]) -> None:
        """Look at all ranks; raises AssertionError when the invariant does not hold."""


def newest_queue(rack: RackSeen) -> JobTable | None:
    """The newest copy of the log on a host whose agent runs."""
    plugins = [rack.plugin(name, "scheduler") for name in rack.alive()]
    queues: list[JobTable] = [plugin.queue for plugin in plugins if plugin is not None]
    return max(queues, key=lambda queue: queue.index, default=None)


def known_job(rack: RackSeen, job: str) -> Job | None:
    """The job as the newest copy of the log knows it."""
    queue = newest_queue(rack)
    return None if queue is None else queue.jobs.get(JobId(job))
