"""The world itself: the seed decides everything, nothing escapes, and what is planted is found."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from chaos.world.guard import Escape, escape_guard
from chaos.world.world import Broken, World
from covey.ports.env import Env

TALE = """
import asyncio
from chaos.world.world import World

async def main(env):
    names = {f"name-{n}" for n in range(50)}          # a set of str: its order must not matter
    peers = [f"10.0.0.{n}:7946" for n in range(1, 6)]
    got = []
    socket = await env.datagrams.open("0.0.0.0:7946", lambda data, sender: got.append(data))
    while True:
        tasks = [asyncio.create_task(asyncio.sleep(env.rng.random())) for _ in range(5)]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        socket.send(env.entropy(20), env.rng.choice(peers))
        await env.disk.append("log", b"x" * len(names))

with World(SEED) as world:
    world.network.conditions.loss = 0.1
    world.network.conditions.duplicate = 0.1
    for n in range(1, 6):
        host = world.add_host(f"h{n}")
        host.main = main
        host.start_agent()
    world.at(5, world.hosts["h2"].power_off)
    world.at(9, world.hosts["h2"].power_on)
    world.run(20)
    print(f"{world.story_hash:08x} {world.steps} {world.counts}")
"""


def told(seed: int, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", TALE.replace("SEED", str(seed))],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_same_seed_tells_the_same_story_under_two_hash_seeds() -> None:
    assert told(7, "1") == told(7, "2")


def test_another_seed_tells_another_story() -> None:
    assert told(7, "1") != told(8, "1")


def broken_by(escape: str) -> str:
    """Message of the world in which a process ran this expression."""

    async def main(env: Env) -> int:
        eval(escape, {"time": time, "os": os, "threading": threading})  # noqa: S307
        return 0

    with World(1) as world:
        host = world.add_host("h1")
        host.main = main
        host.start_agent()
        with pytest.raises(Broken) as broken:
            world.run(10)
    return str(broken.value)


@pytest.mark.parametrize(
    ("escape", "named"),
    [
        ("time.time()", "time.time"),
        ("time.monotonic()", "time.monotonic"),
        ("time.sleep(1)", "time.sleep"),
        ("__import__('random').random()", "random.random"),
        ("__import__('random').shuffle([])", "random.shuffle"),
        ("os.urandom(8)", "os.urandom"),
        ("__import__('uuid').uuid4()", "uuid.uuid4"),
        ("__import__('secrets').token_hex()", "secrets.token_hex"),
        ("__import__('socket').socket()", "socket.socket"),
        ("__import__('subprocess').Popen(['true'])", "subprocess.Popen"),
        ("threading.Thread(target=print).start()", "threading.Thread.start"),
    ],
)
def test_an_escape_from_the_simulation_is_refused_and_names_its_caller(escape: str, named: str) -> None:
    message = broken_by(escape)
    assert f"Escape: {named} was called in a simulated rack by" in message
    assert "test_world" in message


def test_the_guard_is_gone_after_the_world_stopped() -> None:
    with pytest.raises(Escape), escape_guard():
        time.time()
    assert time.time() > 0
    assert not hasattr(time.time, "__wrapped__")


def test_a_loop_without_sockets_says_so() -> None:
    assert "NotImplementedError" in broken_by("__import__('asyncio').get_running_loop().create_datagram_endpoint(None)")


class NeverThree:
    name, every_s = "never three", 0.0

    def check(self, world: World) -> None:
        assert world.counts.get("tick", 0) < 3, "it ticked three times"


def test_a_broken_invariant_stops_the_world_with_the_line_that_repeats_it() -> None:
    with World(11) as world:
        world.watch(NeverThree())

        async def main(env: Env) -> int:
            for _ in range(5):
                world.mark("tick", "h1")
                await env.disk.append("x", b"1")
            return 0

        host = world.add_host("h1")
        host.main = main
        host.start_agent()
        with pytest.raises(
            Broken, match=r"(?s)never three: it ticked three times.*\nat \d+\.\d+ s of seed 11"
        ) as broken:
            world.run(10)
        assert "covey-chaos sim --seed 11" in str(broken.value)
        assert world.counts["tick"] == 3


def test_time_does_not_stand_still_in_a_busy_loop() -> None:
    ended: list[float] = []

    async def main(env: Env) -> int:
        end = env.clock.now_s() + 0.01
        while env.clock.now_s() < end:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ended.append(world.now)
        return 0

    with World(1) as world:
        host = world.add_host("h1")
        host.main = main
        host.start_agent()
        world.run(1)
    assert ended == [pytest.approx(0.01, abs=0.001)]
