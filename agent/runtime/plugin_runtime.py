"""The plugins of one agent: started, guarded, and started again after an OSError.

    on --exception--> failed                          a defect: until an operator restarts the agent
    on --OSError----> failed --1, 2, 4 .. 30 s--> on  a full or failing disk: until it works

A plugin has one *life* at a time: a service, its tasks, and a boot number of its own, so that ids and epochs of one
life never come again in the next. Code of a life that ended (a command half way, a timer) reaches no other plugin and
no other host. A new life begins as after a restart of the agent, from disk and from the programs that kept running; it
then receives the facts that hold now. A plugin that fails does not take the others down.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from agent.api.rack_view import PluginsFailed
from agent.config import Config
from agent.event_log import EventLog
from agent.jobs.socket.jobs_socket import JobSocket
from agent.metrics import PLUGIN_RESTARTS
from agent.rpc.rpc import Messenger
from agent.runtime.bus import Bus
from covey.core.errors import Refused
from covey.core.events import Fact, Message
from covey.core.ids import HostId
from covey.core.metrics import MetricSeries
from covey.ports.env import Env
from plugins.base import Plugin, PluginService, ReplicatedLog, Runner
from plugins.facts import HostView
from plugins.views import OtherUsersNow, PluginHealth

S = TypeVar("S", bound=msgspec.Struct)
A = TypeVar("A")
_encode = msgspec.msgpack.Encoder().encode
STOP_S = 1.5
"""Seconds that plugins may take to stop, all together; a part of `agent.main.LEAVE_S`."""
PAUSE_S, PAUSE_MAX_S = 1.0, 30.0
"""Seconds to pause before a plugin that failed with OSError is started again; they double while it fails at once."""
STEADY_S = 60.0
"""A plugin that lived for this many seconds did not fail at once."""


class PluginsAgent(Protocol):
    """What plugins need of the agent around them (`agent.host.HostAgent`)."""

    env: Env
    config: Config
    bus: Bus
    messenger: Messenger
    runner: Runner
    log: ReplicatedLog
    jobs: JobSocket
    event_log: EventLog
    plugin_runtime: "PluginRuntime"

    @property
    def id(self) -> HostId: ...
    @property
    def boot(self) -> int: ...
    @property
    def no_room(self) -> str:
        """What a full disk keeps this host from doing; empty: nothing."""

    @property
    def other_users(self) -> OtherUsersNow:
        """Whether jobs run here as users other than the agent's."""

    async def next_boot(self) -> int:
        """A boot number above every earlier one, durable on return. OSError."""

    def hosts(self) -> Sequence[HostView]: ...
    def standing_facts(self) -> Sequence[Fact]: ...
    def spread(self, key: str, value: msgspec.Struct) -> None: ...
    async def on_message(self, sender: HostId, plugin: str, body: bytes) -> bool: ...
    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct: ...


class PluginInstance:
    """The `plugins.base.Host` of one life of one plugin: the agent, this plugin's settings, tasks whose failure fails
    this plugin. At its end its tasks are cancelled; code of it that still runs can start no task, publish no fact,
    gossip nothing, and its messages and questions are not sent. It can still note events, and use what is the whole
    agent's: the log, the runner, the other ports of `env`."""

    def __init__(self, agent: PluginsAgent, plugin: Plugin, settings: msgspec.Struct, boot: int) -> None:
        self._agent, self.plugin, self._settings = agent, plugin, settings
        self.id, self.advertise, self.boot = agent.id, agent.config.advertise, boot
        self.runner, self.log = agent.runner, agent.log
        self.env = dataclasses.replace(agent.env, spawn=self._spawn)
        self.note, self.peers = agent.event_log.note, agent.jobs.peers
        self.open = True
        self.began_s = agent.env.clock.now_s()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._service: PluginService | None = None

    async def begin(self) -> None:
        self._service = self.plugin.service(self)
        await self._service.start()

    @property
    def service(self) -> PluginService:
        assert self._service is not None, "it has begun"
        return self._service

    def settings(self, kind: type[S]) -> S:
        assert isinstance(self._settings, kind)
        return self._settings

    def hosts(self) -> Sequence[HostView]:
        return self._agent.hosts()

    def spread(self, key: str, value: msgspec.Struct) -> None:
        if self.open:
            self._agent.spread(key, value)

    def publish(self, fact: Fact) -> None:
        if self.open:
            self._agent.bus.publish(fact)

    async def send(self, plugin: str, to: HostId, message: Message, deadline_s: float) -> bool:
        if not self.open:
            return False
        if to == self.id:
            return await self._agent.on_message(to, plugin, _encode(message))
        return await self._agent.messenger.send(plugin, to, _encode(message), deadline_s)

    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct:
        if not self.open:
            raise TimeoutError(f"plugin {self.plugin.name} has ended")
        return await self._agent.ask(plugin, to, question, deadline_s)

    # ---- its tasks ----

    def _spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> object:
        task = self._agent.env.spawn(f"{self.plugin.name}: {name}", self._kept(work))
        if isinstance(task, asyncio.Task):
            task.add_done_callback(lambda _: work.close())  # cancelled before its first step it never came to `work`
        else:
            work.close()
        return task

    async def _kept(self, work: Coroutine[Any, Any, Any]) -> Any:
        if not self.open:
            work.close()
            return None
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        try:
            return await self._agent.plugin_runtime.guarded_life(self, work)
        finally:
            del self._tasks[task]

    def end(self) -> None:
        self.open = False
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    async def over(self) -> None:
        """Return once its tasks have ended, and its service has let go of what it held."""
        waited = [task for task in self._tasks if task is not asyncio.current_task()]
        if waited:
            await asyncio.wait(waited, timeout=STOP_S)
        if self._service is None:
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(STOP_S):
                await self._service.stop()


class PluginRuntime:
    """All plugins of an agent."""

    def __init__(self, agent: PluginsAgent, plugins: Sequence[Plugin]) -> None:
        self._agent = agent
        self.known = {plugin.name: plugin for plugin in plugins}
        self.health: dict[str, PluginHealth] = {}
        self.restarts: dict[str, int] = {}
        self._lives: dict[str, PluginInstance] = {}
        """The running instance of each plugin that is on."""
        self._pauses: dict[str, float] = {}
        """Seconds before the next try of each plugin that failed."""
        self._stopping = False

    @property
    def services(self) -> Mapping[str, PluginService]:
        """The services of the plugins that are on."""
        return {name: life.service for name, life in self._lives.items()}

    async def start(self) -> None:
        """Start every plugin that agent.toml has; one that fails is reported and does not matter here."""
        for name, plugin in self.known.items():
            settings = self._agent.config.plugins.get(name)
            if settings is None:
                self.health[name] = PluginHealth("off", "switched off in agent.toml")
            else:
                await self._begin(PluginInstance(self._agent, plugin, settings, self._agent.boot))

    async def _begin(self, life: PluginInstance) -> None:
        """Begin to give the plugin facts, once its `start` has found again what survived."""
        name = life.plugin.name
        await self.guarded_life(life, life.begin())
        if not life.open:
            return
        if self._stopping:  # `stop` has not seen this life
            life.end()
            await life.over()
            return
        restarts = self.restarts.get(name, 0)
        why = self.health[name].why if restarts else ""
        self.health[name] = PluginHealth(
            "on", f"{restarts} restarts, the last after {why}" if restarts else "", restarts
        )
        self._lives[name] = life
        for fact in self._agent.standing_facts():
            if life.open:
                self._take(life, fact)

    async def stop(self) -> None:
        """Stop all plugins at the same time."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*(self._stop_one(life) for life in list(self._lives.values())))

    async def _stop_one(self, life: PluginInstance) -> None:
        try:
            await life.service.stop()
        except Exception as error:
            self._agent.env.log.error("plugin failed while stopping", plugin=life.plugin.name, why=repr(error))

    # ---- guarded ----

    async def ask(self, name: str, question: Callable[[PluginService], Awaitable[A]]) -> A:
        """Ask a plugin that is on, and return its answer. Refused by itself, when it is not on, or when it fails at
        this: an exception stops that plugin and is reported."""
        life, agent = self._lives.get(name), self._agent.id
        if life is None:
            health = self.health.get(name)
            why = "this host has no such plugin" if health is None else health.why
            raise Refused(1, f"plugin {name} of {agent} is not on", why, "agentctl status")
        try:
            return await question(life.service)
        except (asyncio.CancelledError, Refused):
            raise
        except Exception as error:
            self._failed(life, error)
            raise Refused(1, f"plugin {name} of {agent} failed", _words(error), "see the agent's log") from error

    async def guarded_life(self, life: PluginInstance, work: Coroutine[Any, Any, Any]) -> Any:
        """Await a plugin's own work; an exception stops that plugin and is reported."""
        try:
            return await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._failed(life, error)
            return None

    def reconfigure(self) -> None:
        """Hand every plugin that is on its settings, of which live ones may have changed."""
        for name, life in list(self._lives.items()):
            try:
                life.service.reconfigure(self._agent.config.plugins[name])
            except Exception as error:
                self._failed(life, error)

    def publish(self, fact: Fact) -> None:
        """Publish a fact to every plugin that is on."""
        for life in list(self._lives.values()):
            self._take(life, fact)

    def _take(self, life: PluginInstance, fact: Fact) -> None:
        try:
            life.service.on_fact(fact)
        except Exception as error:
            self._failed(life, error)

    # ---- failed ----

    def _failed(self, life: PluginInstance, error: Exception) -> None:
        agent, name = self._agent, life.plugin.name
        why = _words(error)
        agent.env.log.error("plugin failed", plugin=name, why=why, exc_info=error)
        if not life.open:
            return  # what is left of a life that is over
        life.end()
        self._lives.pop(name, None)
        steady = agent.env.clock.now_s() - life.began_s >= STEADY_S
        again_s = self._pause(name, steady) if isinstance(error, OSError) else None
        self.health[name] = PluginHealth("failed", why, self.restarts.get(name, 0), again_s)
        then = "correct that, then restart the agent" if again_s is None else f"starts again in {again_s:g} s"
        agent.event_log.note(f"host/{agent.id}", f"plugin {name} failed", f"{why}; {then}")
        self.publish_health()
        if not self._stopping:
            agent.env.spawn(f"agent: plugin {name} failed", self._after(life, again_s))

    def _pause(self, name: str, steady: bool) -> float:
        """Seconds until the next try of a plugin that failed."""
        before_s = 0.0 if steady else self._pauses.get(name, 0.0)
        self._pauses[name] = min(PAUSE_MAX_S, 2 * before_s) or PAUSE_S
        return self._pauses[name]

    async def _after(self, life: PluginInstance, again_s: float | None) -> None:
        name = life.plugin.name
        await life.over()
        while again_s is not None and not self._stopping:
            await asyncio.sleep(again_s)
            if self._stopping:
                return
            try:
                boot = await self._agent.next_boot()
            except OSError as error:
                again_s = self._pause(name, steady=False)
                self.health[name] = PluginHealth("failed", _words(error), self.restarts.get(name, 0), again_s)
                continue
            await self._again(life, boot)
            return

    async def _again(self, life: PluginInstance, boot: int) -> None:
        name = life.plugin.name
        self.restarts[name] = self.restarts.get(name, 0) + 1
        self._agent.env.log.info("plugin starts again", plugin=name, boot=boot, restarts=self.restarts[name])
        await self._begin(PluginInstance(self._agent, life.plugin, self._agent.config.plugins[name], boot))
        if name in self._lives:
            self._agent.event_log.note(f"host/{self._agent.id}", f"plugin {name} is on again", self.health[name].why)
            self.publish_health()

    def publish_health(self) -> None:
        """Gossip which plugins have failed, what the disk of this host keeps it from doing, and as whom jobs run."""
        failed = tuple(name for name, health in self.health.items() if health.state == "failed")
        self._agent.spread("health", PluginsFailed(failed, self._agent.no_room, self._agent.other_users))

    def metrics(self) -> Mapping[MetricSeries, float]:
        return {PLUGIN_RESTARTS.of(name): float(self.restarts.get(name, 0)) for name in self.known}


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
