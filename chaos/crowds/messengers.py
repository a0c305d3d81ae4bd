"""Messages between agents that are nothing but a messenger (`agent.rpc.rpc`), by seed: connections break, agents die
and start again, hosts are installed anew under boots that may be lower, plugins are off for a while, one host is dead
and messages for it wait. Receivers remember few of them.

What must hold: no life of an agent handles a message twice, or one that was meant for another, or one of an
installation that lost its name; an acknowledged message was handled. Once nothing fails any more, every message
arrives in time, even while others wait for a plugin that is off, or for the dead host.
"""

import asyncio
import itertools
import signal
from collections import Counter

from agent.rpc.rpc import Messenger
from chaos.world.world import World
from covey.core.ids import HostId
from covey.ports.env import Env

LIVE = (HostId("h1"), HostId("h2"))
DEAD = HostId("h3")
FAULTS = 5
MANY = 24
PROMPT_S = 20.0
"""Seconds within which every message arrives once nothing fails: where a table of eight is full of messages for a
plugin that is off, the others wait with growing pauses."""
OFF_S = 3.0
"""Most seconds that a plugin is off."""
PATIENCE_S = 60.0
"""Seconds for which a message to the dead host is tried."""


class Post:
    """Three hosts, of which the last one is dead."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.chance
        self.faults = 0
        self.boots: Counter[HostId] = Counter(dict.fromkeys((*LIVE, DEAD), 1000))
        self.installed: Counter[HostId] = Counter(dict.fromkeys((*LIVE, DEAD), 1))
        """How often each host was installed, which identifies it."""
        self.holds: dict[HostId, int] = {}
        """How often each host was installed, as gossip knows it, which is later."""
        self.known: dict[HostId, tuple[str, bytes]] = {}
        self.handled: dict[tuple[HostId, int, int], list[bytes]] = {}
        """Host, installation and boot -> bodies of messages."""
        self.left: Counter[HostId] = Counter(dict.fromkeys(LIVE, MANY * 1000))
        """Messages that each host still sends."""
        self.written = self.arrived = 0
        """Messages written to live hosts, and arrived there, once nothing fails."""
        self.off_until_s = 0.0
        """Time until which plugin `late` is off, everywhere."""
        self.faults_over = False
        self.pace_s = self.rng.choice((0.02, 0.04, 0.1))
        self.remembered = self.rng.choice((8, 16, 32))
        for name in (*LIVE, DEAD):
            host = world.add_host(name)
            host.main = self._agent

    # ---- what a host does --------------------------------------------------------------------------------------------

    async def _agent(self, env: Env) -> int:
        me = env.host
        self.boots[me] += 1
        boot, who = self.boots[me], self.installed[me]
        handled = self.handled.setdefault((me, who, boot), [])
        self.world.at(self.world.now + self.rng.uniform(0.0, 1.0), lambda: self._gossiped(me, who))

        async def hear(sender: HostId, plugin: str, body: bytes) -> bool:
            if plugin == "late" and self.world.now < self.off_until_s:
                return False
            assert int(body.split()[2]) >= self.holds.get(sender, 0), f"{me} hears {body!r} of a former {sender}"
            await asyncio.sleep(env.rng.choice((0.0, 0.01, 0.3)))
            to = body.split()[1].decode()
            assert (to, body.split()[0].decode()) == (me, sender), (
                f"{me} handles a message of {sender} with body {body!r}"
            )
            assert body not in handled, f"{me} handles {body!r} again"
            handled.append(body)
            return True

        messenger = Messenger(
            env,
            who,
            boot,
            lambda to: self.boots[to],
            lambda host: self.holds.get(host, 0),
            hear,
            _nothing,
            lambda *_: None,
        )
        messenger.remembered_max = self.remembered
        await env.links.open("0.0.0.0:7947", messenger.received)
        self.known[me] = (env.links.address.replace("0.0.0.0", self.world.hosts[me].ip), env.links.public_key)
        await self._write(env, messenger, f"{who} {boot}")
        return 0

    def _gossiped(self, host: HostId, who: int) -> None:
        self.holds[host] = max(who, self.holds.get(host, 0))

    async def _write(self, env: Env, messenger: Messenger, life: str) -> None:
        """Write messages: one of many is for the dead host, one for the plugin that may be off; at the end the first
        two."""
        to_others = [host for host in LIVE if host != env.host]
        for number in itertools.count():
            await asyncio.sleep(env.rng.uniform(0.5, 1.5) * self.pace_s)
            if self.left[env.host] <= 0:
                continue
            for host in to_others:
                if host in self.known:
                    env.links.know(host, *self.known[host])
            kind = self.left[env.host] % MANY
            self.left[env.host] -= 1
            to = DEAD if kind == 0 else to_others[0]
            body = f"{env.host} {to} {life} {number}".encode()
            env.spawn("message", self._send(messenger, "late" if kind == MANY - 1 else "memory", to, body))

    async def _send(self, messenger: Messenger, plugin: str, to: HostId, body: bytes) -> None:
        must = self.faults_over and to != DEAD
        self.written += must
        acknowledged = await messenger.send(plugin, to, body, PATIENCE_S if to == DEAD else OFF_S + PROMPT_S)
        by = [life for life, bodies in self.handled.items() if life[0] == to and body in bodies]
        assert by or not acknowledged, f"{body!r} was acknowledged and not handled"
        assert acknowledged or not must, f"{body!r} did not arrive though nothing fails"
        self.arrived += must

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def fault(self) -> None:
        self.faults += 1
        host = self.world.hosts[self.rng.choice(LIVE)]
        kind = self.rng.choice(("kill", "install", "break", "cut", "plugin off"))
        if kind in ("kill", "install") and host.agent is not None:
            host.agent.signal(signal.SIGKILL)
            if kind == "install":
                self.installed[HostId(host.name)] += 1
                self.boots[HostId(host.name)] += self.rng.choice((-500, 0, 500))
            self.world.at(self.world.now + self.rng.uniform(0.0, 2.0), host.revive)
        elif kind == "break":
            self.broken()
        elif kind == "cut":
            self.world.network.cut([LIVE])
            self.world.at(self.world.now + self.rng.uniform(0.1, 5.0), self.world.network.heal)
        elif kind == "plugin off":
            self.off_until_s = self.world.now + self.rng.uniform(0.1, OFF_S)
        self.world.run(self.world.now + self.rng.uniform(0.1, 2.0))

    def broken(self) -> None:
        for end in self.world.link_ends.values():
            end.reset(end.host.name)

    def heal(self) -> None:
        self.world.network.heal()
        for name in LIVE:
            self.world.hosts[name].revive()

    def check(self) -> None:
        """Assert that all messages arrive when all is well, except for a plugin that is off for a moment, and
        connections that break once."""
        self.left.clear()
        self.heal()
        self.world.run(self.world.now + OFF_S + PROMPT_S)
        self.faults_over = True
        self.off_until_s = self.world.now + OFF_S
        self.left = Counter(dict.fromkeys(LIVE, MANY * self.remembered // 8))
        self.world.run(self.world.now + self.rng.uniform(0.0, OFF_S))
        self.broken()
        self.world.run(self.world.now + 2 * (OFF_S + PROMPT_S))
        assert self.arrived == self.written > 0, f"{self.arrived} of {self.written} messages arrived"

    # ---- what is told of it ------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.world.now

    @property
    def steps(self) -> int:
        return self.world.steps

    @property
    def ended(self) -> object:
        return self.world.story_hash


async def _nothing(_sender: HostId, _plugin: str, body: bytes) -> bytes:
    return body


def play(seed: int) -> Post:
    """Play one seed. Raises AssertionError when a message is handled twice, lost without an error, or held up by
    another."""
    with World(seed) as world:
        post = Post(world)
        for name in LIVE:
            world.hosts[name].start_agent()
        for _ in range(FAULTS):
            post.fault()
        post.check()
        return post
