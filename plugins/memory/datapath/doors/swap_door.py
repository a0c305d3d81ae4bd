"""A volume as the kernel's swap: this end of the socket that the kernel's NBD has, and another one whenever it ends.

    off -> begin -> on -> the socket ends -> waits -> another socket -> on -> end -> ending -> off
                                             waits -> the kernel has no such device any more -> lost

The host's helper (`covey.wire.swap_wire`) gives the kernel its end, and switches swap on and off; this process has no
right to either. Requests that were under way when a socket ended are sent again over the next one, by the kernel, after
5 s. Requests of an ended socket are finished by this process first: an old write must not come after a newer
one. A read that a lender keeps waiting is tried until it is there, since the kernel would end the program that wants
it.
"""

import asyncio
import contextlib
from typing import Literal

from covey.ports.env import Env
from covey.ports.pages import Handed
from covey.ports.streams import ByteStream
from covey.wire import frames
from covey.wire import swap_wire as swapwire
from covey.wire.swap_wire import (
    AskSwap,
    BeginSwap,
    ConnectSwap,
    EndSwap,
    SwapConnected,
    SwapFrame,
    SwapNow,
    SwapRefused,
)
from plugins.memory.datapath.doors.nbd_front import NbdFront, ServedClients
from plugins.memory.datapath.doors.nbd_pages import NbdPages
from plugins.memory.datapath.volumes.members.mirror_volume import AnyVolume

BLOCK_BYTES = 4096
"""Bytes of the kernel's smallest read or write: a page of its own, whatever a page of the volume is."""
HEAP_BYTES = 48 << 20
"""Bytes of heap for requests under way: the kernel has 128 requests of a device, of 128 KiB each where it swaps, their
answers and writes to lenders beside them."""
ANSWER_S = 20.0
"""Seconds that the helper may take, except for switching swap off."""
ENDING_S = 1.5
"""Seconds that a client which asks for the end waits; the end continues after that."""
AGAIN_S = 1.0
TIMEOUT_S, TIMEOUT_S_MAX = 5, 80
"""First and longest time in seconds that the kernel waits for an answer before it sends the request again. It looks for
requests of a dead socket only then, so the first is how long programs wait when this process was killed. Each socket
that ends while this process lives shows that the volume is slower than that, and doubles it: nothing would ever be done
otherwise."""
LOOK_S = 2.0
"""Seconds between two looks at how much is swapped out."""
SwapWord = Literal["off", "on", "waits", "ending", "lost"]
Answered = SwapConnected | SwapNow


class SwapImpossible(ValueError):
    """The helper, or this process, refuses to swap."""


class SwapDoor:
    """Makes one volume swap of this host. `lacks`: why this process might wait for its own swap, in words; empty: it
    cannot."""

    def __init__(self, env: Env, volume: AnyVolume, lacks: str) -> None:
        self._env, self._volume, self._lacks = env, volume, lacks
        self._pages = NbdPages(env, volume)
        self._changing = asyncio.Lock()
        self._backend = self._helper = ""
        self._front: NbdFront | None = None
        self._timeout_s = TIMEOUT_S
        self._ending: asyncio.Task[None] | None = None
        self.word: SwapWord = "off"
        self.device, self.used_bytes, self.why = "", 0, ""
        self.sockets = 0
        """Number of sockets that the kernel was given."""

    async def begin(self, backend: str, helper: str, resume: bool) -> None:
        """Begin to be swap. Idempotent. `resume`: the kernel has the device already, as far as is known; it gets its
        socket as soon as the helper takes it. SwapImpossible or OSError says why not."""
        async with self._changing:
            if self._backend:
                if self._backend != backend:
                    raise SwapImpossible("it is already swap of this host")
                return
            self._refuse_lacking()
            self._backend, self._helper, self.why = backend, helper, ""
            try:
                if not resume:
                    await self._connect(backend, False)
                    await self._begin_swap()
            except (SwapImpossible, OSError, TimeoutError):
                self._forget("off")
                raise
            self.word = "waits" if resume else "on"
            self._env.spawn("keep swap", self._keep(backend))
            self._env.spawn("look at swap", self._watch(backend))

    def _refuse_lacking(self) -> None:
        lacks = self._lacks or self._env.probes.keep_heap(HEAP_BYTES)
        if lacks:
            raise SwapImpossible(f"the volume's process could deadlock on its own swap: {lacks}")

    async def _begin_swap(self) -> None:
        """Switch swap on; if that fails there must be no device either."""
        begun = False
        try:
            await self._ask(BeginSwap(self._backend))
            begun = True
        finally:
            if not begun:
                with contextlib.suppress(SwapImpossible, OSError, TimeoutError):
                    await self._ask(EndSwap(self._backend))

    async def end(self) -> None:
        """End the swap. Pages go back to memory, which may take minutes: `word` is `ending`, then `off`, or `on` again
        and `why`. SwapImpossible when that is known soon."""
        if not self._backend:
            return
        if self._ending is None:
            self.word, self.why = "ending", ""
            self._ending = asyncio.get_running_loop().create_task(self._end())
        ending = self._ending
        await asyncio.wait([ending], timeout=ENDING_S)
        if self._backend and self.word != "ending" and self.why:
            raise SwapImpossible(self.why)

    async def _end(self) -> None:
        try:
            await self._ask(EndSwap(self._backend), None)
        except (SwapImpossible, OSError) as error:
            self.word, self.why = "on" if self._front is not None else "waits", str(error)
        else:
            self._forget("off")
            self.why = ""
        finally:
            self._ending = None

    def _forget(self, word: SwapWord) -> None:
        self._backend = self.device = ""
        self.word, self.used_bytes = word, 0
        front, self._front = self._front, None
        if front is not None:
            front.close()

    # ---- while it is on ----

    async def _keep(self, backend: str) -> None:
        """Give the kernel a new socket whenever one ends, as soon as that is possible."""
        while self._backend == backend:
            front = self._front
            if front is not None:
                await front.over
                await front.settled()
                if self._front is front:
                    self._front = None
                self._timeout_s = min(TIMEOUT_S_MAX, 2 * self._timeout_s)
                if self._backend == backend and self.word == "on":
                    self.word = "waits"
                continue
            try:
                await self._connect(backend, True)
                if self.word == "waits":
                    self.word, self.why = "on", ""
            except (SwapImpossible, OSError, TimeoutError) as error:
                if self._backend != backend:
                    return
                self.why = str(error) or "the swap helper does not answer"
                if isinstance(error, SwapImpossible) and await self._is_gone(backend):
                    self._forget("lost" if self._ending is None else "off")  # the helper is about to say so
                    return
                await asyncio.sleep(AGAIN_S)

    async def _is_gone(self, backend: str) -> bool:
        try:
            now = await self._ask(AskSwap(backend))
        except (SwapImpossible, OSError, TimeoutError):
            return False
        return isinstance(now, SwapNow) and not now.device

    async def _watch(self, backend: str) -> None:
        while self._backend == backend:
            with contextlib.suppress(SwapImpossible, OSError, TimeoutError):
                now = await self._ask(AskSwap(backend))
                if isinstance(now, SwapNow) and self._backend == backend:
                    self.used_bytes = now.used_bytes
            await asyncio.sleep(LOOK_S)

    async def _connect(self, backend: str, resume: bool) -> None:
        """Give the kernel a socket. Its other end is served before the kernel has it, since it reads at once."""
        stream, other = await self._env.bytes.pair()
        front = NbdFront(self._env, self._volume, stream, self._pages, ServedClients())
        front.begin_agreed()
        connected = False
        try:
            size = self._volume.shape.size_bytes // BLOCK_BYTES * BLOCK_BYTES
            answer = await self._ask(ConnectSwap(backend, size, BLOCK_BYTES, self._timeout_s, resume), handed=other)
            connected = self._backend == backend
        finally:
            other.close()
            if not connected:
                front.close()
        if isinstance(answer, SwapConnected):
            self.device = answer.device
        if not connected:
            return
        self._front = front
        self.sockets += 1
        self._env.log.info("the kernel uses a socket of this volume", device=self.device, resumed=resume)

    # ---- the helper ----

    async def _ask(
        self, frame: SwapFrame, timeout_s: float | None = ANSWER_S, handed: Handed | None = None
    ) -> Answered:
        """Ask the helper. SwapImpossible: it refuses. OSError or TimeoutError: it is not there."""
        async with asyncio.timeout(timeout_s):
            stream = await self._reach()
            try:
                if handed is None:
                    await frames.write_frame(stream, frame)
                else:
                    await stream.write_with(frames.pack(frame), [handed])
                answer = await frames.read_frame(stream, swapwire.to_volume)
            finally:
                stream.close()
        if isinstance(answer, SwapRefused):
            raise SwapImpossible(f"{answer.why}; next: {answer.next}")
        return answer

    async def _reach(self) -> ByteStream:
        try:
            return await self._env.bytes.connect(f"unix:{self._helper}")
        except ConnectionError as error:
            raise ConnectionError(
                f"no swap helper listens at {self._helper} ({error}); next: systemctl enable --now covey-swap"
            ) from error
