"""A volume's end of one slab on another host: one connection, many requests under way, a deadline each.

The paper shares one connection between all slabs of a device and a daemon (Infiniswap §2.6.2); we open one per slab, so
that closing it fences exactly one slab. `held` is the page bitmap. It belongs to the connection and goes with it
(a hole in Infiniswap's released code: its bitmap outlives the mapping and is cleared by hand).
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import NamedTuple

from covey import handshake, headers
from covey.handshake import CHALLENGE_BYTES, NONCE_BYTES
from covey.headers import Op, Request, Status, WireError
from covey.ports import ByteStream, Env
from plugins.memory.datapath import slabwire
from plugins.memory.datapath.control import OpenPlace
from plugins.memory.datapath.slabwire import SlabHello, Versions


class SlabGone(Exception):
    """This place cannot be used any more; nothing is known about requests under way."""


class SlabStale(SlabGone):
    """The lender says: no such slab under this epoch."""


class PagesAtLender:
    """A set of pages of one slab that knows its size; a byte for each page of the slab."""

    __slots__ = ("count", "flags")

    def __init__(self, pages: int) -> None:
        self.flags = bytearray(pages)
        self.count = 0

    def add(self, page: int) -> None:
        if not self.flags[page]:
            self.flags[page] = 1
            self.count += 1

    def drop(self, first: int, count: int) -> None:
        if count == 1:
            self.count -= self.flags[first]
            self.flags[first] = 0
        else:
            self.count -= self.flags.count(1, first, first + count)
            self.flags[first : first + count] = bytes(count)

    def set_all(self, flags: bytes) -> None:
        self.flags[:] = flags
        self.count = flags.count(1)


class _Waiting(NamedTuple):
    request: Request
    into: memoryview | None
    done: asyncio.Future[Versions]


class RemoteSlab:
    """Every method raises SlabGone once the place failed; `why` says how. `ended` is called at once, also when no
    request is under way."""

    ended: Callable[["RemoteSlab"], None] | None = None

    def __init__(self, env: Env, stream: ByteStream, place: OpenPlace, pages: int, page_bytes: int, deadline_s: float):
        self.place, self.pages, self.page_bytes = place, pages, page_bytes
        self.held = PagesAtLender(pages)
        """Pages whose newest content the lender is known to hold; the volume says so, which knows what is newest."""
        self.why = ""
        self.lied = False
        """The lender does not hold what it acknowledged: it is not asked again."""
        self.retiring = False
        """No new requests; those under way may finish."""
        self._env, self._stream, self._deadline_s = env, stream, deadline_s
        self._waiting: dict[int, _Waiting] = {}
        """By tag: two writers that had to wait for the socket may have swapped places."""
        self._tag = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def open(
        cls,
        env: Env,
        volume: str,
        place: OpenPlace,
        pages: int,
        page_bytes: int,
        deadline_s: float,
        within_s: float | None = None,
    ) -> "RemoteSlab":
        """SlabStale when the lender refuses, SlabGone when it cannot be reached or is of another size. `within_s`: for
        each step of opening, when it is less than the deadline of requests."""
        step_s = deadline_s if within_s is None else min(deadline_s, within_s)
        try:
            async with asyncio.timeout(step_s):
                stream = await env.bytes.connect(place.address, step_s)
        except (TimeoutError, OSError) as error:
            raise SlabGone(f"cannot connect to {place.lender} at {place.address}: {error}") from error
        try:
            async with asyncio.timeout(step_s):
                found = await _greet(env, stream, volume, place)
        except (TimeoutError, ConnectionError) as error:
            stream.close()
            raise SlabGone(f"no welcome from {place.lender} at {place.address}: {error}") from error
        if found.status is not Status.OK:
            stream.close()
            raise SlabStale(f"{place.lender} does not lend this slab under epoch {place.epoch}")
        if (found.page_bytes, found.size_bytes) != (page_bytes, pages * page_bytes):
            stream.close()
            raise SlabGone(f"{place.lender} lends {found.size_bytes} bytes in pages of {found.page_bytes}")
        slab = cls(env, stream, place, pages, page_bytes, deadline_s)
        env.spawn(f"slab {place.index}", slab._read_replies())
        return slab

    @property
    def usable(self) -> bool:
        return not self.why and not self.retiring

    async def write(self, first: int, versions: Versions, pages: memoryview | None) -> None:
        """Returns when the lender has them. `pages` None: zeros."""
        op = Op.WRITE if pages is not None else Op.DISCARD
        await self._ask(op, first, versions, pages, None)

    async def read(self, first: int, into: memoryview) -> Versions:
        """Fill `into`; the versions of what is in it."""
        count = len(into) // self.page_bytes
        return await self._ask(Op.READ, first, None, None, into, count)

    async def versions(self) -> Versions:
        """What the lender holds, all pages."""
        found = array("Q")
        while len(found) < self.pages:
            count = min(slabwire.VERSIONS_MAX, self.pages - len(found))
            found.extend(await self._ask(Op.VERSIONS, len(found), None, None, None, count))
        return found

    async def retire(self) -> None:
        """Let what is under way finish (each request has its deadline), then close."""
        self.retiring = True
        await self._idle.wait()
        self.fail("closed")

    def fail(self, why: str) -> None:
        """Idempotent; every request under way ends with SlabGone."""
        if self.why:
            return
        self.why = why
        self._stream.close()
        for waiting in self._waiting.values():
            if not waiting.done.done():
                waiting.done.set_exception(SlabGone(why))
                waiting.done.exception()  # else asyncio warns: nobody awaits a request that could not be written
        self._waiting.clear()
        self._idle.set()
        if self.ended is not None:
            self.ended(self)

    async def _ask(
        self,
        op: Op,
        first: int,
        versions: Versions | None,
        pages: memoryview | None,
        into: memoryview | None,
        count: int = 0,
    ) -> Versions:
        if not self.usable:
            raise SlabGone(self.why or "being closed")
        self._tag += 1
        request = Request(op, first, len(versions) if versions is not None else count, self._tag)
        waiting = _Waiting(request, into, asyncio.get_running_loop().create_future())
        parts: list[bytes | memoryview] = [headers.pack_request(request)]
        if versions is not None:
            parts.append(memoryview(versions).cast("B"))
        if pages is not None:
            parts.append(pages)
        self._waiting[self._tag] = waiting
        self._idle.clear()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._stream.write(*parts)
                return await waiting.done
        except TimeoutError as error:
            self.fail(f"{self.place.lender} did not answer within {self._deadline_s:g} s")
            raise SlabGone(self.why) from error
        except ConnectionError as error:
            self.fail(f"connection to {self.place.lender}: {error}")
            raise SlabGone(self.why) from error
        except asyncio.CancelledError:
            self.fail("a request was given up half way")
            raise

    async def _read_replies(self) -> None:
        header = bytearray(headers.REPLY_BYTES)
        try:
            while not self.why:
                await self._stream.read_into(memoryview(header))
                await self._take_reply(headers.reply(header))
        except ConnectionError as error:
            self.fail(f"connection to {self.place.lender}: {error}")
        finally:
            self.fail("stopped")

    async def _take_reply(self, reply: headers.Reply) -> None:
        waiting = self._waiting.get(reply.tag)
        if waiting is None or reply.status is not Status.OK or reply.pages != waiting.request.pages:
            raise WireError(f"{reply} to {waiting and waiting.request}")
        request, into, done = waiting
        versions = array("Q")
        if request.op in (Op.READ, Op.VERSIONS):
            versions.frombytes(bytes(reply.pages * slabwire.VERSION_BYTES))
            await self._stream.read_into(memoryview(versions).cast("B"))
        if into is not None:
            await self._stream.read_into(into)
        if self.why:
            return
        del self._waiting[request.tag]
        if not self._waiting:
            self._idle.set()
        if not done.done():
            done.set_result(versions)


async def _greet(env: Env, stream: ByteStream, volume: str, place: OpenPlace) -> headers.Welcome:
    """Both ends prove that they know the secret of the slab. SlabGone when the lender does not."""
    hello = slabwire.pack_hello(SlabHello(env.host, volume, place.index, place.epoch, env.entropy(NONCE_BYTES)))
    await stream.write(hello)
    data = bytearray(CHALLENGE_BYTES)
    await stream.read_into(memoryview(data))
    challenge = handshake.parse_challenge(data)
    await stream.write(handshake.proof_of_client(place.secret, hello, challenge.nonce))
    data = bytearray(headers.WELCOME_BYTES)
    await stream.read_into(memoryview(data))
    found = headers.welcome(data)
    expected = handshake.proof_of_server(place.secret, hello, challenge.nonce)
    if found.status is Status.OK and not handshake.is_proof(challenge.proof, expected):
        stream.close()
        raise SlabGone(f"whoever answers at {place.address} does not know the secret of this slab")
    return found
