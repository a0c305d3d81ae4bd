"""Seeds that show a state never seen are kept, and their plans varied: what is rare is looked at from nearby.

Once a virtual second the state of a rack is made into a small signature: per host its role and whether it runs, the
states of slabs it borrows and lends (how many is left out), of jobs, and how far leases of ranks and of slabs are;
then what gangs do, and what happened to them before. Hosts are sorted, so their names do not count. `Seen` keeps the
signatures of a soak. A variation plays the same seed with one fault dropped, moved or added (`varied`), by a number
that is part of the line that repeats it.

Stories with a plan of faults are varied: `swarm`, and `mischief`, `people` and `strangers`, which are a swarm each.
The others strike a few faults at moments that they wait for, and then ask for what follows from those: with one fault
more or less what they ask for is not so. Their seeds vary them.
"""

import random
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chaos import faults
from chaos.rack_seen import RackSeen
from chaos.world.world import World

if TYPE_CHECKING:
    from plugins.scheduler.machine.log.jobs import Job

VARIATIONS = 2
"""Variations that are played of each seed that is kept."""


def varied(plan: Sequence[tuple[float, faults.AnyFault]], seed: int, number: int, hosts: Sequence[str]) -> faults.Plan:
    """The plan with one fault dropped, moved by 1 to 10 s, or added."""
    rng = random.Random(f"{seed}/vary/{number}")
    changed = list(plan)
    how = rng.choice(("drop", "move", "add")) if changed else "add"
    at = rng.randrange(len(changed)) if changed else 0
    if how == "drop":
        del changed[at]
    elif how == "move":
        second, fault = changed[at]
        by_s = rng.uniform(1.0, 10.0)
        changed[at] = (round(second - by_s if second - by_s > changed[0][0] else second + by_s, 3), fault)
    else:
        second = changed[at][0] if changed else 20.0
        known = [family for family in faults.FAMILIES if family not in faults.RARE]
        changed.append((round(second + rng.uniform(0.0, 5.0), 3), faults.draw(rng, rng.choice(known), hosts)))
    return sorted(changed, key=lambda entry: entry[0])


def signature(rack: RackSeen) -> int:
    """Signature of the state of a rack, without its names and numbers."""
    alive = set(rack.alive())
    told = []
    for name in rack.hosts:
        if name not in alive or not rack.began(name):
            told.append("down" if name not in alive else "begins")
            continue
        raft = rack.agents[name].log._raft
        words = [str(raft.role) if raft is not None else ""]
        words += _memory(rack, name) + _scheduler(rack, name)
        told.append(",".join(words))
    return zlib.crc32(";".join([*sorted(told), *_gangs(rack)]).encode())


def _memory(rack: RackSeen, name: str) -> list[str]:
    """States of slabs borrowed and lent on this host, and how far their leases are."""
    memory = rack.plugin(name, "memory")
    if memory is None:
        return []
    now_s, lender = rack.hosts[name].clock.now_s(), memory.lending.machine
    words = {f"b {slab.state}" for slab in memory.borrowing.machine._all()}
    words |= {f"l {lent.state}" for lent in lender.lent.values()}
    return sorted(words | {f"s {_left(lent.expires_s - now_s, lender._lease_s)}" for lent in lender.lent.values()})


def _scheduler(rack: RackSeen, name: str) -> list[str]:
    """States of jobs in this copy of the log, and how far the leases of ranks on this host are."""
    scheduler = rack.plugin(name, "scheduler")
    if scheduler is None:
        return []
    now_s = rack.hosts[name].clock.boot_s()
    words = {f"j {job.state}" for job in scheduler.queue.jobs.values()}
    leases = scheduler.leases.leases.values()
    return sorted(words | {f"r {_left(lease.until_s - now_s, lease.lease_s or 1.0)}" for lease in leases})


def _left(left_s: float, whole_s: float) -> str:
    """How a lease is, in one word, by the seconds that are left of it."""
    return "lost" if left_s <= 0 else "expiring" if left_s < whole_s / 2 else "held"


def _gangs(rack: RackSeen) -> list[str]:
    """What gangs do, and what happened to them before, by one copy of the log."""
    plugins = [plugin for plugin in (rack.plugin(name, "scheduler") for name in rack.hosts) if plugin is not None]
    live = plugins[0].queue.live() if plugins else []
    return sorted({f"{_GANG.get(job.state, job.state)} {_before(job)}" for job in live})


_GANG = {"placing": "forming", "running": "whole"}


def _before(job: "Job") -> str:
    tally = job.tally
    return (
        "preempted" if tally.preemptions else "lost a host" if tally.hosts_lost else "failed" if tally.failures else ""
    )


class Seen:
    """Signatures of all stories of a soak; `watch` each rack of them."""

    def __init__(self) -> None:
        self.states: set[int] = set()
        self.kept: list[int] = []
        """Seeds that showed a state which no earlier one had."""
        self.played = 0
        """Number of variations played."""

    def watch(self, rack: RackSeen) -> None:
        rack.world.watch(_Look(self, rack))

    def line(self) -> str:
        return f"{len(self.states)} states seen, {len(self.kept)} seeds kept, {self.played} variations played"


class _Look:
    name, every_s = "states seen", 1.0

    def __init__(self, seen: Seen, rack: RackSeen) -> None:
        self.seen, self.rack = seen, rack

    def check(self, world: World) -> None:
        self.seen.states.add(signature(self.rack))
