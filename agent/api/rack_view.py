"""What an agent answers about the rack: from gossip, from its copy of the log, and live from the other agents.

A live question goes to every host that is alive, all at once, for as long as the reader waits; hosts that did not
answer are named beside the rows (`agent.api.gathering`).
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from agent.api.forgetting import Forgotten, forget
from agent.api.gathering import Gathered, Gathering, Unanswered, wait_of, words
from agent.api.gossip_row import GossipRow
from agent.api.links import ClockRow, LinkRow, PathRow, PingView, links
from agent.event_log import EventLog, merged
from agent.keyring.views import KeyRow
from covey.core.errors import Refused
from covey.core.events import Message
from covey.core.ids import ID_PATTERN, HostId, JobId
from covey.ports.devices import Gpu
from covey.ports.env import Env
from plugins.base import Command, ReplicatedLog
from plugins.facts import HostView
from plugins.gossiped import AggregatorNow, GpusNow, LateHost, LateNow, Spare, closed, version_of
from plugins.group_views import GroupView
from plugins.views import (
    AggregatorJobView,
    EventLine,
    GpuRow,
    HostRow,
    InterferenceView,
    LeaderView,
    OtherUsersNow,
    PluginHealth,
    SharedGpuView,
    SlabView,
    Trouble,
    VolumeView,
    VoterRow,
    VotersView,
)

NOT_WHOLE = 8
"""The exit code of agentctl for a list that lacks the part of hosts that did not answer."""


class AskView(Message, frozen=True):
    """A read that another agent asks for: the name of one of `READS` and its arguments."""

    read: str
    arguments: dict[str, str] = {}


class ViewAnswer(Message, frozen=True):
    rows: bytes
    """The rows, as a JSON list."""


class PluginsFailed(msgspec.Struct, frozen=True):
    """Published under `health`: plugins of this host that are stopped because they failed, and what its disk lacks."""

    plugins: tuple[str, ...]
    no_room: str = ""
    """What this host's full disk keeps it from doing; empty: nothing."""
    other_users: OtherUsersNow = ""


class GpuHolders(msgspec.Struct):
    """The jobs on one GPU."""

    job: JobId | None = None
    beside: list[JobId] = []
    """The jobs on parts of the GPU."""


class RackMember(Protocol):
    """An agent as a member of the rack."""

    @property
    def id(self) -> HostId: ...
    @property
    def env(self) -> Env: ...
    @property
    def log(self) -> ReplicatedLog: ...
    @property
    def event_log(self) -> EventLog: ...
    @property
    def voters(self) -> Sequence[HostId]: ...
    def hosts(self) -> Sequence[HostView]: ...


class Agent(RackMember, Protocol):
    """What this file needs of the agent."""

    @property
    def up_s(self) -> float: ...
    @property
    def leader_since_s(self) -> float | None: ...
    def voter(self) -> VoterRow: ...
    def voters_now(self) -> VotersView: ...
    def key_row(self) -> KeyRow: ...
    def gossip_row(self) -> GossipRow: ...
    def path_row(self) -> PathRow: ...
    async def change_voters(self, add: str, remove: str, force: bool) -> str: ...
    @property
    def troubles(self) -> Mapping[HostId, Sequence[Trouble]]: ...
    def plugin_commands(self) -> Mapping[str, Command]: ...
    @property
    def health(self) -> Mapping[str, PluginHealth]: ...
    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct: ...


READS: Mapping[str, type[msgspec.Struct]] = {
    "agent.events": EventLine,
    "agent.local_clock": ClockRow,
    "agent.local_gossip": GossipRow,
    "agent.local_gpus": GpuRow,
    "agent.local_keys": KeyRow,
    "agent.local_paths": PathRow,
    "agent.local_voter": VoterRow,
    "agent.story": EventLine,
    "memory.slabs": SlabView,
    "memory.volumes": VolumeView,
    "aggregator.tensors": AggregatorJobView,
    "sharing.gpus": SharedGpuView,
    "sharing.interference": InterferenceView,
    "interleave.groups": GroupView,
}
"""The reads that one agent may ask of another: command -> kind of its rows."""


EVENTS_MAX = 200
"""The most events of one host in a list of what happened on all."""
CHANGE: Mapping[str, Any] = {"add": "", "remove": "", "force": False}
"""The fields of a change of voters and their defaults."""


class RackView:
    """The agent's own commands, by name, for HTTP and agentctl."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._gathering = Gathering(agent, self._rows)
        self._links_found: asyncio.Future[list[LinkRow]] | None = None
        """What is being found out of the links now; None or done: nothing."""

    def commands(self) -> Mapping[str, Command]:
        return {
            "agent.hosts": self._hosts,
            "agent.gpus": self._gpus,
            "agent.local_gpus": self._local_gpus,
            "agent.forget_gpu": self._forget_gpu,
            "agent.forget_host": self._forget_host,
            "agent.local_clock": self._local_clock,
            "agent.links": self._links,
            "agent.local_paths": self._local_paths,
            "agent.ping": self._ping,
            "agent.leader": self._leader,
            "agent.local_voter": self._local_voter,
            "agent.voters": self._voters,
            "agent.change_voters": self._change_voters,
            "agent.events": self._events,
            "agent.rack_events": self._rack_events,
            "agent.story": self._event_log,
            "agent.why": self._why,
            "agent.local_gossip": self._local_gossip,
            "agent.gossip": self._rack("agent.local_gossip"),
            "agent.local_keys": self._local_keys,
            "agent.keys": self._rack("agent.local_keys"),
            "agent.rack_slabs": self._rack("memory.slabs"),
            "agent.rack_volumes": self._rack("memory.volumes"),
            "agent.rack_tensors": self._rack("aggregator.tensors"),
            "agent.rack_shared_gpus": self._rack("sharing.gpus"),
            "agent.rack_interference": self._rack("sharing.interference"),
            "agent.rack_groups": self._rack("interleave.groups"),
            "agent.history": self._books("scheduler.history"),
            "agent.report": self._books("scheduler.report"),
        }

    # ---- from gossip and the log ----

    async def _hosts(self, _arguments: Mapping[str, Any]) -> list[HostRow]:
        now_s, views = self._agent.env.clock.now_s(), self._agent.hosts()
        said = [now for view in views if isinstance(now := view.value("late", LateNow), LateNow)]
        late = [one for now in said for one in now.hosts]
        return [self._row(view, now_s, [one for one in late if one.host == view.host]) for view in views]

    def _row(self, view: HostView, now_s: float, late: Sequence[LateHost]) -> HostRow:
        gpus, spare = view.value("gpus", GpusNow), view.value("spare", Spare)
        sums, failed = view.value("aggregator", AggregatorNow), view.value("health", PluginsFailed)
        shut = closed(view)
        return HostRow(
            host=view.host,
            state=view.state,
            age_s=0.0 if view.host == self._agent.id else view.age_s,
            address=view.address,
            leads=view.host == self._agent.log.leader,
            since_s=max(0.0, now_s - view.since_s),
            gpus_total=gpus.total if isinstance(gpus, GpusNow) else None,
            gpus_free=gpus.free if isinstance(gpus, GpusNow) else None,
            gpus_out=gpus.out if isinstance(gpus, GpusNow) else 0,
            gpus_why=gpus.why if isinstance(gpus, GpusNow) else "",
            gpus_known=not isinstance(gpus, GpusNow) or gpus.known,
            gpus_held=gpus.held if isinstance(gpus, GpusNow) else {},
            slabs_free=spare.slabs_free if isinstance(spare, Spare) else None,
            slabs_lent=spare.slabs_lent if isinstance(spare, Spare) else None,
            aggregator_jobs=sums.jobs if isinstance(sums, AggregatorNow) else None,
            suspected_by=view.suspected_by,
            away_s=view.away_s,
            late=tuple(late),
            drained_by=shut.by if shut and not shut.cordon else None,
            drained_jobs=shut.jobs if shut else 0,
            cordoned_by=shut.by if shut and shut.cordon else None,
            closed_why=shut.why if shut else "",
            closed_wall_s=shut.wall_s if shut else 0.0,
            plugins_failed=failed.plugins if isinstance(failed, PluginsFailed) else (),
            troubles=tuple(self._agent.troubles.get(view.host, ())),
            no_room=failed.no_room if isinstance(failed, PluginsFailed) else "",
            other_users=failed.other_users if isinstance(failed, PluginsFailed) else "",
            version=version_of(view),
        )

    async def _leader(self, _arguments: Mapping[str, Any]) -> LeaderView:
        log, since_s = self._agent.log, self._agent.leader_since_s
        return LeaderView(
            leader=log.leader,
            term=log.term,
            since_s=None if since_s is None else self._agent.env.clock.now_s() - since_s,
            applied_index=log.applied_index,
            age_s=log.age_s,
            voters=tuple(self._agent.voters),
        )

    # ---- who votes ----

    async def _voters(self, arguments: Mapping[str, Any]) -> Gathered:
        """The row that each voter and the learner gives of itself, and those of other hosts that have notes."""
        found = await self._gathering.everywhere("agent.local_voter", {}, wait_of(arguments))
        rows = {row.host: row for row in found.data}
        now = self._agent.voters_now()
        concerned = [HostId(host) for host in (*now.voters, now.learner) if host]
        alive = {view.host for view in self._agent.hosts() if view.state in ("alive", "suspect")}
        shown = [rows.get(host) or VoterRow(host, "silent") for host in concerned]
        shown = [row if row.host in alive else msgspec.structs.replace(row, part="away") for row in shown]
        others = [row for host, row in sorted(rows.items()) if host not in concerned and row.notes]
        return Gathered(msgspec.structs.replace(now, rows=(*shown, *others)), found.unanswered)

    async def _local_voter(self, _arguments: Mapping[str, Any]) -> list[VoterRow]:
        return [self._agent.voter()]

    async def _local_gossip(self, _arguments: Mapping[str, Any]) -> list[GossipRow]:
        return [self._agent.gossip_row()]

    async def _local_keys(self, _arguments: Mapping[str, Any]) -> list[KeyRow]:
        return [self._agent.key_row()]

    async def _change_voters(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        add, remove, force = (arguments.get(name, default) for name, default in CHANGE.items())
        if not (_is_host(add) and _is_host(remove) and isinstance(force, bool)):
            why = "`add` and `remove` must be names of hosts, `force` true or false"
            raise Refused(2, "invalid change of voters", why, "agentctl voters --help")
        return {"said": await self._agent.change_voters(add, remove, force)}

    async def _forget_host(self, arguments: Mapping[str, Any]) -> Forgotten:
        return await forget(self._agent, arguments)

    async def _local_clock(self, arguments: Mapping[str, Any]) -> list[ClockRow]:
        return [ClockRow(self._agent.id, self._agent.env.clock.wall_s(), len(str(arguments.get("pad", ""))))]

    async def _links(self, _arguments: Mapping[str, Any]) -> list[LinkRow]:
        """How this host reaches each other one that gossip has as alive. Whoever asks while that is being found out
        gets the same answer: one reader costs every host some questions, and a crowd no more."""
        if self._links_found is None or self._links_found.done():
            self._links_found = asyncio.get_running_loop().create_future()
            self._agent.env.spawn("agent: links", self._find_links(self._links_found))
        return await asyncio.shield(self._links_found)

    async def _find_links(self, found: "asyncio.Future[list[LinkRow]]") -> None:
        try:
            (rows,) = await asyncio.gather(self._measured_links(), return_exceptions=True)
            if isinstance(rows, BaseException):  # whoever asks is told, as of any other question
                found.set_exception(rows)
            else:
                found.set_result(rows)
        finally:
            found.cancel()  # the agent stops; nothing where there is an answer

    async def _measured_links(self) -> list[LinkRow]:
        others = [view.host for view in self._agent.hosts() if view.state == "alive" and view.host != self._agent.id]
        return await links(others, self._agent.env.clock, self._ask_clock)

    async def _ask_clock(self, host: HostId, pad: int, seconds: float) -> ClockRow:
        (row,) = await self._rows(host, "agent.local_clock", {"pad": "x" * pad}, seconds)
        assert isinstance(row, ClockRow)
        return row

    async def _local_paths(self, _arguments: Mapping[str, Any]) -> list[PathRow]:
        return [self._agent.path_row()]

    async def _ping(self, arguments: Mapping[str, Any]) -> PingView:
        """How this host reaches another one, which is asked for the words of its paths as well."""
        host, wait_s = HostId(str(arguments.get("id", ""))), wait_of(arguments)
        if not any(view.host == host for view in self._agent.hosts()):
            raise Refused(3, f"there is no host {host[:80]!r}", "gossip knows none of that name", "agentctl hosts")
        (link,) = await links([host], self._agent.env.clock, self._ask_clock, wait_s)
        here, why = self._agent.path_row(), link.why
        if link.rtt_s is not None:
            try:
                (row,) = await self._rows(host, "agent.local_paths", {}, wait_s)
                return PingView(link, here, row)
            except (Refused, TimeoutError) as error:
                why = f"{error.what}: {error.why}" if isinstance(error, Refused) else "no answer in time"
        return PingView(link, here, None, why)

    # ---- from this host ----

    async def _local_gpus(self, _arguments: Mapping[str, Any]) -> list[GpuRow]:
        holders, said = await self._gpu_holders(), self._agent.plugin_commands().get("scheduler.gpu_uses")
        uses: Mapping[str, str] = await said({}) if said is not None else {}
        gpus = self._agent.env.probes.gpus()
        return [self._gpu_row(gpu, holders.get(gpu.uuid) or GpuHolders(), uses.get(gpu.uuid, "")) for gpu in gpus]

    def _gpu_row(self, gpu: Gpu, holders: GpuHolders, use: str) -> GpuRow:
        return GpuRow(
            host=self._agent.id,
            index=gpu.index,
            uuid=gpu.uuid,
            model=gpu.model,
            memory_total_bytes=gpu.memory_total_bytes,
            memory_used_bytes=gpu.memory_used_bytes,
            utilization=gpu.utilization,
            job=holders.job,
            simulated=gpu.simulated,
            age_s=0.0,
            beside=tuple(holders.beside),
            condition=gpu.condition,
            why=gpu.why,
            use=use,
        )

    async def _forget_gpu(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Forget what this host knows of a GPU of its own, and say in words what that was."""
        uuid, probes = str(arguments.get("id", "")), self._agent.env.probes
        if not any(gpu.uuid == uuid for gpu in probes.gpus()):
            why = f"{self._agent.id}, which got the request, has no GPU of that name"
            raise Refused(3, f"cannot forget GPU {uuid[:80]!r}", why, "find its host with agentctl gpus, and ask there")
        said = probes.forget_gpu(uuid)
        if said:
            self._agent.env.log.info("forgotten of a GPU", gpu=uuid, what=said)
            self._agent.event_log.note(f"host/{self._agent.id}", "GPU forgotten", f"{uuid}: {said}, by request")
        return {"said": said}

    async def _gpu_holders(self) -> Mapping[str, GpuHolders]:
        """The jobs on each GPU, by UUID, from this host's copy of the log."""
        jobs = self._agent.plugin_commands().get("scheduler.jobs")
        if jobs is None:
            return {}
        found: dict[str, GpuHolders] = {}
        for job in await jobs({}):
            for place in job.places:
                for name, device in zip(place.gpus, place.devices, strict=True):
                    holders = found.setdefault(device, GpuHolders())
                    if name == device or job.runs_as != "opportunistic":
                        holders.job = job.id
                    else:
                        holders.beside.append(job.id)
        return found

    async def _event_log(self, arguments: Mapping[str, Any]) -> list[EventLine]:
        subject = str(arguments.get("id", ""))
        names = (subject, *(f"{kind}/{subject}" for kind in ("slab", "volume", "host", "job", "gpu")))
        return self._agent.event_log.lines_of(names, prefix=f"slab/{subject}/")

    async def _events(self, arguments: Mapping[str, Any]) -> list[EventLine]:
        """The newest events of this host, later than `after` (wall clock, s)."""
        try:
            after_s = float(arguments.get("after", 0.0))
        except (TypeError, ValueError) as error:
            raise Refused(2, "invalid `after`", str(error), "a time in seconds since 1970") from error
        return self._agent.event_log.after(after_s, EVENTS_MAX)

    # ---- from every host ----

    async def _rack_events(self, arguments: Mapping[str, Any]) -> Gathered:
        asked = {"after": str(arguments.get("after", 0.0))}
        found = await self._gathering.everywhere("agent.events", asked, wait_of(arguments))
        return Gathered(merged([found.data]), found.unanswered)

    async def _gpus(self, arguments: Mapping[str, Any]) -> Gathered:
        found = await self._gathering.everywhere("agent.local_gpus", {}, wait_of(arguments))
        states = {view.host: view.state for view in self._agent.hosts()}
        rows = [msgspec.structs.replace(row, host_state=states.get(row.host, "gone")) for row in found.data]
        return Gathered(sorted(rows, key=lambda row: (row.host, row.index)), found.unanswered)

    async def _why(self, arguments: Mapping[str, Any]) -> Gathered:
        subject = str(arguments.get("id", ""))
        found = await self._gathering.everywhere("agent.story", {"id": subject}, wait_of(arguments))
        lines = merged([found.data])
        lost = tuple(Unanswered(view.host, "it is gone") for view in self._agent.hosts() if view.state == "gone")
        if not lines and found.unanswered + lost:
            silent = words(found.unanswered + lost)
            why = f"no host that answered has events of that name, and not all hosts answered: {silent}"
            next = f"ask again, and wait longer: agentctl why {subject} --timeout 30s"
            raise Refused(NOT_WHOLE, f"nothing was found about {subject!r}", why, next)
        if not lines:
            raise Refused(
                3,
                f"nothing is known about {subject!r}",
                "no host has events about a job, slab, volume or host of that name",
                "agentctl jobs, agentctl slabs and agentctl hosts list the names",
            )
        return Gathered(lines, found.unanswered)

    def _rack(self, read: str) -> Command:
        async def gathered(arguments: Mapping[str, Any]) -> Gathered:
            return await self._gathering.everywhere(read, {}, wait_of(arguments))

        return gathered

    def _books(self, read: str) -> Command:
        async def told(arguments: Mapping[str, Any]) -> Gathered:
            """What the scheduler says of jobs that have ended, with the hosts that did not answer it."""
            command = self._agent.plugin_commands().get(read)
            if command is None:
                raise Refused(
                    1, f"{self._agent.id} has no plugin scheduler now", "it is off or failed", "agentctl status"
                )
            view = await command(arguments)
            return Gathered(view, tuple(Unanswered(host, why) for host, why in sorted(view.unanswered.items())))

        return told

    async def _rows(self, host: HostId, read: str, arguments: dict[str, str], wait_s: float) -> list[Any]:
        """The rows of one host. TimeoutError or Refused when there are none."""
        if host == self._agent.id:
            return await self._here(read, arguments)
        answer = await self._agent.ask("agent", host, AskView(read, arguments), wait_s)
        assert isinstance(answer, ViewAnswer)
        try:
            return list(msgspec.json.decode(answer.rows, type=list[READS[read]]))  # type: ignore[valid-type]
        except msgspec.DecodeError as error:
            what = f"the answer of {host} cannot be read here"
            raise Refused(1, what, f"it may run another version: {error}", "agentctl version") from error

    async def _here(self, read: str, arguments: Mapping[str, Any]) -> list[Any]:
        """This host's rows; a plugin that is switched off has none. Refused when they cannot be read now."""
        command = ({**self.commands(), **self._agent.plugin_commands()}).get(read)
        if command is not None:
            return list(await command(arguments))
        plugin = read.partition(".")[0]
        health = self._agent.health.get(plugin)
        if health is not None and health.state == "off":
            return []
        why = "it has not started yet" if health is None else f"it has {health.state}: {health.why}"
        raise Refused(1, f"{self._agent.id} has no plugin {plugin} now", why, "agentctl status")

    async def answer(self, question: AskView) -> ViewAnswer:
        """Answer another agent's live question. Refused when it is none of `READS`, or cannot be read here now."""
        if question.read not in READS:
            raise Refused(3, f"{question.read!r} cannot be read here", "unknown kind of question", "agentctl version")
        return ViewAnswer(msgspec.json.encode(await self._here(question.read, question.arguments)))


def _is_host(name: object) -> bool:
    return isinstance(name, str) and (not name or re.match(ID_PATTERN, name) is not None)
