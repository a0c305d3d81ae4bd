"""A rack of fakes for the scheduler's service: one shared log, hosts that can be cut off or restarted, virtual time.

What belongs to a machine (its disk, its running ranks) stays when its agent restarts; the rest is built anew.
"""

import asyncio
import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
import structlog

from covey.core.errors import NoLeader, Refused
from covey.core.events import Fact, Message
from covey.core.ids import HostId, JobId
from covey.ports.env import Env
from covey.ports.users import FixedUsers, User
from plugins.askers import ASKER, Asker
from plugins.facts import HostState, HostView, RanksStarted, SecondPassed
from plugins.scheduler.messages.wire import decoder
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service.main import SchedulerService
from tests.plugins.scheduler.fake_machine import FakeClock, FakeRunner, Machine
from tests.virtual_time import play

S = TypeVar("S", bound=msgspec.Struct)


async def until(holds: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Let time pass until `holds()`; AssertionError when it never does."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while not holds():
        assert loop.time() < end_s, "it never happened"
        await asyncio.sleep(0.05)


class FakeLog:
    """One host's copy of the shared log."""

    def __init__(self, rack: "Rack", host: HostId) -> None:
        self.rack, self.host = rack, host
        self.applied_index = 0
        self.tail: list[bytes] = []
        """The entries that are not known to be committed."""
        self.results: dict[int, bytes] = {}

    @property
    def leader(self) -> HostId | None:
        return self.rack.leader

    @property
    def voters(self) -> Sequence[HostId]:
        return [HostId(name) for name in self.rack.voters]

    @property
    def term(self) -> int:
        return self.rack.term

    def undecided(self) -> Sequence[bytes]:
        return self.tail

    @property
    def leaderless_s(self) -> float:
        return 0.0 if self.rack.leader is not None else 5.0

    @property
    def is_leader(self) -> bool:
        return self.rack.leader == self.host

    @property
    def caught_up(self) -> bool:
        return self.host not in self.rack.just_started

    @property
    def age_s(self) -> float:
        return 0.0 if self.rack.reaches_leader(self.host) else 1000.0

    def bind(
        self,
        apply: Callable[[int, bytes], bytes],
        snapshot: Callable[[], bytes],
        restore: Callable[[bytes], None],
    ) -> None:
        self.apply, self.snapshot, self.restore = apply, snapshot, restore

    async def be_current(self, timeout_s: float = 5.0) -> None:
        await asyncio.sleep(0.002)
        if not self.rack.reaches_leader(self.host):
            raise NoLeader("nobody leads here")
        self.catch_up()

    def catch_up(self, most: int = 1 << 30) -> None:
        """Apply the entries that are there, or only the next ones when this host's log is slow."""
        if self.host in self.rack.slow:
            most = min(most, self.rack.slow[self.host])
        for _ in range(most):
            if self.applied_index == len(self.rack.entries) or not self.rack.reaches_leader(self.host):
                return
            self.applied_index += 1
            self.results[self.applied_index] = self.apply(self.applied_index, self.rack.entries[self.applied_index - 1])

    async def propose(self, command: bytes, timeout_s: float = 5.0) -> bytes:
        await asyncio.sleep(0.002)
        if not self.rack.reaches_leader(self.host):
            raise NoLeader("nobody leads here")
        assert self.rack.leader is not None
        self.rack.entries.append(command)
        index = len(self.rack.entries)
        leader = self.rack.hosts[self.rack.leader].log
        leader.catch_up()
        self.rack.spread()
        return leader.results[index]


class FakeHost:
    """The `plugins.base.Host` for one plugin."""

    def __init__(self, rack: "Rack", name: str, machine: Machine, boot: int) -> None:
        self.rack, self.machine, self.boot = rack, machine, boot
        self.id, self.advertise = HostId(name), f"10.0.0.{len(rack.hosts) + 1}"
        self.up = True
        self.tasks: list[asyncio.Task[Any]] = []
        self.told: list[Fact] = []
        self.notes: list[tuple[str, str, str, str]] = []
        self.log = FakeLog(rack, self.id)
        self.runner = FakeRunner(machine, self._tell)
        counter = iter(range(1, 1 << 30))
        nothing: Any = None
        self.env = Env(
            host=self.id,
            clock=FakeClock(),
            rng=random.Random(1),
            entropy=lambda size: (f"{name}{boot}".encode() + next(counter).to_bytes(8, "big")).rjust(size, b"0")[
                -size:
            ],
            spawn=self.spawn,
            log=cast(Any, structlog.wrap_logger(structlog.ReturnLogger(), processors=[])),
            datagrams=nothing,
            links=nothing,
            bytes=nothing,
            disk=cast(Any, machine.disk),
            processes=nothing,
            probes=machine.probes,
            pages=nothing,
            run_dir="/run",
            users=rack.users,
            records=machine.records,
        )
        self.service = SchedulerService(self)

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> object:
        task = asyncio.get_running_loop().create_task(work, name=f"{self.id}: {name}")
        self.tasks.append(task)
        return task

    def settings(self, kind: type[S]) -> S:
        assert isinstance(self.rack.settings, kind)
        return self.rack.settings

    def hosts(self) -> Sequence[HostView]:
        return self.rack.views(self.id)

    def spread(self, key: str, value: msgspec.Struct) -> None:
        self.rack.values[self.id][key] = msgspec.msgpack.encode(value)

    def publish(self, fact: Fact) -> None:
        self.told.append(fact)
        self.service.on_fact(fact)
        if self.rack.sharing is not None:
            self.rack.sharing(self, fact)

    def _tell(self, fact: Fact) -> None:
        """Take what becomes of ranks, which an agent that is down does not see."""
        if self.up:
            self.publish(fact)

    async def send(self, plugin: str, to: HostId, message: Message, deadline_s: float) -> bool:
        decoded = decoder.decode(msgspec.msgpack.encode(message))
        self.rack.said.append((self.id, to, message))
        await asyncio.sleep(self.rack.delay_s)
        if not self.rack.connected(self.id, to):
            await asyncio.sleep(deadline_s)
            return False
        await self.rack.hosts[to].service.on_message(self.id, decoded)
        return True

    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct:
        await asyncio.sleep(self.rack.delay_s)
        if not self.rack.connected(self.id, to):
            await asyncio.sleep(deadline_s)
            raise TimeoutError
        asked = decoder.decode(msgspec.msgpack.encode(question))
        answer = await self.rack.hosts[to].service.answer(self.id, asked)
        return cast(msgspec.Struct, decoder.decode(msgspec.msgpack.encode(answer)))

    def note(self, subject: str, event: str, reason: str, key: str = "") -> None:
        self.notes.append((subject, event, reason, key))

    def peers(self, job: JobId) -> Sequence[Any]:
        return ()

    async def start(self) -> None:
        await self.service.start()
        for spec in self.machine.ranks.values():
            self.publish(RanksStarted(spec.job, spec.epoch, {rank.rank: 100 + rank.rank for rank in spec.ranks}))
        for fact in list(self.machine.ends.values()):
            self.publish(fact)
        self.spawn("seconds", self.seconds())

    async def seconds(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.publish(SecondPassed(self.env.clock.now_s()))

    def die(self) -> None:
        """Kill the agent by `kill -9`."""
        self.up = False
        for task in self.tasks:
            task.cancel()

    async def call(self, command: str, asker: Asker | None = None, **given: Any) -> Any:
        """What the command answers whoever asks; an operator, unless somebody else is named."""
        answer: Awaitable[Any] = self.service.commands()[command]({**given, ASKER: asker or operator()})
        return await answer

    def raised(self) -> list[BaseException]:
        """Exceptions that would have stopped the plugin."""
        over = [task for task in self.tasks if task.done() and not task.cancelled()]
        found = [task.exception() for task in over]
        return [error for error in found if error is not None]


def operator(name: str = "root") -> Asker:
    """The agent's own user, under this name."""
    return Asker(0, name, "operator", is_agent=True)


def user(name: str, uid: int) -> Asker:
    return Asker(uid, name, "user")


class Rack:
    def __init__(self, gpus: Mapping[str, int], settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self.users = FixedUsers(User("ann", 64001), User("bob", 64002))
        self.entries: list[bytes] = []
        self.leader: HostId | None = None
        self.voters = list(gpus)[:3]
        self.term = 0
        self.values: dict[HostId, dict[str, bytes]] = {}
        self.hosts: dict[HostId, FakeHost] = {}
        self.cut: set[HostId] = set()
        self.states: dict[HostId, tuple[HostState, float]] = {}
        self.said: list[tuple[HostId, HostId, Message]] = []
        self.just_started: set[HostId] = set()
        """Hosts whose copy of the log no leader has confirmed yet."""
        self.sharing: Callable[[FakeHost, Fact], None] | None = None
        """The plugin `sharing` of every host that shares its GPUs: it is told every fact."""
        self.delay_s = 0.005
        self.slow: dict[HostId, int] = {}
        """Hosts whose copy of the log applies no more entries at a time than this."""
        for name, count in gpus.items():
            self.values[HostId(name)] = {}
            self.hosts[HostId(name)] = FakeHost(self, name, Machine(name, count), 1)

    def __getitem__(self, name: str) -> FakeHost:
        return self.hosts[HostId(name)]

    async def start(self, leader: str | None = None) -> None:
        for host in self.hosts.values():
            self.states[host.id] = ("alive", 0.0)
            await host.start()
        self.lead(leader or min(self.hosts))
        await asyncio.sleep(2.5)

    def lead(self, name: str | None) -> None:
        self.leader = None if name is None else HostId(name)
        self.term += name is not None
        self.spread()

    def reaches_leader(self, host: HostId) -> bool:
        return self.leader is not None and self.connected(host, self.leader)

    def connected(self, one: HostId, other: HostId) -> bool:
        if not (self.hosts[one].up and self.hosts[other].up):
            return False
        return one == other or not ({one, other} & self.cut)

    def spread(self) -> None:
        for host in self.hosts.values():
            if host.up:
                host.log.catch_up()

    def views(self, here: HostId) -> list[HostView]:
        return [
            HostView(
                host=host, state=self.states[host][0], since_s=self.states[host][1], values=dict(self.values[host])
            )
            for host in sorted(self.hosts)
        ]

    def gone(self, name: str, state: HostState = "gone") -> None:
        """Gossip notices now that this host is away."""
        self.states[HostId(name)] = (state, asyncio.get_running_loop().time())

    def cut_off(self, name: str) -> None:
        self.cut.add(HostId(name))
        self.gone(name)

    def heal(self, name: str) -> None:
        self.cut.discard(HostId(name))
        self.gone(name, "alive")
        self.spread()

    async def restart(self, name: str) -> FakeHost:
        """Start the agent again, on its machine."""
        old = self[name]
        if old.up:
            old.die()
        new = FakeHost(self, name, old.machine, old.boot + 1)
        new.advertise = old.advertise
        self.hosts[old.id] = new
        self.gone(name, "alive")
        await new.start()
        self.spread()
        return new

    def job(self, id: str, host: str | None = None) -> Any:
        """The job's record in one host's copy."""
        return self[host or min(self.hosts)].service.queue.jobs[JobId(id)]

    def finish(self, id: str, codes: Mapping[int, int] | None = None) -> None:
        """End every rank that runs for this job: with 0, or as `codes` says."""
        for host in self.hosts.values():
            for (job, epoch), spec in list(host.machine.ranks.items()):
                if job == id:
                    host.runner.end(job, epoch, {rank.rank: (codes or {}).get(rank.rank, 0) for rank in spec.ranks})

    def check(self) -> None:
        """Raise AssertionError when something broke, or something that must hold does not."""
        copies = set()
        for host in self.hosts.values():
            assert host.raised() == []
            host.service.queue.check()
            host.service.gangs.check()
            host.service.ranks.reservations.check()
            if host.up and host.log.applied_index == len(self.entries):
                copies.add(host.service.queue.snapshot())
        assert len(copies) <= 1, "copies of the log differ"

    def stop(self) -> None:
        for host in self.hosts.values():
            host.die()


async def refused(answer: Awaitable[Any]) -> Refused:
    """The refusal that this must be."""
    try:
        await answer
    except Refused as error:
        return error
    raise AssertionError("it was not refused")


FOUR = {"gpu1": 2, "gpu2": 2, "gpu3": 2, "gpu4": 2}


def on_a_rack(
    gpus: Mapping[str, int] = FOUR, settings: SchedulerSettings | None = None
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Give a test a rack with these GPUs as its first argument, play it in virtual time, and check the rack."""

    def played(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def told(given: Mapping[str, Any]) -> None:
            rack = Rack(gpus, settings)
            await rack.start()
            try:
                await test(rack, **given)
                rack.check()
            finally:
                rack.stop()
                await asyncio.sleep(0)

        @functools.wraps(test)
        def whole(**given: Any) -> None:
            play(told(given))

        known = inspect.signature(test)
        whole.__signature__ = known.replace(parameters=list(known.parameters.values())[1:])  # type: ignore[attr-defined]
        return whole

    return played


async def submit(rack: Rack, on: str = "gpu1", **fields: Any) -> Any:
    given: dict[str, Any] = {"argv": ["./train.py"], "workers": 4, "cwd": "/tmp", **fields}
    return await rack[on].call("submit", **given)
