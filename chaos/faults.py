"""What may go wrong with a rack, as data: the same words for the simulator and for real processes.

A plan is a list of (second, fault); a fault strikes, and undoes itself after `for_s`. `swarm` draws a plan from a
seed: it first switches whole families of faults on or off and draws their rates, so that some seeds are all partitions
and some are all kills, which finds more than an even mixture would (swarm testing). A story then has two phases:

    safety      faults strike; whatever happens, nothing wrong may be done
    liveness    `heal` undoes everything; within a bound the rack must be whole again and finish its work
"""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from agent.ports.devices.sim import DeviceFault
from chaos.world.disk import Trap
from covey.core.units import GIB

if TYPE_CHECKING:
    from chaos.world.host import SimProcess
    from chaos.world.world import World

SIGKILL, SIGTERM, SIGSTOP, SIGCONT = 9, 15, 19, 18


HEALERS = ("/healer", "/learner", "/adder")
"""Ends of names of processes that are suspended so that others may take their place: users' programs that may be
lost."""


class Fault(msgspec.Struct, frozen=True, tag=True):
    """One thing that goes wrong. `for_s`: seconds until it undoes itself."""


class Kill(Fault, frozen=True):
    """kill -9 of an agent (started again after `for_s`), of one program or rank by its name, or the power of a host."""

    what: Literal["agent", "host", "program"]
    host: str
    for_s: float = 2.0
    name: str = ""
    """Name of the program with `program`, such as `slabd`; empty: one at random."""


class Pause(Fault, frozen=True):
    """SIGSTOP of a process, and SIGCONT later."""

    host: str
    for_s: float = 3.0
    name: str = "agent"


class Partition(Fault, frozen=True):
    """Packets from every host of `one` to every host of `other` vanish, and back unless it is `one_way`."""

    one: tuple[str, ...]
    other: tuple[str, ...]
    one_way: bool = False
    for_s: float = 10.0


class Unheard(Fault, frozen=True):
    """A firewall drops the datagrams of a host, and nothing else: gossip loses it, connections stay."""

    host: str
    for_s: float = 30.0


class Slow(Fault, frozen=True):
    """Every packet to and from a host takes `factor` times as long, and every callback there costs `callback_s`."""

    host: str
    factor: float = 20.0
    callback_s: float = 0.0
    for_s: float = 10.0


class Lose(Fault, frozen=True):
    """The whole network loses, doubles and delays packets at these rates (0..1)."""

    loss: float = 0.05
    duplicate: float = 0.0
    spike: float = 0.0
    for_s: float = 20.0


class FillMemory(Fault, frozen=True):
    host: str
    size_bytes: int = 48 * GIB
    for_s: float = 15.0


class FillDisk(Fault, frozen=True):
    """No room is left (`sick` 0), or every operation fails with this chance; or nothing can be changed any more."""

    host: str
    sick: float = 0.0
    for_s: float = 5.0
    read_only: bool = False


class SkewClock(Fault, frozen=True):
    """The wall clock jumps by `wall_s`, and both clocks run at `rate` times their speed; several skews add up."""

    host: str
    wall_s: float = 0.0
    rate: float = 1.0
    for_s: float = 30.0


class Restart(Fault, frozen=True):
    """SIGTERM of an agent, which ends in good order; it is started again `for_s` later. What it started lives on."""

    host: str
    for_s: float = 1.5


class CutLinks(Fault, frozen=True):
    """Every connection between a host and the others is reset, idle ones too (`ss -K`): byte streams with chance
    `share` each, and control links. Both ends hear of it at once and may connect again."""

    host: str
    share: float = 1.0
    for_s: float = 0.0


class SlowDisk(Fault, frozen=True):
    """Every operation of a host's disk takes `factor` times as long (an fsync else takes 0.5 to 6 ms)."""

    host: str
    factor: float = 100.0
    for_s: float = 8.0


class DieWriting(Fault, frozen=True):
    """The next write to a file whose name contains `name` is the last action of its process, or (`power`) of its host:
    it dies at some moment between the write's begin and its end. It is back `back_s` later; the trap is taken away
    after `for_s`."""

    host: str
    name: str
    power: bool = False
    back_s: float = 2.0
    for_s: float = 20.0


class Damage(Fault, frozen=True):
    """The power of a host fails for two seconds, and then files whose name contains `name` are not what was synced:
    `lost`, `rolled back` to what they were `for_s` earlier, `cut` somewhere, or `rotten` (one byte is another)."""

    host: str
    name: str
    how: Literal["lost", "rolled back", "cut", "rotten"]
    for_s: float = 5.0


class SickDevice(Fault, frozen=True):
    """One device of a host: its driver reports an error, it falls off the bus, or the driver of all does not answer."""

    host: str
    kind: Literal["xid", "ecc", "lost", "stuck"]
    number: int = 0
    """Index of the device, counted round; its driver reports this number."""
    for_s: float = 20.0


DAMAGED_S = 2.0
"""Seconds without power while files of a host are damaged."""

AnyFault = (
    Kill
    | Pause
    | Partition
    | Unheard
    | Slow
    | Lose
    | FillMemory
    | FillDisk
    | SkewClock
    | Restart
    | CutLinks
    | SlowDisk
    | DieWriting
    | Damage
    | SickDevice
)
Plan = Sequence[tuple[float, AnyFault]]


def strike(world: "World", fault: AnyFault) -> None:
    """Do this fault now, and arrange its end."""
    end = world.now + fault.for_s
    world.mark("fault", "chaos", f"{type(fault).__name__} {_told(fault)}")
    match fault:
        case Kill():
            _kill(world, fault, end)
        case Pause():
            for process in world.hosts[fault.host].find(fault.name):
                process.signal(SIGSTOP)
                world.at(end, lambda process=process: process.signal(SIGCONT))  # type: ignore[misc]
        case Partition():
            pairs = [(a, b) for a in fault.one for b in fault.other if a != b]
            if not fault.one_way:
                pairs += [(b, a) for a, b in pairs]
            world.network.cut(pairs)
            world.at(end, lambda: world.network.heal(pairs))
        case Unheard():
            world.network.unheard[fault.host] = None
            world.at(end, lambda: world.network.unheard.pop(fault.host, None))
        case Slow():
            world.network.slow[fault.host] = fault.factor
            world.hosts[fault.host].slow_down(fault.callback_s)
            world.at(end, lambda: _quicken(world, fault.host))
        case Lose():
            conditions = world.network.conditions
            conditions.loss, conditions.duplicate, conditions.spike = fault.loss, fault.duplicate, fault.spike
            world.at(end, lambda: _calm(world))
        case FillMemory():
            world.hosts[fault.host].probes.fill(fault.size_bytes)
            world.at(end, lambda: _empty_memory(world, fault.host))
        case FillDisk():
            disk = world.hosts[fault.host].disk
            disk.sick, disk.read_only = fault.sick, fault.read_only
            disk.filled_bytes = 0 if fault.sick or fault.read_only else disk.capacity_bytes
            world.at(end, lambda: _mend_disk(world, fault.host))
        case SkewClock():
            number = world.number()
            world.hosts[fault.host].clock.skew(number, fault.wall_s, fault.rate)
            world.at(end, lambda: world.hosts[fault.host].clock.end_skew(number))
        case Restart():
            agent = world.hosts[fault.host].agent
            if agent is not None:
                agent.signal(SIGTERM)
            world.at(end, lambda: _start_again(world, fault.host))
        case CutLinks():
            world.wires.reset(fault.host, fault.share)
            for links in list(world.link_ends.values()):
                links.reset(fault.host)
        case SlowDisk():
            world.hosts[fault.host].disk.slow = fault.factor
            world.at(end, lambda: _quicken_disk(world, fault.host))
        case DieWriting():
            trap = Trap(fault.name, lambda process: _die(world, fault, process))
            disk = world.hosts[fault.host].disk
            disk.traps.append(trap)
            world.at(end, lambda: disk.traps.remove(trap) if trap in disk.traps else None)
        case Damage():
            before = world.hosts[fault.host].disk.image(fault.name)
            world.at(end, lambda: _damage(world, fault, before))
        case SickDevice():
            _sicken(world, fault, end)


def _kill(world: "World", fault: Kill, end: float) -> None:
    host = world.hosts[fault.host]
    if fault.what == "host":
        host.power_off()
        world.at(end, host.power_on)
        return
    if fault.what == "agent":
        if host.agent is not None:
            host.agent.signal(SIGKILL)
        world.at(end, host.revive)
        return
    others = [process for process in host.processes.values() if process.kind != "agent"]
    if fault.name:
        others = [process for process in others if process.name.partition("/")[2].startswith(fault.name)]
    elif others:
        others = [others[int(world.chance.random() * len(others))]]
    for process in others:
        process.signal(SIGKILL)


def _start_again(world: "World", host: str) -> None:
    """Start the agent of a host again as soon as it has ended."""
    agent = world.hosts[host].agent
    if agent is not None and agent.alive:
        world.at(world.now + 0.5, lambda: _start_again(world, host))
    else:
        world.hosts[host].revive()


def _die(world: "World", fault: DieWriting, process: "SimProcess") -> None:
    host = world.hosts[fault.host]
    if fault.power:
        host.power_off()
        world.at(world.now + fault.back_s, host.power_on)
    else:
        process.signal(SIGKILL)
        world.at(world.now + fault.back_s, host.revive)


def _damage(world: "World", fault: Damage, before: dict[str, bytes]) -> None:
    host = world.hosts[fault.host]
    host.power_off()
    world.at(world.now + DAMAGED_S, host.power_on)
    if fault.how == "rolled back":
        host.disk.restore(fault.name, before)
    else:
        host.disk.damage(fault.name, fault.how)


def _sicken(world: "World", fault: SickDevice, end: float) -> None:
    devices = world.hosts[fault.host].probes.devices
    if devices.uuids:
        uuid = devices.uuids[fault.number % len(devices.uuids)]
        devices.strike(DeviceFault(world.now, uuid, fault.kind, fault.number))
        devices.strike(DeviceFault(end, uuid, "well"))


def _quicken_disk(world: "World", host: str) -> None:
    world.hosts[host].disk.slow = 1.0


def _quicken(world: "World", host: str) -> None:
    world.network.slow.pop(host, None)
    world.hosts[host].slow_down(0.0)


def _calm(world: "World") -> None:
    conditions = world.network.conditions
    conditions.loss = conditions.duplicate = conditions.spike = 0.0


def _empty_memory(world: "World", host: str) -> None:
    world.hosts[host].probes.filled_bytes = 0


def _mend_disk(world: "World", host: str) -> None:
    disk = world.hosts[host].disk
    disk.sick, disk.filled_bytes, disk.read_only = 0.0, 0, False


def heal(world: "World") -> None:
    """Undo everything: power on, agents started, stopped processes continued, the network calm and whole."""
    world.mark("healed", "chaos")
    world.mischief.on = False
    world.network.heal()
    world.network.unheard.clear()
    _calm(world)
    for name, host in world.hosts.items():
        _quicken(world, name)
        _empty_memory(world, name)
        _mend_disk(world, name)
        _quicken_disk(world, name)
        host.disk.traps.clear()
        host.probes.devices.heal()
        host.clock.end_skew()
        for process in list(host.processes.values()):
            if not process.name.endswith(HEALERS):  # whoever suspended one does not know yet that all is well
                process.signal(SIGCONT)
        host.power_on()
        host.revive()


def schedule(world: "World", plan: Plan) -> None:
    """Let every fault of a plan strike at its second."""
    for at_s, fault in plan:
        world.at(at_s, lambda fault=fault: strike(world, fault))  # type: ignore[misc]


# ---- drawing a plan --------------------------------------------------------------------------------------------------

FAMILIES: tuple[str, ...] = (
    "kill agent",
    "kill host",
    "kill program",
    "pause",
    "partition",
    "one way",
    "isolate",
    "slow",
    "lose",
    "memory",
    "disk",
    "clock",
    "restart agent",
    "cut links",
    "slow disk",
    "die writing",
    "away",
    "damage",
    "unheard",
    "device",
)
RARE: Mapping[str, float] = {"away": 0.15, "damage": 0.15, "unheard": 0.15, "device": 0.15}
"""Chance that a family is on, where it is not 0.4: a host that is away longer than every lease makes a story long, and
a rack survives damaged files on one host only."""
AWAY_S = (75.0, 110.0)
"""Least and most seconds that a host is away in the family of that name: leases and waits end after 60."""
WRITTEN = ("log-", "snapshot", "state", "places", "volume", "index")
"""Parts of names of files whose writer dies."""
SPOILT = ("consensus/", "acknowledged", "identity", "scheduler/state", "memory/agent", "gossip/", "aggregator/")
"""Parts of names of files that are damaged, on one host of a story: two voters without a log would forget."""


def swarm(
    seed: int, hosts: Sequence[str], start_s: float, end_s: float, families: Sequence[str] = FAMILIES
) -> list[tuple[float, AnyFault]]:
    """A plan between two virtual seconds: each family is on with p = 0.4, at a rate of its own."""
    rng = random.Random(f"{seed}/swarm")
    plan: list[tuple[float, AnyFault]] = []
    for family in families:
        if rng.random() >= RARE.get(family, 0.4):
            continue
        among = [hosts[rng.randrange(len(hosts))]] if family == "damage" else hosts
        pause_s = 60.0 if family == "away" else rng.choice((5.0, 15.0, 40.0))
        at_s = start_s + rng.expovariate(1 / pause_s)
        while at_s < end_s:
            plan.append((round(at_s, 3), draw(rng, family, among)))
            at_s += rng.expovariate(1 / pause_s)
    return sorted(plan, key=lambda entry: entry[0])


def draw(rng: random.Random, family: str, hosts: Sequence[str]) -> AnyFault:
    """One fault of a family. Raises ValueError when there is no such family."""
    host = hosts[rng.randrange(len(hosts))]
    others = tuple(name for name in hosts if name != host)
    for_s = round(rng.choice((0.5, 2.0, 8.0, 20.0)) * rng.uniform(0.7, 1.4), 3)
    match family:
        case "kill agent":
            return Kill("agent", host, for_s)
        case "kill host":
            return Kill("host", host, for_s + 2)
        case "kill program":
            return Kill("program", host, 0.0)
        case "pause":
            return Pause(host, for_s)
        case "partition":
            mixed = list(hosts)
            rng.shuffle(mixed)
            at = rng.randrange(1, max(2, len(mixed)))
            return Partition(tuple(mixed[:at]), tuple(mixed[at:]), False, for_s)
        case "one way":
            return Partition((host,), others, True, for_s)
        case "isolate":
            return Partition((host,), others, False, for_s)
        case "slow":
            return Slow(host, rng.choice((5.0, 50.0, 300.0)), rng.choice((0.0, 0.0005)), for_s)
        case "lose":
            return Lose(rng.choice((0.01, 0.1, 0.3)), rng.choice((0.0, 0.1)), rng.choice((0.0, 0.05)), for_s)
        case "memory":
            return FillMemory(host, rng.choice((30, 50, 59)) * GIB, for_s)
        case "disk":
            return FillDisk(host, rng.choice((0.0, 0.02, 0.3)), for_s / 2)
        case "clock":
            return SkewClock(host, rng.uniform(-60, 60), rng.uniform(0.99, 1.01), for_s)
        case "restart agent":
            return Restart(host, for_s)
        case "cut links":
            return CutLinks(host, rng.choice((0.3, 1.0)))
        case "slow disk":
            return SlowDisk(host, rng.choice((5.0, 50.0, 500.0)), for_s)
        case "die writing":
            return DieWriting(host, rng.choice(WRITTEN), rng.random() < 0.3, back_s=for_s)
        case "damage":
            how: Literal["lost", "rolled back", "cut", "rotten"] = rng.choice(("lost", "rolled back", "cut", "rotten"))
            return Damage(host, rng.choice(SPOILT), how, for_s)
        case "unheard":
            return Unheard(host, 4 * for_s)
        case "device":
            kind: Literal["xid", "ecc", "lost", "stuck"] = rng.choice(("xid", "ecc", "lost", "stuck"))
            return SickDevice(host, kind, rng.choice((0, 1, 48, 63, 79)), 2 * for_s)
        case "away":
            away_s = round(rng.uniform(*AWAY_S), 3)
            return rng.choice(
                (Kill("host", host, away_s), Partition((host,), others, False, away_s), Kill("agent", host, away_s))
            )
        case _:
            raise ValueError(f"{family!r} is no family of faults; there are {', '.join(FAMILIES)}")


def _told(fault: AnyFault) -> str:
    return " ".join(f"{key}={value}" for key, value in msgspec.structs.asdict(fault).items())
