"""Plugin and Host: what a plugin offers the agent, and what it may ask of it. All plugins have this one shape."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import msgspec

from covey.core.errors import Refused
from covey.core.events import Fact, LogEvent, Message, Publish, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from covey.core.metrics import Measured, Metric
from covey.kernel.pages import LimitsWriter, ReportReader
from covey.ports.env import Env
from covey.ports.pages import SharedPage
from covey.ports.streams import ByteStream
from covey.wire.job import AskPages, Frame, SaveIs
from plugins.askers import OwnerUser
from plugins.facts import HostView, SavedAt

S = TypeVar("S", bound=msgspec.Struct)


class ReplicatedLog(Protocol):
    """The rack's replicated log. Voters vote; all other alive hosts receive it, so each answers reads from its copy."""

    @property
    def leader(self) -> HostId | None:
        """The host that this host takes for the leader; None while it knows none."""

    @property
    def term(self) -> int:
        """The term of the newest election that this host knows; it only grows."""

    @property
    def leaderless_s(self) -> float:
        """Seconds for which this host has known no leader, after the time that a leader which lost its majority may
        take to notice: while a majority of voters says more than 0, no host leads, and whoever leads next was elected
        later."""

    @property
    def is_leader(self) -> bool:
        """Whether this host leads: True only while it holds a majority's confirmation (CheckQuorum)."""

    @property
    def applied_index(self) -> int:
        """Index of the newest entry applied here; 0 before the first."""

    def undecided(self) -> Sequence[bytes]:
        """Commands behind the newest entry applied here, oldest first: a majority may have them, and perhaps no other
        host has."""

    @property
    def voters(self) -> Sequence[HostId]:
        """The hosts whose majority elects and commits."""

    @property
    def age_s(self) -> float:
        """Seconds since a leader last confirmed that this copy is current; 0 on the leader."""

    @property
    def caught_up(self) -> bool:
        """Whether a leader has confirmed this copy since this agent started: then what it lacks is younger than
        `age_s`."""

    async def be_current(self, timeout_s: float = 5.0) -> None:
        """Return once this copy holds all that was decided anywhere before this call: a majority has confirmed since
        then who leads (ReadIndex, Raft thesis §6.4), no clock is relied on. NoLeader: that was not known within
        `timeout_s` seconds."""

    def bind(
        self,
        apply: Callable[[int, bytes], bytes],
        snapshot: Callable[[], bytes],
        restore: Callable[[bytes], None],
    ) -> None:
        """Bind the replicated state machine: before start, and again whenever its plugin begins anew; then `restore`
        gets what the one before it holds. `apply(index, command) -> result` is deterministic."""

    async def propose(self, command: bytes, timeout_s: float = 5.0) -> bytes:
        """Propose a command, on any host, and return the result of `apply` once it is committed. NoLeader: nothing was
        proposed. OutcomeUnknown: it was not committed within `timeout_s` seconds, and may be later."""


class RankSpec(msgspec.Struct, frozen=True):
    """One rank of those that a host starts."""

    rank: int
    """The rank's number in the whole gang, 0..world_size-1."""
    local_rank: int
    """The rank's number among the ranks on its host."""
    gpus: tuple[str, ...]
    """UUIDs of the rank's own GPUs."""


class RankLease(msgspec.Struct, frozen=True):
    """How long ranks may run without news from the log's leader. Whoever holds the lease ends them by itself, so that
    they are certainly gone before the leader grants their GPUs' quota again, also when this host is cut off."""

    asked_s: float
    """`Clock.boot_s` when the leader was asked: the lease counts from there, not from when the answer came."""
    lease_s: float | None
    """How long the ranks may run after `asked_s`, in seconds; None: without end, since nobody else could grant
    anything."""
    grace_s: float
    """The most seconds between SIGTERM and SIGKILL once the lease is over."""
    pause_s: float | None = None
    """Seconds after `asked_s` at which ranks that may be lost are suspended, until a newer lease comes; None: they are
    not."""

    @property
    def until_s(self) -> float:
        """`Clock.boot_s` at which the lease runs out; infinite without an end."""
        return math.inf if self.lease_s is None else self.asked_s + self.lease_s


class ArrayTask(msgspec.Struct, frozen=True):
    """Which task of an array a job is."""

    array: JobId
    """The array's id."""
    index: int
    """The task's index, as it was submitted."""
    count: int
    """The number of the array's tasks."""
    first: int
    """Its smallest index."""
    last: int
    """Its largest index."""
    step: int = 1
    """What lies between two indices, where that is always the same; else 1."""


class RanksSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner starts on one host: some ranks of one gang under one epoch."""

    job: JobId
    """The job whose ranks these are."""
    epoch: int
    """The epoch of the grant: a later one fences these ranks."""
    name: str
    """The job's name, for people."""
    tenant: str
    """The tenant whose quota the job counts against."""
    job_class: str
    """What the job runs as under this grant: `guaranteed`, `auto` or `opportunistic`."""
    argv: tuple[str, ...]
    """The program and its arguments."""
    cwd: str
    """The working directory, an absolute path on this host."""
    env: dict[str, str]
    """The submitter's environment variables; the runner adds the rank's own on top."""
    ranks: tuple[RankSpec, ...]
    """The ranks of this host, ascending."""
    world_size: int
    """The number of ranks of the whole gang."""
    node_rank: int
    """Index of this host in `nodes`."""
    nodes: tuple[HostId, ...]
    """The hosts of the gang now. Nothing on which all its ranks have to agree may follow from them: some ranks started
    before."""
    master_addr: str
    """An IP address of rank 0's host that the other ranks reach."""
    master_port: int
    """The TCP port at `master_addr` that rank 0 may listen on."""
    attempt: int = 1
    """The number of starts of the job, this one included."""
    grace_s: float = 60.0
    """Seconds between the stop signal and SIGKILL."""
    stop_signal: str = "TERM"
    """The signal that asks ranks to end, without its SIG."""
    share_host: str = ""
    """The group of jobs with which these ranks take turns on this host (`JobSpec.share_host`); empty: none."""
    bind_gpus: bool = False
    """Each rank sees its own GPUs only, not those of its siblings here."""
    held_back: bool = False
    """Whether its ranks begin on what other ranks leave of the cores, until their first mini-batch has ended
    (`covey.ports.processes.LetsGo`)."""
    hooks: bool = True
    """Whether `covey.hooks` sees the script's steps."""
    tables: int = 1
    """The number of tables of the job's tensors, on each of its ranks, whenever that started
    (`covey.tensors.numbers.blocks`)."""
    since: int = 0
    """How often places of this grant had been exchanged when these ranks came here (`Place.since`)."""
    config: int = 0
    """The number of the elastic job's configuration that `carried` belongs to (`JobHealing.healed`); 0 in any other
    job."""
    carried: dict[int, tuple[int, ...]] = {}
    """In an elastic job, whose `ranks` are processes named by their first rank: the ranks that each process of the job
    carries, on whichever host; empty in any other job."""
    came: dict[int, int] = {}
    """In an elastic job: the configuration in which each rank came to the process that carries it, by rank; 0 for one
    that is not named."""
    awaited: bool = False
    """In an elastic job: whether the others may wait for processes that begin here (`JobHealing.awaited`)."""
    spares: int = 0
    """The number of processes that are to wait on this host to become one of its ranks."""
    may_heal: bool = True
    """Whether a rank whose script attached state is started again alone when it is lost."""
    shared_memory: int = 0
    """Memory that each rank asked for on each of its GPUs, where GPUs are shared, bytes; 0: not said."""
    host_memory: int = 0
    """Memory that the processes of the job on this host may take together, bytes; 0: not limited."""
    cpus: int = 0
    """Processors of each rank; 0: not said."""
    private_tmp: bool = False
    """Whether the ranks have a /tmp of their own, where they run as another user than the agent's."""
    image: str = ""
    """The image in whose container each rank runs; empty: in none."""
    time_left_s: float | None = None
    """Seconds that the job may still run when these ranks start; None: no limit."""
    saved: SavedAt | None = None
    """The newest checkpoint that ranks of the job wrote; None: none is known."""
    submitted_wall_s: float = 0.0
    """When the job was submitted, in seconds since 1970."""
    user: str = ""
    """The user as whom the ranks run (`JobOwner.user`); empty: as the agent's own."""
    uid: int | None = None
    """That user's number: a host where the name has another one starts nothing."""
    hang_s: float | None = None
    """Seconds for which ranks may stand still, by what their processes tell, before something is done; None: for
    ever."""
    stdout: str = ""
    """The file to which what the ranks write is added as well, by its name with words
    (`plugins/scheduler/messages/output_names.py`); empty: to none."""
    stderr: str = ""
    """The file for their standard error, where that has one of its own; empty: it has none."""
    task: ArrayTask | None = None
    """Which task of an array the job is; None: of none."""
    after: dict[JobId, str] = {}
    """The jobs for whose end this one waited, and how each ended: `done`, or `failed 3` with its exit code."""
    lease: RankLease | None = None
    """The first lease; None: these ranks run for as long as they like, until one is given (`Runner.renew`)."""


class LogRead(msgspec.Struct, frozen=True):
    """A part of a rank's output."""

    data: bytes
    """The output as the rank wrote it: any bytes."""
    offset: int
    """The position of the first byte of `data` in all that was written; higher than the one asked for when what was
    there has been dropped."""
    size: int
    """Bytes of output that were ever written."""
    kept: bool = True
    """Whether there is a file of the output, be it empty; False: it was removed, or the rank never began here."""
    timed: bool = False
    """Whether output was asked for by time, and all before `offset` is known to be older."""


class Runner(Protocol):
    """The job processes on this host, which outlive the agent. It publishes the facts `RanksStarted` and
    `RanksEnded`."""

    async def reserve_port(self, job: JobId, epoch: int) -> int:
        """Reserve a free TCP port on the advertised address, kept from others until these ranks start or are released.
        OSError when there is none."""

    def release_port(self, job: JobId, epoch: int) -> None:
        """Free the port for others again. Idempotent."""

    async def start(self, spec: RanksSpec) -> None:
        """Start the ranks. Idempotent: the same job and epoch is started once, also across restarts of the agent. Ranks
        that come back to a host under the same epoch (a larger `since`) start once the earlier ones are over and
        forgotten."""

    async def stop(self, job: JobId, epoch: int, grace_s: float, why: str) -> None:
        """Send the stop signal to the ranks' main processes, and SIGKILL to all their processes after `grace_s`
        seconds. Idempotent; `RanksEnded` follows."""

    async def keep_stacks(self, job: JobId, epoch: int) -> None:
        """Let the ranks here that can (`covey.hooks.stacks`) write where each of their threads is into their output. It
        is asked once, if their supervisor is there."""

    async def end_stuck(self, job: JobId, epoch: int, rank: int, pid: int, why: str) -> None:
        """Send SIGKILL to this rank, if its process is still the one with this pid: it is replaced, or fails, for this
        reason."""

    def may_join(self, job: JobId, epoch: int) -> bool:
        """Whether ranks that come from another host can join those that run here: `start` with more of them, and a
        newer `RanksSpec.since`. In an elastic job `start` with a higher `RanksSpec.config` also ends processes that are
        not in the place any more, and changes which ranks the others carry."""

    def have_state(self, job: JobId, epoch: int) -> tuple[int, ...]:
        """The processes of an elastic job here that have its state, and are alive at this moment, whatever their
        supervisor has said by now."""

    def leaving(self, job: JobId, epoch: int) -> bool:
        """Whether processes that left an elastic job's place here may still run, so that their GPUs are in use;
        `RanksStarted` is told again once none does."""

    def spec(self, job: JobId, epoch: int) -> RanksSpec | None:
        """The spec with which these ranks were started, with the ranks that joined them since."""

    async def keep_spares(self, spec: RanksSpec, modules: tuple[str, ...]) -> None:
        """Keep `spec.spares` processes waiting here for ranks of this epoch, which are yet to come; they import
        `modules` ahead. `spec.ranks` has one rank, of which only the number of GPUs counts. Idempotent; `SparesReady`
        follows. Where ranks run, the runner keeps `RanksSpec.spares` processes by itself once their script attached its
        state."""

    def end_spares(self, job: JobId, epoch: int) -> None:
        """End the waiting processes of this epoch, unless ranks of it run here. Idempotent."""

    def modules(self, job: JobId, epoch: int) -> tuple[str, ...]:
        """The modules that a process imports which waits to become one of the ranks here; empty: none would wait, or
        the ranks' script has attached nothing yet."""

    async def renew(self, leases: Mapping[tuple[JobId, int], RankLease]) -> None:
        """Give the ranks of these (job, epoch) new leases. When a lease runs out they are told, ended, and `RanksEnded`
        says `lost`; that happens also while this agent is dead or stopped."""

    async def kept(self) -> Sequence[RanksSpec]:
        """The specs of all ranks that were started here and are not forgotten, whether they run or have ended: for a
        plugin that lost its own record. OSError from a sick disk."""

    def running(self) -> Mapping[tuple[JobId, int], Mapping[int, int]]:
        """The ranks that run here now: (job, epoch) -> rank -> pid."""

    def is_ending(self, job: JobId, epoch: int) -> bool:
        """Whether ranks of this epoch were asked to end, by this agent or by their supervisor, and have not ended."""

    def knows(self, job: JobId, epoch: int) -> bool:
        """Whether ranks of this epoch run here, or may, or have ended and are not forgotten. True also while the
        records of an earlier agent are not read yet."""

    def log_path(self, job: JobId, rank: int) -> str:
        """Absolute path of a rank's output on this host, whether or not it exists."""

    def forget(self, job: JobId, epoch: int) -> None:
        """Remove the record of this epoch, since the scheduler has its `RanksEnded` in the log. Until then `RanksEnded`
        is told again after every restart of the agent. Output stays."""

    async def read_log(self, job: JobId, rank: int, offset: int, limit: int, since_s: float | None = None) -> LogRead:
        """Up to `limit` bytes of a rank's output from `offset` on (from its end, if negative), or from the next byte
        that was kept; an empty part that is not `kept` when there is none. With `since_s`, from what was written so
        many seconds ago on, wherever that is. The runner does this, not the plugin,
        because files are read through ports. OSError from a sick disk."""

    async def keep_curve(self, job: JobId, data: bytes) -> None:
        """Keep these bytes beside the job's output, as long as that is kept. OSError from a sick or full disk."""

    async def curve(self, job: JobId) -> bytes | None:
        """What `keep_curve` kept last; None: nothing, or no more. OSError from a sick disk."""

    def limited(self, job: JobId, epoch: int) -> bool | None:
        """Whether memory and number of processes of the ranks here are limited, whatever they do; None: none run."""

    def refusal_as(self, user: str, uid: int | None) -> str:
        """Why this host runs no ranks as that user (`RanksSpec.user`, `RanksSpec.uid`) now; empty: it does."""

    @property
    def refusal(self) -> str:
        """Why this host takes no submissions and no ranks now: its disk is about to be full. Empty: it takes them."""


class RankPages(Protocol):
    """The pages that a rank shares with this agent (`covey.kernel.pages`)."""

    @property
    def limits(self) -> LimitsWriter:
        """The page on which the agent writes what the rank may do."""

    @property
    def report(self) -> ReportReader:
        """The page on which the rank writes what it did."""

    @property
    def asked(self) -> AskPages:
        """What the rank's process wrote when it asked for pages: the limits of an earlier agent by which it went."""

    @property
    def mapped(self) -> bool:
        """Whether the rank has mapped the pages: from then on it sees what is written."""

    @property
    def busy(self) -> bool | None:
        """Whether the rank says that it has work on its device; None: it does not say."""

    def show(self, neighbour: "RankPages | None") -> None:
        """Let the rank read the flag of this guaranteed neighbour, or of none any more. Idempotent."""


class JobPeer(Protocol):
    """A process connected on jobs.sock, after it joined."""

    @property
    def job(self) -> JobId | None:
        """The job whose rank the process is; None for a tool."""

    @property
    def of_job(self) -> JobId | None:
        """The job that the peer belongs to, by its token, also when it speaks for none of the ranks; None for a tool
        outside any job."""

    @property
    def rank(self) -> int:
        """The rank's number in the whole gang, 0..world_size-1; without meaning for a tool."""

    @property
    def epoch(self) -> int:
        """The epoch of the grant that the process was started under."""

    @property
    def uid(self) -> int:
        """The user id of the process, as the kernel tells it."""

    @property
    def pages(self) -> RankPages | None:
        """The pages shared with the process; None while it has asked for none: then it goes by no limits."""

    @property
    def saves(self) -> bool:
        """Whether the process answers `AskSave`."""

    @property
    def save(self) -> SaveIs:
        """How far the save is that was asked for last, as the process said."""

    @property
    def may_own(self) -> bool | None:
        """Whether the process can sum tables of its job, when it is told to (`SumsOrder`); None: it has no tensors
        yet."""

    @property
    def gone(self) -> bool:
        """Whether the connection has ended, so that what is sent is lost."""

    def send(self, frame: Frame) -> None:
        """Send a frame. It never waits: a peer that is too far behind with reading is cut off."""

    def hand(self, frame: Frame, page: SharedPage) -> None:
        """Send a frame with the descriptor of a page, which stays open here until it is sent."""


class Host(Protocol):
    """What a plugin may ask of its agent."""

    @property
    def id(self) -> HostId:
        """This host's name."""

    @property
    def env(self) -> Env:
        """This host's ports: clock, chance, disk, links, processes, probes. Nothing else leads outside."""

    @property
    def advertise(self) -> str:
        """The IP address under which other hosts reach this one."""

    @property
    def boot(self) -> int:
        """The number of starts of this agent; kept on disk, it only grows."""

    @property
    def runner(self) -> Runner:
        """The runner, which starts and ends ranks here."""

    @property
    def log(self) -> ReplicatedLog:
        """The rack's replicated log; one plugin binds it."""

    def settings(self, kind: type[S]) -> S:
        """This plugin's section of agent.toml, checked."""

    def hosts(self) -> Sequence[HostView]:
        """Every host that gossip knows, this one included, sorted by name."""

    def spread(self, key: str, value: msgspec.Struct) -> None:
        """Gossip a value to all hosts under a key; they read it with `HostView.value`. It is a hint for others, never a
        promise. ValueError when it takes more than 256 bytes encoded."""

    def publish(self, fact: Fact) -> None:
        """Tell every plugin of this host, this one included, in order: a fact published while another one is told waits
        for its turn."""

    async def send(self, plugin: str, to: HostId, message: Message, deadline_s: float) -> bool:
        """Send a message at least once until `deadline_s` seconds have passed; `on_message` of the same plugin there
        handles it at most once. False: not acknowledged in time (it may still have been handled)."""

    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct:
        """Ask a question that changes nothing, and return the answer of the same plugin's `answer` there, decoded by
        `Plugin.messages`. TimeoutError when there is none in time, Refused when the other side refused."""

    def note(self, subject: str, event: str, reason: str, key: str = "") -> None:
        """Add one line to the event log of `subject`, for `agentctl why`."""

    def peers(self, job: JobId) -> Sequence[JobPeer]:
        """Processes of this job that are joined here now."""


@dataclass(frozen=True)
class Program:
    """A process of Covey beside the agent: bytes or supervision, no policy. It runs on the same ports."""

    name: str
    """The program's name, such as `slabd`, unique among all plugins."""
    config: type[msgspec.Struct]
    """The type of the configuration that it is started with."""
    run: Callable[[Env, Any], Coroutine[Any, Any, None]]
    """The program itself: it ends when its work is over, and is cancelled by SIGTERM."""
    goes_first: int = 0
    """The program's oom_score_adj: when memory runs out the kernel ends it before any job, and only time is lost."""


@dataclass(frozen=True)
class Plugin:
    """One folder of `plugins/`, as the registry lists it."""

    name: str
    """The name of the plugin's folder, of its section of agent.toml, and of the addressee of its messages."""
    paper: str
    """The paper or thesis that the plugin is built after."""
    settings: type[msgspec.Struct]
    """The type of its section of agent.toml: every field has a default that names its source."""
    messages: Any
    """The union of the Message classes that it hears and answers with; decoded with bounds."""
    service: Callable[[Host], "PluginService"]
    """Makes the service; called again, for a new one, after a failure."""
    programs: Sequence[Program] = ()
    """The plugin's own processes, beside the agent."""
    frames: Sequence[type[Frame]] = ()
    """The frames of jobs.sock that go to this plugin's `frame`."""
    metrics: Iterable[Metric] = ()
    """The metrics that its service may measure; names are of the whole rack, so no two plugins have the same."""
    asked_by: Mapping[str, Literal["anybody", "operators"]] = field(default_factory=dict)
    """Who may ask for each of its commands, in a plugin that is not one of the registry's: those are in the table of
    `agent.api.access`. A command that is in neither is refused to everybody."""


Command = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""A read or a change asked over HTTP: takes a JSON object, returns a Struct, list or dict; Refused when it cannot be
done. What it takes has also who asks (`asker_of`), which no JSON can say."""


class PluginService:
    """The part of a plugin that the agent calls. Subclasses hold machines, `feed` them events and `perform` what they
    ask for."""

    name: ClassVar[str]
    """The plugin's name."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.env = host.env
        self.log = host.env.log

    async def start(self) -> None:
        """Find again what survived (journal, processes), then begin. An exception stops this plugin, not the host."""

    async def stop(self) -> None:
        """Tell those who must know, within a second, that the agent leaves. Data-path processes stay."""

    def reconfigure(self, settings: Any) -> None:
        """Go by these settings from now on: they differ from those before in what is live (`agent.etc.reload`)."""

    def on_fact(self, fact: Fact) -> None:
        """Handle a fact from the bus, this plugin's own included."""

    async def on_message(self, sender: HostId, message: Any) -> None:
        """Handle a message from this plugin on another host; it is acknowledged when this returns."""

    async def answer(self, sender: HostId, question: Any) -> msgspec.Struct:
        """Answer a read-only question from this plugin on another host."""
        what = f"{self.name} does not answer {type(question).__name__}"
        raise Refused(2, what, "this agent does not know the question", "upgrade the older host")

    async def frame(self, peer: JobPeer, frame: Frame) -> None:
        """Handle a frame from a joined process; answer with `peer.send`."""

    def commands(self) -> Mapping[str, Command]:
        """The commands that HTTP and agentctl may call: name -> command."""
        return {}

    def tenants_of(self, user: str) -> Sequence[str]:
        """The tenants for which this user may submit jobs and create volumes."""
        return ()

    async def whose(self, name: str) -> OwnerUser:
        """The owner of the job or volume of this name, for the commands about it (`agent.api.access`). Refused where
        there is none of that name."""
        raise Refused(3, f"there is no {name[:80]!r}", f"plugin {self.name} has nothing that belongs to users", "none")

    def status(self) -> Mapping[str, str]:
        """Lines for `agentctl status`: subject -> how it is now."""
        return {}

    def metrics(self) -> Measured:
        """The values that this plugin measured, of the metrics that `Plugin.metrics` declares."""
        return {}

    def notes(self) -> Sequence[str]:
        """What `agentctl status` says of this host beside its state: what is not as it should be, and how to mend
        it."""
        return ()

    # ---- performing what machines ask for ----

    def perform(self, action: Any, feed: Callable[[Any], None]) -> None:
        """Perform one of the actions that every plugin shares; a plugin handles its own first and passes the rest here.
        `feed` hands an event to the machine that asked."""
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
    """Frames for one slow reader, bounded: `put` never blocks; when it is full the reader is cut off rather than the
    agent."""

    limit: int = 256
    """The most frames (not bytes) that wait."""
    over: bool = False
    """Whether the connection has ended."""
    queue: asyncio.Queue[tuple[bytes, tuple[SharedPage, ...]]] = field(default_factory=asyncio.Queue)
    """Frames that were put and not yet written, with the pages that go with each, oldest first."""

    def put(self, data: bytes, pages: tuple[SharedPage, ...] = ()) -> bool:
        """Add a frame; False when the reader is too far behind."""
        if self.queue.qsize() >= self.limit:
            return False
        with contextlib.suppress(asyncio.QueueFull):
            self.queue.put_nowait((data, pages))
        return True

    async def write_to(self, stream: ByteStream) -> None:
        """Write all that is put, until the connection ends."""
        with contextlib.suppress(ConnectionError):
            while True:
                data, pages = await self.queue.get()
                await (stream.write_with(data, pages) if pages else stream.write(data))
        self.over = True
