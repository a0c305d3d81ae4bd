"""A slab process's end of one connection, once its borrower has proven its identity: a machine that bytes drive.

A page arrives in a buffer of the connection first and is moved into the slab only when it is there whole: a borrower
that dies in the middle of a write leaves the older page, complete, under its older version. What is read is copied out
at once, so a write that follows cannot change it while it waits for the network.
"""

import asyncio
from array import array
from dataclasses import dataclass
from typing import Final

from covey.ports.env import Env
from covey.ports.verbs import NoVerbs
from covey.wire import handshake
from covey.wire.driven import DrivenStream, Part
from covey.wire.headers import WireError
from plugins.memory.datapath.lending import slab_maps
from plugins.memory.datapath.lending.slab_store import HostedSlab, SlabStore
from plugins.memory.datapath.lending.slab_verbs import SessionVerbs
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.slabwire import (
    ATTACH,
    BAD,
    COPY,
    DETACH,
    GONE,
    MAP,
    PAIR,
    READ,
    REGION,
    REQUEST_BYTES,
    VERSION_BYTES,
    VERSIONS,
    WRITE,
    AttachedSlab,
    LentRegion,
    SlabHello,
    SlabReply,
    SlabRequest,
)

GATHERED_MAX: Final = 256 << 10
"""Bytes of answers that are sent before the turn is over."""
SCRATCH_BYTES: Final = 64 << 10
"""Size in bytes of the parts in which unwanted payload is read."""


@dataclass(frozen=True)
class Greeting:
    """The hello and nonce of a connection: proofs for further slabs hold for this connection alone."""

    hello: SlabHello
    packed: bytes
    nonce: bytes
    """Nonce of the lender."""


class SlabSession:
    """One connection: `Driven`, and `SlabUser` of the slabs that are attached over it."""

    def __init__(
        self, env: Env, store: SlabStore, verbs: SessionVerbs, stream: DrivenStream, greeting: Greeting
    ) -> None:
        self.session = greeting.hello.session
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set at its end, with the reason."""
        self._env, self._store, self._verbs = env, store, verbs
        self._stream, self._greeting = stream, greeting
        self._slabs: dict[tuple[int, int], HostedSlab] = {}
        """Index and epoch -> slab."""
        self._header = memoryview(bytearray(REQUEST_BYTES))
        self._payload = memoryview(bytearray(SCRATCH_BYTES))
        self._asked: SlabRequest | None = None
        """Request whose payload is on its way."""
        self._slab: HostedSlab | None = None
        self._unwanted = 0
        """Bytes still to be read of a request about a slab that this connection does not have."""
        self._out: list[Part] = []
        self._gathered = 0

    def attach(self, slab: HostedSlab) -> None:
        slab.attach(self)
        self._slabs[slab.index, slab.epoch] = slab

    def lose(self, slab: HostedSlab) -> None:
        self._verbs.lose(slab)
        if self._slabs.pop((slab.index, slab.epoch), None) is not None:
            self._say(SlabReply(GONE, 0, slab.index, slab.epoch, 0))
            self._stream.soon(self.turn)

    # ---- driven ----

    def wanted(self) -> memoryview:
        asked = self._asked
        if asked is None:
            return self._header
        if self._unwanted:
            return self._payload[: min(self._unwanted, SCRATCH_BYTES)]
        return self._payload[: asked.size]

    def filled(self) -> None:
        try:
            self._filled()
        except WireError as error:
            self._store.refused += 1
            self._say(SlabReply(BAD, 0, 0, 0, 0))
            self.turn()
            self._end(str(error))

    def turn(self) -> None:
        if self._out:
            out, self._out, self._gathered = self._out, [], 0
            self._stream.send(out)

    def ended(self, error: ConnectionError) -> None:
        self._verbs.end()
        for slab in self._slabs.values():
            if self in slab.users:
                slab.users.remove(self)
        self._slabs.clear()
        if not self.over.done():
            self.over.set_result(str(error))

    def _end(self, why: str) -> None:
        if not self.over.done():
            self.over.set_result(why)
        self._stream.close()

    # ---- requests ----

    def _filled(self) -> None:
        asked = self._asked
        if asked is None:
            self._begin(slabwire.request(self._header))
        elif self._unwanted:
            self._unwanted -= min(self._unwanted, SCRATCH_BYTES)
            if not self._unwanted:
                self._asked = None
                self._gone(asked)
        else:
            self._asked = None
            self._do(asked, self._slab)

    def _begin(self, asked: SlabRequest) -> None:
        slab = self._slabs.get((asked.slab, asked.epoch))
        self._slab = slab
        if asked.op is ATTACH or asked.op is PAIR:
            slabwire.check(asked, 0, 0)
        elif slab is not None:
            slabwire.check(asked, slab.pages, slab.page_bytes)
        elif asked.size:
            self._asked, self._unwanted = asked, asked.size
            return
        if not asked.size:
            self._do(asked, slab)
            return
        if asked.size > len(self._payload):
            self._payload = memoryview(bytearray(asked.size))
        self._asked = asked

    def _do(self, asked: SlabRequest, slab: HostedSlab | None) -> None:
        op = asked.op
        if op is ATTACH:
            self._attach(asked)
            return
        if op is PAIR:
            self._pair(asked)
            return
        if op is DETACH:
            self._verbs.drained(asked.slab, asked.epoch)
        if slab is None or self._slabs.get((asked.slab, asked.epoch)) is not slab:  # lost while its payload came
            self._gone(asked)
            return
        if op is READ:
            pages = bytes(slab.has(asked.page, asked.pages))
            self._done(asked, self._versions(slab, asked), pages)
        elif op is VERSIONS:
            self._done(asked, self._versions(slab, asked))
        elif op is DETACH:
            del self._slabs[asked.slab, asked.epoch]
            slab.users.remove(self)
        elif op is REGION:
            self._region(asked, slab)
        elif op is MAP:
            self._env.spawn(f"lend slab {slab.index} to be mapped", self._map(asked, slab))
        else:
            self._write(slab, asked)
            self._out.append(slabwire.pack_done(asked))

    def _versions(self, slab: HostedSlab, asked: SlabRequest) -> bytes:
        return slab.versions[asked.page : asked.page + asked.pages].tobytes()

    def _write(self, slab: HostedSlab, asked: SlabRequest) -> None:
        payload = self._payload[: asked.size]
        op = asked.op
        if op is COPY:
            versions = array("Q")
            versions.frombytes(payload[: asked.pages * VERSION_BYTES])
            slab.put(asked.page, versions, payload[asked.pages * VERSION_BYTES :])
        elif op is WRITE and asked.pages == 1:
            slab.put_one(asked.page, asked.version, payload)
        else:
            versions = array("Q", (asked.version,)) * asked.pages
            slab.put(asked.page, versions, payload if op is WRITE else None)

    def _attach(self, asked: SlabRequest) -> None:
        """Attach a further slab. An unknown slab, a stale epoch and a wrong proof get the same refusal."""
        said = self._greeting
        slab = self._store.known(said.hello.borrower, said.hello.volume, asked.slab, asked.epoch)
        proof = bytes(self._payload[: asked.size])
        known_by = (said.packed, said.nonce, asked.slab, asked.epoch)
        if slab is None or not handshake.is_proof(proof, slabwire.proof_of_volume(slab.secret, *known_by)):
            self._store.refused += 1
            self._gone(asked)
            return
        self.attach(slab)
        proof = slabwire.proof_of_lender(slab.secret, *known_by)
        self._done(asked, slabwire.pack_attached(AttachedSlab(proof, slab.page_bytes, len(slab.memory))))

    def _pair(self, asked: SlabRequest) -> None:
        """Make a queue pair. WireError when the connection has one already."""
        if self._verbs.has_pair:
            raise WireError("a second queue pair for one connection")
        peer = slabwire.paired(bytes(self._payload[: asked.size]))
        if isinstance(peer, str):
            raise WireError(f"no queue pair to be connected to: {peer}")
        try:
            answer = slabwire.pack_paired(self._verbs.connect(peer))
        except NoVerbs as why:
            answer = slabwire.pack_paired(None, str(why))
        self._done(asked, answer)

    def _region(self, asked: SlabRequest, slab: HostedSlab) -> None:
        """Register a slab and answer later: the client asks for nothing else meanwhile. WireError without a queue
        pair."""
        if not self._verbs.has_pair:
            raise WireError("a region without a queue pair")

        def answer(where: LentRegion | None, why: str) -> None:
            self._done(asked, slabwire.pack_region(where, why))
            self.turn()

        self._verbs.register(self._env, slab, answer)

    async def _map(self, asked: SlabRequest, slab: HostedSlab) -> None:
        """Lend a slab's memory for mapping and answer later, as for a region."""
        try:
            answer = slabwire.pack_lent_memory(await slab_maps.lend(slab))
        except ValueError as why:
            answer = slabwire.pack_lent_memory("", str(why))
        self._done(asked, answer)
        self.turn()

    def _gone(self, asked: SlabRequest) -> None:
        if asked.op is not DETACH:
            self._say(SlabReply(GONE, 0, asked.slab, asked.epoch, asked.tag))

    def _say(self, reply: SlabReply) -> None:
        self._out.append(slabwire.pack_reply(reply))

    def _done(self, asked: SlabRequest, *parts: bytes) -> None:
        self._out.append(slabwire.pack_done(asked))
        self._out += parts
        for part in parts:
            self._gathered += len(part)
        if self._gathered > GATHERED_MAX:
            self.turn()
