"""No slab stays lent that its borrower does not use: within a lease its lender has the memory back.

A slab is unused while its borrower's agent runs, knows what the processes of its volumes have, and has no such place,
nor looks for one under that epoch. The time counts anew when the lender's agent or its slab process began anew, since
it then grants a new lease, and is longer where a borrower said that it would be away.
"""

from typing import Any

from chaos.rack_seen import RackSeen
from chaos.world.world import World
from plugins.memory.policy import mirroring

SLACK_S = 5.0
"""Seconds beyond a lease: lenders look once a second. A renewal that was sent before may be on its way for a third of
a lease besides."""
LentKey = tuple[Any, ...]


class UnusedSlabs:
    """An invariant that watches all lenders of a rack."""

    name, every_s = "no unused slab stays lent", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self._since: dict[LentKey, float] = {}
        self._away: dict[LentKey, None] = {}
        """Slabs that were lent for longer than a lease because their borrower had said that it would be away."""

    def check(self, world: World) -> None:
        unused: dict[LentKey, float] = {}
        for name in self.rack.alive():
            memory = self.rack.plugin(name, "memory")
            for lent in [] if memory is None else memory.lending.machine.lent.values():
                if not self._is_unused(lent):
                    continue
                ref, machine = lent.slab, memory.lending.machine
                key = (*self._programs(name), lent.borrower, ref.volume, ref.index, ref.epoch)
                unused[key] = since = self._since.get(key, world.now)
                if lent.expires_s - self.rack.hosts[name].clock.now_s() > machine._lease_s + 1.0:
                    self._away[key] = None
                lease_s = machine._lease_s
                most_s = mirroring.orphan_after_s(lease_s, lent.members) + lease_s / 3 + SLACK_S
                if key in self._away:
                    most_s += self.rack.agents[name].config.gossip.away_s
                assert world.now - since <= most_s, (
                    f"{name} lends slab {ref.index} of {ref.volume}, epoch {ref.epoch}, to {lent.borrower}, which has "
                    f"not used it for {world.now - since:.0f} s"
                )
        self._since = unused
        self._away = {key: None for key in self._away if key in unused}

    def _programs(self, lender: str) -> LentKey:
        """Process ids of the lender's agent and of its slab process."""
        host = self.rack.hosts[lender]
        return (lender, host.agent and host.agent.id.pid, *(process.id.pid for process in host.find("slabd")))

    def _is_unused(self, lent: Any) -> bool:
        """Whether the slab is unused; False while it cannot be known."""
        memory = self.rack.plugin(str(lent.borrower), "memory")
        if memory is None or lent.slab.volume in memory.borrowing.machine.awaited:
            return False
        volume = memory.borrowing.machine.volumes.get(lent.slab.volume)
        if volume is None:
            return lent.slab.volume not in memory.borrowing.volumes
        return lent.slab.epoch not in volume.slabs[lent.slab.index].epochs
