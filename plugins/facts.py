"""What plugins tell one another on one host (facts), and what hosts gossip about themselves (published values)."""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.events import Fact
from covey.core.ids import HostId, JobId
from covey.ports import Address
from covey.wire.job import GoneRank as GoneRank
from gossip.types import HostState as HostState
from gossip.types import HostView as HostView
from gossip.types import MaybeHostName as HostName

# ---- facts on the bus of one host ------------------------------------------------------------------------------------


class SecondPassed(Fact, frozen=True):
    """Told by the agent once a second."""

    now_s: float


class HostSeen(Fact, frozen=True):
    """Gossip: this host is alive (joined, came back, or refuted a suspicion)."""

    host: HostId


class HostSuspected(Fact, frozen=True):
    """Gossip: `by` could not reach it; it may still be alive."""

    host: HostId
    by: HostId


class HostAway(Fact, frozen=True):
    """Gossip: its agent restarts and is back within `for_s`; its slabs, sums and ranks go on meanwhile. Nothing new
    goes there, nothing is taken back. `HostSeen` follows, or `HostGone` once the time is over."""

    host: HostId
    for_s: float


class HostGone(Fact, frozen=True):
    """Gossip: dead to the rack, or left on purpose (`left`)."""

    host: HostId
    left: bool


class LeaderChanged(Fact, frozen=True):
    """The elected leader as this host knows it; None while there is none."""

    term: int
    leader: HostId | None


PART = "+"
"""`UUID+2` is a part of a GPU that an opportunistic job holds: the log gives one name to one job."""


class Place(msgspec.Struct, frozen=True):
    """The ranks of one gang on one host."""

    host: HostId
    ranks: tuple[int, ...]
    """Global ranks, in the order in which they came: at the start of a gang ascending and consecutive."""
    gpus: tuple[str, ...]
    """GPU UUIDs granted there, or parts of GPUs; empty for a job without GPUs."""
    since: int = 0
    """How many times places of this grant were exchanged when these ranks came here, the last of them; 0: they started
    with the gang."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Their UUIDs."""
        return tuple(gpu.partition(PART)[0] for gpu in self.gpus)


class JobPlaced(Fact, frozen=True):
    """The replicated log says: this gang runs here, under this epoch. Told on every host, also after a restart, and
    again under the same epoch when some of its ranks go on on another host."""

    job: JobId
    epoch: int
    tenant: str
    world_size: int
    places: tuple[Place, ...]
    tables: int
    """How many tables its tensors have (`covey.tensors.numbers.blocks`): as at its start, however many hosts it has
    now."""
    remote_memory: int = 0
    """Most remote memory that its volumes have, all hosts together, bytes; 0: not limited."""


class JobUnplaced(Fact, frozen=True):
    """The gang of this epoch is over: ended, cancelled, or taken back to be placed again. Told on every host."""

    job: JobId
    epoch: int
    ended: bool
    """True when the job will not run again."""


class RanksStarted(Fact, frozen=True):
    """The runner started (or, after a restart of the agent, found again) this host's ranks of a job."""

    job: JobId
    epoch: int
    pids: dict[int, int]
    """rank -> pid."""


class RankReplaced(Fact, frozen=True):
    """A rank here was lost, and started again alone: the others have what it needs (`covey.job.job_state`)."""

    job: JobId
    epoch: int
    rank: int
    pid: int
    """Of the process that takes its place."""
    incarnation: int
    """How many processes of this rank were lost."""


class RanksEnded(Fact, frozen=True):
    """All of this host's ranks of a job have ended."""

    job: JobId
    epoch: int
    codes: dict[int, int]
    """rank -> exit status: 0..255, or -N when killed by signal N."""
    reason: str
    """Empty, or why they could not be started or were ended (for people)."""
    lost: bool = False
    """They did not end by themselves: the machine restarted, or their supervisor died and took them along."""
    since: int = 0
    """Of the place that they had (`Place.since`)."""


class RankEndedHere(Fact, frozen=True):
    """The process of a rank here ended for good, while others of this host run. Told again after a restart."""

    job: JobId
    epoch: int
    rank: int
    code: int


class RanksLeft(Fact, frozen=True):
    """The log says that these ranks, of whatever hosts, ended with 0 while others of the gang run: they push nothing
    more. Told again and again."""

    job: JobId
    epoch: int
    ranks: dict[int, GoneRank]


class RankWaitsInVain(Fact, frozen=True):
    """A rank here ends its wait for a tensor with an error: another one, which has left, would have to push it."""

    job: JobId
    epoch: int
    rank: int
    why: str


class RanksHeal(Fact, frozen=True):
    """Whether this host and all its ranks of a job may be lost: other ranks have what their successors need, and its
    supervisor suspends them when no leader confirms them (`RankLease.pause_s`)."""

    job: JobId
    epoch: int
    since: int
    """Of their place."""
    may_be_lost: bool


class SparesReady(Fact, frozen=True):
    """Runner: so many processes wait on this host to become ranks of this job (`Runner.keep_spares`). Told whenever it
    changes, also of those that the runner keeps by itself, for ranks that run here."""

    job: JobId
    epoch: int
    warm: int
    why: str = ""
    """Why there are none, or fewer, for good."""


JobKind = Literal["guaranteed", "opportunistic"]


class RanksComing(Fact, frozen=True):
    """Scheduler: the log placed these ranks here, on GPUs that are shared. They start when `RanksMayStart` says so.
    Told again until it does, and after a restart of the agent also for ranks that run already."""

    job: JobId
    epoch: int
    kind: JobKind
    gpus: dict[int, tuple[str, ...]]
    """rank -> UUIDs of its own."""
    memory_bytes: int
    """What each rank asks for on each of its GPUs; 0: it did not say."""
    running: bool = False
    """They run already."""


class RanksMayStart(Fact, frozen=True):
    """Sharing: there is room for all of them on their GPUs, and what the others may do there is settled."""

    job: JobId
    epoch: int


class RanksUnfit(Fact, frozen=True):
    """Sharing: these ranks cannot be, or stay, on their GPUs here; the job is taken back and runs elsewhere."""

    job: JobId
    epoch: int
    why: str


class KindChanged(Fact, frozen=True):
    """Scheduler: the log upgraded or downgraded this gang in place, all ranks of it (AntMan §3.3)."""

    job: JobId
    epoch: int
    kind: JobKind
    grant: int
    """Log index of the change: an older one changes nothing."""


class GpuUse(msgspec.Struct, frozen=True):
    """One GPU of this host, as its sharing measures it."""

    uuid: str
    utilization: float
    """Mean over the last 10 s, 0..1 (AntMan §3.3: M)."""
    free_bytes: int
    """Of device memory, promised to nobody."""
    refusal: str = ""
    """Why no job comes here now; empty: one may."""


class GpusMeasured(Fact, frozen=True):
    """Sharing: told once a second, of every GPU here."""

    gpus: tuple[GpuUse, ...]


class PairHarms(Fact, frozen=True):
    """Sharing: measured here, `beside` makes `job` slower than is tolerated whatever it may do."""

    job: JobId
    beside: JobId
    slowdown: float
    """Share of the step alone, 0.08: 8 %."""
    error: float
    """One standard error of it."""


class JobJoined(Fact, frozen=True):
    """A rank of a job called `covey.join()` on this host."""

    job: JobId
    epoch: int
    rank: int
    kernel: str = ""
    """What it computes with (`covey/healing/kernels.py`); empty: not known."""


class StepTiming(msgspec.Struct, frozen=True):
    """How long the mini-batches of a job take. Medians over the newest, seconds."""

    step_s: Annotated[float, Meta(ge=0, le=1e9)]
    input_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Of it, waited for input."""
    communicate_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Of it, waited for other ranks."""
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Of the rank that uses most; 0: not known."""
    boundary: Annotated[str, Meta(max_length=32)] = "script"
    """What a mini-batch is: as the `script` says, or what `covey.hooks` sees (`optimizer`, `data loader`)."""


class StepTimed(Fact, frozen=True):
    """A rank on this host finished a mini-batch. All plugins that measure a job hear it."""

    job: JobId
    epoch: int
    rank: int
    step: int
    step_s: float
    compute_s: float
    communicate_s: float
    metrics: dict[str, float]
    input_s: float = 0.0
    """Of `step_s`, waited for input."""
    memory_bytes: int = 0
    """Highest use of device memory by this rank; 0: not known."""
    boundary: str = "script"
    """What a mini-batch is here (`covey.wire.job.Stepped`)."""


class JobHooked(Fact, frozen=True):
    """What `covey.hooks` sees of a rank's script on this host."""

    job: JobId
    epoch: int
    rank: int
    to: str
    """Such as `torch 2.13.0`; empty: nothing."""
    problem: str
    """Why less is seen than could be; empty: no reason."""


class HeartbeatHeard(Fact, frozen=True):
    """A process of a rank on this host said how its script gets on (`covey.wire.job.Heartbeat`)."""

    job: JobId
    epoch: int
    rank: int
    pid: int
    step: int | None
    quiet_s: float
    waits_s: float
    begun: bool = False


class RankShares(Fact, frozen=True):
    """A rank on this host goes by limits from now on: it has its pages (`JobPeer.pages`)."""

    job: JobId
    epoch: int
    rank: int


class TableUsed(Fact, frozen=True):
    """A rank on this host has Blocks in this table of its job (`covey.tensors.numbers.blocks`), other than table 0."""

    job: JobId
    epoch: int
    table: int


class TensorsSeen(Fact, frozen=True):
    """Tensors of a job's rank on this host: what the model's skew is measured from (Tiresias §3.2). Told again
    whenever one more, or a larger one, was seen; of one epoch the newest counts."""

    job: JobId
    epoch: int
    largest_bytes: int
    """Of the largest tensor."""
    total_bytes: int
    """Of all tensors, each counted once however many ranks push it."""


class TensorsAssigned(Fact, frozen=True):
    """Who sums a job's tensors from now on, as the ranks of this host are told. The higher `assignment` is the
    newer."""

    job: JobId
    epoch: int
    """Of the grant, as in `JobPlaced`."""
    assignment: int
    aggregator: HostId


class RanksAwaited(Fact, frozen=True):
    """Said where a job is summed, about once a second: its other ranks wait for the parts of these just now, if there
    are any."""

    job: JobId
    epoch: int
    """Of the grant, as in `JobPlaced`."""
    ranks: tuple[int, ...]
    waits_s: float


class SpareChanged(Fact, frozen=True):
    """This host can lend more or less memory than before."""

    spare_bytes: int


# ---- what a host publishes about itself by gossip: key -> Struct, msgpack, at most 256 bytes each --------------------


class Endpoints(msgspec.Struct, frozen=True):
    """Key `endpoints`: where this host's agent answers."""

    control: Address
    public_key: bytes
    boot: int
    """Counts starts of the agent; a message from an older boot is stale."""
    http: Address = ""


class Spare(msgspec.Struct, frozen=True):
    """Key `spare`: memory above headroom. A hint with an age: whoever is chosen is asked live and may refuse."""

    slab_bytes: int
    """Memory that a slab of its own size takes at a lender, with seals: others of that size hear of each that fits."""
    slabs_free: int
    slabs_lent: int
    rack: Annotated[str, Meta(max_length=63)] = ""
    """What the host stands in, as its agent.toml says; empty: no label."""


class LentNow(msgspec.Struct, frozen=True, array_like=True):
    """Key `lent`: what this host lends to tenants and jobs, so that budgets hold over the rack
    (`plugins/memory/policy/budgets.py`)."""

    accounts: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...], Meta(max_length=64)] = ()
    """CRC-32 of `tenant/NAME` or `job/ID`, KiB, and so on: those that have most of their budgets here."""


class GpusNow(msgspec.Struct, frozen=True):
    """Key `gpus`: what a gang could get here. A hint."""

    total: int
    """All that this host has, also those of which its driver tells nothing now."""
    free: int
    """Of those that take jobs."""
    model: str
    simulated: bool
    out: int = 0
    """Of `total`: those that no job holds and that take none, since they are sick, or nobody knows how they are."""
    why: Annotated[str, Meta(max_length=96)] = ""
    """What is wrong with the worst one, or why nobody knows which GPUs are here; empty: all take jobs."""
    known: bool = True
    """Whether this host knows which GPUs it has."""


class GpusShared(msgspec.Struct, frozen=True):
    """Key `gpus_shared`: which GPUs are here and how busy they are, for jobs beside others. A hint. Only in racks where
    some host shares its GPUs."""

    setting: Annotated[int, Meta(ge=0, le=64)]
    """`beside` in agent.toml there."""
    takes: Annotated[int, Meta(ge=0, le=64)]
    """Opportunistic jobs on one GPU at most, now: 0 while nothing measures them."""
    names: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=64)]
    """CRC-32 of each GPU's UUID, by number; none when two of them are alike."""
    use: Annotated[tuple[Annotated[int, Meta(ge=0, le=127)], ...], Meta(max_length=64)]
    """Percent of the last 10 s, for each; 127: it takes no job now."""


class LateHost(msgspec.Struct, frozen=True):
    """A host for which the other ranks of a job waited, in percent of the job's newest minutes."""

    host: HostId
    job: JobId
    percent: int


class LateNow(msgspec.Struct, frozen=True):
    """Key `late`: hosts for whose ranks others wait again and again, as this host sees it, which sums for them."""

    hosts: Annotated[tuple[LateHost, ...], Meta(max_length=8)] = ()


class DrainedNow(msgspec.Struct, frozen=True):
    """Key `drained`: whether this host is to be left, as its copy of the log says."""

    by: str
    """Who wants that, cut short; empty: nobody."""
    jobs: int = 0
    """That still have ranks here."""


def drained(view: HostView) -> DrainedNow | None:
    """What a host says of that; None: it takes jobs, slabs and sums as ever."""
    said = view.value("drained", DrainedNow)
    return said if isinstance(said, DrainedNow) and said.by else None


def is_drained(host: HostId, views: Iterable[HostView]) -> bool:
    """Whether this host, which is among `views`, says so of itself."""
    return any(drained(view) for view in views if view.host == host)


class LogNow(msgspec.Struct, frozen=True, array_like=True):
    """Key `log`: which rack's log this host follows."""

    rack: Annotated[bytes, Meta(max_length=8)] = b""
    """Random, of the first entry of that log (`agent/raft/messages.py`); empty: it is not certain of any."""
    leader: HostName = HostId("")
    """Whom it follows, itself when it leads; empty: nobody now."""


class WrongNow(msgspec.Struct, frozen=True, array_like=True):
    """Key `wrong`: what this host saw that somebody has to mend."""

    names: Annotated[tuple[HostName, ...], Meta(max_length=8)] = ()
    """Names that two machines claim."""
    full: HostName = HostId("")
    """A host that it does not let in, since it knows `hosts_max` hosts; empty: there is room."""


class AggregatorNow(msgspec.Struct, frozen=True):
    """Key `aggregator`: who sums tensors here, and how busy it is. A hint."""

    address: Address
    """Where the process that sums listens, or `asleep`: the first offer starts it. Empty: nothing is summed there."""
    jobs: int
    load: float
    """Measured: part of the time that its process worked, 0..1."""
    cycle_us: int = 0
    """C of the jobs it promised to sum, microseconds (AutoPS §4.3.3.2); 0 without any."""
    used_us: int = 0
    """W, their work in one cycle."""
    lanes: int = 1
