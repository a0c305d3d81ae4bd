"""Doors of a volume for the kernel and for block device clients. Open doors are remembered, and opened again when the
volume's process begins anew."""

from collections.abc import Callable, Mapping

import msgspec

from covey.core.errors import Refused
from covey.ports.env import Env
from covey.wire.swap_wire import SwapCounts
from plugins.base import Host
from plugins.memory.datapath.wire import control
from plugins.memory.datapath.wire.control import Answer, Question, Yes
from plugins.memory.service.open_volume import OpenVolume
from plugins.memory.service.process import ByteProcess
from plugins.memory.service.record import SlabRecord

ASK_S = 5.0
BEGIN_S = 18.0
"""Seconds that making a swap area may take; less than a command of `agentctl` may."""
BACKEND_BYTES = 8
"""Random bytes in the name of a device, so that it is not taken for an earlier one."""
SOCKET_PATH_MAX = 107  # bytes of a unix socket's path


class Doors:
    """The doors of this host's volumes."""

    def __init__(self, host: Host, helper: str, record: SlabRecord, volumes: Mapping[str, OpenVolume]) -> None:
        self._host, self._record, self._volumes = host, record, volumes
        self._env: Env = host.env
        self._helper = helper
        self._lacks: str | None = None
        """The privileges that this agent lacks, in words; None: not asked yet."""

    def _volume(self, name: str) -> OpenVolume:
        volume = self._volumes.get(name)
        if volume is None:
            raise Refused(3, f"no volume {name}", "this host has none of that name", "agentctl volume ls")
        return volume

    async def _ask(self, name: str, question: Callable[[int], Question], timeout_s: float) -> Answer:
        try:
            return await self._volume(name).process.ask(question, timeout_s)
        except (ConnectionError, TimeoutError) as error:
            why = f"its process does not answer: {error}"
            raise Refused(1, f"cannot reach the process of volume {name}", why, "try again in a few seconds") from error

    async def _remember(self, volume: OpenVolume, **changed: object) -> None:
        volume.known = msgspec.structs.replace(volume.known, **changed)
        await self._record.set_volume(volume.known)

    async def open_again(self, name: str, process: ByteProcess) -> None:
        """Open again what was open when the earlier process ended."""
        volume = self._volumes.get(name)
        if volume is None:
            return
        if volume.known.swap:
            self._stay()
            backend = volume.known.swap
            answer = await process.ask(lambda id: control.BeginSwapping(id, backend, self._helper, True), ASK_S)
            if not isinstance(answer, Yes):
                self._host.note(f"volume/{name}", "not swap", f"{getattr(answer, 'why', answer)}")
        for path in volume.known.exports:
            answer = await process.ask(lambda id, path=path: control.ExportVolume(id, path), ASK_S)  # type: ignore[misc]
            if not isinstance(answer, Yes):
                self._host.note(f"volume/{name}", "not exported", f"{path}: {getattr(answer, 'why', answer)}")

    # ---- a block device at a unix socket ----

    async def export(self, name: str, path: str, end: bool) -> None:
        """Offer the volume as a block device at this unix socket, now and whenever its process starts; with `end` stop
        that."""
        volume, what = self._volume(name), f"volume {name} is not exported at {path}"
        if not end:
            _must_be_formed(volume, what)
        if not path.startswith("/") or "\0" in path or len(path.encode()) > SOCKET_PATH_MAX:
            why = f"a unix socket's path is absolute and has at most {SOCKET_PATH_MAX} bytes"
            raise Refused(2, what, why, "choose another --socket")
        frame = control.EndExport if end else control.ExportVolume
        answer = await self._ask(name, lambda id: frame(id, path), ASK_S)
        if not isinstance(answer, Yes):
            why = getattr(answer, "why", str(answer))
            raise Refused(4, what, why, "choose a --socket in a directory that the agent's user may write")
        others = tuple(each for each in volume.known.exports if each != path)
        await self._remember(volume, exports=others if end else (*others, path))
        self._host.note(f"volume/{name}", "export ended" if end else "exported", path)

    # ---- swap of this host ----

    def _stay(self) -> str:
        """Keep this agent in memory: if its pages were in the volume it could not start that volume's process again.
        Returns what it lacks for that."""
        if self._lacks is None:
            self._lacks = self._env.probes.stay_in_memory(flushes=False)
        return self._lacks

    async def begin_swap(self, name: str) -> None:
        """Make the volume swap of this host, also after its process or this agent begins anew. Idempotent. Refused when
        it cannot."""
        volume, what = self._volume(name), f"volume {name} is not swap"
        if volume.known.swap:  # of a try that nobody heard the end of it may be off: then that is found, and said
            known = volume.known.swap
            await self._ask(name, lambda id: control.BeginSwapping(id, known, self._helper, True), ASK_S)
            return
        _must_be_formed(volume, what)
        if volume.known.uid != -1 or volume.known.exports:
            why = "processes of this host use it as a volume"
            raise Refused(4, what, why, "agentctl volume swap ANOTHER SIZE")
        lacks = self._stay()
        if lacks:
            why = f"the agent could deadlock on its own swap: {lacks}"
            raise Refused(4, what, why, "see docs/guides/memory.md, As swap")
        backend = f"covey:{self._host.id}:{name}:{self._env.entropy(BACKEND_BYTES).hex()}"
        await self._remember(volume, swap=backend)  # first: of what the kernel has somebody must know
        # Without an answer it may be on: that stays on record, and the next process finds it, or that there is none.
        answer = await self._ask(name, lambda id: control.BeginSwapping(id, backend, self._helper), BEGIN_S)
        if not isinstance(answer, Yes):
            await self._remember(volume, swap="")
            why, _, further = str(getattr(answer, "why", answer)).partition("; next: ")
            raise Refused(4, what, why, further or "see docs/guides/memory.md, As swap")
        self._host.note(f"volume/{name}", "swap", "the host swaps to it from now on")

    async def end_swap(self, name: str) -> str:
        """End the swap: `off`, or `ending` when it takes longer. Refused when there is no room for its pages: it stays
        swap."""
        volume, what = self._volume(name), f"volume {name} stays swap"
        if not volume.known.swap:
            return "off"
        answer = await self._ask(name, control.EndSwapping, ASK_S)
        if not isinstance(answer, Yes):
            why, _, further = str(getattr(answer, "why", answer)).partition("; next: ")
            raise Refused(4, what, why, further or "try again in a few seconds")
        counts = await self._ask(name, control.CountPages, ASK_S)
        word = counts.swap.word if isinstance(counts, control.PageCounts) else "ending"
        if word == "off":
            await self._ended(volume, "its pages are back in memory")
        return "off" if word == "off" else "ending"

    async def look(self, volume: OpenVolume, now: SwapCounts) -> None:
        """Once a second, note swap that was to end and has ended, or that the kernel does not have any more."""
        if volume.known.swap and now.word == "lost":
            await self._ended(volume, f"{now.why}; pages that were in it are gone")
        elif volume.known.swap and volume.ending and now.word == "off":
            await self._ended(volume, "its pages are back in memory")
        volume.ending = now.word == "ending"

    async def _ended(self, volume: OpenVolume, why: str) -> None:
        await self._remember(volume, swap="")
        self._host.note(f"volume/{volume.known.volume}", "swap ended", why)


def _must_be_formed(volume: OpenVolume, what: str) -> None:
    """Refuse a volume that has no place for all of it yet: it may be given up for want of room, with all its
    content."""
    if volume.known.members > 1 and not volume.known.formed:
        why = f"{volume.formed()} of its {volume.slabs} slabs have all their lenders so far"
        raise Refused(1, what, why, "try again in a few seconds")
