"""The simulated ports and the real ones keep the same promises: the same small programs run on both."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent.ports.disk import DirectoryDisk
from agent.ports.network.bytes import SocketBytes
from agent.ports.network.datagrams import UdpDatagrams
from chaos.checks import conformance
from chaos.world.host import SimLog
from chaos.world.world import World
from covey.ports.addresses import Address
from covey.ports.datagrams import Datagrams
from covey.ports.disk import Disk
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.ports.streams import Bytes, ByteStream


def in_a_world(promise: Callable[[Env], Awaitable[None]], seed: int = 5) -> None:
    ended: list[bool] = []

    async def main(env: Env) -> int:
        await promise(env)
        ended.append(True)
        return 0

    with World(seed) as world:
        host = world.add_host("h1")
        host.main = main
        host.start_agent()
        world.run(100)
    assert ended == [True]


def named(promise: Any) -> str:
    return str(promise.__name__)


@pytest.mark.parametrize("promise", conformance.DISK, ids=named)
def test_the_simulated_disk_keeps_its_promises(promise: Callable[[Disk], Awaitable[None]]) -> None:
    in_a_world(lambda env: promise(env.disk))


@pytest.mark.parametrize("promise", conformance.DISK, ids=named)
def test_the_real_disk_keeps_the_same_promises(promise: Callable[[Disk], Awaitable[None]], tmp_path: Path) -> None:
    disk = DirectoryDisk(str(tmp_path))
    try:
        asyncio.run(promise(disk))  # type: ignore[arg-type]
    finally:
        disk.close()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "unix:/run/covey/h1/x.sock"])
@pytest.mark.parametrize("promise", conformance.BYTES, ids=named)
def test_simulated_streams_keep_their_promises(
    promise: Callable[[Bytes, Address], Awaitable[None]], bind: Address
) -> None:
    in_a_world(lambda env: promise(env.bytes, bind))


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("promise", conformance.BYTES, ids=named)
def test_real_streams_keep_the_same_promises(
    promise: Callable[[Bytes, Address], Awaitable[None]], kind: str, tmp_path: Path
) -> None:
    with World(1) as world:
        port = SocketBytes(SimLog(world, "test"))
        bind = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/x.sock"
        asyncio.run(promise(port, bind))  # type: ignore[arg-type]


@pytest.mark.parametrize("promise", conformance.DATAGRAMS, ids=named)
def test_simulated_datagrams_keep_their_promises(promise: Callable[[Datagrams, Address], Awaitable[None]]) -> None:
    in_a_world(lambda env: promise(env.datagrams, "127.0.0.1:0"))


@pytest.mark.parametrize("promise", conformance.DATAGRAMS, ids=named)
def test_real_datagrams_keep_the_same_promises(promise: Callable[[Datagrams, Address], Awaitable[None]]) -> None:
    asyncio.run(promise(UdpDatagrams(), "127.0.0.1:0"))  # type: ignore[arg-type]


def test_the_machine_of_a_killed_process_hears_nothing_of_its_end() -> None:
    """The kernel closes the sockets of the killed process; no code of its own runs any more."""
    heard: list[str] = []

    class Listening(conformance._Echoes):
        def ended(self, error: ConnectionError) -> None:
            heard.append(str(error))

    async def serve(env: Env, command: Command) -> int:
        async def accept(stream: ByteStream) -> None:
            machine = Listening(stream)
            machine.stream.drive(machine, polite=True)
            await asyncio.Event().wait()

        await env.bytes.listen("127.0.0.1:700", accept)
        await asyncio.Event().wait()
        return 0

    ends: list[str] = []

    async def ask(env: Env, command: Command) -> int:
        stream = await env.bytes.connect("127.0.0.1:700")
        try:
            await stream.read_into(memoryview(bytearray(1)))
        except ConnectionError as error:
            ends.append(str(error))
        return 0

    with World(5) as world:
        host = world.add_host("h1")
        server = host.run("server", serve)
        world.run(1.0)
        host.run("client", ask)
        world.run(2.0)
        server.signal(9)
        world.run(3.0)
    assert len(ends) == 1 and heard == []
