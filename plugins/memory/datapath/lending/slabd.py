"""The slab process: one per lending host. It keeps slabs in memory and serves their pages over TCP.

It outlives the agent, and its slabs outlive it (`slab_keeper`). It does what the agent's `Lender` tells it on
`slabd.sock`: register a slab, free a slab (`slab_store`). A client proves first that it knows the secret of a
slab (`covey.wire.handshake`); until then it costs a task and a few hundred bytes, and few such connections are
admitted. After that bytes drive a machine (`slab_session`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from covey.ports.addresses import Address
from covey.ports.env import Env
from covey.ports.streams import ByteStream, Listener
from covey.ports.verbs import SWITCHED_OFF
from covey.wire import handshake, headers
from covey.wire.driven import driven
from covey.wire.handshake import HANDSHAKE_S, NONCE_BYTES, PROOF_BYTES, Strangers
from covey.wire.headers import Status, Welcome, WireError
from plugins.base import Program
from plugins.memory.datapath.lending.slab_keeping import SlabKeeping
from plugins.memory.datapath.lending.slab_session import Greeting, SlabSession
from plugins.memory.datapath.lending.slab_store import HostedSlab, SlabStore
from plugins.memory.datapath.lending.slab_verbs import LenderVerbs, SessionVerbs
from plugins.memory.datapath.wire import control, slabwire
from plugins.memory.datapath.wire.control import (
    Answer,
    No,
    Question,
    RdmaLent,
    SlabList,
    Yes,
)
from plugins.memory.datapath.wire.control_ends import ControlServer


class SlabdConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the agent gives the slab process at its start."""

    bind: Address
    """Address at which the byte path listens; port 0 takes a free one."""
    secret: bytes
    """Secret that an agent must say on the control socket."""
    lend_bytes: int
    """Most bytes that are ever held, whatever the agent says."""
    control: str = "slabd"
    """Name of the control socket."""
    rdma: bool = True
    """May pages be read and written one-sided, where there is a device?"""


class SlabServer:
    """The byte path: two connections for each volume that has slabs here."""

    def __init__(self, env: Env, store: SlabStore) -> None:
        self._env, self._store = env, store
        self.verbs = LenderVerbs(env)
        self.strangers: Strangers[ByteStream] = Strangers()
        self._nobodys = env.entropy(NONCE_BYTES)
        """Key used for slabs that are not here: strangers cannot tell them from others."""

    async def serve(self, stream: ByteStream) -> None:
        crowded_out = self.strangers.come(stream, stream.peer.rpartition(":")[0])
        if crowded_out is not None:
            self._store.refused += 1
            crowded_out.close()
        try:
            session = await self._welcome(stream)
            self.strangers.go(stream)
            if session is not None:
                driven(stream).drive(session, polite=True)
                await session.over
        except WireError as error:
            self._store.refused += 1
            self._env.log.debug("dropped a slab connection", peer=stream.peer, why=str(error))
        finally:
            self.strangers.go(stream)

    async def _welcome(self, stream: ByteStream) -> SlabSession | None:
        """Let the peer prove that it knows the secret of a slab, attach that slab, and return the session. An unknown
        slab, a stale epoch and a wrong proof get the same refusal."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                slab, greeting = await self._proven(stream)
        except headers.OtherProtocolVersion:
            await stream.write(headers.pack_welcome(Welcome(Status.VERSION, 0, 0)))
            raise
        except TimeoutError as error:
            raise WireError(f"it did not authenticate within {HANDSHAKE_S:g} s") from error
        if slab is None or not slab.live:
            self._store.refused += 1
            await stream.write(headers.pack_welcome(Welcome(Status.REFUSED, 0, 0)))
            return None
        session = SlabSession(
            self._env, self._store, SessionVerbs(self.verbs, greeting.hello), driven(stream), greeting
        )
        await stream.write(headers.pack_welcome(Welcome(Status.OK, slab.page_bytes, len(slab.memory))))
        if slab.live:
            session.attach(slab)
        return session

    async def _proven(self, stream: ByteStream) -> tuple[HostedSlab | None, Greeting]:
        data = bytearray(slabwire.HELLO_BYTES)
        await stream.read_into(memoryview(data))
        hello = bytes(data)
        said = slabwire.hello(hello)
        slab = self._store.find(said)
        key = self._nobodys if slab is None else slab.secret
        nonce = self._env.entropy(NONCE_BYTES)
        await stream.write(handshake.challenge(key, hello, nonce))
        found = bytearray(PROOF_BYTES)
        await stream.read_into(memoryview(found))
        known = handshake.is_proof(bytes(found), handshake.proof_of_client(key, hello, nonce))
        return (slab if known else None), Greeting(said, hello, nonce)


async def run_slabd(env: Env, config: SlabdConfig) -> None:
    """The program. OSError when another slab process serves this host already. When the agent says `Stop` it ends, and
    the slabs with it; after SIGTERM, or a crash, they stay with the keeper for the next process."""
    store, stopped = SlabStore(config.lend_bytes, env.pages), asyncio.Event()
    slabs = SlabServer(env if config.rdma else replace(env, verbs=SWITCHED_OFF), store)
    keeping, serves = SlabKeeping(env, config.secret, store), asyncio.Event()
    lacks, stalls = env.probes.stay_in_memory(flushes=False), env.probes.watch_loop()
    env.probes.keep_heap(0)
    listener: Listener | None = None

    async def answer(question: Question) -> Answer:
        await serves.wait()
        assert listener is not None
        match question:
            case control.RegisterSlabFrame():
                store.register(question)
            case control.FreeSlabFrame():
                store.free(question.borrower, question.volume, question.index, question.epoch)
                await store.left()
            case control.ListSlabs():
                held, more = store.listed(question.after, question.most)
                rdma = RdmaLent(slabs.verbs.name, slabs.verbs.pairs, slabs.verbs.why[:400])
                return SlabList(
                    question.id, listener.address, held, store.refused, store.touched_bytes, more, rdma,
                    lacks="; ".join(why for why in (lacks, keeping.why and f"slabs end with it: {keeping.why}") if why),
                    unlocked_bytes=store.unlocked_bytes,
                    stalls=stalls.count,
                    stall_s_longest=stalls.longest_s,
                    waits=stalls.waits_count,
                    wait_s_longest=stalls.waits_longest_s,
                    byte_path=env.byte_path[:1000],
                )  # fmt: skip
            case control.StopProgram():
                asyncio.get_running_loop().call_later(0.05, stopped.set)
            case _:
                return No(question.id, f"a slab process does not know {type(question).__name__}")
        return Yes(question.id)

    server = ControlServer(env, config.secret, answer)
    await server.open(config.control)  # first: whoever holds this socket owns what the keeper has
    try:
        listener = await _listen(env, config, await keeping.take_up(), slabs.serve)
        keeping.listens(listener.address)
        env.spawn("keep slabs", keeping.run())
        serves.set()
        env.log.info("slab process serves", address=listener.address)
        await stopped.wait()
        await keeping.end()
    finally:
        await server.close()
        if listener is not None:
            await listener.close()


async def _listen(
    env: Env, config: SlabdConfig, before: Address, serve: Callable[[ByteStream], Coroutine[Any, Any, None]]
) -> Listener:
    """Listen where the earlier process did, unless the configuration says otherwise: borrowers connect there again."""
    host, _, port = config.bind.rpartition(":")
    if port == "0" and before.rpartition(":")[0] == host:
        try:
            return await env.bytes.listen(before, serve)
        except OSError as error:
            env.log.warning(
                "another process has taken over; its borrowers must be told", address=before, why=str(error)
            )
    return await env.bytes.listen(config.bind, serve)


PROGRAM = Program("slabd", SlabdConfig, run_slabd, goes_first=800)
"""The slab process is killed for memory before jobs, as waiting ranks are (`agent.ports.processes.shim.GOES_FIRST`),
and after its keeper."""
