"""`aggd-lane`: adds what `aggd` tells it to, in shared memory, in a process and so on a core of its own.

It holds nothing: whatever it has written is in memory that `aggd` has mapped too. It ends with its connection, and so
with `aggd`, however that ends.
"""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.owner.part_additions import add_part
from plugins.aggregator.datapath.lanes.frame_ends import FrameEnd
from plugins.aggregator.datapath.lanes.wire import LaneDone, LaneMaps, LaneOrder, Place, orders
from plugins.base import Program


class LaneConfig(msgspec.Struct, frozen=True, kw_only=True):
    socket: str
    """Name of the unix socket in the run directory at which `aggd` waits for it."""


class Lane(FrameEnd[LaneOrder | LaneMaps]):
    """The lane's end of its connection."""

    def __init__(self, env: Env, stream: ByteStream) -> None:
        super().__init__(stream, orders)
        self._env = env
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._cpu_s = env.clock.cpu_s()

    def heard(self, message: LaneOrder | LaneMaps) -> None:
        if isinstance(message, LaneMaps):
            self._map(message)
            return
        count, why = 0, ""
        try:
            count = self._add(message)
        except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            why = repr(error)[:200]
        before_s, self._cpu_s = self._cpu_s, self._env.clock.cpu_s()
        self.say(LaneDone(message.number, count, self._cpu_s - before_s, why))

    def _map(self, maps: LaneMaps) -> None:
        """Map memory. Memory that cannot be had is missing when an order speaks of it, which then fails."""
        for number in maps.closes:
            self._memory.pop(number, None)
        for at in maps.opens:
            try:
                ring = self._env.pages.open_ring(at.name, at.size, sparse=True)
            except OSError as error:
                self._env.log.error("memory of aggd cannot be mapped", size=at.size, why=str(error))
                continue
            self._memory[at.number] = np.frombuffer(ring.view, np.uint8)

    def _add(self, order: LaneOrder) -> int:
        into = None if order.into is None else self._bytes(order.into)
        sides = [self._bytes(place) for place in order.sides]
        old, new = self._numbers(order, order.old), self._numbers(order, order.new)
        return add_part(order.of, order.single, sides, into, order.last, old, new)

    def _bytes(self, place: Place) -> npt.NDArray[np.uint8]:
        number, first, end = place
        return self._memory[number][first:end]

    def _numbers(self, order: LaneOrder, places: tuple[Place, ...]) -> list[npt.NDArray[Any]]:
        """The parameters, and after them their moments."""
        numbers = NUMBERS[order.of]
        return [self._bytes(place).view(numbers.wide if at else numbers.stored) for at, place in enumerate(places)]


async def run(env: Env, config: LaneConfig) -> None:
    lane = Lane(env, await env.bytes.connect(f"unix:{env.run_dir}/{config.socket}"))
    lane.start()
    await lane.over


LANE = Program("aggd-lane", LaneConfig, run)
