"""One agent: the only file that knows gossip, the log, the rooms, links, the bus, the runner and the journal.

    gossip -> facts -> bus -> rooms            jobs.sock -> frames -> the room that hears them
    links  -> courier -> rooms, log, reads     HTTP      -> commands of rooms and of the rack's view

`agent.rooms` keeps the rooms apart: one that fails does not take the others down. Everything outside comes through
`Env`, so the same `HostAgent` runs under the simulator.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from agent.bus import Bus
from agent.config import Config
from agent.consensus.service import Consensus
from agent.consensus.service.voters import under_way
from agent.courier import Courier
from agent.jobs import JobSocket
from agent.journal import Journal
from agent.rackview import Answer, Ask, RackView
from agent.rooms import Rooms
from agent.runner import SupervisedRunner
from agent.standing import Standing, facts_of_hosts
from covey import checked
from covey.addresses import reached_at
from covey.core import Fact, HostId, Message
from covey.ports import Env
from covey.wire import Frame
from gossip.service import GossipEvent, GossipService, HostAway, HostDown, HostSuspected, HostUp, NameConflict, Peer
from plugins import facts
from plugins.base import Command, JobPeer, Refused, Room, RoomService
from plugins.facts import Endpoints, HostView
from plugins.registry import ROOMS
from plugins.views import RoomHealth, VoterRow, VotersView

_encode = msgspec.msgpack.Encoder().encode
_asks: msgspec.msgpack.Decoder[Ask | Answer] = msgspec.msgpack.Decoder(Ask | Answer)
AGENT, LOG = "agent", "log"
"""Addressees of letters beside the rooms."""


@runtime_checkable
class Measured(Protocol):
    """Links that count what happens to them: the real ones."""

    @property
    def counters(self) -> Mapping[str, int]: ...
    def metrics(self) -> Mapping[str, float]: ...


class Identity(msgspec.Struct, frozen=True):
    """What makes this host the same host after a restart."""

    uuid: bytes
    boot: int


_identity = msgspec.msgpack.Decoder(Identity)
_endpoints = msgspec.msgpack.Decoder(Endpoints)


class HostAgent:
    """Constructed with ports and configuration; `start`, then it lives, then `stop`."""

    def __init__(self, env: Env, config: Config, gossip_keys: Sequence[bytes], rooms: Sequence[Room] = ROOMS) -> None:
        self.env, self.config, self.id = env, config, config.name
        self.started_wall_s = env.clock.wall_s()
        self.boot = 0
        self.bus = Bus()
        self.journal = Journal(self.id, env.clock, env.disk)
        self.standing = Standing()
        self.rooms_at_work = Rooms(self, rooms)
        self.counters: dict[str, int] = {"letters for nobody": 0, "malformed letters": 0}
        self._keys = gossip_keys
        self._decoders = {room.name: msgspec.msgpack.Decoder(room.messages) for room in rooms}
        self._identity_now = Identity(b"", 0)
        self._said_of_voters: dict[HostId, str] = {}
        self.loop_lag_s = 0.0
        """How late the event loop was when last measured, seconds; kept up by whoever runs the agent."""

    # ---- life ----

    async def start(self) -> None:
        """OSError or ValueError when this host cannot be an agent (address taken, sick disk), StateRefused when its
        identity or log cannot be trusted; a failing room does not matter here."""
        identity = self._identity_now = await self._identity()
        self.boot = identity.boot
        await self.journal.load()
        self.courier = Courier(self.env, self.boot, self._boot_of, self.hear, self._answer, self._raw)
        await self.env.links.open(self.config.control.bind, self.courier.received)
        settings = self.config.gossip
        settings = msgspec.structs.replace(settings, advertise=settings.advertise or self.config.advertise)
        self.gossip = GossipService(self.env, settings, self._keys, identity.uuid, identity.boot, self._gossiped)
        self.log = Consensus(
            self.env, self.id, self.config.leader, self._raft_send, self._ask_log, self._leader_changed
        )
        self.consensus = self.log
        self.log.configured = self._voters_changed
        socket_path = f"{self.env.run_dir}/jobs.sock"
        self.runner = SupervisedRunner(self.env, self.bus.tell, self.config.advertise, socket_path, self.config.jobs)
        self.jobs = JobSocket(self.env, self.runner, self.bus.tell, self._frame)
        self.runner.on_stopping = self.jobs.say_stopping
        self.rackview = RackView(self)
        self.bus.listen(self._listen)
        control = reached_at(self.env.links.address, self.config.advertise)
        self.gossip.publish(
            "endpoints", _encode(Endpoints(control, self.env.links.public_key, self.boot, self.config.http.bind))
        )
        await self.gossip.start()
        await self.rooms_at_work.start()
        if not self.log.bound:
            self.log.bind(lambda _index, _command: b"", lambda: b"", lambda _state: None)
        await self.log.start()
        await self.runner.start_up()
        await self.jobs.start()
        self.env.spawn("agent: seconds", self._seconds())
        self.env.spawn("agent: peers", self._meet())
        self.env.log.info("agent started", boot=self.boot, rooms=sorted(self.rooms))

    async def stop(self, leave: bool = True, away_s: int = 0) -> None:
        """Say goodbye (`leave`: others see at once that this host `left`, or is `away` for so many seconds); data
        paths and jobs live on."""
        await self.rooms_at_work.stop()
        with contextlib.suppress(OSError):
            await self.journal.write()
        await self.jobs.stop()
        await self.runner.stop_up()
        await self.log.stop()
        await self.gossip.stop(leave, away_s)
        await self.env.links.close()

    async def _identity(self) -> Identity:
        known = await self._known_identity()
        if known is None:
            identity = Identity(self.env.entropy(16), self._boot_after(0))
        else:
            identity = Identity(known.uuid, self._boot_after(known.boot))
        await checked.save(self.env.disk, "identity", identity)
        return identity

    def _boot_after(self, known: int) -> int:
        """Above every boot before, also where this file is an older copy, or is gone while others remember the host:
        what a smaller one says is taken for a replay, for ever. So it is the second of the start, unless the clock
        lags."""
        return max(known + 1, int(self.env.clock.wall_s()))

    async def _known_identity(self) -> Identity | None:
        """StateRefused for a damaged file: under a boot number that was used before, what this host asks of others is
        taken for what it asked then."""
        try:
            return await checked.load(self.env.disk, "identity", _identity)
        except checked.Damaged as error:
            path = self.env.disk.path("identity")
            raise checked.StateRefused(
                "this host does not know which one it is",
                str(error),
                f"put {path} back from a copy; or delete it and start again: it is a new host under its old name then",
            ) from error

    async def next_boot(self) -> int:
        """A boot number above every one before, durable on return: a room begins anew under it. OSError."""
        identity = msgspec.structs.replace(self._identity_now, boot=self._identity_now.boot + 1)
        self._identity_now = identity
        await checked.save(self.env.disk, "identity", identity)
        return identity.boot

    # ---- rooms ----

    @property
    def rooms(self) -> Mapping[str, RoomService]:
        """Those that are on."""
        return self.rooms_at_work.services

    @property
    def health(self) -> Mapping[str, RoomHealth]:
        return self.rooms_at_work.health

    def standing_facts(self) -> Sequence[Fact]:
        """What holds now, for a room that begins late."""
        leader = [facts.LeaderChanged(self.log.term, self.log.leader)] if self.log.term else []
        others = [view for view in self.hosts() if view.host != self.id]
        known = (facts_of_hosts(others), leader, self.standing.facts(), self.runner.facts(), self.jobs.facts())
        return [fact for some in known for fact in some]

    def _listen(self, fact: Fact) -> None:
        if isinstance(fact, facts.HostGone) and fact.left:
            self.env.links.forget(fact.host)
        self.standing.hear(fact)
        self.rooms_at_work.tell(fact)

    # ---- letters ----

    async def hear(self, sender: HostId, room: str, body: bytes) -> bool:
        """A letter for a room: whether it was handled. What is malformed or for nobody now is dropped and counted; it
        may come again, to a room that is on by then. Refused when the room failed at it."""
        message = self._decoded(room, body)
        if room not in self.rooms or message is None:
            self.counters["letters for nobody"] += 1
            return False
        await self.rooms_at_work.ask(room, lambda service: service.hear(sender, message))
        return True

    async def _answer(self, sender: HostId, room: str, body: bytes) -> bytes:
        if room == AGENT:
            question = _decode(_asks, body)
            if not isinstance(question, Ask):
                raise self._not_understood(room)
            return _encode(await self.rackview.answer(question))
        if room == LOG:
            return await self.log.answer(sender, body)
        message = self._decoded(room, body)
        if message is None:
            raise self._not_understood(room)
        return _encode(await self.rooms_at_work.ask(room, lambda service: service.answer(sender, message)))

    def _not_understood(self, room: str) -> Refused:
        return Refused(1, f"{self.id} cannot answer", f"its room {room!r} is of another version", "agentctl hosts")

    def _decoded(self, room: str, body: bytes) -> Any:
        decoder = self._decoders.get(room)
        message = None if decoder is None else _decode(decoder, body)
        if decoder is not None and message is None:
            self.counters["malformed letters"] += 1
        return message

    def _raw(self, sender: HostId, room: str, body: bytes) -> None:
        if room == LOG:
            self.log.receive(sender, body)

    async def ask(self, room: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct:
        body = _encode(question)
        answer = await (self._answer(to, room, body) if to == self.id else self.courier.ask(room, to, body, deadline_s))
        decoder: Any = _asks if room == AGENT else self._decoders[room]
        decoded = _decode(decoder, answer)
        if decoded is None:
            raise Refused(1, f"{to} answered something else", "it may run another version", "upgrade the older host")
        assert isinstance(decoded, msgspec.Struct)
        return decoded

    def _raft_send(self, to: HostId, data: bytes) -> bool:
        return self.courier.raw(LOG, to, data)

    async def _ask_log(self, to: HostId, data: bytes, deadline_s: float) -> bytes:
        return await self.courier.ask(LOG, to, data, deadline_s)

    # ---- gossip ----

    def _gossiped(self, event: GossipEvent) -> None:
        match event:
            case HostUp():
                self.bus.tell(facts.HostSeen(event.host))
            case HostSuspected():
                self.bus.tell(facts.HostSuspected(event.host, event.by))
            case HostAway():
                self.bus.tell(facts.HostAway(event.host, event.for_s))
                self.journal.note(f"host/{event.host}", "away", f"it restarts, and is back within {event.for_s:g} s")
            case HostDown():
                self.bus.tell(facts.HostGone(event.host, event.left))
                self.journal.note(f"host/{event.host}", "left" if event.left else "gone", "said so by gossip")
            case NameConflict():
                why = f"another machine claims to be {event.host}; rename one of them in its agent.toml"
                self.env.log.error("name conflict", peer=event.host, why=why)
                self.journal.note(f"host/{event.host}", "name conflict", why)
        self._meet_now()

    def hosts(self) -> Sequence[HostView]:
        return [_view(peer) for peer in self.gossip.hosts()]

    def publish(self, key: str, value: msgspec.Struct) -> None:
        self.gossip.publish(key, _encode(value))

    def _boot_of(self, host: HostId) -> int:
        """The boot that `host` last gossiped; 0 while nothing is known."""
        peer = self.gossip.peer(host)
        endpoints = None if peer is None else _endpoints_in(peer.values.get("endpoints"))
        return 0 if endpoints is None else endpoints.boot

    def _meet_now(self) -> None:
        """Know where everybody's control link is, and who is to receive the log."""
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
        while True:
            self._meet_now()
            await asyncio.sleep(0.25)

    async def _seconds(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.bus.tell(facts.SecondPassed(self.env.clock.now_s()))
            try:
                await self.journal.write()
            except OSError as error:
                self.env.log.error("stories cannot be written", why=str(error))

    def _leader_changed(self, term: int, leader: HostId | None) -> None:
        self.bus.tell(facts.LeaderChanged(term, leader))
        if leader is not None:
            self.journal.note(f"host/{leader}", "leads", f"elected in term {term}", key=f"term/{term}")

    def _voters_changed(self) -> None:
        """One line in the story of every host that is concerned."""
        now = self.log.configuration
        says = dict.fromkeys(now.hosts, "votes") | {now.learner: "learns the log", now.leaving: "is to vote no more"}
        for host in {*self._said_of_voters, *says} - {""}:
            if self._said_of_voters.get(host) != says.get(host):
                self.journal.note(f"host/{host}", says.get(host, "votes no more"), f"voters are {', '.join(now.hosts)}")
        self._said_of_voters = says

    # ---- processes of jobs ----

    async def _frame(self, peer: JobPeer, frame: Frame) -> None:
        for name, room in self.rooms_at_work.known.items():
            if type(frame) in room.frames:
                await self.rooms_at_work.ask(name, lambda service: service.frame(peer, frame))

    # ---- what HTTP and agentctl ask ----

    @property
    def leader_since_s(self) -> float | None:
        return self.log.leader_since_s

    @property
    def voters(self) -> Sequence[HostId]:
        return self.log.voters

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

    def voters_now(self) -> VotersView:
        now = self.log.configuration
        return VotersView(voters=now.hosts, learner=now.learner, leaving=now.leaving, under_way=under_way(now))

    async def change_voters(self, add: str, remove: str, force: bool) -> str:
        return await self.log.change_voters(add, remove, force)

    def room_commands(self) -> Mapping[str, Command]:
        return {
            f"{name}.{command}": self._guarded_command(name, command)
            for name, service in self.rooms.items()
            for command in service.commands()
        }

    def _guarded_command(self, name: str, command: str) -> Command:
        async def guarded(arguments: Mapping[str, Any]) -> Any:
            return await self.rooms_at_work.ask(name, lambda service: service.commands()[command](arguments))

        return guarded

    @property
    def commands(self) -> Mapping[str, Command]:
        return {**self.rackview.commands(), "agent.health": self._health, **self.room_commands()}

    async def _health(self, _arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "host": self.id,
            "boot": self.boot,
            "started_wall_s": self.started_wall_s,
            "leader": self.log.leader,
            "hosts_alive": sum(view.state == "alive" for view in self.hosts()),
            "voters": self.log.voters,
            "notes": self.log.changes.notes(self.config.source),
            "rooms": dict(self.health),
            "log": self.log.trouble,
            "seeds_unknown": dict(self.gossip.seeds_unknown),
        }

    def metrics(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for service in self.rooms.values():
            found |= service.metrics()
        found |= self.jobs.metrics()
        found |= self.rooms_at_work.metrics()
        links = self.env.links
        if isinstance(links, Measured):
            found |= links.metrics()
        for source, counters in (
            ("links", links.counters if isinstance(links, Measured) else {}),
            ("gossip", self.gossip.counters),
            ("courier", self.courier.counters),
            ("log", self.log.counters),
            ("agent", self.counters),
        ):
            for name, count in counters.items():
                found[f'covey_events_total{{source="{source}",event="{name}"}}'] = count
        found["covey_leader_term"] = self.log.term
        found["covey_hosts_alive"] = sum(view.state == "alive" for view in self.hosts())
        return found


def _view(peer: Peer) -> HostView:
    """Gossip's word for a host, as rooms know it."""
    return HostView(
        host=peer.host,
        state=peer.state,
        address=peer.address,
        incarnation=peer.incarnation,
        since_s=peer.since_s,
        age_s=peer.age_s,
        suspected_by=peer.suspected_by,
        values=peer.values,
        away_s=peer.away_s,
    )


def _endpoints_in(said: bytes | None) -> Endpoints | None:
    """Where a host's agent answers; None as long as it has not said so."""
    endpoints: Endpoints | None = None if said is None else _decode(_endpoints, said)
    return endpoints


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", body: bytes) -> Any:
    """The message, or None when it is malformed."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
