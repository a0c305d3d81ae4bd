"""How a real connection drives a machine (`covey.wire.driven`): a part of what came in each turn, all of it in the
end."""

import asyncio

import pytest

from agent.ports.network.bytes import SocketBytes
from agent.ports.network.stream import FILLS_MAX
from agent.program import JsonLog
from covey.ports.streams import ByteStream
from covey.wire.driven import driven
from tests.agent.here import LOOPS, Lines, run_on, until

PORT = SocketBytes(JsonLog(Lines(), "debug"))  # type: ignore[arg-type]
PIECE = 8
PIECES = 10 * FILLS_MAX


class Counting:
    """A `Driven` that takes pieces of `PIECE` bytes, and counts them."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.turns: list[int] = []
        """The number of pieces in each turn."""
        self.over = False
        self._piece = memoryview(bytearray(PIECE))
        self._of_turn = 0

    def wanted(self) -> memoryview:
        return self._piece

    def filled(self) -> None:
        assert not self.over
        self.came.append(int.from_bytes(self._piece, "big"))
        self._of_turn += 1

    def turn(self) -> None:
        self.turns.append(self._of_turn)
        self._of_turn = 0

    def ended(self, error: ConnectionError) -> None:
        self.over = True


async def driven_by_all(close: bool) -> Counting:
    """A machine to which all pieces come at once."""
    machine, sent = Counting(), b"".join(number.to_bytes(PIECE, "big") for number in range(PIECES))

    async def accept(stream: ByteStream) -> None:
        driven(stream).drive(machine, polite=True)
        await asyncio.Event().wait()

    listener = await PORT.listen("127.0.0.1:0", accept)
    near = await PORT.connect(listener.address)
    try:
        await near.write(sent)
        if close:
            near.close()
            await until(lambda: machine.over)
        else:
            await until(lambda: len(machine.came) == PIECES)
    finally:
        near.close()
        await listener.close()
    return machine


@pytest.mark.parametrize("loop", LOOPS)
def test_what_comes_at_once_is_handed_over_in_several_turns(loop: str) -> None:
    """In this way what a machine sends leaves while the rest is handled, and others have their turn."""

    async def story() -> None:
        machine = await driven_by_all(close=False)
        assert machine.came == list(range(PIECES))
        assert max(machine.turns) == FILLS_MAX and len(machine.turns) >= PIECES // FILLS_MAX

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_what_came_before_the_end_is_handed_over_before_it_is_told(loop: str) -> None:
    async def story() -> None:
        assert (await driven_by_all(close=True)).came == list(range(PIECES))

    run_on(loop, story())


class Telling(Counting):
    """A machine that has something to do soon, over another connection, whenever a piece is there."""

    def __init__(self, other: ByteStream, fails: bool = False) -> None:
        super().__init__()
        self.order: list[str] = []
        self._other, self._fails = driven(other), fails

    def filled(self) -> None:
        super().filled()
        asyncio.get_running_loop().call_soon(self.order.append, "the loop's next turn")
        if self._fails:
            self._other.soon(self._fail)
        self._other.soon(lambda: self.order.append("soon"))

    def turn(self) -> None:
        self.order.append("turn")

    def _fail(self) -> None:
        raise RuntimeError("of a test")


async def told(fails: bool) -> Telling:
    """A machine to which one piece came, and which has done all that it was to do."""
    machines: list[Telling] = []

    async def accept(stream: ByteStream) -> None:
        machines.append(Telling(other, fails))
        driven(stream).drive(machines[0], polite=True)
        await asyncio.Event().wait()

    async def idle(_stream: ByteStream) -> None:
        await asyncio.Event().wait()

    listeners = [await PORT.listen("127.0.0.1:0", each) for each in (idle, accept)]
    other = await PORT.connect(listeners[0].address)
    near = await PORT.connect(listeners[1].address)
    try:
        await until(lambda: machines and machines[0].order == ["turn"])  # of `drive` itself
        await near.write(bytes(PIECE))
        await until(lambda: {"soon", "the loop's next turn"} <= set(machines[0].order))
        return machines[0]
    finally:
        for stream in (near, other):
            stream.close()
        for listener in listeners:
            await listener.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_to_be_done_soon_waits_for_what_arrived_but_not_for_the_loop(loop: str) -> None:
    async def story() -> None:
        assert (await told(fails=False)).order == ["turn", "turn", "soon", "the loop's next turn"]

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_to_be_done_soon_is_done_though_something_before_it_failed(loop: str) -> None:
    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        assert (await told(fails=True)).order.count("soon") == 1

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_to_be_done_soon_while_nothing_arrives_is_done_in_the_next_turn(loop: str) -> None:
    async def story() -> None:
        async def accept(_stream: ByteStream) -> None:
            await asyncio.Event().wait()

        listener, done = await PORT.listen("127.0.0.1:0", accept), list[str]()
        near = await PORT.connect(listener.address)
        driven(near).soon(lambda: done.append("soon"))
        assert not done
        await asyncio.sleep(0)
        assert done == ["soon"]
        near.close()
        await listener.close()

    run_on(loop, story())
