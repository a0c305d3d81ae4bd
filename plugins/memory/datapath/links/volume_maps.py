"""Maps a volume's slabs that are on its own host, instead of asking their lender.

    a slab is attached (TCP) --> both ends of this host? --> third connection, MAP --> its memory by name
                                                                                  `-> is it that slab? --> mapped

Where something refuses (another user's process, another namespace of processes) its pages go as to another host. Hosts
with several agents have such slabs: one for each NUMA node, or a rack to try things.
"""

from collections.abc import Callable
from functools import partial

from covey.ports.env import Env
from covey.wire.headers import WireError
from plugins.memory.datapath.links.mapped_slab import MappedSlab
from plugins.memory.datapath.links.one_sided import OneSided, OwnDisk
from plugins.memory.datapath.links.remote_slab import AwaitedAnswer, RemoteSlab, SlabGone
from plugins.memory.datapath.links.volume_verbs import Control, PairableLink
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.control import OpenPlace
from plugins.memory.datapath.wire.slab_memory import SlabHead, SlabPages, memory_bytes
from plugins.memory.datapath.wire.slabwire import LENT_MEMORY_BYTES, SlabOp


class CannotMap(Exception):
    """The slab cannot be mapped; the message says why."""


class VolumeMaps:
    """Maps slabs of one volume. `disk` None: nothing is known of its pages, so nothing is mapped."""

    def __init__(self, env: Env, volume: str, pages: int, page_bytes: int, disk: OwnDisk | None) -> None:
        self.why = ""
        """Why the slab that tried last is not mapped; empty: it is, or none tried."""
        self._env, self._volume, self._pages, self._disk = env, volume, pages, disk
        self.page_bytes = page_bytes
        """Bytes of a page as it is stored at its lender, sealed or not."""

    def begin(self, link: PairableLink, slab: RemoteSlab, control: Control, otherwise: Callable[[], None]) -> None:
        """A slab of this host was attached: try to map it. `otherwise` is called when it cannot be mapped."""
        if self._disk is None:
            otherwise()
        else:
            self._env.spawn(f"map slab {slab.place.index}", self._try(link, slab, control, self._disk, otherwise))

    async def _try(
        self, link: PairableLink, slab: RemoteSlab, control: Control, disk: OwnDisk, otherwise: Callable[[], None]
    ) -> None:
        try:
            kept = await self._mapped(slab.place, control)
        except (CannotMap, WireError, SlabGone, OSError) as why:
            if not link.why and not slab.why:
                if str(why) != self.why:
                    self.why = str(why)
                    self._env.log.info("a slab of this host is not mapped", lender=link.lender, why=self.why)
                otherwise()
            return
        if link.why or slab.why:
            kept.let_go()
            return
        there = MappedSlab(kept, partial(link.gone, slab.place.index, slab.place.epoch))
        slab.mapped = there
        slab.go_one_sided(OneSided(there, slab.place.index * self._pages, self._pages, disk))
        self.why = ""

    async def _mapped(self, place: OpenPlace, control: Control) -> SlabPages:
        """The slab's memory. CannotMap, SlabGone, WireError and OSError when it cannot be had, or is not that
        slab's."""
        lane, _ = await control(place, _nothing)
        try:
            data, answer = bytearray(LENT_MEMORY_BYTES), AwaitedAnswer()
            lane.ask(place, SlabOp.MAP, 0, 0, 0, (), memoryview(data), answer.answered)
            if await answer.done is None:
                raise CannotMap(f"{place.lender} {lane.why or 'no longer lends that slab'}")
            name, why = slabwire.lent_memory(data)
            if not name:
                raise CannotMap(f"{place.lender}: {why}")
            slab_bytes = self._pages * self.page_bytes
            shared = self._env.pages.open_ring(name, memory_bytes(slab_bytes, self.page_bytes), sparse=True)
            kept = SlabPages.take_up(shared)
            if kept is None:
                shared.close()
                raise CannotMap(f"what {place.lender} calls {name} is no slab")
            wanted = SlabHead(
                self._env.host, self._volume, place.index, place.epoch, place.secret, self.page_bytes, slab_bytes
            )
            if kept.record != wanted:
                kept.let_go()
                raise CannotMap(f"what {place.lender} calls {name} is another slab")
            return kept
        finally:
            lane.end("mapped, or not")


def _nothing(why: str) -> None:
    """The end of this connection does not matter: a mapped slab depends on its link's other connections."""
