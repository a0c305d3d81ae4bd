"""Whole logs (`agent.raft.service`) with messengers and disks, and clients on every host, whose answers must fit one
order of their requests (`chaos.checks.linearizable`): quotas are set and read, job ids given, leases of memory taken
and given back. What changes something goes through the log; reads are answered from the copy of the client's own host,
most of which follow, once it is current (`be_current`).

Meanwhile hosts are killed, stopped, cut off, and suspended, as a virtual machine is: its clocks stand still, so a
leader that continues after others have elected the next one finds by its clock that its lease runs.
"""

import asyncio
import random
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from agent.raft.service import Consensus, LeaderSettings
from agent.rpc.rpc import Messenger
from chaos.checks.linearizable import Request, contradiction
from chaos.crowds.log.books import FIRST, Asked, BookCommand, Count, Give, Look, Put, Take, command_of, perform
from chaos.world.host import SimHost
from chaos.world.world import World
from covey.core.errors import NoLeader, OutcomeUnknown
from covey.core.ids import HostId
from covey.ports.env import Env

LOG = "log"
CLIENTS = 2
"""Clients of each host."""
FAULTS = 5
KEY_S = 4.0
"""Seconds after which clients go on with other keys, so that a history of one key stays short."""
WAIT_S = 1.5
"""The most seconds that a client waits for an answer."""
SETTLES_S = 6.0
"""Seconds after the last fault within which a client of every host has an answer again."""


class LoggedHost:
    """One host: its log and its copy of the books, one life after the other."""

    def __init__(self, rack: "ClientRack", host: SimHost) -> None:
        self.rack, self.host, self.name = rack, host, HostId(host.name)
        self.log: Consensus | None = None
        self.books: dict[str, Any] = {}
        self.lives = 0
        self.answered_s = 0.0
        """When a client here last had an answer."""
        host.main = self._main

    async def _main(self, env: Env) -> int:
        rack, self.books = self.rack, {}
        self.lives += 1

        async def answer(sender: HostId, _: str, body: bytes) -> bytes:
            return await log.answer(sender, body)

        def heard(sender: HostId, _: str, body: bytes) -> None:
            log.receive(sender, body)

        async def send(to: HostId, data: bytes, seconds: float) -> bytes:
            return await messenger.ask(LOG, to, data, seconds)

        messenger = Messenger(
            env, 1, self.lives, lambda to: rack.hosts[to].lives, lambda _: 1, _no_message, answer, heard
        )
        log = Consensus(
            env, self.name, rack.settings, lambda to, data: messenger.raw(LOG, to, data), send, lambda *_: None
        )
        log.bind(self._apply, lambda: msgspec.msgpack.encode(self.books), self._restore)
        log.hosts([*rack.hosts])
        await env.links.open("0.0.0.0:7947", messenger.received)
        rack.known[self.name] = (env.links.address.replace("0.0.0.0", self.host.ip), env.links.public_key)
        env.spawn("meet", self._meet(env))
        await log.start()
        self.log = log
        for number in range(CLIENTS):
            env.spawn("client", self._client(env, log, f"{self.name}.{self.lives}.{number}"))
        await asyncio.Event().wait()
        return 0

    async def _meet(self, env: Env) -> None:
        while True:
            for other, (address, key) in self.rack.known.items():
                if other != self.name:
                    env.links.know(other, address, key)
            await asyncio.sleep(0.5)

    def _apply(self, _: int, data: bytes) -> bytes:
        command = command_of(data)
        self.books[command.key], answer = perform(self.books.get(command.key, FIRST), command.asked)
        return msgspec.msgpack.encode(answer)

    def _restore(self, data: bytes) -> None:
        self.books = msgspec.msgpack.decode(data)

    # ---- clients ----

    async def _client(self, env: Env, log: Consensus, name: str) -> None:
        while True:
            await asyncio.sleep(env.rng.uniform(0.0, self.rack.pace_s))
            kind, asked = env.rng.choice(_kinds(str(self.name), env.rng))
            key = f"{kind}/{self.rack.world.now // KEY_S:.0f}"
            done = self.rack.begin(Request(name, key, asked, self.rack.world.now))
            try:
                done(await self._answer(log, key, asked))
                self.answered_s = self.rack.world.now
            except NoLeader:
                done(None, never=True)
            except OutcomeUnknown:
                pass

    async def _answer(self, log: Consensus, key: str, asked: Asked) -> Any:
        if isinstance(asked, Look):
            await log.be_current(WAIT_S)
            return self.books.get(key, FIRST)
        return msgspec.msgpack.decode(await log.propose(msgspec.msgpack.encode(BookCommand(key, asked)), WAIT_S))


def _kinds(owner: str, rng: random.Random) -> list[tuple[str, Asked]]:
    quota: list[tuple[str, Asked]] = [("quota", Put(rng.randrange(1000))), ("quota", Look()), ("quota", Look())]
    return [*quota, ("jobs", Count()), ("jobs", Look()), ("lease", Take(owner)), ("lease", Give(owner))]


async def _no_message(_sender: HostId, _plugin: str, _body: bytes) -> bool:
    return True


class ClientRack:
    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.chance
        self.faults = 0
        self.known: dict[HostId, tuple[str, bytes]] = {}
        self.history: list[Request] = []
        voters = tuple(f"v{number}" for number in range(self.rng.choice((3, 3, 5))))
        others = tuple(f"o{number}" for number in range(self.rng.choice((1, 2))))
        self.settings = LeaderSettings(voters=voters, voters_wanted=1, snapshot_entries=40, keep_entries=10)
        self.pace_s = self.rng.choice((0.2, 0.6))
        self.hosts = {HostId(name): LoggedHost(self, world.add_host(name)) for name in (*voters, *others)}

    def begin(self, request: Request) -> Callable[..., None]:
        """Note a request; call the result with its answer. With `never` it certainly changed nothing, and is
        forgotten."""
        at = len(self.history)
        self.history.append(request)

        def done(answer: Any, never: bool = False) -> None:
            asked = Look() if never else request.asked  # an unanswered read says nothing
            ended_s = float("inf") if never else self.world.now
            self.history[at] = msgspec.structs.replace(request, asked=asked, ended_s=ended_s, answer=answer)

        return done

    # ---- what happens to it ----

    def start(self) -> None:
        for host in self.hosts.values():
            host.host.start_agent()
        self.world.run(self.world.now + 4.0)

    def leader(self) -> LoggedHost | None:
        """A host that leads by its own clock, if one does."""
        found = [each for each in self.hosts.values() if each.log is not None and each.log.is_leader]
        return found[0] if found else None

    def fault(self) -> None:
        self.faults += 1
        chosen = self.leader() if self.rng.random() < 0.7 else None
        target = chosen or self.hosts[self.rng.choice(sorted(self.hosts))]
        kind = self.rng.choice(("suspend", "suspend", "stop", "kill", "cut", "one way", "lossy"))
        for_s = self.rng.uniform(0.3, 4.0)
        end_s = self.world.now + for_s
        others = [name for name in self.hosts if name != target.name]
        if kind in ("suspend", "stop"):
            self._stop(target, end_s, kind == "suspend")
            if kind == "suspend":  # what others sent meanwhile comes when they try again
                self._cut([(str(other), str(target.name)) for other in others], end_s + self.rng.uniform(0.0, 1.0))
        elif kind == "kill" and target.host.agent is not None:
            target.host.agent.signal(signal.SIGKILL)
            self.world.at(end_s, target.host.revive)
        elif kind in ("cut", "one way"):
            pairs = [(str(target.name), str(other)) for other in others]
            pairs += [(b, a) for a, b in pairs] if kind == "cut" else []
            self._cut(pairs, end_s)
        elif kind == "lossy":
            self.world.network.conditions.loss = 0.1
            self.world.at(end_s, self._lossless)
        self.world.run(end_s + self.rng.uniform(0.0, 1.5))

    def _stop(self, target: LoggedHost, end_s: float, suspend: bool) -> None:
        agent, clock = target.host.agent, target.host.clock
        if agent is None:
            return

        def resume() -> None:
            if suspend:
                clock.go_on()
            agent.signal(signal.SIGCONT)

        agent.signal(signal.SIGSTOP)
        if suspend:
            clock.stand_still()
        self.world.at(end_s, resume)

    def _cut(self, pairs: list[tuple[str, str]], end_s: float) -> None:
        self.world.network.cut(pairs)
        self.world.at(end_s, lambda: self.world.network.heal(pairs))

    def _lossless(self) -> None:
        self.world.network.conditions.loss = 0.0

    def check(self) -> None:
        """Assert that clients of all hosts are answered once nothing fails, and that all answers fit one order."""
        healed_s = self.world.now
        self.world.network.heal()
        for host in self.hosts.values():
            host.host.revive()
        self.world.run(healed_s + SETTLES_S)
        late = [host.name for host in self.hosts.values() if host.answered_s <= healed_s]
        assert not late, f"{SETTLES_S:g} s after the last fault no client of {late} was answered"
        wrong = contradiction(self.history, FIRST, perform)
        assert not wrong, wrong

    # ---- what is told of it ----

    @property
    def now_s(self) -> float:
        return self.world.now

    @property
    def steps(self) -> int:
        return self.world.steps

    @property
    def ended(self) -> object:
        return self.world.story_hash


def play(seed: int) -> ClientRack:
    """Play one seed. Raises AssertionError when the answers of clients fit no order of their requests."""
    with World(seed) as world:
        rack = ClientRack(world)
        rack.start()
        for _ in range(FAULTS):
            rack.fault()
        rack.check()
        return rack
