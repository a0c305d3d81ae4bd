"""Compares what a rank's pages say of its class with the log, over the whole rack, whatever has failed.

A gang is upgraded by one entry of the log, for all of its ranks. Hosts tell their ranks one after the other, some only
after they are back; so for a while some ranks still run as opportunistic, and none is guaranteed before the log says
so.
"""

from typing import Any

from chaos.actors.sharer import DeviceAccounts, SharerLink, name_of
from chaos.rackworld import SimRack
from chaos.world.world import World

KNOWN_S = 5.0
"""Seconds within which the copies of the log that are left have what an agent had that died."""


def alive(rack: SimRack) -> set[str]:
    """Ranks that live, as `name_of` calls them."""
    hosts = rack.hosts.values()
    return {name_of(host.commands[process.id.pid]) for host in hosts for process in host.find("sharer")}


class PagesFollowTheLog:
    """A rank follows the limits of a guaranteed one only where some copy of the log has its job as guaranteed, and
    there are never two such ranks on one device."""

    name, every_s = "pages say the class that the log says", 0.25

    def __init__(self, rack: SimRack, accounts: DeviceAccounts) -> None:
        self.rack, self.accounts = rack, accounts
        self._since: dict[str, float] = {}
        """Rank -> time since when no copy of the log agrees with its page."""

    def check(self, world: World) -> None:
        owner: dict[str, str] = {}
        guaranteed = self.guaranteed()
        for name, (_, uuids) in guaranteed.items():
            for uuid in uuids:
                other = owner.setdefault(uuid, name)
                assert other == name, f"{name} and {other} are both guaranteed on {uuid}, by their pages"
        against = [name for name, (link, _) in guaranteed.items() if not self._counts(link)]
        self._since = {name: self._since.get(name, world.now) for name in against}
        for name, since in self._since.items():
            age_s = world.now - since
            assert age_s < KNOWN_S, f"{name} is guaranteed by its page, for {age_s:.0f} s, and by no copy of the log"

    def guaranteed(self) -> dict[str, tuple[SharerLink, list[str]]]:
        """Live ranks that are guaranteed by their pages, with their devices."""
        living = alive(self.rack)
        links = self.accounts.links
        return {name: found for name, found in links.items() if name in living and found[0].now.guaranteed}

    def _counts(self, link: SharerLink) -> bool:
        agents: list[Any] = [agent for agent in self.rack.agents.values() if hasattr(agent, "plugins")]
        plugins = [agent.plugins["scheduler"] for agent in agents if "scheduler" in agent.plugins]
        known = [plugin.queue.jobs.get(link.job) for plugin in plugins]
        return any(job is not None and job.counts for job in known)
