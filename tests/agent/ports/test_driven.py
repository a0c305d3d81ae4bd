"""How a real connection drives a machine (`covey.driven`): a part of what came in each turn, all of it in the end."""

import asyncio

import pytest

from agent.ports.bytes import SocketBytes
from agent.ports.stream import FILLS_MAX
from agent.program import JsonLog
from covey.driven import driven
from covey.ports import ByteStream
from tests.agent.here import LOOPS, Lines, run_on, until

PORT = SocketBytes(JsonLog(Lines(), "debug"))  # type: ignore[arg-type]
PIECE = 8
PIECES = 10 * FILLS_MAX


class Counting:
    """`Driven`: pieces of so many bytes."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.turns: list[int] = []
        """Pieces of each."""
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
    """So that what a machine sends leaves while the rest is handled, and others have their turn."""

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
