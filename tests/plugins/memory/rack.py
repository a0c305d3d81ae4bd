"""A simulated rack whose agents run the memory plugin alone: real service, machines and byte programs on virtual time.

The rest of an agent is a stand-in: everybody sees everybody at once, and messages take a little while, arrive at most
once, and not at all where the network is cut.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from chaos.askers import as_root
from chaos.world.host import SimHost, SimProcess
from chaos.world.world import World
from covey.core.errors import Refused
from covey.core.events import Fact, Message
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.wire import headers
from covey.wire import volume_wire as volumewire
from covey.wire.headers import Op, Request, Status
from plugins.base import JobPeer, Program, ReplicatedLog, Runner, S
from plugins.facts import HostGone, HostState, HostView, SecondPassed
from plugins.memory.machine.borrowing.slab import BorrowedSlab
from plugins.memory.messages import Messages
from plugins.memory.plugin import PLUGIN
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service import MemoryService
from plugins.views import SlabView, VolumeView

SETTINGS = MemorySettings(lend="4 MiB", slab="64 KiB", spill_queue="2 MiB", grace="5 s", lease="20 s")
PAGE = 4096
SLAB_PAGES = 16

_encode = msgspec.msgpack.Encoder().encode
_messages: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Messages)


class RackHost:
    """`plugins.base.Host` on a simulated machine."""

    log: ReplicatedLog
    runner: Runner

    def __init__(self, rack: "MemoryRack", env: Env, boot: int) -> None:
        self.rack, self.env, self.id, self.boot = rack, env, env.host, boot
        self.advertise = rack.world.hosts[env.host].ip

    def settings(self, kind: type[S]) -> S:
        settings = msgspec.structs.replace(self.rack.settings, rack=self.rack.racks.get(self.id, ""))
        assert isinstance(settings, kind)
        return settings

    def hosts(self) -> Sequence[HostView]:
        return [self.rack.view(name) for name in sorted(self.rack.world.hosts)]

    def spread(self, key: str, value: msgspec.Struct) -> None:
        self.rack.published.setdefault(self.id, {})[key] = _encode(value)

    def publish(self, fact: Fact) -> None:
        self.rack.told.append((self.id, fact))

    async def send(self, plugin: str, to: HostId, message: Message, deadline_s: float) -> bool:
        try:
            async with asyncio.timeout(deadline_s):
                await self.rack.post(self, to, lambda service, read: service.on_message(self.id, read), message)
        except TimeoutError:
            return False
        return True

    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct:
        async with asyncio.timeout(deadline_s):
            answer = await self.rack.post(self, to, lambda service, read: service.answer(self.id, read), question)
        assert isinstance(answer, msgspec.Struct)
        return answer

    def note(self, subject: str, event: str, reason: str, key: str = "") -> None:
        self.rack.notes.append((self.id, subject, event, reason))

    def peers(self, job: JobId) -> Sequence[JobPeer]:
        return ()


class MemoryRack:
    """`hosts` machines h1, h2, ...; `agents[h]` is the plugin's service while that host's agent lives."""

    def __init__(
        self, world: World, hosts: int, settings: MemorySettings = SETTINGS, racks: Mapping[str, str] | None = None
    ) -> None:
        self.world, self.settings = world, settings
        self.racks: dict[str, str] = dict(racks or {})
        """The rack in which each host stands."""
        self.agents: dict[str, MemoryService] = {}
        self.processes: dict[str, SimProcess] = {}
        self.published: dict[str, dict[str, bytes]] = {}
        self.states: dict[str, HostState] = {}
        self.notes: list[tuple[str, str, str, str]] = []
        """Host, subject, event and reason of each note."""
        self.told: list[tuple[str, Fact]] = []
        self.messages: list[tuple[str, str, Message]] = []
        """Sender, receiver and message, for everything that was heard."""
        self._boots: dict[str, int] = {}
        world.programs = self.programs
        for n in range(1, hosts + 1):
            host = world.add_host(f"h{n}")
            host.main = self._main
            host.start_agent()

    def programs(self) -> Mapping[str, Program]:
        return {program.name: program for program in PLUGIN.programs}

    async def _main(self, env: Env) -> int:
        boot = self._boots[env.host] = self._boots.get(env.host, 0) + 1
        service = MemoryService(RackHost(self, env, boot))
        self.agents[env.host] = service
        agent = self.host(env.host).agent
        assert agent is not None
        self.processes[env.host] = agent
        await service.start()
        while True:
            await asyncio.sleep(1.0)
            service.on_fact(SecondPassed(env.clock.now_s()))
            service.lending.machine.check()
            service.borrowing.machine.check()

    # ---- between hosts ----

    def view(self, name: str) -> HostView:
        return HostView(host=HostId(name), state=self.states.get(name, "alive"), values=self.published.get(name, {}))

    async def post(
        self,
        sender: RackHost,
        to: str,
        call: Callable[[MemoryService, Any], Coroutine[Any, Any, Any]],
        message: Message,
    ) -> Any:
        """Return what the call at the other host returns; never return when the message is lost."""
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        encoded = _encode(message)

        async def at_the_other() -> None:
            read = _messages.decode(encoded)
            self.messages.append((sender.id, to, read))
            result = await call(self.agents[to], read)
            self._later(to, sender.id, lambda: None if answered.done() else answered.set_result(result))

        def arrive() -> None:
            process = self.processes.get(to)
            if process is not None and process.alive:
                process.spawn("hear", at_the_other())

        self._later(sender.id, to, arrive)
        return await answered

    def _later(self, source: str, target: str, what: Callable[[], object]) -> None:
        network = self.world.network
        if network.open(source, target):
            self.world.at(self.world.now + network.delay_s(source, target), what)

    def declare(self, host: str, state: HostState) -> None:
        """Let gossip say so everywhere."""
        self.states[host] = state
        for name, service in self.agents.items():
            if state == "gone" and name != host and self.processes[name].alive:
                self.processes[name].loop.call_soon(service.on_fact, HostGone(HostId(host), False))

    # ---- looking and doing ----

    def host(self, name: str) -> SimHost:
        return self.world.hosts[name]

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def until(self, what: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline = self.world.now + within_s
        assert self.world.run(deadline, stop=what), f"not within {within_s} s; repeat with seed {self.world.seed}"

    def do(self, host: str, work: Callable[[], Coroutine[Any, Any, Any]], within_s: float = 60.0) -> Any:
        """Run a coroutine in the agent of this host; return its result, or its refusal."""
        done: list[Any] = []

        async def run() -> None:
            try:
                done.append(await work())
            except Refused as refused:
                done.append(refused)

        self.processes[host].spawn("test", run())
        self.until(lambda: bool(done), within_s)
        if isinstance(done[0], Refused):
            raise done[0]
        return done[0]

    def command(self, host: str, name: str, **arguments: Any) -> Any:
        async def call() -> Any:
            return await self.agents[host].commands()[name](as_root(arguments))

        return self.do(host, call)

    def attach(self, host: str, volume: str, size: str, mirror: int = 0, parity: str = "") -> VolumeView:
        view = self.command(host, "create", volume=volume, size=size, mirror=mirror, parity=parity)
        assert isinstance(view, VolumeView)
        return view

    def slabs(self, host: str) -> list[SlabView]:
        return self.agents[host].borrowing.slab_views()

    def slab(self, host: str, volume: str, index: int) -> BorrowedSlab:
        return self.agents[host].borrowing.machine.volumes[volume].slabs[index]

    def mapped(self, host: str, volume: str) -> list[int]:
        """The slabs of this volume that have a place."""
        return [slab.index for slab in self.slabs(host) if slab.volume == volume and slab.state == "mapped"]

    def lender(self, host: str, volume: str, index: int) -> str:
        place = self.slab(host, volume, index).place
        assert place is not None
        return place.lender

    def vold(self, host: str, volume: str) -> SimProcess:
        return self.host(host).find(f"vold-{volume}")[-1]

    def slabd(self, host: str) -> SimProcess:
        return self.host(host).find("slabd")[-1]

    def lose_memory(self, host: str) -> None:
        """Lose all that this host lent: its slab process and the process that keeps the memory die, as when memory runs
        out."""
        kill([*self.host(host).find("slab-keeper"), self.slabd(host)])

    def story(self, subject: str) -> list[tuple[str, str]]:
        """Event and reason of each note, in order, on all hosts."""
        return [(event, reason) for _, told, event, reason in self.notes if told == subject]

    def client(self, host: str, work: Callable[["SimClient"], Coroutine[Any, Any, None]], volume: str) -> "SimClient":
        """Start a user's process on this host that works on a volume."""
        known = self.agents[host].borrowing.volumes[volume].known
        client = SimClient(self.agents[host].borrowing.path(volume), known.token, known.size_bytes)

        async def run(env: Env, command: Command) -> int:
            client.env = env
            try:
                await work(client)
            except AssertionError as error:
                client.error = str(error)
                return 1
            client.done = True
            return 0

        client.process = self.host(host).run(f"client-{len(self.notes)}", run)
        return client


class SimClient:
    """A client that does what `covey.remote.RemoteMemory` does, on ports: requests are repeated until they are
    answered."""

    env: Env
    process: SimProcess

    def __init__(self, path: str, token: bytes, size_bytes: int) -> None:
        self.path, self.token, self.size_bytes = path, token, size_bytes
        self.done = False
        self.error = ""
        """What was wrong in a page that the client read."""
        self.failed, self.why = 0, ""
        """How many requests failed, and why the last one did."""
        self._stream: Any = None
        self._tag = 0

    async def write(self, page: int, data: bytes) -> None:
        await self._ask(Op.WRITE, page, len(data) // PAGE, data)

    async def read(self, page: int, count: int) -> bytes:
        return await self._ask(Op.READ, page, count)

    async def flush(self) -> None:
        await self._ask(Op.FLUSH, 0, 0)

    async def discard(self, page: int, count: int) -> None:
        await self._ask(Op.DISCARD, page, count)

    async def _ask(self, op: Op, page: int, count: int, data: bytes = b"") -> bytes:
        while True:
            try:
                if self._stream is None:
                    await self._connect()
                self._tag += 1
                await self._stream.write(headers.pack_request(Request(op, page, count, self._tag)), data)
                header = bytearray(headers.REPLY_BYTES)
                await self._stream.read_into(memoryview(header))
                reply = headers.reply(header)
                if reply.status is not Status.OK:
                    reason = bytearray(headers.reason_bytes(reply))
                    await self._stream.read_into(memoryview(reason))
                    self.failed, self.why = self.failed + 1, reason.decode()
                    await asyncio.sleep(0.2)
                    continue
                assert (reply.tag, reply.pages) == (self._tag, count)
                pages = bytearray(count * PAGE if op is Op.READ else 0)
                await self._stream.read_into(memoryview(pages))
                return bytes(pages)
            except ConnectionError:
                self._stream = None
                await asyncio.sleep(0.05)

    async def _connect(self) -> None:
        stream = await self.env.bytes.connect(f"unix:{self.path}")
        await stream.write(volumewire.pack_hello(self.token))
        data = bytearray(headers.WELCOME_BYTES)
        await stream.read_into(memoryview(data))
        found = headers.welcome(data)
        assert found == headers.Welcome(Status.OK, PAGE, self.size_bytes), found
        self._stream = stream


def pattern(page: int, version: int) -> bytes:
    """Content of one page that no other page and version has."""
    word = (page << 32 | version).to_bytes(8, "little")
    return word * (PAGE // 8)


def kill(processes: Iterable[SimProcess]) -> None:
    for process in processes:
        process.signal(9)
