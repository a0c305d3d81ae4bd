"""One agent: the only file that knows gossip, the log, the plugins, links, the bus, the runner and the journal.

    gossip -> facts -> bus -> plugins            jobs.sock -> frames -> the plugin that hears them
    links  -> messenger -> plugins, log, reads     HTTP      -> commands of plugins and of the rack's view

`agent.runtime.plugin_runtime` keeps the plugins apart: one that fails does not take the others down. Everything outside
comes through `Env`, so the same `HostAgent` runs under the simulator.
"""

import asyncio
import contextlib
import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from agent import identity, metrics
from agent.api.access import rules_of
from agent.api.gate import Gate
from agent.api.gossip_row import GossipRow, gossip_row
from agent.api.joining import Joining
from agent.api.links import PathRow
from agent.api.login import Logins
from agent.api.rack_view import AskView, RackView, ViewAnswer
from agent.authority.service import HostAuthority
from agent.config import TENANTS_NEXT, Config, open_to_read, tenants_together
from agent.event_log import EventLog
from agent.host_watch import HostWatch, LogSeen
from agent.identity import Identity
from agent.jobs.beside.messages import OpenSession, RankStacksWanted, SessionOpened, StacksHere, Turned, TurnSession
from agent.jobs.beside.service import BesideSessions
from agent.jobs.runner import SupervisedRunner
from agent.jobs.socket.jobs_socket import JobSocket
from agent.keyring.policy import KeyRing, KeyStep
from agent.keyring.service import HostKeyring, of_file
from agent.keyring.views import KeyRow
from agent.raft.messages import NO_RACK
from agent.raft.service import Consensus
from agent.raft.service.voters import under_way
from agent.rpc.rpc import Messenger
from agent.runtime.bus import Bus
from agent.runtime.measured import measured
from agent.runtime.plugin_runtime import PluginRuntime
from agent.runtime.retained_facts import RetainedFacts, facts_of_hosts
from covey.core.errors import Refused
from covey.core.events import Fact, Message
from covey.core.ids import HostId
from covey.core.metrics import Measured, Tally
from covey.core.version import VERSION
from covey.ports.addresses import Address, reached_at
from covey.ports.env import Env
from covey.ports.starter import ENFORCED, LooksAgain
from covey.wire.job import Frame
from gossip.service import (
    GossipEvent,
    GossipService,
    HostDown,
    HostUp,
    LaterBootKnown,
    MemberAway,
    MemberSuspected,
    NameConflict,
    TableFull,
)
from gossip.types import identity as known_as
from plugins import facts
from plugins.askers import Asker, OwnerUser
from plugins.base import Command, JobPeer, Plugin, PluginService
from plugins.facts import HostView
from plugins.gossiped import Endpoints, LogNow, closed
from plugins.registry import PLUGINS
from plugins.views import OtherUsersNow, PluginHealth, Trouble, VoterRow, VotersView

_encode = msgspec.msgpack.Encoder().encode
Asks = (
    AskView | ViewAnswer | KeyStep | OpenSession | SessionOpened | TurnSession | Turned | RankStacksWanted | StacksHere
)
_asks: msgspec.msgpack.Decoder[Asks] = msgspec.msgpack.Decoder(Asks)
JOBS_SOCKET = "jobs.sock"
"""The socket in `run_dir` where ranks reach their agent."""
DEVICES_FILE = "gpus.json"
"""The file in `state_dir` that says which GPUs NVIDIA's driver listed here before
(`agent/ports/devices/inventory.py`)."""
MEET_S = 2.0
"""Seconds after which links and log are told of all hosts again although gossip knows nothing new."""
USERS_S = 10.0
"""Seconds between two looks at whether jobs can run as other users."""
AGENT, LOG = "agent", "log"
"""Addressees of messages that are for the agent or the log, not for a plugin."""


_endpoints = msgspec.msgpack.Decoder(Endpoints)


class HostAgent:
    """One host's agent. It is constructed with ports and configuration, and runs from `start` to `stop`."""

    def __init__(
        self, env: Env, config: Config, keys: Sequence[bytes] | KeyRing, plugins: Sequence[Plugin] = PLUGINS
    ) -> None:
        """`keys`: those of gossip, or the ring in which they are."""
        self.env, self.config, self.id = env, config, config.name
        self.started_wall_s, self._started_s = env.clock.wall_s(), env.clock.now_s()
        self.boot = 0
        self.bus = Bus()
        self.event_log = EventLog(self.id, env.clock, env.disk)
        self.watch = HostWatch(env, self.id, self.event_log)
        self.retained = RetainedFacts()
        self.plugin_runtime = PluginRuntime(self, plugins)
        self.counters: dict[str, int] = {"without_plugin": 0, "malformed_bodies": 0, "not_gossiped": 0}
        self._ring = keys if isinstance(keys, KeyRing) else of_file(keys)
        self._decoders = {plugin.name: msgspec.msgpack.Decoder(plugin.messages) for plugin in plugins}
        self._identity_now = Identity(b"", 0)
        self._said_of_voters: dict[HostId, str] = {}
        self._events_unwritten = ""
        """Why event logs cannot be written now."""
        self._said_of_room = ""
        self._said_of_tenants = ""
        self.gate = Gate(self, rules_of(plugins), config.access.operators)
        self._heard_of_hosts = 0
        """How often gossip told something of a host."""
        self.loop_lag_s = 0.0
        """How late the event loop was when last measured, seconds; `agent.main.Daemon` sets it, and counts it in
        `loop_lags`."""
        self.loop_lags = Tally(metrics.EVENT_LOOP_LAG_SECONDS)

    # ---- life ----

    async def start(self) -> None:
        """Start the agent. OSError or ValueError when this host cannot be an agent (address taken, disk error),
        StateRefused when its identity or log cannot be trusted; a failing plugin does not matter here."""
        who = self._identity_now = await self._identity()
        self.boot = who.boot
        await self.event_log.load()
        self.messenger = Messenger(
            self.env,
            known_as(self.id, who.uuid),
            self.boot,
            self._boot_of,
            self._holder,
            self.on_message,
            self._answer,
            self._raw,
        )
        await self.env.links.open(self.config.control.bind, self.messenger.received)
        settings = self.config.gossip
        settings = msgspec.structs.replace(settings, advertise=settings.advertise or self.config.advertise)
        self.keyring = HostKeyring(self.env, self._ring, self.event_log, self.hosts, self._ask_keys, self._keys_changed)
        self.gossip = GossipService(self.env, settings, self.keyring.keys, who.uuid, who.boot, self._gossiped)
        self.joining = Joining(self, lambda: self.keyring.keys, settings.cluster, settings.advertise)
        self.authority = HostAuthority(lambda: self.keyring.keys, self.env.clock)
        self.logins = Logins(self, self.authority)
        self.log = Consensus(
            self.env, self.id, self.config.leader, self._raft_send, self._ask_log, self._leader_changed
        )
        self.consensus = self.log
        self.log.configured = self._voters_changed
        socket_path = f"{self.env.run_dir}/{JOBS_SOCKET}"
        self.runner = SupervisedRunner(self.env, self.bus.publish, self.config.advertise, socket_path, self.config.jobs)
        self.jobs = JobSocket(self.env, self.runner, self.bus.publish, self._frame)
        self.runner.let_users_in = self.jobs.let_users_in
        self.runner.on_stopping, self.runner.on_carries = self.jobs.say_stopping, self.jobs.say_carries
        self.rackview = RackView(self)
        self.sessions = BesideSessions(self, socket_path)
        self.bus.listen(self._listen)
        control = reached_at(self.env.links.address, self.config.advertise)
        self.gossip.spread(
            "endpoints",
            _encode(
                Endpoints(
                    control,
                    self.env.links.public_key,
                    self.boot,
                    self.config.http.bind,
                    self.config.http.read_open,
                    VERSION,
                )
            ),
        )
        if isinstance(self.env.starter, LooksAgain):
            await self.env.starter.look()
            self._warn_of_tenants()
            self.env.spawn("agent: users", self._look_at_users(self.env.starter))
        await self.gossip.start()
        await self.plugin_runtime.start()
        if not self.log.bound:
            self.log.bind(lambda _index, _command: b"", lambda: b"", lambda _state: None)
        await self.log.start()
        await self.runner.start_up()
        await self.jobs.start()
        self.env.spawn("agent: seconds", self._seconds())
        self.env.spawn("agent: peers", self._meet())
        self.env.log.info("agent started", boot=self.boot, plugins=sorted(self.plugins))

    def reconfigure(self, config: Config) -> None:
        """Go on with a configuration of which only settings differ that may change meanwhile (`agent.etc.reload`)."""
        self.config = config
        self.runner.reconfigure(config.jobs)
        self.plugin_runtime.reconfigure()

    async def stop(self, leave: bool = True, away_s: int = 0) -> None:
        """End the agent; datapath programs and jobs keep running. With `leave`, gossip tells the other hosts that this
        host `left`, or is `away` for `away_s` seconds."""
        await self.plugin_runtime.stop()
        with contextlib.suppress(OSError):
            await self.event_log.write()
        await self.jobs.stop()
        await self.runner.stop_up()
        await self.log.stop()
        await self.gossip.stop(leave, away_s)
        await self.env.links.close()

    async def _identity(self) -> Identity:
        known, folder = await identity.load(self.env.disk), self.env.disk.path(identity.FILE).rpartition("/")[0]
        if known is None:
            now = Identity(self.env.entropy(16), self._boot_after(0), self.id)
        elif (refused := identity.of_another_name(known, self.id, folder)) is not None:
            raise refused
        else:
            now = Identity(known.uuid, self._boot_after(known.boot), self.id)
        await identity.save(self.env.disk, now)
        return now

    def _boot_after(self, known: int) -> int:
        """A boot number above every earlier one, also when the identity file is an old copy or is missing: other hosts
        would drop everything under a smaller number as a replay. Therefore it is the wall clock's second, unless
        `known` is later."""
        return max(known + 1, int(self.env.clock.wall_s()))

    async def _begin_after(self, boot: int) -> None:
        """Save a higher boot number and end the agent, since other hosts know it under `boot` already: the identity
        file is an older copy, and the wall clock was ahead when a newer one was written. Other hosts ignore messages
        with an old boot number. Raises OSError."""
        later = max(boot, self._identity_now.boot)
        await identity.save(self.env.disk, msgspec.structs.replace(self._identity_now, boot=later))
        why = (
            f"other hosts know this host under boot number {boot}, and this agent "
            f"started with {self.boot}, so they ignore it"
        )
        raise OSError(
            errno.ESTALE, f"{why}; it exits and starts again with a higher one", self.env.disk.path("identity")
        )

    async def next_boot(self) -> int:
        """A boot number above every earlier one, durable on return: a plugin begins anew under it. OSError."""
        self._identity_now = now = msgspec.structs.replace(self._identity_now, boot=self._identity_now.boot + 1)
        await identity.save(self.env.disk, now)
        return now.boot

    # ---- plugins ----

    @property
    def plugins(self) -> Mapping[str, PluginService]:
        """The plugins that are on."""
        return self.plugin_runtime.services

    @property
    def health(self) -> Mapping[str, PluginHealth]:
        return self.plugin_runtime.health

    def standing_facts(self) -> Sequence[Fact]:
        """The facts that hold now, for a plugin that starts later than the others."""
        leader = [facts.LeaderChanged(self.log.term, self.log.leader)] if self.log.term else []
        others = [view for view in self.hosts() if view.host != self.id]
        known = (facts_of_hosts(others), leader, self.retained.facts(), self.runner.facts(), self.jobs.facts())
        return [fact for some in known for fact in some]

    def _listen(self, fact: Fact) -> None:
        if isinstance(fact, facts.HostGone) and fact.left:
            self.env.links.forget(fact.host)
        elif isinstance(fact, facts.HostNeverBack):
            self.gossip.forget(fact.host, fact.boot)
        self.retained.on_fact(fact)
        self.plugin_runtime.publish(fact)

    # ---- messages ----

    async def on_message(self, sender: HostId, plugin: str, body: bytes) -> bool:
        """Handle a message for a plugin, and say whether it was handled. One that is malformed, or for a plugin that is
        off, is counted and not acknowledged, so the sender repeats it. Refused when the plugin raised an exception."""
        message = self._decoded(plugin, body)
        if plugin not in self.plugins or message is None:
            self.counters["without_plugin"] += 1
            return False
        await self.plugin_runtime.ask(plugin, lambda service: service.on_message(sender, message))
        return True

    async def _answer(self, sender: HostId, plugin: str, body: bytes) -> bytes:
        if plugin == AGENT:
            question = _decode(_asks, body)
            if isinstance(question, KeyStep):
                return _encode(ViewAnswer(msgspec.json.encode([await self.keyring.take(question)])))
            if isinstance(question, OpenSession | TurnSession | RankStacksWanted):
                return _encode(await self.sessions.answer(question))
            if not isinstance(question, AskView):
                raise self._not_understood(plugin)
            return _encode(await self.rackview.answer(question))
        if plugin == LOG:
            return await self.log.answer(sender, body)
        message = self._decoded(plugin, body)
        if message is None:
            raise self._not_understood(plugin)
        return _encode(await self.plugin_runtime.ask(plugin, lambda service: service.answer(sender, message)))

    def _not_understood(self, plugin: str) -> Refused:
        return Refused(1, f"{self.id} cannot answer", f"its plugin {plugin!r} is of another version", "agentctl hosts")

    def _decoded(self, plugin: str, body: bytes) -> Any:
        decoder = self._decoders.get(plugin)
        message = None if decoder is None else _decode(decoder, body)
        if decoder is not None and message is None:
            self.counters["malformed_bodies"] += 1
        return message

    def _raw(self, sender: HostId, plugin: str, body: bytes) -> None:
        if plugin == LOG:
            self.log.receive(sender, body)

    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct:
        body = _encode(question)
        answer = await (
            self._answer(to, plugin, body) if to == self.id else self.messenger.ask(plugin, to, body, deadline_s)
        )
        decoder: Any = _asks if plugin == AGENT else self._decoders[plugin]
        decoded = _decode(decoder, answer)
        if decoded is None:
            raise Refused(1, f"{to} gave an unexpected answer", "it may run another version", "upgrade the older host")
        assert isinstance(decoded, msgspec.Struct)
        return decoded

    async def _ask_keys(self, to: HostId, step: KeyStep, deadline_s: float) -> KeyRow:
        answer = await self.ask(AGENT, to, step, deadline_s)
        assert isinstance(answer, ViewAnswer)
        try:
            (row,) = msgspec.json.decode(answer.rows, type=list[KeyRow])
        except (msgspec.DecodeError, ValueError) as error:
            raise Refused(1, f"the answer of {to} cannot be read here", str(error), "agentctl version") from error
        return row

    def _keys_changed(self, keys: Sequence[bytes]) -> None:
        self.gossip.rekey(keys)

    def _raft_send(self, to: HostId, data: bytes) -> bool:
        return self.messenger.raw(LOG, to, data)

    async def _ask_log(self, to: HostId, data: bytes, deadline_s: float) -> bytes:
        return await self.messenger.ask(LOG, to, data, deadline_s)

    # ---- gossip ----

    def _gossiped(self, event: GossipEvent) -> None:
        match event:
            case HostUp():
                self.bus.publish(facts.HostSeen(event.host))
            case MemberSuspected():
                self.bus.publish(facts.HostSuspected(event.host, event.by))
            case MemberAway():
                self.bus.publish(facts.HostAway(event.host, event.for_s))
            case HostDown():
                self.bus.publish(facts.HostGone(event.host, event.left))
            case NameConflict() | TableFull():
                pass
            case LaterBootKnown():
                self.env.spawn("agent: later boot", self._begin_after(event.boot))
        self._heard_of_hosts += 1
        self.watch.heard(event, None if isinstance(event, LaterBootKnown) else self.gossip.peer(event.host))
        self._meet_now()

    def hosts(self) -> Sequence[HostView]:
        return self.gossip.hosts()

    def spread(self, key: str, value: msgspec.Struct) -> None:
        self.gossip.spread(key, _encode(value))

    def _boot_of(self, host: HostId) -> int:
        """The boot number that `host` last gossiped; 0 while none is known."""
        peer = self.gossip.peer(host)
        endpoints = None if peer is None else _endpoints_in(peer.values.get("endpoints"))
        return 0 if endpoints is None else endpoints.boot

    def _holder(self, host: HostId) -> int:
        return self.gossip.holder(host)

    def _meet_now(self) -> None:
        """Tell the links the address and key of every host, and the log which hosts are alive."""
        alive, away = [], []
        for host, state, said in self.gossip.said("endpoints"):
            if state in ("gone", "left"):
                away.append(host)
            endpoints = _endpoints_in(said) if state in ("alive", "suspect") else None
            if endpoints is not None:
                self.env.links.know(host, endpoints.control, endpoints.public_key)
                alive.append(host)
        self.log.hosts(alive, away)

    async def _meet(self) -> None:
        met, met_s = -1, 0.0
        while True:
            now_s = self.env.clock.now_s()
            if self.gossip.changes != met or now_s - met_s >= MEET_S:
                met, met_s = self.gossip.changes, now_s
                self._meet_now()
            await asyncio.sleep(0.25)

    async def _seconds(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.bus.publish(facts.SecondPassed(self.env.clock.now_s()))
            self._look()
            self._note_room()
            await self._write_events()

    async def _look_at_users(self, users: LooksAgain) -> None:
        while True:
            await asyncio.sleep(USERS_S)
            before = self.other_users
            await users.look()
            self._warn_of_tenants()
            if self.other_users != before:
                now = self.env.starter.refusal or "jobs of other users are possible"
                self.event_log.note(f"host/{self.id}", "other users", now)
                self.plugin_runtime.publish_health()

    @property
    def tenants_together(self) -> str:
        """What is wrong with how tenants are kept apart here; empty: nothing."""
        return tenants_together(self.config) if self.other_users == "no" else ""

    def _warn_of_tenants(self) -> None:
        """The agent's log says once what is wrong with tenants, and again when that has changed."""
        before, now = self._said_of_tenants, self.tenants_together
        self._said_of_tenants = now
        if now and now != before:
            self.env.log.warning(now, next=TENANTS_NEXT)

    @property
    def other_users(self) -> OtherUsersNow:
        starter = self.env.starter
        if not isinstance(starter, LooksAgain):
            return ""
        return "no" if starter.refusal else "limited" if starter.limits == ENFORCED else "unlimited"

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Lines for `agentctl status` and `doctor`."""
        starter = self.env.starter
        if self.other_users == "no":
            yield "jobs of other users", f"not possible: {starter.refusal}"
        elif self.other_users:
            yield "jobs of other users", f"possible; limits of their memory and processes: {starter.limits}"
        for each in self.plugins.values():
            yield from each.status().items()

    @property
    def no_room(self) -> str:
        """What a full disk keeps this host from doing; empty: nothing."""
        return f"{self.log.no_room}: its log waits for room" if self.log.no_room else self.runner.refusal

    def _note_room(self) -> None:
        """Note in the event log and by gossip when the lack of room begins, changes or ends."""
        before, now = self._said_of_room, self.no_room
        if now != before:
            self._said_of_room = now
            self.event_log.note(f"host/{self.id}", "disk full" if now else "disk has room again", now or before)
            self.plugin_runtime.publish_health()

    async def _write_events(self) -> None:
        """Write the event logs. The agent's log says once that this fails, and once that it works again."""
        failed = self._events_unwritten
        try:
            await self.event_log.write()
            self._events_unwritten = ""
        except OSError as error:
            self._events_unwritten = str(error)
        if self._events_unwritten and not failed:
            self.env.log.error("event logs cannot be written", why=self._events_unwritten)
        elif failed and not self._events_unwritten:
            self.env.log.info("event logs are written again")

    def _look(self) -> None:
        """Find what is wrong with hosts now, and tell the others of it."""
        now = LogNow(b"" if self.log.rack == NO_RACK else self.log.rack, self.log.leader or HostId(""))
        self.watch.look(self.hosts(), LogSeen(now, self.log.voters, self.joining.at))
        self.log.grow(frozenset(view.host for view in self.hosts() if view.host in self.watch.troubles or closed(view)))
        for key, value in (("log", now), ("wrong", self.watch.told())):
            try:
                self.spread(key, value)
            except ValueError as error:
                self.counters["not_gossiped"] += 1
                if self.counters["not_gossiped"] == 1:
                    self.env.log.error(
                        "other hosts do not learn the state of the log here", why=str(error), next="report this"
                    )

    def _leader_changed(self, term: int, leader: HostId | None) -> None:
        self.bus.publish(facts.LeaderChanged(term, leader))
        if leader is not None:
            self.event_log.note(f"host/{leader}", "leads", f"elected in term {term}", key=f"term/{term}")

    def _voters_changed(self) -> None:
        """Note the change in the event log of every host whose part changed."""
        now = self.log.configuration
        says = dict.fromkeys(now.hosts, "votes") | {now.learner: "learns the log", now.leaving: "will stop voting"}
        for host in {*self._said_of_voters, *says} - {""}:
            if self._said_of_voters.get(host) != says.get(host):
                self.event_log.note(
                    f"host/{host}", says.get(host, "stopped voting"), f"voters are {', '.join(now.hosts)}"
                )
        self._said_of_voters = says

    # ---- processes of jobs ----

    async def _frame(self, peer: JobPeer, frame: Frame) -> None:
        for name, plugin in self.plugin_runtime.known.items():
            if type(frame) in plugin.frames:
                await self.plugin_runtime.ask(name, lambda service: service.frame(peer, frame))

    # ---- what HTTP and agentctl ask ----

    @property
    def up_s(self) -> float:
        """Seconds since this agent began."""
        return self.env.clock.now_s() - self._started_s

    @property
    def leader_since_s(self) -> float | None:
        return self.log.leader_since_s

    @property
    def voters(self) -> Sequence[HostId]:
        return self.log.voters

    @property
    def troubles(self) -> Mapping[HostId, Sequence[Trouble]]:
        """What is wrong with hosts, as far as people have to know: of this one also how tenants are kept apart."""
        found = self.watch.troubles
        if not (what := self.tenants_together):
            return found
        return {**found, self.id: (*found.get(self.id, ()), Trouble(what, TENANTS_NEXT))}

    def voter(self) -> VoterRow:
        """This host's part in the log."""
        log, now = self.log, self.log.configuration
        part = "learns" if now.learner == self.id else "leaves" if now.leaving == self.id else "votes"
        return VoterRow(
            host=self.id,
            part=part if self.id in (*now.hosts, now.learner) else "observes",
            leads=log.is_leader,
            entry=log.applied_index,
            names=log.founders,
            notes=tuple(log.changes.notes(self.config.source)),
        )

    def key_row(self) -> KeyRow:
        """The keys of this host, by their hashes."""
        return self.keyring.row

    def gossip_row(self) -> GossipRow:
        """The gossip of this host, and whom it knows to be suspected."""
        return gossip_row(self.id, self.up_s, self.env.clock.now_s(), self.gossip)

    def path_row(self) -> PathRow:
        """Over what this host's pages and tensors travel."""
        said = dict(self._lines())
        return PathRow(self.id, said.get("pages", ""), said.get("tensors", ""))

    def voters_now(self) -> VotersView:
        now = self.log.configuration
        return VotersView(voters=now.hosts, learner=now.learner, leaving=now.leaving, under_way=under_way(now))

    async def change_voters(self, add: str, remove: str, force: bool) -> str:
        return await self.log.change_voters(add, remove, force)

    def plugin_commands(self) -> Mapping[str, Command]:
        return {
            f"{name}.{command}": self._guarded_command(name, command)
            for name, service in self.plugins.items()
            for command in service.commands()
        }

    def _guarded_command(self, name: str, command: str) -> Command:
        async def guarded(arguments: Mapping[str, Any]) -> Any:
            return await self.plugin_runtime.ask(name, lambda service: service.commands()[command](arguments))

        return guarded

    @property
    def commands(self) -> Mapping[str, Command]:
        """All commands, each behind the gate: whoever asks has to say who they are (`plugins.askers.ASKER`)."""
        every = {
            **self.rackview.commands(),
            **self.joining.commands(),
            **self.logins.commands(),
            **self.keyring.commands(),
            **self.sessions.commands(),
            "agent.health": self._health,
            **self.plugin_commands(),
        }
        return {name: self.gate.guarded(name, command) for name, command in every.items()}

    async def asker(self, uid: int) -> Asker | None:
        return await self.gate.asker(uid)

    async def owner_of(self, plugin: str, name: str) -> OwnerUser:
        if plugin not in self.plugins:
            why = f"its plugin `{plugin}` is switched off or has failed on {self.id}"
            raise Refused(1, f"it is not known whose {name[:80]!r} is", why, "agentctl status")
        return await self.plugin_runtime.ask(plugin, lambda service: service.whose(name))

    def tenants_of(self, user: str) -> Sequence[str]:
        return [tenant for service in self.plugins.values() for tenant in service.tenants_of(user)]

    def note(self, subject: str, event: str, reason: str) -> None:
        self.event_log.note(subject, event, reason)

    async def _health(self, _arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "host": self.id,
            "boot": self.boot,
            "started_wall_s": self.started_wall_s,
            "up_s": self.up_s,
            "http": {"bind": str(self.config.http.bind), "read_open": self.config.http.read_open},
            "leader": self.log.leader,
            "hosts_alive": sum(view.state == "alive" for view in self.hosts()),
            "voters": self.log.voters,
            "notes": [
                *open_to_read(self._http_binds()),
                *self.log.changes.notes(self.config.source),
                *(note for service in self.plugins.values() for note in service.notes()),
            ],
            "plugins": dict(self.health),
            "log": self.log.trouble,
            "wrong": [
                {"host": host, "what": each.what, "next": each.next}
                for host, found in self.troubles.items()
                for each in found
            ],
            "lines": dict(self._lines()),
            "seeds_unknown": dict(self.gossip.seeds_unknown),
        }

    def _http_binds(self) -> Iterator[tuple[HostId, Address]]:
        """The HTTP addresses at which hosts that are alive or suspect tell everybody all. Only agents of older versions
        start so beyond loopback."""
        for host, state, said in self.gossip.said("endpoints"):
            endpoints = _endpoints_in(said) if state in ("alive", "suspect") else None
            if endpoints is not None and endpoints.read_open:
                yield host, endpoints.http

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers that grow when something has changed: in this host's copy of the log; in what gossip knows of
        hosts."""
        return {"log": self.log.applied_index, "hosts": self._heard_of_hosts}

    def metrics(self) -> Measured:
        return measured(self)


def _endpoints_in(said: bytes | None) -> Endpoints | None:
    """The addresses where a host's agent answers; None as long as it has not said so."""
    endpoints: Endpoints | None = None if said is None else _decode(_endpoints, said)
    return endpoints


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", body: bytes) -> Any:
    """The message, or None when it is malformed."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
