"""Faults strike, undo themselves, and are drawn from the seed alone."""

import asyncio
import itertools
from typing import Literal, get_args

import pytest

from agent.ports.devices.sim import SimDevices
from chaos.faults import (
    FAMILIES,
    AnyFault,
    CutLinks,
    Damage,
    DieWriting,
    FillDisk,
    FillMemory,
    Kill,
    Lose,
    Partition,
    Pause,
    Restart,
    SickDevice,
    SkewClock,
    Slow,
    SlowDisk,
    heal,
    schedule,
    strike,
    swarm,
)
from chaos.world.world import World
from covey.ports.env import Env
from covey.ports.streams import ByteStream

HOSTS = ("h1", "h2", "h3", "h4")


async def idle(env: Env) -> int:
    await asyncio.Event().wait()
    return 0


def rack(seed: int = 1) -> World:
    world = World(seed)
    for name in HOSTS:
        host = world.add_host(name, gpus=2)
        host.main = idle
        host.start_agent()
    world.run(1)
    return world


async def conditions(devices: SimDevices) -> list[str]:
    return [(await devices.health(uuid)).condition for uuid in devices.uuids]


def state(world: World) -> tuple[object, ...]:
    """Everything that a fault may change."""
    network = world.network.conditions
    return (
        sorted(world.network.cuts),
        sorted(world.network.slow),
        (network.loss, network.duplicate, network.spike),
        [
            (
                host.up,
                host.agent is not None and host.agent.alive and not host.agent.loop.paused,
                host.callback_s,
                host.probes.filled_bytes,
                host.disk.sick,
                host.disk.filled_bytes,
                host.disk.slow,
                len(host.disk.traps),
                host.clock.rate,
                host.clock.wall_error_s,
                asyncio.run(conditions(host.probes.devices)),
            )
            for host in world.hosts.values()
        ],
    )


EACH: tuple[AnyFault, ...] = (
    Kill("agent", "h1"),
    Kill("host", "h2"),
    Pause("h3"),
    Partition(("h1", "h2"), ("h3", "h4")),
    Partition(("h1",), ("h3", "h4"), one_way=True),
    Slow("h1", callback_s=0.001),
    Lose(),
    FillMemory("h4"),
    FillDisk("h4"),
    FillDisk("h4", sick=0.5),
    SkewClock("h2", rate=1.01),
    SkewClock("h2", wall_s=-40.0),
    Restart("h1"),
    SlowDisk("h3"),
    DieWriting("h4", "log-"),
    SickDevice("h1", "xid", 95),
    SickDevice("h1", "ecc", 2),
    SickDevice("h1", "lost", 1),
    SickDevice("h1", "stuck"),
)


@pytest.mark.parametrize("fault", EACH, ids=lambda fault: str(fault))
def test_a_fault_changes_the_rack_and_undoes_itself(fault: AnyFault) -> None:
    with rack() as world:
        healthy = state(world)
        strike(world, fault)
        world.run(world.now + 0.01)
        assert state(world) != healthy
        world.run(world.now + fault.for_s + 0.1)
        assert state(world) == healthy


@pytest.mark.parametrize("fault", EACH, ids=lambda fault: str(fault))
def test_healing_undoes_every_fault_at_once(fault: AnyFault) -> None:
    with rack() as world:
        healthy = state(world)
        strike(world, fault)
        heal(world)
        world.run(world.now + fault.for_s + 0.1)
        assert state(world) == healthy


def test_connections_that_nobody_uses_are_reset_too_and_both_ends_hear_of_it() -> None:
    heard: list[str] = []

    async def accept(stream: ByteStream) -> None:
        await listen(stream, "near")

    async def listen(stream: ByteStream, who: str) -> None:
        try:
            await stream.read_into(memoryview(bytearray(1)))
        except ConnectionError as error:
            heard.append(f"{who}: {error}")

    async def serving(env: Env) -> int:
        await env.bytes.listen("0.0.0.0:9000", accept)
        return await idle(env)

    async def calling(env: Env) -> int:
        await listen(await env.bytes.connect("10.0.0.1:9000"), "far")
        return 0

    with World(4) as world:
        for name, main in (("h1", serving), ("h2", calling), ("h3", idle)):
            host = world.add_host(name)
            host.main = main
            world.at(0.1 * len(world.hosts), host.revive)
        world.run(2)
        strike(world, CutLinks("h3"))
        world.run(3)
        assert heard == []
        strike(world, CutLinks("h1"))
        world.run(4)
    assert sorted(line.partition(":")[0] for line in heard) == ["far", "near"]
    assert all("was reset" in line for line in heard)


async def writing(env: Env) -> int:
    for number in itertools.count():
        await env.disk.append("log/log-1", b"%09d" % number)
        await env.disk.replace("other", b"x")
        await asyncio.sleep(1.0)
    return 0


def test_a_process_dies_in_the_middle_of_the_write_that_was_named_and_comes_back() -> None:
    lengths = set()
    for seed in range(30):
        with World(seed) as world:
            host = world.add_host("h1")
            host.main = writing
            host.start_agent()
            world.run(2.5)
            strike(world, DieWriting("h1", "log-", power=seed % 2 == 0, back_s=1.0))
            world.run(3.4)
            assert host.agent is not None and not host.agent.alive
            lengths.add(len(host.disk.files["log/log-1"].data) - 27)
            world.run(6)
            assert host.agent.alive
    assert {0, 9} < lengths and not lengths - set(range(10)), "not at all, wholly, and something between"


@pytest.mark.parametrize(
    ("how", "lengths"),
    [("lost", range(1)), ("cut", range(45)), ("rotten", range(45, 46)), ("rolled back", range(9, 45))],
)
def test_files_that_were_synced_are_lost_rolled_back_or_damaged(
    how: Literal["lost", "cut", "rotten", "rolled back"], lengths: range
) -> None:
    with World(3) as world:
        host = world.add_host("h1")
        host.main = writing
        host.start_agent()
        world.run(1.5)
        strike(world, Damage("h1", "log-", how, for_s=3.0))
        world.run(4.6)
        right = b"".join(b"%09d" % number for number in range(5))
        data = bytes(host.disk.files["log/log-1"].data) if "log/log-1" in host.disk.files else b""
        assert len(data) in lengths and data != right
        assert data == right[: len(data)] or how == "rotten"
        assert host.disk.files["other"].data == b"x"
        world.run(8)
        assert host.agent is not None and host.agent.alive


def test_two_jumps_of_a_clock_add_up_and_each_ends_for_itself() -> None:
    with rack() as world:
        clock = world.hosts["h2"].clock
        strike(world, SkewClock("h2", 10.0, 1.01, for_s=5.0))
        strike(world, SkewClock("h2", 30.0, 0.99, for_s=20.0))
        assert clock.wall_error_s == 40.0 and clock.rate == pytest.approx(1.01 * 0.99)
        world.run(world.now + 6)
        assert (clock.wall_error_s, clock.rate) == (30.0, 0.99)
        strike(world, Kill("host", "h2", 1.0))
        world.run(world.now + 2)
        assert world.hosts["h2"].clock.wall_error_s == 30.0, "a wrong clock is wrong after a reboot too"
        heal(world)
        world.run(world.now + 30)
        assert (world.hosts["h2"].clock.wall_error_s, world.hosts["h2"].clock.rate) == (0.0, 1.0)


def test_a_one_way_partition_leaves_the_other_direction_open() -> None:
    with rack() as world:
        strike(world, Partition(("h1",), ("h2",), one_way=True))
        assert not world.network.open("h1", "h2")
        assert world.network.open("h2", "h1")


def test_the_same_seed_draws_the_same_plan_and_every_family_comes_up() -> None:
    assert swarm(5, HOSTS, 10, 100) == swarm(5, HOSTS, 10, 100)
    assert swarm(5, HOSTS, 10, 100) != swarm(6, HOSTS, 10, 100)
    kinds = {type(fault).__name__ for seed in range(60) for _, fault in swarm(seed, HOSTS, 10, 100)}
    assert kinds == {kind.__name__ for kind in get_args(AnyFault)}
    assert all(10 <= at < 100 for seed in range(20) for at, _ in swarm(seed, HOSTS, 10, 100))


def test_any_plan_can_be_played_and_healed() -> None:
    for seed in range(15):
        with rack(seed) as world:
            healthy = state(world)
            schedule(world, swarm(seed, HOSTS, 2, 60, FAMILIES))
            world.run(60)
            heal(world)
            world.run(120)
            assert state(world) == healthy
