"""Which hosts the GPUs of a gang are on, and what it costs a gang to be spread.

The model. A cluster is `hosts` times `gpus_each`. A gang that starts is placed by the agents' own `place`: packed when
the model is skewed (skew > PACKLIMIT) or nothing is known of it, into the gaps otherwise (a skew in a trace means that
a history has shown it), a single GPU where it leaves the least. Placement never keeps a gang waiting: it starts
whenever enough GPUs are free, wherever they are (Tiresias §3.4). So hosts change two things only. One is how many of
them a gang spans. The other is the pace of a gang whose skew is above PACKLIMIT as published (whatever limit packing
goes by) and that spans more hosts than the fewest that could hold it: the same work takes 1 + `slowdown` times as long
until it is placed again. No gang migrates; a checkpoint holds its places until it is over, and a restart is a new
placement.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from covey.core.ids import HostId
from plugins.scheduler.policy.packing import PACKLIMIT
from plugins.scheduler.policy.place import consolidate, place

SKEWS = {
    "vgg19": 0.715,
    "vgg16": 0.743,
    "vgg11": 0.773,
    "alexnet": 0.610,
    "resnet152": 0.039,
    "resnet101": 0.053,
    "resnet50": 0.092,
    "inception_v4": 0.036,
    "inception_v3": 0.086,
    "googlenet": 0.146,
}
"""Largest tensor over all bytes, by the `model` of a trace (Gu 2021, table 3.3)."""


@dataclass(frozen=True)
class Placing:
    """What is assumed of gangs and hosts."""

    packlimit: float = PACKLIMIT
    """Skew above which a gang is packed."""
    skew: float | None = None
    """Skew of a job whose trace says neither `skew` nor a `model` of SKEWS; None: it has shown nothing, so it is
    packed, as agents do."""
    slowdown: Fraction = Fraction(0)
    """How much longer a skewed gang takes that is spread, unless its trace says `spread_slowdown`: 1/2 is one and a
    half times as long."""


@dataclass
class Tally:
    """Counts of placements. A start is a placement: a job that is stopped and restarted counts again."""

    gangs: int = 0
    """Starts of gangs of more than one GPU."""
    hosts: int = 0
    """Hosts on which these gangs were, summed up."""
    hosts_fewest: int = 0
    """Hosts on which these gangs could have been in an empty cluster, summed up."""
    spread: int = 0
    """Gangs on more hosts than the fewest."""
    hosts_spread: int = 0
    """Hosts of the spread gangs, summed up."""
    needless: int = 0
    """Gangs on several hosts when fewer hosts had room."""
    skewed: int = 0
    skewed_spread: int = 0
    lost_gpu_s: Fraction = field(default_factory=Fraction)
    """GPU-seconds that slower paces took beyond the work."""

    def found(self) -> dict[str, float | int]:
        """The counts by name, for people and programs; a mean of nothing is 0."""
        gangs = max(1, self.gangs)
        return {
            "gang_starts": self.gangs,
            "nodes_per_gang_mean": self.hosts / gangs,
            "nodes_per_gang_fewest_mean": self.hosts_fewest / gangs,
            "gangs_spread": self.spread,
            "nodes_per_spread_gang_mean": self.hosts_spread / max(1, self.spread),
            "gangs_spread_needlessly": self.needless,
            "gangs_skewed": self.skewed,
            "gangs_skewed_spread": self.skewed_spread,
            "spread_lost_gpu_s": float(self.lost_gpu_s),
        }


@dataclass
class _Placed:
    hosts: dict[HostId, int]
    pace: Fraction
    """Seconds that a second of work takes."""
    began_s: int
    """Seconds at this pace that the job still had to run when it was placed."""


class Floor:
    """Which job is on which host. Jobs are numbers; `asked(job)` is (GPUs, skew or None, slowdown or None)."""

    def __init__(
        self,
        hosts: int,
        gpus_each: int,
        placing: Placing,
        asked: Callable[[int], tuple[int, float | None, Fraction | None]],
    ) -> None:
        digits = len(str(hosts))
        self.gpus_each, self.placing, self.asked = gpus_each, placing, asked
        self.free = {HostId(f"{at:0{digits}}"): gpus_each for at in range(hosts)}
        """Free GPUs by host, without hosts that have none."""
        self.placed: dict[int, _Placed] = {}
        self.work: dict[int, Fraction] = {}
        """Seconds of work still to do, exact, for jobs that were ever slow."""
        self.tally = Tally()

    def put(self, job: int, remaining_s: int) -> int:
        """Place a job with `remaining_s` of work; returns the seconds that it takes there, rounded up."""
        gpus, skew, slowdown = self.asked(job)
        skew = self.placing.skew if skew is None else skew
        chosen = place(self.free, gpus, 1, skew, self.placing.packlimit)
        assert chosen is not None, "a gang that starts has all its GPUs"
        self.tally.needless += len(chosen) > 1 and len(chosen) > len(consolidate(self.free, gpus))
        for host, count in chosen.items():
            self.free[host] -= count
            if not self.free[host]:
                del self.free[host]
        pace = Fraction(1)
        if gpus > 1 and self._count(gpus, len(chosen), skew is not None and skew > PACKLIMIT):
            pace += self.placing.slowdown if slowdown is None else slowdown
        work = self.work.get(job, Fraction(remaining_s))
        if pace != 1 or job in self.work:
            self.work[job] = work
            remaining_s = math.ceil(work * pace)
        self.placed[job] = _Placed(chosen, pace, remaining_s)
        return remaining_s

    def _count(self, gpus: int, hosts: int, skewed: bool) -> bool:
        """Count a placement; returns whether it is a skewed gang that is spread."""
        fewest = -(-gpus // self.gpus_each)
        tally = self.tally
        tally.gangs += 1
        tally.hosts += hosts
        tally.hosts_fewest += fewest
        tally.spread += hosts > fewest
        tally.hosts_spread += hosts if hosts > fewest else 0
        tally.skewed += skewed
        tally.skewed_spread += skewed and hosts > fewest
        return skewed and hosts > fewest

    def lift(self, job: int, remaining_s: int) -> int:
        """Take a job off its places, with `remaining_s` seconds still to come there; returns the seconds of its work,
        rounded up."""
        placed = self.placed.pop(job)
        for host, count in placed.hosts.items():
            self.free[host] = self.free.get(host, 0) + count
        if job not in self.work:
            return remaining_s
        passed = placed.began_s - remaining_s
        before = self.work[job]
        self.work[job] = max(Fraction(0), before - passed / placed.pace)
        self.tally.lost_gpu_s += self.asked(job)[0] * (passed - (before - self.work[job]))
        return math.ceil(self.work[job])

    def check(self) -> None:
        """Assert that held and free GPUs of each host sum up to `gpus_each`."""
        held: dict[HostId, int] = {}
        for placed in self.placed.values():
            for host, count in placed.hosts.items():
                assert count > 0
                held[host] = held.get(host, 0) + count
        for host in {*held, *self.free}:
            assert held.get(host, 0) + self.free.get(host, 0) == self.gpus_each, f"host {host}"
