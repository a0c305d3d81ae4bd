"""Thousands of hosts at once: only their machines, on the heap of one world, with the network model of the rack.

Whole agents cost a few hundred callbacks a second each; a machine alone costs a few events. So what only shows with
many hosts is measured here: how long until a thousand hosts know of a death, how many healthy hosts are called dead
meanwhile, how evenly slabs fall when a thousand borrowers choose by the power of two.

This module has both planes of gossip (`gossip.machine.Gossip`); remote memory is in `chaos.crowds.memory_crowd`.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from chaos.world.world import World
from covey.core.events import Publish, SetTimer
from covey.core.ids import HostId
from gossip.machine import DatagramHeard, Gossip, GossipStarted
from gossip.membership.messages import MemberRecord
from gossip.packet import budget
from gossip.settings import DATAGRAM_BYTES, GossipSettings
from gossip.types import HostDown, SendDatagram, Sender


def names(count: int) -> list[HostId]:
    return [HostId(f"h{number:04d}") for number in range(1, count + 1)]


class GossipHost:
    def __init__(self, name: HostId, ip: str, machine: Gossip) -> None:
        self.name, self.address, self.machine = name, f"{ip}:7946", machine
        self.up = True


class GossipCrowd:
    """Gossip machines of `count` hosts that all knew one another before (a rack that comes back), or know only the
    first one (`join`)."""

    def __init__(self, world: World, count: int, settings: GossipSettings | None = None, join: bool = False) -> None:
        self.world = world
        self.settings = settings or GossipSettings(hosts_max=max(512, min(4096, 2 * count)))
        self.hosts: dict[HostId, GossipHost] = {}
        self.by_address: dict[str, GossipHost] = {}
        self.told_down: dict[HostId, dict[HostId, float]] = {}
        """Host said to be down -> host that was told so -> when first."""
        self.packets = self.events = 0
        rng = random.Random(f"{world.seed}/crowd")
        for name in names(count):
            ip = world.add_host(name).ip
            me = Sender(name, rng.randbytes(16), 1)
            machine = Gossip(me, self.settings, budget(DATAGRAM_BYTES, name), random.Random(rng.random()))
            self.hosts[name] = GossipHost(name, ip, machine)
            self.by_address[f"{ip}:7946"] = self.hosts[name]
        records = tuple(
            MemberRecord(host.name, host.machine.me.uuid, 1, 0, host.address, 0, HostId(""))
            for host in self.hosts.values()
        )
        first = records[:1]
        for host in self.hosts.values():
            known = tuple(record for record in (first if join else records) if record.host != host.name)
            self.world.at(rng.uniform(0, 1.0), self._timer(host, GossipStarted(host.address, known)))

    def dispatch(self, host: GossipHost, event: Any) -> None:
        if not host.up:
            return
        self.events += 1
        for action in host.machine.handle(event, self.world.now):
            match action:
                case SendDatagram():
                    self._say(host, action)
                case SetTimer():
                    self.world.at(self.world.now + action.after_s, self._timer(host, action.event))
                case Publish():
                    if isinstance(action.fact, HostDown):
                        about = self.told_down.setdefault(action.fact.host, {})
                        about.setdefault(host.name, self.world.now)
                        self.world.mark("down", host.name, action.fact.host)

    def _timer(self, host: GossipHost, event: Any) -> Callable[[], None]:
        return lambda: self.dispatch(host, event)

    def _say(self, host: GossipHost, say: SendDatagram) -> None:
        target = self.by_address.get(say.to)
        network = self.world.network
        self.packets += 1
        if target is None or not network.open(host.name, target.name) or network.lost(host.name, target.name):
            return
        heard = DatagramHeard(host.machine.me, host.address, say.messages)
        self.world.at(self.world.now + network.delay_s(host.name, target.name), lambda: self.dispatch(target, heard))

    def kill(self, name: HostId) -> None:
        self.hosts[name].up = False
        self.told_down.pop(name, None)

    def up(self) -> list[GossipHost]:
        return [host for host in self.hosts.values() if host.up]

    def agreed(self) -> bool:
        """Whether every host that is up sees exactly the hosts that are up."""
        alive = {host.name for host in self.up()}
        for host in self.up():
            members = host.machine.membership.members.values()
            if {member.host for member in members if member.state == "alive"} | {host.name} != alive:
                return False
        return True

    def falsely_dead(self) -> int:
        """How often a host that is up was called dead by another."""
        return sum(len(by) for name, by in self.told_down.items() if self.hosts[name].up)

    def check(self) -> None:
        for host in self.hosts.values():
            host.machine.check()


class GossipResult(msgspec.Struct, frozen=True):
    """Results of a crowd of gossiping hosts. Times are virtual seconds after the event."""

    hosts: int
    agreed_s: float
    first_knows_s: float
    all_know_s: float
    falsely_dead: int
    events: int
    packets: int
    story_hash: int


def gossip_story(seed: int, count: int, log: Callable[[str], None] | None = None) -> GossipResult:
    """Play one seed: a rack comes back, agrees on its hosts, and then loses one. Raises AssertionError when it does
    not agree."""
    with World(seed, log=log) as world:
        world.replay = f"covey-chaos crowd --hosts {count} --seed {seed}"
        world.network.conditions.loss = 0.01
        crowd = GossipCrowd(world, count)
        agreed_s = _until(world, crowd.agreed, 60.0, "every host sees every other")
        victim = list(crowd.hosts)[count // 2]
        killed_s = world.now
        crowd.kill(victim)
        _until(
            world, lambda: len(crowd.told_down.get(victim, {})) == count - 1, 120.0, f"all know that {victim} is gone"
        )
        crowd.check()
        heard = crowd.told_down[victim].values()
        return GossipResult(
            hosts=count,
            agreed_s=round(agreed_s, 2),
            first_knows_s=round(min(heard) - killed_s, 2),
            all_know_s=round(max(heard) - killed_s, 2),
            falsely_dead=crowd.falsely_dead(),
            events=crowd.events,
            packets=crowd.packets,
            story_hash=world.story_hash,
        )


def _until(world: World, reached: Callable[[], bool], within_s: float, what: str) -> float:
    """Run until `reached()` (looked at twice a virtual second); returns when. Raises AssertionError when it is not in
    time."""
    start = world.now
    while not reached():
        if world.now - start > within_s:
            raise world.broken(f"not within {within_s:g} s: {what}")
        world.run(world.now + 0.5)
    return world.now
