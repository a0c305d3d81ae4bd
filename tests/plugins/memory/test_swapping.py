"""A volume as swap of its host: when pages may come back, the door of its process, and what an agent remembers."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.swap.received import receive
from covey.core.errors import Refused
from covey.core.events import LogEvent
from covey.wire import frames
from covey.wire import swap_wire as swapwire
from covey.wire.swap_wire import (
    BeginSwap,
    ConnectSwap,
    EndSwap,
    SwapConnected,
    SwapFrame,
    SwapNow,
    SwapRefused,
)
from plugins.memory.datapath.doors import nbd_front
from plugins.memory.datapath.doors.nbd_front import NbdFront
from plugins.memory.datapath.doors.nbdwire import NbdCommand
from plugins.memory.datapath.doors.swap_door import SwapDoor, SwapImpossible
from plugins.memory.datapath.volumes.volume import Volume
from plugins.memory.datapath.wire.shape import Undecided
from plugins.memory.machine.borrowing.events import BorrowerTick
from plugins.memory.policy.swapping import GroupMemory, RoomNow, lacks_room
from tests.plugins.memory.nbd import Client
from tests.plugins.memory.ports import PAGE, Bench, QuietProbes, a_volume, placed, soon
from tests.plugins.memory.tale import PEERS, Tale, only
from tests.plugins.memory.test_service import a_rack
from tests.quiet import quiet

MIB = 1 << 20
BACKEND = "covey:h1:swap:00ff"

# ---- may pages come back? ----


def machine(used: int, available: int, elsewhere: int = 0, *groups: GroupMemory) -> RoomNow:
    return RoomNow(1024 * MIB, available * MIB, elsewhere * MIB, used * MIB, groups)


def group(limit: int, used: int, swapped: int, cache: int = 0) -> GroupMemory:
    return GroupMemory("job", limit * MIB, used * MIB, cache * MIB, swapped * MIB)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (machine(100, 200), ""),
        (machine(100, 120), "room for 88 MiB"),  # a thirty-second of all memory is kept
        (machine(100, 120, 12), ""),
        (machine(0, 0), ""),
        (machine(100, 900, 0, group(64, 60, 90)), "group job has 90 MiB"),
        (machine(100, 900, 0, group(200, 60, 90)), ""),
        (machine(100, 900, 0, group(150, 60, 90)), "room for 80.6 MiB"),  # a sixteenth of its limit is kept
        (machine(100, 900, 0, group(150, 70, 90, cache=20)), ""),
        (machine(100, 900, 90, group(64, 60, 90)), ""),  # they go to another area
        (machine(40, 900, 0, group(150, 60, 90)), ""),  # no more than is here can come back
    ],
)
def test_pages_come_back_where_memory_and_limits_have_room(now: RoomNow, why: str) -> None:
    said = lacks_room(now)
    assert (why in said) and bool(why) == bool(said)


@given(st.integers(0, 2000), st.integers(0, 1024), st.integers(0, 2000), st.integers(0, 2000))
def test_more_room_never_keeps_pages_out(used: int, available: int, elsewhere: int, limit: int) -> None:
    before = machine(used, available, elsewhere, group(limit, limit, used))
    if not lacks_room(before):
        for more in (
            machine(used, available + 10, elsewhere, group(limit, limit, used)),
            machine(used, available, elsewhere + 10, group(limit, limit, used)),
            machine(used, available, elsewhere, group(limit + 100, limit, used)),
        ):
            assert lacks_room(more) == ""


# ---- the door ----


class StandIn:
    """A helper, and the kernel behind it: the kernel has the socket that it was given last."""

    def __init__(self, bench: Bench) -> None:
        self.path = f"{bench.env.run_dir}/swapd.sock"
        self.bench = bench
        self.asked: list[SwapFrame] = []
        self.kernel: Client | None = None
        self.has_device = self.is_on = False
        self.refuses: dict[type, SwapRefused] = {}
        self.ends_after_s = 0.0
        """The seconds between the end of the device and the answer."""
        self._tasks: list[asyncio.Task[None]] = []
        self._listener = socket.socket(socket.AF_UNIX)

    def listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        Path(self.path).unlink(missing_ok=True)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        if self.kernel is not None:
            self.kernel.stream.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._tasks.append(asyncio.get_running_loop().create_task(self._answer(connection)))

    async def _answer(self, connection: socket.socket) -> None:
        with connection:
            received = await asyncio.to_thread(receive, connection, swapwire.to_helper)
            assert received is not None
            question, descriptors = received
            answer = await self._done(question, descriptors)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(connection.sendall, frames.pack(answer))

    async def _done(self, question: SwapFrame, descriptors: list[int]) -> SwapFrame:
        self.asked.append(question)
        if type(question) in self.refuses:
            for descriptor in descriptors:
                os.close(descriptor)
            return self.refuses[type(question)]
        match question:
            case ConnectSwap():
                if question.resume and not self.has_device:
                    os.close(descriptors[0])
                    return SwapRefused("the kernel no longer has this device", "agentctl volume unswap NAME")
                resumed, self.has_device = self.has_device, True
                self.kernel = await kernel_with(descriptors[0])
                return SwapConnected("/dev/nbd7", resumed)
            case BeginSwap():
                self.is_on = True
            case EndSwap():
                self.is_on = self.has_device = False
                self.device.stream.close()
                await asyncio.sleep(self.ends_after_s)
                return SwapNow()
            case _:
                pass
        return SwapNow("/dev/nbd7", self.is_on, 5 * PAGE) if self.has_device else SwapNow()

    @property
    def device(self) -> Client:
        assert self.kernel is not None
        return self.kernel


async def kernel_with(descriptor: int) -> Client:
    from agent.ports.network.stream import SocketStream, Turn

    plain = socket.socket(fileno=descriptor)
    plain.setblocking(False)
    _, stream = await asyncio.get_running_loop().create_unix_connection(lambda: SocketStream(Turn()), sock=plain)
    return Client(stream)


@contextlib.asynccontextmanager
async def a_door(lacks: str = "") -> AsyncIterator[tuple[StandIn, SwapDoor, Volume]]:
    async with a_volume() as (bench, volume):
        await placed(volume, bench.register(0))
        stand_in = StandIn(bench)
        stand_in.listen()
        door = SwapDoor(bench.env, volume, lacks)
        try:
            yield stand_in, door, volume
        finally:
            door._forget("off")
            stand_in.close()


async def test_a_volume_becomes_swap_and_the_kernel_reads_what_it_wrote() -> None:
    async with a_door() as (helper, door, volume):
        await door.begin(BACKEND, helper.path, resume=False)
        assert (door.word, door.device, helper.is_on) == ("on", "/dev/nbd7", True)
        size = volume.shape.size_bytes
        assert helper.asked[0] == ConnectSwap(BACKEND, size, 4096, 5)
        assert await helper.device.write(3 * PAGE, b"x" * PAGE) == 0
        assert await helper.device.read(3 * PAGE, PAGE) == b"x" * PAGE
        assert await helper.device.ask(NbdCommand.TRIM, 3 * PAGE, PAGE) == 0
        assert volume.are_zeros(3, 1)
        await soon(lambda: door.used_bytes == 5 * PAGE)


async def test_a_socket_that_ends_is_followed_by_another_one() -> None:
    """Each socket gives the volume twice the time of the last: a slow volume would never be done otherwise."""
    async with a_door() as (helper, door, _):
        await door.begin(BACKEND, helper.path, resume=False)
        assert await helper.device.write(0, b"y" * PAGE) == 0
        for number in (2, 3):
            helper.device.stream.close()
            await soon(lambda number=number: door.sockets == number and str(door.word) == "on")
            assert ConnectSwap(BACKEND, 32 * PAGE, 4096, 5 << number - 1, resume=True) in helper.asked
            assert await helper.device.read(0, PAGE) == b"y" * PAGE


async def test_a_process_that_began_anew_gives_the_kernel_a_socket_when_the_helper_is_back() -> None:
    async with a_door() as (helper, door, _):
        helper.has_device = helper.is_on = True
        helper.close()
        await door.begin(BACKEND, helper.path, resume=True)
        await soon(lambda: "no swap helper listens" in door.why)
        assert str(door.word) == "waits"
        helper.listen()
        await soon(lambda: str(door.word) == "on")
        assert door.why == "" and not any(isinstance(each, BeginSwap) for each in helper.asked)
        assert await helper.device.read(0, PAGE) == bytes(PAGE)


async def test_swap_that_the_kernel_does_not_have_is_lost_and_is_not_made_anew() -> None:
    async with a_door() as (helper, door, _):
        await door.begin(BACKEND, helper.path, resume=True)
        await soon(lambda: str(door.word) == "lost")
        assert "no longer has this device" in door.why and not helper.has_device


async def test_what_an_ended_socket_began_is_over_before_there_is_another() -> None:
    """A write that was held up would otherwise come after a newer one of the same page."""
    async with a_door() as (helper, door, _):
        await door.begin(BACKEND, helper.path, resume=False)
        front = door._front
        assert isinstance(front, NbdFront)
        front._began(PAGE)
        helper.device.stream.close()
        await quiet()
        assert door.sockets == 1 and str(door.word) == "on"
        front._over(PAGE)
        await soon(lambda: door.sockets == 2)


async def test_a_read_that_a_lender_keeps_waiting_is_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the kernel would end the program that wants the page."""
    monkeypatch.setattr(nbd_front, "AGAIN_S", 0.01)
    async with a_door() as (helper, door, _):
        await door.begin(BACKEND, helper.path, resume=False)
        assert await helper.device.write(0, b"z" * PAGE) == 0
        front, tries = door._front, 0
        assert front is not None
        read = front._pages.read

        def late(offset: int, into: memoryview, done: Callable[[OSError | None], None]) -> None:
            nonlocal tries
            tries += 1
            if tries < 4:
                done(Undecided(5, "h2 has not said what it holds"))
            else:
                read(offset, into, done)

        monkeypatch.setattr(front._pages, "read", late)
        assert await helper.device.read(0, PAGE) == b"z" * PAGE
        assert tries == 4


async def test_swap_that_has_no_room_for_its_pages_stays_on_and_says_so() -> None:
    async with a_door() as (helper, door, _):
        await door.begin(BACKEND, helper.path, resume=False)
        helper.refuses[EndSwap] = SwapRefused("there is room for 1 MiB", "free memory")
        with pytest.raises(SwapImpossible, match="there is room for 1 MiB; next: free memory"):
            await door.end()
        assert str(door.word) == "on" and helper.is_on
        assert await helper.device.read(0, PAGE) == bytes(PAGE)
        del helper.refuses[EndSwap]
        await door.end()
        assert str(door.word) == "off" and not helper.has_device


@pytest.mark.parametrize("ends_after_s", [0.0, 0.3])
async def test_swap_that_ended_as_it_should_is_not_lost(ends_after_s: float) -> None:
    """The socket of the swap ends before the helper says so."""
    async with a_door() as (helper, door, _):
        await door.begin(BACKEND, helper.path, resume=False)
        helper.ends_after_s = ends_after_s
        ending = asyncio.get_running_loop().create_task(door.end())
        while not ending.done():
            assert str(door.word) != "lost"
            await asyncio.sleep(0.01)
        await ending
        assert (str(door.word), door.why) == ("off", "")
        await quiet()
        assert (door.word, door.device, helper.has_device) == ("off", "", False)


async def test_the_writer_of_a_volumes_log_is_locked_as_the_volume_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes wait for the writer when the ring is full: swapped out to the volume it would wait for itself."""
    asked: list[bool] = []

    def note(probes: QuietProbes, flushes: bool) -> str:
        asked.append(flushes)
        return ""

    monkeypatch.setattr(QuietProbes, "stay_in_memory", note)
    async with a_volume():
        assert asked == [True]


async def test_a_device_that_becomes_no_swap_is_taken_away_again() -> None:
    async with a_door() as (helper, door, _):
        helper.refuses[BeginSwap] = SwapRefused("mkswap: no", "read")
        with pytest.raises(SwapImpossible, match="mkswap"):
            await door.begin(BACKEND, helper.path, resume=False)
        assert str(door.word) == "off" and not helper.has_device


async def test_a_process_that_may_be_swapped_out_is_no_swap() -> None:
    async with a_door("without CAP_IPC_LOCK it may be swapped out") as (helper, door, _):
        with pytest.raises(SwapImpossible, match="could deadlock on its own swap: without CAP_IPC_LOCK"):
            await door.begin(BACKEND, helper.path, resume=False)
        assert helper.asked == []


async def test_pages_that_are_discarded_leave_an_empty_slab() -> None:
    async with a_door() as (helper, door, volume):
        await door.begin(BACKEND, helper.path, resume=False)
        for at in (0, 3):
            assert await helper.device.write(at * PAGE, b"x" * PAGE) == 0
        await soon(lambda: volume.slab(0).remote == 2)
        counted = {slab.index: slab.empty for slab in volume.counts(1, 0, 0).slabs}
        assert counted == {0: False}
        assert await helper.device.ask(NbdCommand.TRIM, 0, 2 * PAGE) == 0
        assert not volume.counts(1, 0, 0).slabs[0].empty
        assert await helper.device.ask(NbdCommand.TRIM, 0, 16 * PAGE) == 0
        assert volume.counts(1, 0, 0).slabs[0].empty


def test_a_slab_of_which_everything_was_discarded_goes_back_to_its_lender() -> None:
    tale = Tale()
    tale.mapped()
    for rates, state in ((15, "mapped"), (0, "mapped")):
        tale.tell(BorrowerTick({"v": [rates]}, PEERS), 1.0)
        assert tale.state() == state
    for _ in range(30):
        actions = tale.tell(BorrowerTick({"v": [0]}, PEERS, empty={"v": [0]}), 1.0)
        if tale.state() != "mapped":
            break
    assert "everything in it was discarded" in only(actions, LogEvent).reason
    assert tale.state() == "moving"


def test_what_was_discarded_stays_while_it_is_hot_or_all_is() -> None:
    for tale, requests in ((Tale(), 1000), (Tale(hot=0.0), 0)):
        tale.mapped()
        for _ in range(30):
            tale.tell(BorrowerTick({"v": [requests]}, PEERS, empty={"v": [0]}), 1.0)
        assert tale.state() == "mapped"


# ---- the agent, on a simulated rack ----


def test_a_host_without_a_helper_says_so_and_has_no_swap() -> None:
    with a_rack(1) as rack:
        rack.attach("h1", "data", "64 KiB")
        with pytest.raises(Refused) as refused:
            rack.command("h1", "swap", volume="data")
        assert "there is no kernel here" in refused.value.why and refused.value.code == 4
        assert rack.agents["h1"].borrowing.volumes["data"].known.swap == ""
        assert "no swap helper listens" in rack.agents["h1"].status()["swap"]
        rack.command("h1", "remove", volume="data")


def test_a_volume_that_others_use_is_no_swap() -> None:
    with a_rack(1) as rack:
        rack.attach("h1", "data", "64 KiB")
        rack.command("h1", "export", volume="data", socket="/run/of-a-test.sock")
        with pytest.raises(Refused) as refused:
            rack.command("h1", "swap", volume="data")
        assert "use it as a volume" in refused.value.why


def test_swap_is_not_forgotten_while_it_may_be_on() -> None:
    with a_rack(1) as rack:
        rack.attach("h1", "data", "64 KiB")
        volume = rack.agents["h1"].borrowing.volumes["data"]
        volume.known = msgspec.structs.replace(volume.known, swap=BACKEND)
        with pytest.raises(Refused) as refused:
            rack.command("h1", "remove", volume="data")
        assert refused.value.code == 4 and refused.value.next == "agentctl volume unswap data"
