"""What the simulated ports do when the world is unkind: loss, cuts, kills, power failures, full and sick disks."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from chaos.checks import conformance
from chaos.world.host import SimHost
from chaos.world.world import World
from covey.core.ids import HostId
from covey.ports.env import Env
from covey.ports.processes import Command, Process, ProcessId
from covey.ports.streams import ByteStream
from plugins.base import Program

Main = Callable[[Env], Coroutine[Any, Any, int | None]]


def rack(world: World, mains: dict[str, Main]) -> dict[str, SimHost]:
    for name, main in mains.items():
        host = world.add_host(name)
        host.main = main
        host.start_agent()
    return world.hosts


def kill_agent(host: SimHost, number: int = 9) -> None:
    assert host.agent is not None
    host.agent.signal(number)


async def forever(env: Env) -> int:
    await asyncio.Event().wait()
    return 0


# ---- datagrams -------------------------------------------------------------------------------------------------------


def packets_seen(seed: int, tune: Callable[[World], None], count: int = 2000) -> list[int]:
    got: list[int] = []

    async def listening(env: Env) -> int:
        await env.datagrams.open("0.0.0.0:7946", lambda data, sender: got.append(int(data)))
        return await forever(env)

    async def sending(env: Env) -> int:
        socket = await env.datagrams.open("0.0.0.0:7946", lambda data, sender: None)
        await asyncio.sleep(1)
        for number in range(count):
            socket.send(b"%d" % number, "10.0.0.1:7946")
            await asyncio.sleep(0.0005)
        return 0

    with World(seed) as world:
        rack(world, {"h1": listening, "h2": sending})
        tune(world)
        world.run(10)
    return got


def test_a_calm_network_delivers_every_packet_once() -> None:
    assert sorted(packets_seen(1, lambda world: None)) == list(range(2000))


def test_packets_are_lost_doubled_and_reordered_at_the_rates_asked_for() -> None:
    def storm(world: World) -> None:
        world.network.conditions.loss = 0.2
        world.network.conditions.duplicate = 0.1
        world.network.conditions.spike = 0.05

    got = packets_seen(1, storm)
    assert 0.75 < len(set(got)) / 2000 < 0.85
    assert 0.05 < (len(got) - len(set(got))) / 2000 < 0.15
    assert got != sorted(got)


def test_a_one_way_cut_stops_one_direction_only() -> None:
    def cut(world: World) -> None:
        world.network.cut([("h2", "h1")])

    def other(world: World) -> None:
        world.network.cut([("h1", "h2")])

    assert packets_seen(1, cut) == []
    assert len(packets_seen(1, other)) == 2000


# ---- streams ---------------------------------------------------------------------------------------------------------


async def echo(stream: ByteStream) -> None:
    byte = bytearray(1)
    while True:
        await stream.read_into(memoryview(byte))
        await stream.write(byte)


async def echoing(env: Env) -> int:
    await env.bytes.listen("0.0.0.0:9000", echo)
    return await forever(env)


def talk(fault: Callable[[World], None], seconds: float = 30.0) -> tuple[list[float], list[str]]:
    """Send a byte there and back every 0.1 s; returns when each came back, and how it ended."""
    back: list[float] = []
    ended: list[str] = []

    async def calling(env: Env) -> int:
        await asyncio.sleep(0.1)
        stream = await env.bytes.connect("10.0.0.1:9000")
        byte = bytearray(1)
        try:
            while True:
                await stream.write(b"x")
                await stream.read_into(memoryview(byte))
                back.append(world.now)
                await asyncio.sleep(0.1)
        except ConnectionError as error:
            ended.append(f"{world.now:.1f} {error}")
        return 0

    with World(1) as world:
        rack(world, {"h1": echoing, "h2": calling})
        world.at(5, lambda: fault(world))
        world.run(seconds)
    return back, ended


def test_a_short_cut_only_delays_a_stream() -> None:
    def cut(world: World) -> None:
        world.network.cut([("h1", "h2"), ("h2", "h1")])
        world.at(8, world.network.heal)

    back, ended = talk(cut)
    assert ended == []
    assert max(late - early for early, late in itertools.pairwise(back)) == pytest.approx(3.3, abs=0.5)
    assert back[-1] > 29


def test_a_long_cut_in_one_direction_breaks_a_stream_after_the_user_timeout() -> None:
    back, ended = talk(lambda world: world.network.cut([("h1", "h2")]))
    assert back[-1] < 5.1
    assert [10 <= float(line.split()[0]) <= 11.1 for line in ended] == [True]


def test_a_killed_process_resets_its_streams_at_once() -> None:
    _, ended = talk(lambda world: kill_agent(world.hosts["h1"]))
    assert [float(line.split()[0]) < 5.3 for line in ended] == [True]


def test_a_host_without_power_is_silent_and_resets_when_it_is_back() -> None:
    _, ended = talk(lambda world: world.hosts["h1"].power_off())
    assert [10 <= float(line.split()[0]) <= 11.1 for line in ended] == [True]

    def blink(world: World) -> None:
        world.hosts["h1"].power_off()
        world.at(6, world.hosts["h1"].power_on)

    _, ended = talk(blink)
    assert [6 <= float(line.split()[0]) <= 7.1 for line in ended] == [True]


def test_a_stopped_reader_breaks_a_writer_that_waits_longer_than_the_user_timeout() -> None:
    ended: list[float] = []

    async def calling(env: Env) -> int:
        await asyncio.sleep(0.1)
        stream = await env.bytes.connect("10.0.0.1:9000")
        try:
            await stream.write(bytes(8 << 20))
        except ConnectionError:
            ended.append(world.now)
        return 0

    with World(1) as world:
        hosts = rack(world, {"h1": echoing, "h2": calling})
        world.at(0.05, lambda: kill_agent(hosts["h1"], 19))
        world.run(30)
    assert ended == [pytest.approx(5.1, abs=0.3)]


@pytest.mark.parametrize("driven", [False, True])
def test_what_a_slow_reader_has_not_taken_leaves_later_from_memory_as_it_is_then(driven: bool) -> None:
    """Memory that is used again too early shows: transports keep views of it."""
    size, got = 3 << 20, bytearray(3 << 20)

    async def reading(env: Env) -> int:
        async def slow(stream: ByteStream) -> None:
            await asyncio.sleep(2.0)
            await stream.read_into(memoryview(got))

        await env.bytes.listen("0.0.0.0:9000", slow)
        return await forever(env)

    async def calling(env: Env) -> int:
        await asyncio.sleep(0.1)
        stream = await env.bytes.connect("10.0.0.1:9000")
        memory = bytearray(b"a" * size)
        if driven:
            speaks = conformance.Speaks(stream)
            speaks.stream.drive(speaks, polite=False)
            speaks.stream.send([memory])
        else:
            env.spawn("writes", refused(stream.write(memory)))
        await asyncio.sleep(0.5)
        stream.close()
        memory[:] = b"b" * size
        return await forever(env)

    with World(1) as world:
        rack(world, {"h1": reading, "h2": calling})
        world.run(10)
    taken = world.wires.window_bytes
    assert got == b"a" * taken + b"b" * (size - taken)


async def refused(writing: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(ConnectionError):
        await writing


def test_unix_sockets_tell_the_user_and_do_not_leave_their_host() -> None:
    told: list[Any] = []

    async def serving(env: Env) -> int:
        async def accept(stream: ByteStream) -> None:
            told.append(stream.uid)

        await env.bytes.listen("unix:/run/x.sock", accept)
        stream = await env.bytes.connect("unix:/run/x.sock")
        told.append(stream.uid)
        return await forever(env)

    async def elsewhere(env: Env) -> int:
        await asyncio.sleep(1)
        try:
            await env.bytes.connect("unix:/run/x.sock")
        except ConnectionRefusedError:
            told.append("refused")
        return 0

    with World(1) as world:
        rack(world, {"h1": serving, "h2": elsewhere})
        world.run(5)
    assert told == [1000, 1000, "refused"]


# ---- links -----------------------------------------------------------------------------------------------------------


def numbered(fault: Callable[[World], None], knows: bool = True) -> tuple[list[int], int, list[bool]]:
    """Send numbered messages, ten a second for 30 s; returns which were heard, how many were sent, what `send` said."""
    heard: list[int] = []
    said: list[bool] = []
    keys: dict[str, bytes] = {}

    async def start(env: Env, peer: str) -> None:
        await env.links.open("0.0.0.0:7947", lambda sender, data: heard.append(int(data)))
        keys[env.host] = env.links.public_key
        await asyncio.sleep(0.5)
        if knows or env.host == "h2":
            ip = {"h1": "10.0.0.1", "h2": "10.0.0.2"}[peer]
            env.links.know(HostId(peer), f"{ip}:7947", keys[peer])
        await asyncio.sleep(0.5)

    async def hearing(env: Env) -> int:
        await start(env, "h2")
        return await forever(env)

    async def sending(env: Env) -> int:
        await start(env, "h1")
        for number in range(300):
            said.append(env.links.send(HostId("h1"), b"%d" % number))
            await asyncio.sleep(0.1)
        return 0

    with World(2) as world:
        rack(world, {"h1": hearing, "h2": sending})
        world.at(5, lambda: fault(world))
        world.run(40)
    return heard, sum(said), said


def test_a_calm_link_delivers_every_message_once_and_in_order() -> None:
    heard, sent, _ = numbered(lambda world: None)
    assert heard == list(range(300))
    assert sent == 300


def test_a_link_across_a_long_cut_loses_messages_silently_and_then_goes_on() -> None:
    def cut(world: World) -> None:
        world.network.cut([("h2", "h1")])
        world.at(11, world.network.heal)

    heard, sent, said = numbered(cut)
    assert heard == sorted(set(heard))
    assert sent > len(heard) + 10, "some were accepted and never heard"
    assert not all(said), "while there is no connection, send says so"
    assert heard[-1] == 299


def test_a_link_across_a_short_cut_loses_nothing() -> None:
    def cut(world: World) -> None:
        world.network.cut([("h2", "h1")])
        world.at(7, world.network.heal)

    heard, sent, _ = numbered(cut)
    assert (heard, sent) == (list(range(300)), 300)


def test_a_link_whose_key_is_not_known_delivers_nothing() -> None:
    heard, sent, _ = numbered(lambda world: None, knows=False)
    assert (heard, sent) == ([], 0)


# ---- disk ------------------------------------------------------------------------------------------------------------


def test_what_an_append_acknowledged_survives_and_the_rest_is_a_torn_tail() -> None:
    """What was acknowledged is a prefix of what is recovered, which is no longer than what was asked for."""
    torn = 0
    for seed in range(300):
        acknowledged: list[int] = []

        async def main(env: Env, acknowledged: list[int] = acknowledged) -> int:
            for number in range(100):
                await env.disk.append("log", bytes([number]) * 700)
                acknowledged.append(number)
            return 0

        with World(seed) as world:
            hosts = rack(world, {"h1": main})
            world.run(random.Random(seed).uniform(0.01, 0.1))
            hosts["h1"].power_off()
            left = bytes(hosts["h1"].disk.files["log"].data) if "log" in hosts["h1"].disk.files else b""
        whole = b"".join(bytes([number]) * 700 for number in acknowledged)
        assert left.startswith(whole)
        assert len(left) <= len(whole) + 700
        torn += len(left) not in (len(whole), len(whole) + 700)
    assert torn > 20


def test_a_replaced_file_is_the_old_or_the_new_one_whatever_dies() -> None:
    seen = set()
    for seed in range(200):

        async def main(env: Env) -> int:
            await env.disk.replace("state", b"old" * 1000)
            await env.disk.replace("state", b"newer" * 1000)
            return 0

        with World(seed) as world:
            hosts = rack(world, {"h1": main})
            world.run(random.Random(seed).uniform(0.0, 0.01))
            if seed % 2:
                hosts["h1"].power_off()
            else:
                kill_agent(hosts["h1"])
            file = hosts["h1"].disk.files.get("state")
            seen.add(None if file is None else bytes(file.data))
    assert seen == {None, b"old" * 1000, b"newer" * 1000}


def test_unsynced_writes_survive_a_killed_process_but_not_a_power_failure() -> None:
    async def main(env: Env) -> int:
        await env.disk.write_at("pages", 0, b"a" * 512 * 64)
        await env.disk.sync("pages")
        await env.disk.write_at("pages", 0, b"b" * 512 * 64)
        return await forever(env)

    def sectors(power: bool) -> list[int]:
        with World(4) as world:
            hosts = rack(world, {"h1": main})
            world.run(1)
            kill_agent(hosts["h1"])
            if power:
                hosts["h1"].power_off()
            data = bytes(hosts["h1"].disk.files["pages"].data)
        parts = [data[at : at + 512] for at in range(0, len(data), 512)]
        return [parts.count(b"a" * 512), parts.count(b"b" * 512)]

    assert sectors(power=False) == [0, 64]
    old, new = sectors(power=True)
    assert old > 10
    assert new > 10


def test_a_full_or_sick_disk_raises_os_error_and_keeps_what_it_has() -> None:
    told: list[int | None] = []

    async def main(env: Env) -> int:
        await env.disk.replace("a", b"1" * 1000)
        for _ in range(2):
            await asyncio.sleep(10)
            try:
                await env.disk.replace("a", b"2" * 3000)
            except OSError as error:
                told.append(error.errno)
        return 0

    with World(1) as world:
        hosts = rack(world, {"h1": main})
        disk = hosts["h1"].disk
        disk.capacity_bytes = 10_000
        world.run(5)
        disk.filled_bytes = 9_000
        world.run(15)
        disk.filled_bytes, disk.sick = 0, 1.0
        world.run(30)
    assert told == [28, 5]


# ---- processes -------------------------------------------------------------------------------------------------------


class Quiet(msgspec.Struct, frozen=True):
    seconds: float


async def quiet(env: Env, config: Quiet) -> None:
    await asyncio.sleep(config.seconds)


PROGRAMS = {"quiet": Program("quiet", Quiet, quiet)}


def family(act: Callable[[World, SimHost], None], play: Callable[[Env, list[Any]], Awaitable[None]]) -> list[Any]:
    told: list[Any] = []

    async def main(env: Env) -> int:
        await play(env, told)
        return await forever(env)

    async def train(env: Env, command: Command) -> int:
        await asyncio.sleep(float(command.argv[1]))
        return 42

    with World(1, programs=lambda: PROGRAMS) as world:
        world.user_programs["train"] = train
        hosts = rack(world, {"h1": main})
        act(world, hosts["h1"])
        world.run(60)
    return told


def command(*argv: str) -> Command:
    return Command(argv=argv, cwd="/", env={}, output="/dev/null")


def test_a_process_tells_its_exit_status_to_its_parent() -> None:
    async def play(env: Env, told: list[Any]) -> None:
        told.append(await (await env.processes.start(command("train", "1"))).wait())
        with pytest.raises(FileNotFoundError):
            await env.processes.start(command("no-such-thing"))

    assert family(lambda world, host: None, play) == [42]


def test_signals_end_stop_and_continue_a_process() -> None:
    async def play(env: Env, told: list[Any]) -> None:
        for number in (15, 9):
            process = await env.processes.start(command("train", "10"))
            process.signal(number)
            told.append(await process.wait())
        process = await env.processes.start(command("train", "1"))
        before = env.clock.now_s()
        await asyncio.sleep(0.2)
        process.signal(19)
        asyncio.get_running_loop().call_later(8, process.signal, 18)
        told.append((await process.wait(), round(env.clock.now_s() - before)))

    assert family(lambda world, host: None, play) == [-15, -9, (42, 8)]


def test_programs_and_ranks_outlive_the_agent_and_are_found_again_not_as_children() -> None:
    ids: list[ProcessId] = []

    async def play(env: Env, told: list[Any]) -> None:
        if not ids:
            ids.append((await env.processes.start_program("quiet", "q-1", Quiet(20.0))).id)
            ids.append((await env.processes.start(command("train", "20"))).id)
            return
        for known in ids:
            process: Process | None = env.processes.find(known)
            assert process is not None
            told.append(await process.wait())
        told.append(env.processes.find(ids[0]))

    def act(world: World, host: SimHost) -> None:
        world.at(5, lambda: kill_agent(host))
        world.at(6, host.start_agent)

    assert family(act, play) == [None, None, None]


def test_all_processes_die_with_their_host() -> None:
    ids: list[ProcessId] = []

    async def play(env: Env, told: list[Any]) -> None:
        if not ids:
            ids.append((await env.processes.start_program("quiet", "q-1", Quiet(50.0))).id)
            return
        told.append(env.processes.find(ids[0]))

    def act(world: World, host: SimHost) -> None:
        world.at(5, host.power_off)
        world.at(6, host.power_on)

    assert family(act, play) == [None]
