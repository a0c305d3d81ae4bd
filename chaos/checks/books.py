"""What must hold of the books: every GPU on which a rank runs is on its job's bill, every GPU·s of a bill is accounted
for once, and whatever hosts die, every agent has the same record of each job that ended."""

from collections import Counter

from chaos.checks.ranks_seen import Rank, RanksHeld, newest_queue
from chaos.rack_seen import RackSeen
from chaos.world.world import World
from covey.core.ids import HostId, JobId
from covey.core.job_records import JobRecord, RecordsAsked

TOLD_MAX = 3
"""The most jobs that a failure names."""


class BillsHold:
    """In every copy of the log each bill counts the GPUs that its job holds, and what was held is used, idle, lost or
    not known, and once."""

    name, every_s = "bills account for all that jobs hold", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack

    def check(self, world: World) -> None:
        for name in self.rack.alive():
            scheduler = self.rack.plugin(name, "scheduler")
            if scheduler is not None:
                queue = scheduler.queue
                holds = Counter(id for gpus in queue.holders.values() for id in gpus.values())
                for job in queue.jobs.values():
                    job.bill.check(holds[job.id])


class GpusBilled(RanksHeld):
    """A GPU on which a rank runs is on its job's bill, as the newest copy of the log has it, while that job is placed
    there."""

    name = "GPUs in use are on bills"

    def look(self, ranks: list[Rank]) -> None:
        queue = newest_queue(self.rack)
        for rank in ranks:
            job = None if queue is None else queue.jobs.get(JobId(rank.job))
            if job is None or not job.placed or job.grant.epoch != rank.epoch:
                continue
            place = job.place_on(HostId(rank.host))
            if place is not None and job.awaits(place.host):
                unpaid = [gpu for gpu in place.gpus if f"{place.host} {gpu}" not in job.bill.since]
                assert not unpaid, f"{job.id} computes on {unpaid} of {place.host}, which are on no bill"


def unrecorded(rack: RackSeen) -> str:
    """Which records hosts with an agent lack, or have otherwise than others, in words; empty: all have the same, one of
    each job that some copy of the log says has ended."""
    kept: dict[str, dict[int, JobRecord]] = {}
    over: set[int] = set()
    for name in rack.alive():
        scheduler = rack.plugin(name, "scheduler")
        if scheduler is not None:
            kept[name] = {each.number: each for each in rack.hosts[name].records.file.find(RecordsAsked())}
            over |= {job.number for job in scheduler.queue.jobs.values() if job.over}
    known = {number: each for records in kept.values() for number, each in records.items()}
    if nowhere := sorted(over - known.keys()):
        return f"no host has a record of j{nowhere[0]}"
    for name, records in sorted(kept.items()):
        lacks = [f"j{number}" for number in sorted(known.keys() - records.keys())]
        if lacks:
            return f"{name} has no record of {', '.join(lacks[:TOLD_MAX])}"
        for number in sorted(known):
            if records[number] != known[number]:
                return f"{name} has another record of j{number}: {records[number]} and {known[number]}"
    return ""
