"""Plugin and Host: what a plugin offers the agent, and what it may ask of it. All six plugins have this one shape."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from covey.core.errors import Refused
from covey.core.events import Fact, LogEvent, Message, Publish, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from covey.core.metrics import Measured, Metric
from covey.kernel.pages import LimitsWriter, ReportReader
from covey.ports import ByteStream, Env, SharedPage
from covey.wire.job import AskPages, Frame
from plugins.facts import HostView

S = TypeVar("S", bound=msgspec.Struct)


class ReplicatedLog(Protocol):
    """The log under the leader. Voters vote; all other alive hosts receive it, so each answers reads from its copy."""

    @property
    def leader(self) -> HostId | None:
        """Whom this host takes for the leader; None while it knows none."""

    @property
    def term(self) -> int:
        """Of the newest election that this host knows; grows."""

    @property
    def leaderless_s(self) -> float:
        """Seconds for which this host has known no leader, after the time that one which lost its majority may take to
        notice: while a majority of voters says more than 0, nobody leads, and whoever leads next was elected later."""

    @property
    def is_leader(self) -> bool:
        """True only while this host holds a majority's confirmation (CheckQuorum)."""

    @property
    def applied_index(self) -> int:
        """Index of the newest entry applied here; 0 before the first."""

    def undecided(self) -> Sequence[bytes]:
        """Commands behind the newest entry applied here, oldest first: a majority may have them, and so may nobody."""

    @property
    def voters(self) -> Sequence[HostId]:
        """The hosts whose majority elects and commits."""

    @property
    def age_s(self) -> float:
        """Seconds since a leader last confirmed that this copy is current; 0 on the leader."""

    @property
    def caught_up(self) -> bool:
        """A leader confirmed this copy at some time since this agent started: what it lacks is younger than `age_s`."""

    def bind(
        self,
        apply: Callable[[int, bytes], bytes],
        snapshot: Callable[[], bytes],
        restore: Callable[[bytes], None],
    ) -> None:
        """The replicated state machine: before start, and again whenever its plugin begins anew; then `restore` gets
        what the one before it holds. `apply(index, command) -> result` is deterministic."""

    async def propose(self, command: bytes, timeout_s: float = 5.0) -> bytes:
        """From any host: the result of `apply` once committed. NoLeader: nothing was proposed. OutcomeUnknown: it was
        not committed within `timeout_s` seconds, and may be later."""


class RankSpec(msgspec.Struct, frozen=True):
    """One rank of those that a host starts."""

    rank: int
    """Of the whole gang, 0..world_size-1."""
    local_rank: int
    """Among the ranks on its host."""
    gpus: tuple[str, ...]
    """UUIDs of its own."""


class RankLease(msgspec.Struct, frozen=True):
    """For how long ranks may run without news from the log's leader. Whoever holds it ends them by itself, so that they
    are certainly gone before the leader grants their GPUs' quota again, also when this host is cut off."""

    asked_s: float
    """`Clock.boot_s` when the leader was asked: what it said is counted from there, not from when the answer came."""
    lease_s: float | None
    """None: without end; nobody else could grant anything."""
    grace_s: float
    """Most that lies between SIGTERM and SIGKILL once it is over."""
    pause_s: float | None = None
    """Ranks that may be lost are suspended so long after `asked_s`, until a newer one comes; None: they are not."""

    @property
    def until_s(self) -> float:
        """`Clock.boot_s` at which it runs out; infinite without an end."""
        return math.inf if self.lease_s is None else self.asked_s + self.lease_s


class RanksSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner starts on one host: some ranks of one gang under one epoch."""

    job: JobId
    """Whose ranks these are."""
    epoch: int
    """Of the grant: a later one fences these ranks."""
    name: str
    """Of the job, for people."""
    tenant: str
    """Whose quota the job counts against."""
    job_class: str
    """What the job runs as under this grant: `guaranteed`, `auto` or `opportunistic`."""
    argv: tuple[str, ...]
    """Program and arguments."""
    cwd: str
    """Absolute path on this host."""
    env: dict[str, str]
    """The submitter's variables; the runner adds the rank's own on top."""
    ranks: tuple[RankSpec, ...]
    """Those of this host, ascending."""
    world_size: int
    """Ranks of the whole gang."""
    node_rank: int
    """Index of this host in `nodes`."""
    nodes: tuple[HostId, ...]
    """Hosts of the gang now. Nothing on which all its ranks have to agree follows from them: some started before."""
    master_addr: str
    """An IP the peers reach."""
    master_port: int
    """TCP port there that rank 0 may listen on."""
    attempt: int = 1
    """Starts of the job, this one included."""
    grace_s: float = 60.0
    """Seconds between SIGTERM and SIGKILL."""
    bind_gpus: bool = False
    """Each rank sees its own GPUs only, not those of its siblings here."""
    held_back: bool = False
    """Its ranks begin on what others leave of the cores, until their channel answers (`covey.ports.LetsGo`)."""
    hooks: bool = True
    """`covey.hooks` sees the script's steps."""
    tables: int = 1
    """How many the job's tensors have, on each of its ranks, whenever that started (`covey.tensors.numbers.blocks`)."""
    since: int = 0
    """How often places of this grant had been exchanged when these ranks came here (`Place.since`)."""
    spares: int = 0
    """Processes that are to wait on this host to become one of its ranks."""
    may_heal: bool = True
    """A rank whose script attached state is started again alone when it is lost."""
    shared_memory: int = 0
    """Where GPUs are shared: the memory of each of its GPUs that each rank asked for, bytes; 0: not said."""
    hang_s: float | None = None
    """How long ranks may stand still before something is done, as their processes tell; None: for ever."""
    lease: RankLease | None = None
    """The first one; None: these ranks run for as long as they like, until one is given (`Runner.renew`)."""


class LogRead(msgspec.Struct, frozen=True):
    """A part of a rank's output."""

    data: bytes
    """As the rank wrote it: any bytes."""
    offset: int
    """Of its first byte in all that was written: over the one that was asked for when what lay there was dropped."""
    size: int
    """All that was ever written."""
    kept: bool = True
    """False: there is nothing of it, not even an empty file; it was removed, or the rank never began here."""


class Runner(Protocol):
    """Job processes on this host, which outlive the agent. It tells the facts `RanksStarted` and `RanksEnded`."""

    async def reserve_port(self, job: JobId, epoch: int) -> int:
        """A free TCP port on the advertised address, kept from others until these ranks start or are released.
        OSError when there is none."""

    def release_port(self, job: JobId, epoch: int) -> None:
        """The port is free for others again. Idempotent."""

    async def start(self, spec: RanksSpec) -> None:
        """Idempotent: the same job and epoch is started once, also across restarts of the agent. Ranks that come back
        to a host under the same epoch (a larger `since`) start once those of before are over and forgotten."""

    async def stop(self, job: JobId, epoch: int, grace_s: float, why: str) -> None:
        """SIGTERM to the ranks' main processes, SIGKILL to all of them after `grace_s` seconds. Idempotent;
        `RanksEnded` follows."""

    async def keep_stacks(self, job: JobId, epoch: int) -> None:
        """The ranks here that can (`covey.hooks.stacks`) write where each of their threads is into their output. Once,
        if their supervisor is there."""

    async def end_stuck(self, job: JobId, epoch: int, rank: int, pid: int, why: str) -> None:
        """SIGKILL to this rank, if its process is still that one: it is replaced, or fails, for this reason."""

    def may_join(self, job: JobId, epoch: int) -> bool:
        """Whether ranks that come from another host can join those that run here: `start` with more of them, and a
        newer `RanksSpec.since`."""

    def spec(self, job: JobId, epoch: int) -> RanksSpec | None:
        """As it was started, with what joined it since."""

    async def keep_spares(self, spec: RanksSpec, modules: tuple[str, ...]) -> None:
        """`spec.spares` processes are to wait here for ranks of this epoch, which are yet to come; they import
        `modules` ahead. `spec.ranks`: one, of which only its number of GPUs counts. Idempotent; `SparesReady` follows.
        Where ranks run, the runner keeps `RanksSpec.spares` of them by itself once their script attached its state."""

    def end_spares(self, job: JobId, epoch: int) -> None:
        """None wait any more, unless ranks of this epoch run here. Idempotent."""

    def modules(self, job: JobId, epoch: int) -> tuple[str, ...]:
        """What a process imports that waits to become a rank of what runs here; empty: none would wait, or its script
        has attached nothing yet."""

    async def renew(self, leases: Mapping[tuple[JobId, int], RankLease]) -> None:
        """The ranks of these (job, epoch) may go on for so long. When a lease runs out they are told, ended, and
        `RanksEnded` says `lost`; that happens also while this agent is dead or stopped."""

    async def kept(self) -> Sequence[RanksSpec]:
        """What was started here and is not forgotten, whether it runs or has ended: what a plugin that lost its own
        record asks. OSError from a sick disk."""

    def running(self) -> Mapping[tuple[JobId, int], Mapping[int, int]]:
        """(job, epoch) -> rank -> pid of what runs here now."""

    def is_ending(self, job: JobId, epoch: int) -> bool:
        """Whether ranks of this epoch were asked to end, by this agent or by their supervisor, and have not ended."""

    def knows(self, job: JobId, epoch: int) -> bool:
        """Whether ranks of this epoch run here, or may, or have ended and are not forgotten. True too while what an
        earlier agent wrote down is not read yet."""

    def log_path(self, job: JobId, rank: int) -> str:
        """Absolute path of a rank's output on this host, whether or not it exists."""

    def forget(self, job: JobId, epoch: int) -> None:
        """The scheduler has this epoch's `RanksEnded` in the log: its record may go. Until then it is told again after
        every restart of the agent. Logs stay."""

    async def read_log(self, job: JobId, rank: int, offset: int, limit: int) -> LogRead:
        """Up to `limit` bytes of that output from `offset` on (from its end, if negative), or from the next byte that
        was kept; nothing of size 0, not kept, when there is none. Here, not in the plugin, because files are read
        through ports. OSError from a sick disk."""

    @property
    def refusal(self) -> str:
        """Why this host takes no submissions and no ranks now: its disk is about to be full. Empty: it does."""


class RankPages(Protocol):
    """The pages that a rank shares with this agent (`covey.kernel.pages`)."""

    @property
    def limits(self) -> LimitsWriter:
        """What it may do."""

    @property
    def report(self) -> ReportReader:
        """What it did."""

    @property
    def asked(self) -> AskPages:
        """By what it went when it connected: limits of an agent before this one."""

    @property
    def mapped(self) -> bool:
        """It has them: from now on it sees what is written."""

    @property
    def busy(self) -> bool | None:
        """Whether it says that it has work on its device; None: it does not say."""

    def show(self, neighbour: "RankPages | None") -> None:
        """Let it read the flag of this guaranteed rank, or of nobody any more. Idempotent."""


class JobPeer(Protocol):
    """A process connected on jobs.sock, after it joined."""

    @property
    def job(self) -> JobId | None:
        """Whose rank it is; None of a tool."""

    @property
    def of_job(self) -> JobId | None:
        """Of which job it is, by its token, also when it speaks for none of the ranks; None of a tool outside any."""

    @property
    def rank(self) -> int:
        """Of the whole gang, 0..world_size-1; without meaning for a tool."""

    @property
    def epoch(self) -> int:
        """Of the grant that it was started under."""

    @property
    def uid(self) -> int:
        """User of the process, as the kernel tells it."""

    @property
    def pages(self) -> RankPages | None:
        """None while it has asked for none: then it goes by no limits."""

    @property
    def gone(self) -> bool:
        """Nobody hears what is sent."""

    def send(self, frame: Frame) -> None:
        """Never waits: a peer that is too far behind with reading is cut off."""


class Host(Protocol):
    """What a plugin may ask of its agent."""

    @property
    def id(self) -> HostId:
        """This host's name."""

    @property
    def env(self) -> Env:
        """Its ports: clock, chance, disk, links, processes, probes. Nothing else leads outside."""

    @property
    def advertise(self) -> str:
        """The IP address under which other hosts reach this one."""

    @property
    def boot(self) -> int:
        """Counts starts of this agent; kept on disk, grows."""

    @property
    def runner(self) -> Runner:
        """Who starts and ends ranks here."""

    @property
    def log(self) -> ReplicatedLog:
        """The rack's replicated log; one plugin binds it."""

    def settings(self, kind: type[S]) -> S:
        """This plugin's section of agent.toml, checked."""

    def hosts(self) -> Sequence[HostView]:
        """Every host gossip knows, this one included, sorted by name."""

    def spread(self, key: str, value: msgspec.Struct) -> None:
        """Gossip this to everybody under a key; read with `HostView.value`. A hint for others, never a promise.
        ValueError when it takes more than 256 bytes encoded."""

    def publish(self, fact: Fact) -> None:
        """Tell every plugin of this host, this one included, in order: what is published while another fact is told
        waits for its turn."""

    async def send(self, plugin: str, to: HostId, message: Message, deadline_s: float) -> bool:
        """At least once until `deadline_s` seconds have passed, handled at most once by `on_message` of the same plugin
        there. False: not acknowledged in time (it may still have been handled)."""

    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct:
        """A question that changes nothing: the answer of the same plugin's `answer` there, decoded by
        `Plugin.messages`. TimeoutError when there is none in time, Refused when the other side refused."""

    def note(self, subject: str, event: str, reason: str, key: str = "") -> None:
        """One line of the event log of `subject`, for `agentctl why`."""

    def peers(self, job: JobId) -> Sequence[JobPeer]:
        """Processes of this job that are joined here now."""


@dataclass(frozen=True)
class Program:
    """A process of ours beside the agent: bytes or supervision, no policy. Runs on the same ports."""

    name: str
    """Such as `slabd`, unique among all plugins."""
    config: type[msgspec.Struct]
    """What it is started with."""
    run: Callable[[Env, Any], Coroutine[Any, Any, None]]
    """Ends when its work is over; cancelled by SIGTERM."""
    goes_first: int = 0
    """Its oom_score_adj: when memory runs out the kernel ends it before any job, and only time is lost."""


@dataclass(frozen=True)
class Plugin:
    """One folder of `plugins/`, as the registry lists it."""

    name: str
    """Of its folder, of its section of agent.toml, and of its messages' addressee."""
    paper: str
    """What it is built after."""
    settings: type[msgspec.Struct]
    """Its section of agent.toml: every field has a default that names its source."""
    messages: Any
    """Union of the Message classes it hears and answers with; decoded with bounds."""
    service: Callable[[Host], "PluginService"]
    """Makes the service; again, on a new one, after a failure."""
    programs: Sequence[Program] = ()
    """Processes of its own, beside the agent."""
    frames: Sequence[type[Frame]] = ()
    """Frames of jobs.sock that go to this plugin's `frame`."""
    metrics: Iterable[Metric] = ()
    """What its service may measure; names are of the whole rack, so no two plugins have the same."""


Command = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""A read or a change asked over HTTP: JSON object in, a Struct, list or dict out; Refused when it cannot be."""


class PluginService:
    """What the agent calls. Subclasses hold machines, `feed` them events and `perform` what they ask for."""

    name: ClassVar[str]
    """The plugin's."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.env = host.env
        self.log = host.env.log

    async def start(self) -> None:
        """Find again what survived (journal, processes), then begin. An exception stops this plugin, not the host."""

    async def stop(self) -> None:
        """The agent leaves: tell those who must know, within a second. Data-path processes stay."""

    def on_fact(self, fact: Fact) -> None:
        """A fact from the bus, this plugin's own included."""

    async def on_message(self, sender: HostId, message: Any) -> None:
        """A message from this plugin on another host; acknowledged when this returns."""

    async def answer(self, sender: HostId, question: Any) -> msgspec.Struct:
        """A read-only question from this plugin on another host."""
        what = f"{self.name} does not answer {type(question).__name__}"
        raise Refused(2, what, "this agent does not know the question", "upgrade the older host")

    async def frame(self, peer: JobPeer, frame: Frame) -> None:
        """A frame from a joined process; answer with `peer.send`."""

    def commands(self) -> Mapping[str, Command]:
        """Name -> what HTTP and agentctl may ask."""
        return {}

    def status(self) -> Mapping[str, str]:
        """Lines for `agentctl status`: what it is about, and how it is now."""
        return {}

    def metrics(self) -> Measured:
        """What this plugin measured, of the metrics that `Plugin.metrics` declares."""
        return {}

    def notes(self) -> Sequence[str]:
        """What `agentctl status` says of this host beside its state: what is not as it should be, and how to mend
        it."""
        return ()

    # ---- performing what machines ask for ----

    def perform(self, action: Any, feed: Callable[[Any], None]) -> None:
        """The actions every plugin shares; a plugin handles its own first and passes the rest here. `feed` hands an
        event to the machine that asked."""
        match action:
            case Send():
                self.env.spawn(f"{self.name} send", self._send(action, feed))
            case SetTimer():
                asyncio.get_running_loop().call_later(action.after_s, feed, action.event)
            case Publish():
                self.host.publish(action.fact)
            case LogEvent():
                self.host.note(action.subject, action.event, action.reason, action.key)
            case _:
                raise TypeError(f"{self.name} cannot perform {type(action).__name__}")

    async def _send(self, action: Send, feed: Callable[[Any], None]) -> None:
        if not await self.host.send(self.name, action.to, action.message, action.deadline_s):
            feed(Undelivered(action.to, action.message))


@dataclass
class Outbox:
    """Frames to one slow reader, bounded: `put` never blocks; when full the reader is cut off rather than the agent."""

    limit: int = 256
    """Frames, not bytes."""
    over: bool = False
    """Whether the connection has ended."""
    queue: asyncio.Queue[tuple[bytes, tuple[SharedPage, ...]]] = field(default_factory=asyncio.Queue)
    """What was put and not yet written, and pages that go with it, oldest first."""

    def put(self, data: bytes, pages: tuple[SharedPage, ...] = ()) -> bool:
        """False when the reader is too far behind."""
        if self.queue.qsize() >= self.limit:
            return False
        with contextlib.suppress(asyncio.QueueFull):
            self.queue.put_nowait((data, pages))
        return True

    async def write_to(self, stream: ByteStream) -> None:
        """All that is put, until the connection ends."""
        with contextlib.suppress(ConnectionError):
            while True:
                data, pages = await self.queue.get()
                await (stream.write_with(data, pages) if pages else stream.write(data))
        self.over = True
