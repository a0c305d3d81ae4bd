"""What must hold of elastic jobs at every moment, whatever grows, shrinks, and is lost (`chaos.checks.invariants`)."""

from chaos.checks.ranks_seen import Rank, RanksHeld, newest_queue, ranks_of
from chaos.rack_seen import RackSeen
from chaos.world.world import World
from covey.core.ids import JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job

ENDS_S = 30.0
"""Seconds for which a process may still run once the log has it no longer: its agent may be cut off, and then its lease
ends it."""
STARTS_S = 120.0
"""Seconds within which a process that the log has runs on its host, while the agent there is alive and knows of it: a
host that cannot start it has given it up by then."""


class CarriedOnce:
    """In every copy of the log each rank of an elastic job that runs is carried by one process, each process has a
    place, and no two processes have a GPU."""

    name, every_s = "each rank of an elastic job is carried by one process", 0.5

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self._seen: dict[str, int] = {}

    def check(self, world: World) -> None:
        for name in self.rack.alive():
            scheduler = self.rack.plugin(name, "scheduler")
            if scheduler is not None and self._seen.get(name) != scheduler.queue.index:
                self._seen[name] = scheduler.queue.index
                self._look(name, scheduler.queue)

    def _look(self, name: str, queue: JobTable) -> None:
        gpus: dict[tuple[str, str], JobId] = {}
        for job in queue.live():
            if not job.spec.elastic or not job.placed:
                continue
            self._carried(name, job)
            for place in job.start.places:
                for gpu in place.gpus:
                    other = gpus.setdefault((place.host, gpu), job.id)
                    assert other == job.id, f"{name} has {job.id} and {other} on {gpu} of {place.host}"
                    holder = queue.holders.get(place.host, {}).get(gpu)
                    ended = place.host in job.ending.codes or place.host in job.ending.lost
                    assert ended or holder == job.id, (
                        f"{name}: {gpu} of {place.host} is {holder}'s, and {job.id} is on it"
                    )

    def _carried(self, name: str, job: Job) -> None:
        processes = sorted(process for place in job.start.places for process in place.ranks)
        ranks = sorted(rank for each in job.start.carried.values() for rank in each)
        what = f"{name} has {job.id} in configuration {job.healing.healed} with {job.start.carried}"
        assert ranks == list(range(job.spec.world_size)), f"{what}: not each rank once"
        assert processes == sorted(job.start.carried), f"{what}, and places of {processes}"
        assert all(each[0] == process for process, each in job.start.carried.items()), (
            f"{what}: a process lost its name"
        )
        per_host = [(place.host, gpu) for place in job.start.places for gpu in place.gpus]
        assert len(per_host) == len(set(per_host)) == len(processes) * job.spec.gpus_per_worker, f"{what} on {per_host}"


class OneProcessEach(RanksHeld):
    """No GPU runs two processes of one elastic job, each of which wants it for itself. A process of one name runs once
    in one configuration: a new one may begin while an earlier one of that name is about to end, on another host, and it
    is the newer one that is heard."""

    name = "a GPU runs one process of an elastic job, and each runs once"

    def look(self, ranks: list[Rank]) -> None:
        running: dict[tuple[str, str, int], Rank] = {}
        named: dict[tuple[str, int, int, int], Rank] = {}
        for rank in (rank for rank in ranks if rank.elastic and not rank.still):
            twin = named.setdefault((rank.job, rank.epoch, rank.rank, rank.config), rank)
            assert twin is rank, f"process {rank.rank} of {rank.job} runs on {twin.host} and on {rank.host}"
            for gpu in rank.gpus:
                other = running.setdefault((gpu, rank.job, rank.epoch), rank)
                assert other is rank, f"{gpu} runs processes {other.rank} and {rank.rank} of {rank.job}"


class ProcessesPlaced:
    """The processes of an elastic job that run are those that the log has on their hosts, others end within a bound;
    and those that the log has begin within a bound where an agent is alive. Until a host has said that a process that
    stays has the state, those that are to end run on, however long it is away."""

    name, every_s = "processes of elastic jobs run where the log has them", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self._since: dict[tuple[str, ...], float] = {}

    def check(self, world: World) -> None:
        queue = newest_queue(self.rack)
        if queue is None:
            return
        strays, missing, runs = set[tuple[str, ...]](), set[tuple[str, ...]](), set[tuple[str, str, int, int]]()
        for rank in (rank for rank in ranks_of(world) if rank.elastic):
            runs.add((rank.host, rank.job, rank.epoch, rank.rank))
            job = queue.jobs.get(JobId(rank.job))
            if job is not None and job.grant.epoch == rank.epoch and not _is_placed(job.as_sure(), rank):
                strays.add(("stray", rank.host, rank.job, str(rank.rank), str(rank.process.id.pid)))
        alive = set(self.rack.alive())
        for job in [job.as_sure() for job in queue.live()]:
            if not job.spec.elastic or job.state != "running" or job.ending.codes or job.healing.gone:
                continue
            for place in job.start.places:
                for process in place.ranks if place.host in alive and place.host not in job.healing.missing else ():
                    if (str(place.host), str(job.id), job.grant.epoch, process) not in runs:
                        missing.add(("missing", place.host, job.id, str(process), str(job.healing.healed)))
        self._since = {key: self._since.get(key, world.now) for key in strays | missing}
        for key, since in self._since.items():
            most_s = (ENDS_S if key[0] == "stray" else STARTS_S) + self.rack.patience_s
            assert world.now - since < most_s, (
                f"process {key[3]} of {key[2]} on {key[1]} is {key[0]} for {world.now - since:.0f} s"
            )


def _is_placed(job: Job, rank: Rank) -> bool:
    return any(place.host == rank.host and rank.rank in place.ranks for place in job.start.places)
