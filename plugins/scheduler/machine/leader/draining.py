"""Hosts that people drain: which ranks the leader has leave them, and when it asks again.

    drained --the gang can go on elsewhere--> MoveAsked --> it moves, or no other host has room --pause--> MoveAsked
            --it cannot--> it runs to its end there; with `stop_jobs` it stops, and is queued again

A gang leaves one host at a time: what is left of it has what its successors need.
"""

from collections.abc import Container

import msgspec

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.leader.admission import taken_back
from plugins.scheduler.machine.log.job_index import JobIndex
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.replacing import leaves_to, move_asked
from plugins.scheduler.messages.commands import MoveAsked, TakenBack

AGAIN_S = (2.0, 5.0, 15.0, 60.0)
"""Pause in seconds after the 1st, 2nd, ... time that a gang was asked to leave a host; it may have found no room."""
TRIES = 2
"""The number of times that a gang is asked to leave before it stops, where jobs that cannot leave are to stop."""

Departure = tuple[JobId, int, HostId]
"""A departure: job, epoch, and the host that it is to leave."""


class Asked(msgspec.Struct, frozen=True):
    times: int = 0
    again_s: float = 0.0


class Draining:
    """The departures that this leader asked for."""

    def __init__(self, queue: JobTable) -> None:
        self.queue = queue
        self.asked: dict[Departure, Asked] = {}

    def commands(
        self, roll: JobIndex, alive: Container[HostId], settled: Container[JobId], wall_s: float, now_s: float
    ) -> list[MoveAsked | TakenBack]:
        """Commands that have gangs leave drained hosts. `alive`: hosts that are alive; `settled`: jobs about which
        something else is decided now."""
        found: list[MoveAsked | TakenBack] = []
        known, self.asked = self.asked, {}
        for host, drain in self.queue.drained.items():
            if drain.cordon:
                continue
            for job in roll.by_age(roll.awaited.get(host, ()) if host in alive else ()):
                if job.state != "running" or job.place_on(host) is None:
                    continue
                departure = job.id, job.grant.epoch, host
                asked = known.get(departure, Asked())
                self.asked[departure] = asked
                told = {command.job for command in found}
                if job.seeks or job.id in settled or job.id in told or now_s < asked.again_s:
                    continue
                coordinator = leaves_to(job, host, alive)
                if coordinator is not None and not (drain.stop_jobs and asked.times >= TRIES):
                    pause_s = AGAIN_S[min(asked.times, len(AGAIN_S) - 1)]
                    self.asked[departure] = Asked(asked.times + 1, now_s + pause_s)
                    by = f"{drain.by}, who drains {host},"
                    found.append(move_asked(job, host, None, coordinator, by, wall_s))
                elif drain.stop_jobs:
                    found.append(taken_back(job, "preempted", f"{host} is drained, by {drain.by}", wall_s))
        return found
