"""A volume's links to slab processes: two connections to each, whatever the number of slabs there.

    short    requests of at most 32 KiB, so that they do not wait behind long ones
    long     the rest, and what is copied in the background

Both are of one session (`slabwire`). The slab for which a link is made brings proof of who we are; each further one is
attached with its own. When one connection ends or does not answer in time the other ends too, and with them the places
of all slabs there: `lenders` opens them again. A link that no slab uses any more is closed.

Where the lender is of this host its slabs are mapped (`volume_maps`), and where both hosts have a device, pages are
written and read one-sided (`volume_verbs`). These two connections then carry the rest: what must be done whole,
questions, and notices.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.wire import handshake, headers
from covey.wire.driven import driven
from covey.wire.handshake import CHALLENGE_BYTES, NONCE_BYTES
from covey.wire.headers import Status, WireError
from plugins.memory.datapath.lending.slab_session import Greeting
from plugins.memory.datapath.links.lender_lane import LenderLane
from plugins.memory.datapath.links.one_sided import OwnDisk
from plugins.memory.datapath.links.remote_slab import RemoteSlab, SlabGone, SlabStale
from plugins.memory.datapath.links.sealing import PageSeal
from plugins.memory.datapath.links.volume_maps import VolumeMaps
from plugins.memory.datapath.links.volume_verbs import PairedLink, PairTries, VolumeVerbs
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.control import OpenPlace
from plugins.memory.datapath.wire.slabwire import ATTACHED_BYTES, SESSION_BYTES, SlabHello, SlabOp, Versions


class LenderLink:
    """The link to one slab process."""

    def __init__(self, lender: str, address: str) -> None:
        self.lender, self.address = lender, address
        self.why = ""
        self.lanes: list[LenderLane] = []
        self.greetings: list[Greeting] = []
        self.slabs: dict[tuple[int, int], RemoteSlab] = {}
        """Index and epoch -> slab, including slabs that are being attached."""
        self.paired: PairedLink | None = None
        self.pairing = PairTries()
        self.same_host = False

    def end(self, why: str) -> None:
        """End the link and all slabs over it. Idempotent."""
        if self.why:
            return
        self.why = f"{self.lender} {why}"
        slabs, self.slabs = self.slabs, {}
        for slab in slabs.values():
            slab.lost(self.why)
        for lane in self.lanes:
            lane.end(why)
        if self.paired is not None:
            self.paired.end(why)

    def gone(self, index: int, epoch: int) -> None:
        """The lender says that this slab is not ours any more."""
        slab = self.slabs.pop((index, epoch), None)
        if slab is not None:
            slab.lost(f"{self.lender} no longer lends this slab under epoch {epoch}")
            if self.paired is not None and slab.is_paired:
                slab.when_idle(self.paired.detach)
            self._close_unused()

    def unused(self, slab: RemoteSlab) -> None:
        if self.slabs.get((slab.place.index, slab.place.epoch)) is slab:
            del self.slabs[slab.place.index, slab.place.epoch]
            for lane in self.lanes:
                lane.detach(slab.place)
            if self.paired is not None and slab.is_paired:
                self.paired.detach(slab.place)
            self._close_unused()

    def _close_unused(self) -> None:
        if not self.slabs:
            asyncio.get_running_loop().call_soon(self._close_if_unused)  # after what is to be said over it

    def _close_if_unused(self) -> None:
        if not self.slabs:
            self.end("is no longer used")


class LenderLinks:
    """The links of one volume, whose slabs have `pages` pages at a lender. `open` raises SlabStale when the lender
    refuses, and SlabGone when it cannot be reached or its slab has another size."""

    def __init__(
        self, env: Env, volume: str, pages: int, page_bytes: int, deadline_s: float, disk: OwnDisk | None = None
    ) -> None:
        self._env, self._volume = env, volume
        self._pages, self._page_bytes, self._deadline_s = pages, page_bytes, deadline_s
        self.verbs = VolumeVerbs(env, pages, page_bytes, deadline_s, disk)
        self._maps = VolumeMaps(env, volume, pages, page_bytes, disk)
        self.may_map = False
        """Slabs of this host may be mapped; otherwise they are used like those of other hosts."""
        self.seal: PageSeal | None = None
        self._links: dict[str, LenderLink] = {}
        self._making: dict[str, asyncio.Future[SlabGone | None]] = {}

    @property
    def one_sided(self) -> int:
        """Number of slabs whose pages go one-sided now."""
        return sum(slab.one_sided and slab.mapped is None for slab in self._slabs_now())

    @property
    def map_why(self) -> str:
        """Why a slab of this host is not mapped, for the last one that tried; empty: none failed."""
        return self._maps.why

    @property
    def mapped(self) -> int:
        """Number of slabs of this host that are mapped now."""
        return sum(slab.one_sided and slab.mapped is not None for slab in self._slabs_now())

    def _slabs_now(self) -> list[RemoteSlab]:
        return [slab for link in self._links.values() for slab in link.slabs.values()]

    def seal_with(self, seal: PageSeal | None) -> None:
        """Set the seal for pages that leave; None: they are not sealed. Called before any place is opened."""
        self.seal = seal
        self.verbs.page_bytes = self._page_bytes if seal is None else seal.sealed_bytes
        self._maps.page_bytes = self.verbs.page_bytes

    @property
    def refused(self) -> int:
        """Number of pages that came back and were not what had been sealed."""
        return 0 if self.seal is None else self.seal.refused

    async def open(self, place: OpenPlace, within_s: float | None = None) -> RemoteSlab:
        """Open a place. `within_s`: seconds for each step of making a link, if less than the deadline of requests."""
        slab = await self._opened(place, within_s)
        link = self._links[place.address]
        if link.slabs.get((place.index, place.epoch)) is slab:
            self._join(link, slab)
        return slab

    def _join(self, link: LenderLink, slab: RemoteSlab) -> None:
        async def control(place: OpenPlace, lost: Callable[[str], None]) -> tuple[LenderLane, Greeting]:
            stream = await self._connected(place, self._deadline_s)
            try:
                greeting = await self._greeted(stream, place, link.greetings[0].hello.session, self._deadline_s)
            except (SlabGone, asyncio.CancelledError):
                stream.close()
                raise
            lane = LenderLane(self._env, driven(stream), self._deadline_s, lost, link.gone)
            driven(stream).drive(lane, polite=False)
            return lane, greeting

        if self.may_map and link.same_host:
            self._maps.begin(link, slab, control, partial(self.verbs.begin, link, slab, control))
        else:
            self.verbs.begin(link, slab, control)

    async def _opened(self, place: OpenPlace, within_s: float | None) -> RemoteSlab:
        while True:
            link = self._links.get(place.address)
            if link is not None and not link.why:
                return await self._attach(link, place)
            making = self._making.get(place.address)
            if making is None:
                return await self._make(place, within_s)
            failed = await asyncio.shield(making)
            if failed is not None and not isinstance(failed, SlabStale):
                raise SlabGone(str(failed)) from failed.__cause__

    async def _make(self, place: OpenPlace, within_s: float | None) -> RemoteSlab:
        """Make a link, one at a time for an address: other callers that want it wait for the result."""
        done = self._making[place.address] = asyncio.get_running_loop().create_future()
        failed: SlabGone | None = SlabGone("given up")
        try:
            slab = await self._made(place, within_s)
            failed = None
            return slab
        except SlabGone as gone:
            failed = gone
            raise
        finally:
            del self._making[place.address]
            done.set_result(failed)

    async def _made(self, place: OpenPlace, within_s: float | None) -> RemoteSlab:
        step_s = self._deadline_s if within_s is None else min(self._deadline_s, within_s)
        session = self._env.entropy(SESSION_BYTES)
        streams: list[ByteStream] = []
        link = LenderLink(place.lender, place.address)
        try:
            for _ in range(2):
                streams.append(await self._connected(place, step_s))
                link.greetings.append(await self._greeted(streams[-1], place, session, step_s))
        except SlabGone:
            for stream in streams:
                stream.close()
            raise
        except asyncio.CancelledError:
            for stream in streams:
                stream.close()
            raise
        for stream in streams:
            lane = LenderLane(self._env, driven(stream), self._deadline_s, link.end, link.gone)
            link.lanes.append(lane)
        link.same_host = streams[0].same_host
        slab = self._slab(link, place)
        for stream, lane in zip(streams, link.lanes, strict=True):
            driven(stream).drive(lane, polite=False)
        self._links[place.address] = link
        return slab

    def _slab(self, link: LenderLink, place: OpenPlace) -> RemoteSlab:
        short, long = link.lanes
        slab = RemoteSlab(place, self._pages, self._page_bytes, (short, long), link.end, link.unused, self.seal)
        link.slabs[place.index, place.epoch] = slab
        return slab

    async def _connected(self, place: OpenPlace, step_s: float) -> ByteStream:
        try:
            async with asyncio.timeout(step_s):
                return await self._env.bytes.connect(place.address, step_s)
        except (TimeoutError, OSError) as error:
            raise SlabGone(f"cannot connect to {place.lender} at {place.address}: {error}") from error

    async def _greeted(self, stream: ByteStream, place: OpenPlace, session: bytes, step_s: float) -> Greeting:
        try:
            async with asyncio.timeout(step_s):
                greeting, found = await _greet(self._env, stream, self._volume, place, session)
        except (TimeoutError, ConnectionError) as error:
            raise SlabGone(f"{place.lender} at {place.address} did not accept the connection: {error}") from error
        if found.status is not Status.OK:
            raise SlabStale(f"{place.lender} does not lend this slab under epoch {place.epoch}")
        self._check_size(place, found.page_bytes, found.size_bytes)
        return greeting

    def _check_size(self, place: OpenPlace, page_bytes: int, slab_bytes: int) -> None:
        size = self._page_bytes if self.seal is None else self.seal.sealed_bytes
        if (page_bytes, slab_bytes) != (size, self._pages * size):
            raise SlabGone(f"{place.lender} lends {slab_bytes} bytes in pages of {page_bytes}")

    async def _attach(self, link: LenderLink, place: OpenPlace) -> RemoteSlab:
        """Attach one more slab over a working link. On return, everything that an earlier use of it over this link left
        under way is done, since each connection keeps its order."""
        known = link.slabs.get((place.index, place.epoch))
        if known is not None:
            raise SlabGone(f"slab {place.index} is open under epoch {place.epoch} already")
        slab = self._slab(link, place)
        try:
            for lane, greeting in zip(link.lanes, link.greetings, strict=True):
                await self._attach_over(lane, greeting, slab)
        except (SlabGone, asyncio.CancelledError) as gone:
            slab.fail(str(gone) or "given up")
            raise
        return slab

    async def _attach_over(self, lane: LenderLane, greeting: Greeting, slab: RemoteSlab) -> None:
        place = slab.place
        key = (place.secret, greeting.packed, greeting.nonce, place.index, place.epoch)
        data = bytearray(ATTACHED_BYTES)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def answered(did: bool, versions: Versions) -> None:
            if not done.done():
                done.set_result(did)

        proof = slabwire.proof_of_volume(*key)
        lane.ask(place, SlabOp.ATTACH, 0, 0, 0, (proof,), memoryview(data), answered)
        if not await done:
            if lane.why:
                raise SlabGone(f"{place.lender} {lane.why}")
            raise SlabStale(f"{place.lender} does not lend this slab under epoch {place.epoch}")
        found = slabwire.attached(data)
        if not handshake.is_proof(found.proof, slabwire.proof_of_lender(*key)):
            raise SlabGone(f"the process at {place.address} does not know the secret of this slab")
        self._check_size(place, found.page_bytes, found.slab_bytes)


async def _greet(
    env: Env, stream: ByteStream, volume: str, place: OpenPlace, session: bytes
) -> tuple[Greeting, headers.Welcome]:
    """Let both ends prove that they know the secret of the slab. SlabGone when the lender does not."""
    said = SlabHello(env.host, volume, place.index, place.epoch, session, env.entropy(NONCE_BYTES))
    hello = slabwire.pack_hello(said)
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
        raise SlabGone(f"the process at {place.address} does not know the secret of this slab")
    if found.status is Status.VERSION:
        raise WireError("it speaks another version of the slab protocol")
    return Greeting(said, hello, challenge.nonce), found
