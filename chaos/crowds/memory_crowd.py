"""Remote memory with a thousand borrowers and lenders: only their machines (`Borrower`, `Lender`), and a stand-in for
the byte processes that answers after a while.

Checked after every few virtual seconds: no mapping is held by two lenders, no borrower has a slab open at a host that
does not hold it, and, when all is quiet again, no unused slab is held.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from chaos.crowds.crowd import names
from chaos.world.world import World
from covey.core.events import Heard, LogEvent, Message, Send, SetTimer, Undelivered
from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from covey.ports.probes import MemoryNow
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.lender_search import Opening
from plugins.memory.machine.borrowing.place import SlabPlace
from plugins.memory.machine.borrowing.slab import BorrowedSlab
from plugins.memory.machine.lending import events as le
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.messages import AboutSlab, CheckActivity, SlabRef
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.mirroring import orphan_after_s
from plugins.memory.policy.placement import HOT_SLAB, LenderPeer

SLAB = 64 * MIB
PAGE = 4096
LEASE_S = 60.0
GRACE_S = 10.0
Key = tuple[str, int]


class MemoryHost:
    """Both halves of one host, and what its byte processes would know."""

    def __init__(self, name: HostId, rng: random.Random, slabs: int, spare_slabs: int, members: int = 1) -> None:
        self.name, self.rng, self.volume, self.slabs, self.members = name, rng, f"v-{name}", slabs, members
        self.borrower = Borrower(name, rng, 1, HOT_SLAB, LEASE_S)
        self.lender = Lender(rng, rng.randbytes, Headroom(fraction=0.125), 64 * GIB, GRACE_S, LEASE_S)
        self.total_bytes = 64 * GIB
        self.wanted_bytes = self.total_bytes - 8 * GIB - spare_slabs * SLAB
        """Bytes that the host's own programs use: everything except headroom and `spare_slabs` slabs."""
        self.store: dict[tuple[HostId, Any], bytes] = {}
        """(borrower, slab) -> secret, for each slab that the slab process holds."""
        self.open: dict[tuple[str, int, int], SlabPlace] = {}
        """(volume, index, epoch) -> place, for each slab that the volume's process has open."""
        self.requests: dict[str, list[int]] = {self.volume: [0] * slabs * members}
        self.up = True

    def memory(self) -> MemoryNow:
        return MemoryNow(
            total_bytes=self.total_bytes,
            available_bytes=max(0, self.total_bytes - self.wanted_bytes),
            pressure_some_avg10=0.0,
        )


class MemoryCrowd:
    """Hosts that borrow and lend. `loss`: chance that a message is not acknowledged before its deadline. `members`: of
    each slab; with several, hosts are in `racks` racks."""

    def __init__(
        self, world: World, count: int, slabs: int, spare_slabs: int = 32, loss: float = 0.0, members: int = 1,
        racks: int = 8,
    ) -> None:  # fmt: skip
        self.world, self.loss = world, loss
        self.rng = random.Random(f"{world.seed}/memory")
        self.hosts = {
            name: MemoryHost(name, random.Random(self.rng.random()), slabs, spare_slabs, members)
            for name in names(count)
        }
        self.rack_of = {name: f"r{number % racks}" for number, name in enumerate(self.hosts)} if members > 1 else {}
        for name in self.hosts:
            world.add_host(name)
        self._peers: tuple[LenderPeer, ...] = ()
        for host in self.hosts.values():
            self._soon(self.rng.uniform(0, 1), self._begin, host)
        world.at(1.0, self._gossip)

    def _begin(self, host: MemoryHost) -> None:
        self.lender(host, le.StoreFound(f"{self.world.hosts[host.name].ip}:7000", ()))
        self.borrower(host, b.VolumeFound(host.volume, host.slabs, SLAB, PAGE, (), host.members))
        self._second(host)

    def _gossip(self) -> None:
        """Every two seconds, tell every host what each host could lend: as old as gossip is."""
        self._peers = tuple(
            LenderPeer(
                host.name,
                "alive" if host.up else "gone",
                host.lender.spare_bytes() // SLAB or None,
                rack=self.rack_of.get(host.name, ""),
            )
            for host in self.hosts.values()
        )
        self.world.at(self.world.now + 2.0, self._gossip)

    def _second(self, host: MemoryHost) -> None:
        if host.up:
            self.lender(host, le.LenderTick(host.memory(), 0))
            self.borrower(host, b.BorrowerTick(host.requests, self._peers))
        self.world.at(self.world.now + 1.0, lambda: self._second(host))

    # ---- feeding and performing --------------------------------------------------------------------------------------

    def lender(self, host: MemoryHost, event: le.LenderEvent) -> None:
        if host.up:
            self._perform(host, host.lender.handle(event, self.world.now), lambda back: self.lender(host, back))

    def borrower(self, host: MemoryHost, event: b.BorrowerEvent) -> None:
        if host.up:
            self._perform(host, host.borrower.handle(event, self.world.now), lambda back: self.borrower(host, back))

    def _perform(self, host: MemoryHost, actions: Iterable[Any], feed: Callable[[Any], None]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(host, action, feed)
                case SetTimer():
                    self._soon(action.after_s, feed, action.event)
                case le.RegisterSlab():
                    host.store[action.borrower, action.slab] = action.secret
                    address = f"{self.world.hosts[host.name].ip}:7000"
                    self._soon(0.005, feed, le.SlabRegistered(action.borrower, action.slab, address))
                case le.FreeSlab():
                    host.store.pop((action.borrower, action.slab), None)
                    self._hang_up(self.hosts[action.borrower], action.slab)
                    self._soon(0.005, feed, le.SlabFreed(action.borrower, action.slab))
                case b.OpenSlab():
                    self._soon(0.01, lambda event: self._open(host, event), action)
                case b.CloseSlab():
                    host.open.pop((action.volume, action.index, action.epoch), None)
                    self._soon(0.01, feed, b.SlabClosed(action.volume, action.index, action.epoch))
                case LogEvent():
                    self.world.mark("note", host.name, f"{action.subject} {action.event}")
                case _:
                    raise TypeError(f"unknown action {action}")

    def _soon(self, after_s: float, feed: Callable[[Any], None], event: Any) -> None:
        self.world.at(self.world.now + after_s, lambda: feed(event))

    def _send(self, host: MemoryHost, send: Send, feed: Callable[[Any], None]) -> None:
        """Deliver a message at least once until its deadline, handled at most once; sometimes it is handled and yet
        not acknowledged."""
        target = self.hosts[send.to]
        fails = self.rng.random() < self.loss
        if target.up and not (fails and self.rng.random() < 0.5):
            delay_s = self.world.network.delay_s(host.name, target.name)
            self._soon(delay_s, lambda message: self._hear(target, host.name, message), send.message)
        if fails or not target.up:
            self._soon(send.deadline_s, feed, Undelivered(send.to, send.message))

    def _hear(self, host: MemoryHost, sender: HostId, message: Message) -> None:
        heard = Heard(sender, message)
        if isinstance(message, AboutSlab | CheckActivity):
            self.borrower(host, heard)
        else:
            self.lender(host, heard)

    def _hang_up(self, host: MemoryHost, slab: SlabRef) -> None:
        """Close the connection of a slab that the slab process frees; the volume's process notices at once."""
        if host.open.pop((slab.volume, slab.index, slab.epoch), None) is not None:
            failed = b.SlabFailed(slab.volume, slab.index, slab.epoch, "freed by its lender")
            self._soon(0.005, self._feeder(host), failed)

    def _open(self, host: MemoryHost, action: b.OpenSlab) -> None:
        """Connect the volume's process to the slab process, which knows the secret or refuses."""
        place = action.place
        lender = self.hosts[place.lender]
        reference = SlabRef(action.volume, action.index, place.epoch)
        if not lender.up or lender.store.get((host.name, reference)) != place.secret:
            self.borrower(host, b.SlabNotOpened(action.volume, action.index, place.epoch, "refused"))
            return
        host.open[action.volume, action.index, place.epoch] = place
        self.borrower(host, b.SlabOpened(action.volume, action.index, place.epoch))
        copied = b.SlabCopied(action.volume, action.index, place.epoch)
        self._soon(0.05, self._feeder(host), copied)

    def _feeder(self, host: MemoryHost) -> Callable[[Any], None]:
        return lambda event: self.borrower(host, event)

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def heat(self, requests_per_s: int) -> None:
        """Use all slabs of all volumes at this rate from now on."""
        for host in self.hosts.values():
            for requests in host.requests.values():
                requests[:] = [requests_per_s] * len(requests)

    def kill(self, name: HostId) -> None:
        """Kill a host: its borrowers' connections break, and gossip says so a while later."""
        lost = self.hosts[name]
        lost.up = False
        self.world.mark("killed", name)
        for host in self.hosts.values():
            for (volume, index, epoch), place in list(host.open.items()):
                if place.lender == name:
                    del host.open[volume, index, epoch]
                    failed = b.SlabFailed(volume, index, epoch, "connection reset")
                    self._soon(self.rng.uniform(0.1, 5), self._feeder(host), failed)
            self._soon(self.rng.uniform(5, 9), self._feeder(host), b.LenderLost(name))

    def press(self, name: HostId, more_bytes: int) -> None:
        """Let a host's own programs need more memory."""
        self.hosts[name].wanted_bytes += more_bytes

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that no slab has two owners, no borrower reads where it is not lent, and the machines' own
        invariants."""
        holders: dict[tuple[HostId, str, int, int], HostId] = {}
        for host in self.hosts.values():
            host.borrower.check()
            host.lender.check()
            for borrower, slab in host.store:
                key = (borrower, slab.volume, slab.index, slab.epoch)
                assert key not in holders, f"{key} is held by {holders[key]} and by {host.name}"
                holders[key] = host.name
        for host in self.hosts.values():
            for (volume, index, epoch), place in host.open.items():
                owner = self.hosts[place.lender]
                if host.up and owner.up:
                    held = holders.get((host.name, volume, index, epoch))
                    assert held == place.lender, f"{volume}/{index} is open at {place.lender}, which does not hold it"

    def mapped(self) -> int:
        return sum(slab.place is not None for host in self.up() for slab in host.borrower._all())

    def alike(self) -> list[tuple[str, int]]:
        """Slabs with both members placed in one rack: volume and number of the first member."""
        found: list[tuple[str, int]] = []
        for host in self.up():
            for volume, known in host.borrower.volumes.items():
                for one, other in zip(known.slabs[::2], known.slabs[1::2], strict=True):
                    places = [slab.place.lender for slab in (one, other) if slab.place is not None]
                    if len(places) == 2 and self.rack_of[places[0]] == self.rack_of[places[1]]:
                        found.append((volume, one.index))
        return found

    def lent(self) -> list[int]:
        """Number of slabs lent by each host that is up."""
        return [len(host.lender.lent) for host in self.up()]

    def up(self) -> Sequence[MemoryHost]:
        return [host for host in self.hosts.values() if host.up]


class MemoryResult(msgspec.Struct, frozen=True):
    """How slabs fell on a crowd of lenders."""

    hosts: int
    slabs: int
    mapped: int
    lent_most: int
    lent_mean: float
    lost_to_kills: int
    leaked: int
    story_hash: int
    one_rack: int = 0
    """Slabs whose two members are in one rack."""


def memory_story(
    seed: int, count: int, slabs: int = 4, log: Callable[[str], None] | None = None, members: int = 1
) -> MemoryResult:
    """Play one seed: every host's volume turns hot in the same second, or has no disk (several `members`); then one
    host in fifty dies, one in twenty needs its memory back, and at the end all is quiet: no unused slab may be held."""
    with World(seed, log=log) as world:
        world.replay = f"covey-chaos crowd --hosts {count} --seed {seed}"
        crowd = MemoryCrowd(world, count, slabs, loss=0.01, members=members)
        crowd.heat(500)
        _watched(world, crowd, 30.0)
        mapped, lent = crowd.mapped(), crowd.lent()
        victims = crowd.rng.sample(list(crowd.hosts), max(1, count // 50))
        for name in victims:
            crowd.kill(name)
        for name in crowd.rng.sample([host.name for host in crowd.up()], max(1, count // 20)):
            crowd.press(name, 4 * GIB)
        lost = mapped - crowd.mapped()
        _watched(world, crowd, 60.0)
        _watched(world, crowd, 1.5 * LEASE_S + orphan_after_s(LEASE_S, members))
        used = {
            (host.name, slab.volume, slab.index, epoch)
            for host in crowd.up()
            for slab in host.borrower._all()
            for epoch in _in_use(slab)
        }
        leaked = [
            (borrower, slab)
            for host in crowd.up()
            for borrower, slab in host.store
            if (borrower, slab.volume, slab.index, slab.epoch) not in used
        ]
        return MemoryResult(
            hosts=count,
            slabs=count * slabs * members,
            mapped=mapped,
            lent_most=max(lent),
            lent_mean=round(sum(lent) / len(lent), 2),
            lost_to_kills=lost,
            leaked=len(leaked),
            story_hash=world.story_hash,
            one_rack=len(crowd.alike()) if members > 1 else 0,
        )


def _in_use(slab: BorrowedSlab) -> list[int]:
    """Epochs of the slab's places that are open or being opened."""
    opening = [slab.search.epoch] if isinstance(slab.search, Opening) else []
    return [*(place.epoch for place in slab.places), *opening]


def _watched(world: World, crowd: MemoryCrowd, seconds: float) -> None:
    end = world.now + seconds
    while world.now < end:
        world.run(min(end, world.now + 5.0))
        crowd.check()
