"""Faults strike, undo themselves, and are drawn from the seed alone."""

import asyncio

import pytest

from chaos.faults import (
    FAMILIES,
    AnyFault,
    FillDisk,
    FillMemory,
    Kill,
    Lose,
    Partition,
    Pause,
    SkewClock,
    Slow,
    heal,
    schedule,
    strike,
    swarm,
)
from chaos.world import World
from covey.ports import Env

HOSTS = ("h1", "h2", "h3", "h4")


async def idle(env: Env) -> int:
    await asyncio.Event().wait()
    return 0


def rack(seed: int = 1) -> World:
    world = World(seed)
    for name in HOSTS:
        host = world.add_host(name)
        host.main = idle
        host.start_agent()
    world.run(1)
    return world


def state(world: World) -> tuple[object, ...]:
    """Everything that a fault may change."""
    weather = world.network.weather
    return (
        sorted(world.network.cuts),
        sorted(world.network.slow),
        (weather.loss, weather.duplicate, weather.spike),
        [
            (
                host.up,
                host.agent is not None and host.agent.alive and not host.agent.loop.paused,
                host.callback_s,
                host.probes.filled_bytes,
                host.disk.sick,
                host.disk.filled_bytes,
                host.clock.rate,
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
)


@pytest.mark.parametrize("fault", EACH, ids=lambda fault: str(fault))
def test_a_fault_changes_the_rack_and_undoes_itself(fault: AnyFault) -> None:
    with rack() as world:
        healthy = state(world)
        strike(world, fault)
        assert state(world) != healthy
        world.run(world.now + fault.for_s + 0.1)
        assert state(world) == healthy


@pytest.mark.parametrize("fault", EACH, ids=lambda fault: str(fault))
def test_healing_undoes_every_fault_at_once(fault: AnyFault) -> None:
    with rack() as world:
        healthy = state(world)
        strike(world, fault)
        heal(world)
        world.run(world.now + 0.1)
        assert state(world) == healthy


def test_a_one_way_partition_leaves_the_other_direction_open() -> None:
    with rack() as world:
        strike(world, Partition(("h1",), ("h2",), one_way=True))
        assert not world.network.open("h1", "h2")
        assert world.network.open("h2", "h1")


def test_the_same_seed_draws_the_same_plan_and_every_family_comes_up() -> None:
    assert swarm(5, HOSTS, 10, 100) == swarm(5, HOSTS, 10, 100)
    assert swarm(5, HOSTS, 10, 100) != swarm(6, HOSTS, 10, 100)
    kinds = {type(fault).__name__ for seed in range(60) for _, fault in swarm(seed, HOSTS, 10, 100)}
    assert kinds == {"Kill", "Pause", "Partition", "Slow", "Lose", "FillMemory", "FillDisk", "SkewClock"}
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
