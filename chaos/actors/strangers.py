"""Strangers: processes that connect to a port of Covey and do not follow its protocol.

    garbage        a process that connects to whatever listens (a port scan), and sends noise, half a frame, a frame
                   that holds something else, or nothing; noise to the sockets of gossip
    a bad client   authenticates, and then sends malformed frames: a broken script, or one of another version
    a usurper      takes the port of a program of Covey's that just died, and answers in another protocol
    a newer agent  a member of the rack, with its keys, whose messages, answers, gossip and log commands the others
                   cannot decode: an upgrade of the rack that stopped half way

What cannot be understood is counted, dropped or refused, and does no more harm than a message that is lost.
"""

import asyncio
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from agent.api.rack_view import ViewAnswer
from agent.rpc.envelope import Envelope
from chaos.actors.people import People
from chaos.rack_seen import RackSeen
from chaos.world.host import SimHost
from covey.core.events import Message
from covey.core.ids import HostId
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.ports.streams import ByteStream
from covey.wire import headers
from covey.wire import volume_wire as volumewire
from covey.wire.frames import pack, read_frame
from covey.wire.handshake import CHALLENGE_BYTES, NONCE_BYTES, parse_challenge, proof_of_client
from covey.wire.headers import Op, Request
from covey.wire.job import Join, VolumeAt, VolumeWanted, decoder
from gossip.packet import HEADER_BYTES
from plugins.memory.datapath.wire import slabwire
from plugins.memory.datapath.wire.slabwire import SlabOp, SlabRequest

EVERY_S = (0.2, 3.0)
"""Least and most seconds between two strangers."""
SILENT_S = 8.0
"""Seconds that a stranger is silent: longer than any listener waits for a first frame."""
GARBLED = 0.05
"""Share of a newer agent's messages that the others cannot decode."""
NEWER = msgspec.msgpack.encode({"type": "Tomorrow", "says": [1, 2, 3]})
"""A message of a later version."""
NO_MESSAGE = b"\xc1"
"""A byte that no msgpack text begins with."""


class Tomorrow(Message, frozen=True):
    """A message of gossip that the present version does not know."""

    says: str


class Strangers:
    """Strangers that come to the hosts of a rack from now on, until the virtual second `until_s`."""

    def __init__(self, rack: RackSeen, until_s: float) -> None:
        self.rack, self.rng, self.until_s = rack, rack.rng, until_s
        self.came = 0
        self.people = People(rack, 0.0)
        self._next()

    def _next(self) -> None:
        world = self.rack.world
        if world.now < self.until_s:
            world.at(world.now + self.rng.uniform(*EVERY_S), self._come)

    def _come(self) -> None:
        up = [host for host in self.rack.hosts.values() if host.up]
        here = [name for name in self.rack.alive() if self.rack.began(name)]
        if here:  # somebody looks at it all
            self.people.ask(self.rng.choice(here), *self.people.lists())
        if up:
            self.came += 1
            self.rng.choice((self._garbage, self._garbage, self._noise, self._client, self._borrower, self._newer))(
                self.rng.choice(up)
            )
        self._next()

    def _run(self, host: SimHost, name: str, work: Callable[[Env], Coroutine[Any, Any, None]]) -> None:
        async def program(env: Env, command: Command) -> int:
            try:
                async with asyncio.timeout(4 * SILENT_S):
                    await work(env)
            except (OSError, TimeoutError):
                return 1
            return 0

        host.run(name, program)

    # ---- processes that do not belong here ----

    def _garbage(self, host: SimHost) -> None:
        """Send garbage to any listener of any host, or to a unix socket of this one."""
        listeners = self.rack.world.wires.listeners
        addresses = sorted(address for owner, address in listeners if owner in ("", host.name))
        if not addresses:
            return
        address, words = self.rng.choice(addresses), self.rng.choice(GARBAGE)(self.rng.randbytes(1 + 3 * 64))

        async def talk(env: Env) -> None:
            stream = await env.bytes.connect(address)
            if words:
                await stream.write(words)
            await asyncio.sleep(env.rng.choice((0.0, 0.5, SILENT_S)))
            stream.close()

        self._run(host, "garbage", talk)

    def _noise(self, host: SimHost) -> None:
        """Send datagrams to gossip: noise, and some that a member sealed, damaged on their way."""
        others = sorted(self.rack.world.network.sockets)
        if not others:
            return
        data = self.rng.randbytes(self.rng.choice((1, 40, 200, 1400)))

        async def send(env: Env) -> None:
            socket = await env.datagrams.open(f"{host.ip}:0", lambda data, sender: None)
            for address in others:
                socket.send(data, address)
            socket.close()

        self._run(host, "noise", send)

    def _client(self, host: SimHost) -> None:
        """Act as a client of the agent and of a volume that authenticates, and then asks for what does not exist."""
        volumes = [oracle for at, oracles in self.rack.oracles.items() if at == host.name for oracle in oracles]
        oracle = self.rng.choice(volumes) if volumes else None
        path = f"unix:{host.run_dir}/jobs.sock"

        async def join_badly(env: Env) -> None:
            stream = await env.bytes.connect(path)
            await stream.write(pack(env.rng.choice((Join(1), Join(1, "j1", 0, 1, "wrong"), VolumeWanted("x", 1)))))  # type: ignore[arg-type]
            await stream.write(env.rng.choice(GARBAGE)(env.rng.randbytes(90)))
            await asyncio.sleep(1.0)
            stream.close()

        async def page_badly(env: Env) -> None:
            assert oracle is not None
            at = await attached(env, path, oracle.volume, oracle.size_bytes)
            stream = await env.bytes.connect(f"unix:{at.path.removeprefix('unix:')}")
            hello = volumewire.pack_hello(at.token)
            older = hello.replace(volumewire.MAGIC, volumewire.MAGIC[:-1] + b"1")
            await stream.write(env.rng.choice((hello, hello, older, hello[:5], bytes(len(hello)))))
            data = bytearray(headers.WELCOME_BYTES)
            await stream.read_into(memoryview(data))
            await stream.write(env.rng.choice((headers.pack_request(Request(Op.READ, 1 << 40, 1, 7)), b"\xff" * 64)))
            await asyncio.sleep(1.0)
            stream.close()

        self._run(host, "client", page_badly if oracle is not None and self.rng.random() < 0.6 else join_badly)

    def _borrower(self, host: SimHost) -> None:
        """Act as a false borrower of a slab that this host lends: of another version, or with the right secret and
        wrong requests."""
        memory = self.rack.plugin(host.name, "memory")
        lent = [] if memory is None else list(memory.lending.machine.lent.values())
        if not lent or not memory.lending.machine.address:
            return
        slab, address, rng = self.rng.choice(lent), memory.lending.machine.address, self.rng

        async def borrow(env: Env) -> None:
            stream = await env.bytes.connect(address)
            ref = slab.slab
            nonce = env.entropy(NONCE_BYTES)
            said = slabwire.SlabHello(str(slab.borrower), ref.volume, ref.index, ref.epoch, nonce, nonce)
            hello = slabwire.pack_hello(said)
            other = (slabwire.MAGIC[:-1] + b"9", slabwire.MAGIC, slabwire.MAGIC, b"\0" * 8)
            hello = env.rng.choice(other) + hello[8:]
            if env.rng.random() < 0.3:
                hello = hello[:8] + b"\xff" * 64 + hello[72:]
            await stream.write(hello)
            data = bytearray(CHALLENGE_BYTES)
            await stream.read_into(memoryview(data))
            await stream.write(proof_of_client(slab.secret, hello, parse_challenge(data).nonce))
            read = SlabRequest(SlabOp.READ, 1 << 30, ref.index, 1, 0, ref.epoch, 7, 0)
            await stream.write(slabwire.pack_request(read))
            await asyncio.sleep(0.5)
            stream.close()

        if rng.random() < 0.7:  # who proves the secret takes the place of the borrower's connection
            self._run(host, "borrower", borrow)

    # ---- an agent of a version to come ----

    def _newer(self, host: SimHost) -> None:
        if host.name not in self.rack.alive() or not self.rack.began(host.name):
            return
        agent = self.rack.agents[host.name]
        to = HostId(self.rng.choice([name for name in self.rack.hosts if name != host.name]))
        body = self.rng.choice((NEWER, NO_MESSAGE, b"", self.rng.randbytes(30)))
        plugin = self.rng.choice(("log", "agent", "memory", "scheduler", "aggregator", "tomorrow"))
        kind = self.rng.choice(("raw", "send", "ask", "refused", "answer", "link", "command", "gossip", "datagram"))
        process = host.agent
        assert process is not None
        match kind:
            case "raw":
                agent.messenger.raw(plugin, to, body)
            case "send" | "ask" | "refused" | "answer":
                agent.messenger._post(to, Envelope(kind, self.rng.randrange(1, 200), agent.boot, 0, 0, plugin, body))
            case "link":
                agent.env.links.send(to, body or NEWER)
            case "datagram":
                process.loop.call_soon(self._datagram, agent.gossip, f"{self.rack.hosts[to].ip}:7946", body)
            case "gossip":
                process.loop.call_soon(agent.gossip.spread, "health", body[:200])
            case _:
                process.spawn("a newer command", self._command(agent, body))

    def _datagram(self, gossip: Any, to: str, body: bytes) -> None:
        """Send a datagram sealed with the key of the rack: one message more than are known, or none at all."""
        sealer = gossip._sealer
        if self.rng.random() < 0.5:
            data = sealer.seal((Tomorrow("later"),))
        else:
            head = bytearray(sealer.seal(()))[:HEADER_BYTES]
            data = bytes(head) + sealer._cipher(sealer.primary).encrypt(
                bytes(head[-12:]), body, bytes(head) + sealer._ring.label
            )
        if gossip._socket is not None:  # else its agent has not got so far
            gossip._socket.send(data, to)

    async def _command(self, agent: Any, body: bytes) -> None:
        """Propose unknown bytes to the log, where every host finds them."""
        try:
            await agent.log.propose(body)
        except Exception as error:
            assert type(error).__name__ in ("NoLeader", "OutcomeUnknown"), repr(error)


async def attached(env: Env, path: str, volume: str, size_bytes: int) -> VolumeAt:
    """Where a volume is served. Raises ConnectionError when the agent does not say."""
    stream = await env.bytes.connect(path)
    await stream.write(pack(Join(1)), pack(VolumeWanted(volume, size_bytes)))
    await read_frame(stream, decoder)
    frame = await read_frame(stream, decoder)
    stream.close()
    if not isinstance(frame, VolumeAt):
        raise ConnectionRefusedError(f"{volume} is not there now")
    return frame


def newer_answers(rack: RackSeen, name: str) -> None:
    """Let some answers of this host's agent be of a later version from now on."""
    answers, rng = rack.agents[name].messenger._answers, rack.rng
    answer, post = answers._answer, answers._post

    async def garbled(sender: HostId, plugin: str, body: bytes) -> bytes:
        right = await answer(sender, plugin, body)
        if plugin == "agent" and rng.random() < 0.5:
            return rng.choice((NEWER, msgspec.msgpack.encode(ViewAnswer(b"[tomorrow]"))))
        return right if rng.random() >= GARBLED else rng.choice((NEWER, NO_MESSAGE, b""))

    def posted(to: HostId, envelope: Envelope) -> bool:
        newer = envelope.kind == "refused" and rng.random() < 0.5
        return post(to, msgspec.structs.replace(envelope, body=NEWER) if newer else envelope)

    answers._answer, answers._post = garbled, posted


def usurp(host: SimHost, address: str, words: bytes, rack: RackSeen) -> None:
    """Give this port, on which no process listens now, to a foreign program that answers with these bytes."""

    async def serve(env: Env, command: Command) -> int:
        async def answer(stream: ByteStream) -> None:
            await stream.write(words)
            await asyncio.sleep(1.0)

        try:
            listener = await env.bytes.listen(address, answer)
        except OSError:
            return 1
        await asyncio.sleep(SILENT_S)
        await listener.close()
        return 0

    host.run("usurper", serve)


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


GARBAGE: tuple[Callable[[bytes], bytes], ...] = (
    lambda noise: noise,
    lambda noise: b"",
    lambda noise: _frame(noise),
    lambda noise: _frame(NEWER),
    lambda noise: _frame(NO_MESSAGE),
    lambda noise: _frame(noise)[:-5],
    lambda noise: struct.pack("<I", 0xFFFFFFFF),
    lambda noise: volumewire.pack_hello(noise[:32].ljust(32, b"\0")),
    lambda noise: volumewire.MAGIC[:-1] + b"1" + bytes(32),
    lambda noise: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
)
