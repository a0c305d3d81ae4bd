"""Volumes without a disk behind them: each slab in copies or with parity on other hosts, and a whole rack is lost.

A page of an ordinary volume is on its host's disk too, so no lender's loss costs one. A volume kept in memory only
must survive a rack instead: members of one group (the copies of a slab, or its parts and their parity) go to hosts of
different racks, by `placement.hosts_apart`. For comparison, the places are chosen without looking at racks: different
hosts, chosen as for any slab. Live volumes may have copies (`attach --mirror 2`), whose places come from the same
function, and no parity.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from covey.core.ids import HostId
from plugins.memory.policy import placement
from plugins.memory.policy.placement import LenderPeer
from sim.report import Cell, Progress, Report, Table

SLABS_PER_HOST = 64
FULL = 0.7
"""Share of all slabs that is lent at the end."""
HOSTS = 64
RACKS = (2, 4, 8)


@dataclass(frozen=True)
class Scheme:
    label: str
    members: int
    lost_max: int
    """Most members that may be lost without losing the slab."""


SCHEMES = (Scheme("two copies", 2, 1), Scheme("three copies", 3, 2), Scheme("4 parts + 2 parity", 6, 2))


@dataclass(frozen=True)
class Losses:
    """Shares of all slabs that are lost with a rack, over the racks, and how even the hosts are."""

    racks: int
    scheme: str
    apart: bool
    slabs: int
    mean: float
    worst: float
    spread: float
    """Standard deviation over mean of slabs lent, over hosts."""


class Cluster:
    """Racks of equal size, and what their hosts lend."""

    def __init__(self, racks: int, hosts: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = [HostId(f"h{n:04d}") for n in range(hosts)]
        self.rack_of = {name: f"r{n % racks}" for n, name in enumerate(self.names)}
        self.free = dict.fromkeys(self.names, SLABS_PER_HOST)

    def group(self, borrower: HostId, members: int, apart: bool) -> list[HostId]:
        """Hosts of one slab's group; its members find their places one after the other, as slabs of a volume do."""
        found: list[HostId] = []
        while len(found) < members:
            peers = [LenderPeer(name, "alive", free) for name, free in self.free.items() if name != borrower]
            candidates: Sequence[HostId] = [host for host in placement.askable(peers) if host not in found]
            if apart:
                candidates = placement.hosts_apart(candidates, found, self.rack_of)
            asked = placement.hosts_to_ask_by_view({host: self.free[host] for host in candidates}, found, self.rng)
            chosen = placement.freest(asked, self.free)
            if chosen is None:
                break
            self.free[chosen] -= 1
            found.append(chosen)
        return found

    def lost(self, groups: Sequence[Sequence[HostId]], lost_max: int) -> dict[str, float]:
        """Rack -> share of groups that do not survive it."""
        counts = [Counter(self.rack_of[host] for host in group) for group in groups]
        racks = sorted(set(self.rack_of.values()))
        return {rack: float(np.mean([count[rack] > lost_max for count in counts])) for rack in racks}


def losses(racks: int, scheme: Scheme, apart: bool, seed: int, hosts: int = HOSTS) -> Losses:
    """Fill a hall of racks once, and measure what is lost with each rack."""
    hall = Cluster(racks, hosts, seed)
    slabs = int(FULL * hosts * SLABS_PER_HOST) // scheme.members
    groups = [hall.group(hall.rng.choice(hall.names), scheme.members, apart) for _ in range(slabs)]
    assert all(len(set(group)) == scheme.members for group in groups), "a rack that is not full has room"
    lost: Mapping[str, float] = hall.lost(groups, scheme.lost_max)
    lent = np.array([SLABS_PER_HOST - free for free in hall.free.values()])
    spread = float(lent.std() / lent.mean())
    return Losses(racks, scheme.label, apart, slabs, float(np.mean(list(lost.values()))), max(lost.values()), spread)


def report(seed: int, progress: Progress, hosts: int = HOSTS) -> Report:
    """Run every scheme in halls of few and of many racks, with racks looked at and without."""
    cases = [(racks, scheme, apart) for racks in RACKS for scheme in SCHEMES for apart in (False, True)]
    found: list[Losses] = []
    for number, (racks, scheme, apart) in enumerate(cases):
        progress(number / len(cases), f"{racks} racks, {scheme.label}")
        found.append(losses(racks, scheme, apart, seed, hosts))
    rows: list[list[Cell]] = [
        [
            one.racks,
            one.scheme,
            "hosts of different racks" if one.apart else "different hosts",
            100 * one.mean,
            100 * one.worst,
            one.spread,
        ]
        for one in found
    ]
    columns = ("racks", "a slab is", "its members lie on", "lost with a rack %", "with the worst rack %", "spread")
    notes = (
        f"{hosts} hosts, {100 * FULL:.0f} % of what they lend is taken. Of two racks none may be lost with 4 + 2.",
    )
    table = Table("Losing a whole rack, with no disk behind", columns, rows, notes)
    return Report("memory-racks", {"runs": [asdict(one) for one in found]}, (table,))
