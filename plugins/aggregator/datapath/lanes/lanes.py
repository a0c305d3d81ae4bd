"""`aggd`'s lanes: processes that add, each one part of a tensor at a time, in place (AutoPS: an aggregator with
several cores; capacity is lanes * C in `policy.cycle`).

    aggd's loop    reads and writes ............. begins an addition ......... ends it, begins the next one
    lane 1                                        adds part 3 of "w"
    lane 2                                        adds part 7 of "w", or of another job's tensor

A thread would do as well if the interpreter did not have one lock: with two threads a step of Adam in numpy was slower
than with one. `addition_queue` decides what is added first; the order of additions of a part is fixed, and no two of
them touch the same bytes. What a lane was doing when it ended is lost, as by an addition that fails.
"""

import asyncio
from collections.abc import Callable

from covey.ports.env import Env
from covey.ports.streams import ByteStream, Listener
from covey.tensors.owner.part_additions import PartAddition
from plugins.aggregator.datapath.lanes.frame_ends import FrameEnd
from plugins.aggregator.datapath.lanes.lane import LaneConfig
from plugins.aggregator.datapath.lanes.memory import LaneMemory
from plugins.aggregator.datapath.lanes.wire import SOCKET, LaneDone, LaneMaps, LaneOrder, Place, answers
from plugins.starting import Pauses

DEPTH = 2
"""Most orders that one lane may have: it begins the second one without waiting for this process."""
FORGET_S = 0.5

Ended = Callable[[LaneDone], None]


class LaneLink(FrameEnd[LaneDone]):
    """`aggd`'s end of the connection of one lane."""

    def __init__(self, lanes: "Lanes", stream: ByteStream) -> None:
        super().__init__(stream, answers)
        self._lanes = lanes
        self.under_way: dict[int, tuple[PartAddition, Ended]] = {}
        """Number of an order -> its addition and callback; the addition's arrays stay as long as it is here."""
        self.knows: set[int] = set()
        """Numbers of the memory that it has mapped."""

    def heard(self, message: LaneDone) -> None:
        found = self.under_way.pop(message.number, None)
        if found is not None:
            self._lanes.ended(found[1], message)
        if message.why:  # it may be unable to map memory: the next one comes after a pause, in which this process adds
            self._stream.close()

    def ended(self, error: ConnectionError) -> None:
        self._lanes.lost(self)
        super().ended(error)


class Lanes:
    """The lanes of one process; `freed` is called when one may have room again, or is gone."""

    def __init__(self, env: Env, count: int) -> None:
        self.env, self.count = env, count
        self.memory = LaneMemory(env.pages)
        self.freed: Callable[[], None] = lambda: None
        self.cpu_s = 0.0
        """Seconds of a core that all of them have worked."""
        self._links: list[LaneLink] = []
        self._orders = 0

    @property
    def up(self) -> int:
        """Number of lanes that are up."""
        return len(self._links)

    @property
    def has_room(self) -> bool:
        return any(len(link.under_way) < DEPTH for link in self._links)

    async def start(self) -> Listener:
        """Start the lanes, which connect when they are ready; until then the caller adds by itself."""
        listener = await self.env.bytes.listen(f"unix:{self.env.run_dir}/{SOCKET}", self._accept)
        for number in range(1, self.count + 1):
            self.env.spawn(f"aggd keeps lane {number}", self._keep(f"aggd-lane-{number}"))
        self.env.spawn("aggd's lanes forget memory", self._forget())
        return listener

    def take(self, addition: PartAddition, ended: Ended) -> bool:
        """Let a lane do an addition; `ended` is called after it. False: there is no lane with room, or no lane can see
        the memory."""
        link = min(self._links, key=lambda each: len(each.under_way), default=None)
        if link is None or len(link.under_way) >= DEPTH:
            return False
        order = self._order(addition)
        if order is None:
            return False
        link.under_way[order.number] = addition, ended
        self._map(link, order)
        link.say(order)
        return True

    def ended(self, tell: Ended, done: LaneDone) -> None:
        self.cpu_s += done.cpu_s
        tell(done)
        self.freed()

    def lost(self, link: LaneLink) -> None:
        if link not in self._links:
            return
        self._links.remove(link)
        under_way, link.under_way = link.under_way, {}
        for number, (_, tell) in under_way.items():
            tell(LaneDone(number, why="the lane that added it has ended"))
        self.freed()

    # ---- inside ----

    async def _accept(self, stream: ByteStream) -> None:
        if len(self._links) >= self.count:
            return
        link = LaneLink(self, stream)
        self._links.append(link)
        link.start()
        self.freed()
        await link.over

    async def _keep(self, name: str) -> None:
        pauses, clock = Pauses(self.env.rng), self.env.clock
        while True:
            began_s = clock.now_s()
            try:
                process = await self.env.processes.start_program("aggd-lane", name, LaneConfig(socket=SOCKET))
                await process.wait()
                why = "it ended"
            except OSError as error:
                why = str(error)
            lived_s = clock.now_s() - began_s
            self.env.log.warning("a lane has ended; the main process adds instead", lane=name, why=why)
            await asyncio.sleep(pauses.after(lived_s))

    def _order(self, addition: PartAddition) -> LaneOrder | None:
        into = None if addition.into is None else self.memory.place(addition.into)
        places = [self.memory.place(each) for each in (*addition.sides, *addition.old, *addition.new)]
        found = [place for place in places if place is not None]
        if len(found) < len(places) or (into is None and addition.into is not None):
            return None
        self._orders += 1
        sides, old = len(addition.sides), len(addition.old)
        each: tuple[Place, ...] = tuple(found)
        return LaneOrder(
            self._orders,
            addition.type,
            addition.single,
            each[:sides],
            into,
            addition.last,
            each[sides : sides + old],
            each[sides + old :],
        )

    def _map(self, link: LaneLink, order: LaneOrder) -> None:
        """Tell the lane of memory that this order speaks of."""
        used = {place[0] for place in (*order.sides, *order.old, *order.new)}
        used |= {order.into[0]} if order.into is not None else set()
        if new := used - link.knows:
            link.knows |= new
            link.say(LaneMaps([self.memory.by_number[number] for number in sorted(new)]))

    async def _forget(self) -> None:
        """Tell lanes to unmap memory that is given back: it exists until no lane has it either."""
        while True:
            await asyncio.sleep(FORGET_S)
            for link in self._links:
                if gone := link.knows - self.memory.by_number.keys():
                    link.knows -= gone
                    link.say(LaneMaps((), sorted(gone)))
