"""What plugins tell one another on one host."""

from collections.abc import Collection, Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.events import Fact
from covey.core.ids import HostId, JobId
from covey.wire.job import GoneRank as GoneRank
from gossip.types import HostState as HostState
from gossip.types import HostView as HostView


class SecondPassed(Fact, frozen=True):
    """The agent's tick, told once a second."""

    now_s: float


class HostSeen(Fact, frozen=True):
    """Gossip: this host is alive (joined, came back, or refuted a suspicion)."""

    host: HostId


class HostSuspected(Fact, frozen=True):
    """Gossip: `by` could not reach it; it may still be alive."""

    host: HostId
    by: HostId


class HostAway(Fact, frozen=True):
    """Gossip: the agent of this host restarts and is back within `for_s` seconds; its slabs, sums and ranks keep
    running meanwhile. Nothing new goes there, nothing is taken back. `HostSeen` follows, or `HostGone` once the time is
    over."""

    host: HostId
    for_s: float


class HostGone(Fact, frozen=True):
    """Gossip: this host is dead to the rack, or left on purpose (`left`)."""

    host: HostId
    left: bool


class HostNeverBack(Fact, frozen=True):
    """The log: somebody says that this host, of this boot or an earlier one, will never come back."""

    host: HostId
    boot: int


class LeaderChanged(Fact, frozen=True):
    """The elected leader as this host knows it; None while there is none."""

    term: int
    leader: HostId | None


PART = "+"
"""The separator in the name of a part of a GPU: `UUID+2` is a part that an opportunistic job holds, since the log gives
one name to one job."""


class Place(msgspec.Struct, frozen=True):
    """The ranks of one gang on one host."""

    host: HostId
    ranks: tuple[int, ...]
    """Global ranks, in the order in which they came: at the start of a gang ascending and consecutive."""
    gpus: tuple[str, ...]
    """GPU UUIDs granted there, or parts of GPUs; empty for a job without GPUs."""
    since: int = 0
    """How many times places of this grant had been exchanged when these ranks came here, their own exchange included;
    0: they started with the gang."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs, or of the GPUs that these are parts of."""
        return tuple(gpu.partition(PART)[0] for gpu in self.gpus)


def coordinator_place(places: Iterable[Place], gone: Collection[HostId]) -> Place | None:
    """The place whose host is the job's coordinator: of those whose hosts are not `gone` the one with the lowest
    process. None: nobody is there."""
    there = [place for place in places if place.ranks and place.host not in gone]
    return min(there, key=lambda place: min(place.ranks), default=None)


class JobPlaced(Fact, frozen=True):
    """The replicated log says: this gang runs here, under this epoch. Told on every host, also after a restart, and
    again under the same epoch when some of its ranks continue on another host."""

    job: JobId
    epoch: int
    tenant: str
    world_size: int
    places: tuple[Place, ...]
    tables: int
    """The number of tables of its tensors (`covey.tensors.numbers.blocks`), fixed at its start, however many hosts it
    has now."""
    remote_memory: int = 0
    """The most remote memory that its volumes may have, all hosts together, bytes; 0: not limited."""
    config: int = 0
    """The number of the job's configuration (`JobHealing.healed`): a proposal for another one names it."""
    carried: dict[int, tuple[int, ...]] = {}
    """In an elastic job: the ranks that each process carries, by its first rank; `places` name processes then."""
    owners: tuple[HostId, ...] = ()
    """The host that is to own each table, in the order of tables; empty: nobody said, and each table goes to the host
    of its number, as does one whose owner has an empty name."""
    owners_since: int = 0
    """The number of the configuration that said so: each that says it again ends what people wished meanwhile."""
    share_host: str = ""
    """The group of jobs with which it takes turns on hosts that they share; empty: it takes no turns."""
    workers: int = 0
    """The fewest processes of an elastic job; 0: it is not elastic."""


def owner_of_table(placed: JobPlaced, table: int) -> HostId | None:
    """The host that is to own this table of the job: the one that the log names, else the host of the table's number
    among those of the job. None: the log names none, and the job has no places."""
    hosts = list(dict.fromkeys(place.host for place in placed.places))
    named = placed.owners[table] if table < len(placed.owners) else HostId("")
    return named or (hosts[table % len(hosts)] if hosts else None)


class WantedArrangement(msgspec.Struct, frozen=True):
    """How somebody on this host wants an elastic job to be arranged."""

    epoch: int
    replaces: int
    """The number of the configuration that it replaces (`JobPlaced.config`)."""
    processes: dict[HostId, int] = {}
    """Host -> how many processes of the job it has; a host that is not named has none. Empty: all stay as they are."""
    shares: dict[HostId, int] = {}
    """Host -> how many of the job's ranks its processes carry together. Empty: all processes carry equally many."""
    owners: tuple[HostId, ...] | None = None
    """The host that is to own each table; it needs no process of the job. Empty: as nobody said, as is an empty name
    for one table; None: as it is."""


class ArrangementsWanted(Fact, frozen=True):
    """A plugin on this host wants these elastic jobs to be arranged anew, all of them or none."""

    ask: str
    """Name of this wish, which its answer repeats."""
    jobs: dict[JobId, WantedArrangement]
    by: str
    """Who wants it, for people: `the tuner`."""
    why: str
    """Why, for people: what is predicted to come of it."""


class ArrangementsAnswered(Fact, frozen=True):
    """Scheduler: the wish of this name is in force in the log, or why it is not."""

    ask: str
    refused: str = ""
    """Why nothing was arranged anew; empty: it was."""
    full: HostId = HostId("")
    """The host that has no room for a process of it, if that is why."""


class TunerAsked(Fact, frozen=True):
    """The log says whether this elastic job, which runs, is tuned (`agentctl tune`). Told on every host, after its
    `JobPlaced`, also after a restart."""

    job: JobId
    epoch: int
    asked: int
    """The index of the log at which somebody switched the tuner on; 0: it is off. Whoever asks again moves it: the
    tuner begins anew."""


class JobUnplaced(Fact, frozen=True):
    """The gang of this epoch is over: ended, cancelled, or taken back to be placed again. Told on every host."""

    job: JobId
    epoch: int
    ended: bool
    """True when the job will not run again."""


class RanksStarted(Fact, frozen=True):
    """The runner started (or, after a restart of the agent, found again) this host's ranks of a job. Told again once
    ranks that joined them run, and processes that left an elastic job's place here have ended."""

    job: JobId
    epoch: int
    pids: dict[int, int]
    """The processes: rank -> pid."""


class RankReplaced(Fact, frozen=True):
    """A rank here was lost, and started again alone: the others have what it needs (`covey.job.job_state`)."""

    job: JobId
    epoch: int
    rank: int
    pid: int
    """The pid of the process that takes its place."""
    incarnation: int
    """The number of processes of this rank that were lost."""


class MemoryKilled(msgspec.Struct, frozen=True):
    """The kernel killed processes of a job on this host, as their memory was at its limit there."""

    killed: int
    """The number of processes, since a rank was last started again there."""
    peak_bytes: int
    """The most memory that the job had there; 0: not known."""
    limit_bytes: int


StartFault = Literal["", "host", "job"]
"""Whose fault it is that ranks never ran: `host`: this host failed them, whatever job they are of; `job`: their
command, or something of their user's; empty: they ran, or were stopped before."""


class RanksEnded(Fact, frozen=True):
    """All of this host's ranks of a job have ended."""

    job: JobId
    epoch: int
    codes: dict[int, int]
    """How each rank ended: rank -> exit status, 0..255, or -N when killed by signal N."""
    reason: str
    """Why the ranks could not be started or were ended, for people; empty: no reason."""
    lost: bool = False
    """The ranks did not end by themselves: the machine restarted, or their supervisor died and took them along."""
    since: int = 0
    """`Place.since` of the place that these ranks had."""
    oom: MemoryKilled | None = None
    """What the kernel killed of them since their memory was at its limit; None: nothing, or it does not say."""
    unstarted: StartFault = ""


class RankEndedHere(Fact, frozen=True):
    """The process of a rank here ended for good, while others of this host run. Told again after a restart."""

    job: JobId
    epoch: int
    rank: int
    code: int


class RankLeavesHere(Fact, frozen=True):
    """The process of a rank here that pushed tensors has left well, and no other took its place: what started it (a
    shell, a launcher) still runs, or it does something else."""

    job: JobId
    epoch: int
    rank: int


class RanksLeft(Fact, frozen=True):
    """The log says that these ranks, of whatever hosts, ended with 0 while others of the gang run: they push nothing
    more. It is told again and again."""

    job: JobId
    epoch: int
    ranks: dict[int, GoneRank]


class RankWaitsInVain(Fact, frozen=True):
    """A rank here ended its wait for a tensor with an error: another rank, which has left, would have to push it."""

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
    """`Place.since` of these ranks' place."""
    may_be_lost: bool
    have: tuple[int, ...] = ()
    """In an elastic job: the processes here that have the job's state now; one that was lost and starts again has not,
    until it says so."""


class SparesReady(Fact, frozen=True):
    """Runner: `warm` processes wait on this host to become ranks of this job (`Runner.keep_spares`). Told whenever the
    number changes, also of processes that the runner keeps by itself, for ranks that run here."""

    job: JobId
    epoch: int
    warm: int
    why: str = ""
    """Why there are no spares, or fewer, for good."""


JobKind = Literal["guaranteed", "opportunistic"]


class RanksComing(Fact, frozen=True):
    """Scheduler: the log placed these ranks here, on GPUs that are shared. They start when `RanksMayStart` says so.
    Told again until it does, and after a restart of the agent also for ranks that run already."""

    job: JobId
    epoch: int
    kind: JobKind
    gpus: dict[int, tuple[str, ...]]
    """GPUs of each rank: rank -> UUIDs of its own."""
    memory_bytes: int
    """Bytes that each rank asks for on each of its GPUs; 0: it did not say."""
    running: bool = False
    """The ranks run already."""


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
    """The log index of the change: an older one changes nothing."""


class GpuUse(msgspec.Struct, frozen=True):
    """One GPU of this host, as its sharing measures it."""

    uuid: str
    utilization: float | None
    """Mean utilization over the last 10 s, 0..1 (AntMan §3.3: M); None: not known."""
    free_bytes: int
    """Bytes of device memory that are promised to no job."""
    refusal: str = ""
    """Why this GPU takes no job now; empty: it takes one."""
    jobs: int = 1
    """How many jobs have ranks there."""


class GpusMeasured(Fact, frozen=True):
    """Sharing: told once a second, of every GPU here."""

    gpus: tuple[GpuUse, ...]


class PairHarms(Fact, frozen=True):
    """Sharing: as measured here, `beside` makes `job` slower than is tolerated, whatever limits `beside` has."""

    job: JobId
    beside: JobId
    slowdown: float
    """How much longer a step takes, as a share of the step alone: 0.08 is 8 %."""
    error: float
    """One standard error of `slowdown`."""


class JobJoined(Fact, frozen=True):
    """A rank of a job called `covey.join()` on this host."""

    job: JobId
    epoch: int
    rank: int
    kernel: str = ""
    """The kernel that the rank computes with (`covey/healing/kernels.py`); empty: not known."""


class RankDisconnected(Fact, frozen=True):
    """A process of a rank on this host is no longer connected: it has ended, closed its connection, or was cut off."""

    job: JobId
    epoch: int
    rank: int


class SavedAt(msgspec.Struct, frozen=True):
    """A checkpoint that is complete."""

    step: Annotated[int, Meta(ge=0, le=1 << 53)]
    """The step with which the job continues from it."""
    wall_s: Annotated[float, Meta(ge=0, le=1e12)]
    """When it was complete, in seconds since 1970, by the clock of the host that wrote it."""
    path: Annotated[str, Meta(max_length=1024)]


class StepTiming(msgspec.Struct, frozen=True):
    """How long the mini-batches of a job take: medians over the newest ones, in seconds."""

    step_s: Annotated[float, Meta(ge=0, le=1e9)]
    input_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds of `step_s` spent waiting for input."""
    communicate_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds of `step_s` spent waiting for other ranks."""
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Device memory of the rank that uses most, bytes; 0: not known."""
    boundary: Annotated[str, Meta(max_length=32)] = "script"
    """What a mini-batch is: one that the `script` itself reports, or one that `covey.hooks` sees (`optimizer`, `data
    loader`)."""
    sending_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds in which a process sent under a turn; 0 in a job that takes no turns."""
    turns_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds of `step_s` spent waiting for turns of other jobs."""


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
    """Seconds of `step_s` spent waiting for input."""
    memory_bytes: int = 0
    """The most device memory that this rank used, bytes; 0: not known."""
    boundary: str = "script"
    """What a mini-batch is here (`covey.wire.job.Stepped`)."""
    sending_s: float = 0.0
    """Seconds in which the process sent under a turn (COMM); 0 in a job that takes no turns."""
    turns_s: float = 0.0
    """Seconds of `step_s` in which the script waited for turns of other jobs; not in `communicate_s`."""
    added_s: float = 0.0
    """Seconds of a processor that the process used while its script waited for sums; 0 in a job that takes no turns."""


class MemoryInUse(msgspec.Struct, frozen=True):
    """Memory of one host that the processes of a job have there, as they said last, all together."""

    blocks_bytes: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Data Blocks in memory."""
    arrays_bytes: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Arrays that scripts registered as their state; 0: not known, as in a job without a limit of host memory."""
    peak_bytes: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """The most resident memory of each process, added up; 0: not known."""


class MemoryMeasured(Fact, frozen=True):
    """What the processes of a job on this host said last of their memory."""

    job: JobId
    epoch: int
    memory: MemoryInUse


class MemoryPromised(Fact, frozen=True):
    """What jobs may take of this host's memory together by their `--mem`, in use already or not."""

    promised_bytes: int


class JobHooked(Fact, frozen=True):
    """What `covey.hooks` sees of a rank's script on this host."""

    job: JobId
    epoch: int
    rank: int
    to: str
    """What is attached, such as `torch 2.13.0`; empty: nothing."""
    problem: str
    """Why less is seen than could be; empty: there is no reason."""


class JobSaved(Fact, frozen=True):
    """A rank on this host has written a checkpoint (`covey.wire.job.CheckpointSaved`)."""

    job: JobId
    epoch: int
    rank: int
    saved: SavedAt


class HeartbeatHeard(Fact, frozen=True):
    """A process of a rank on this host said how its script is doing (`covey.wire.job.Heartbeat`)."""

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
    """A rank on this host has Blocks in this table of its job (`covey.tensors.numbers.blocks`), and needs its owner."""

    job: JobId
    epoch: int
    table: int


class TensorsSeen(Fact, frozen=True):
    """Tensors of a job's rank on this host: what the model's skew is measured from (Tiresias §3.2). Told again whenever
    one more, or a larger one, was seen; within one epoch the newest counts."""

    job: JobId
    epoch: int
    largest_bytes: int
    """Bytes of the largest tensor."""
    total_bytes: int
    """Bytes of all tensors, each counted once however many ranks push it."""


class TensorsAssigned(Fact, frozen=True):
    """Who sums a job's tensors from now on, as the ranks of this host are told. The higher `assignment` is the
    newer."""

    job: JobId
    epoch: int
    """The epoch of the grant, as in `JobPlaced`."""
    assignment: int
    aggregator: HostId


class RanksAwaited(Fact, frozen=True):
    """The ranks whose parts the other ranks of a job wait for now, if there are any; told where the job is summed,
    about once a second."""

    job: JobId
    epoch: int
    """The epoch of the grant, as in `JobPlaced`."""
    ranks: tuple[int, ...]
    waits_s: float


class SumsWorked(Fact, frozen=True):
    """What the `aggd` of this host did for one table of a job since it was asked last, about a second before."""

    job: JobId
    epoch: int
    """The epoch of the grant, as in `JobPlaced`."""
    table: JobId
    rounds: int
    """Rounds of its most frequent tensor, at least one: mini-batches."""
    worked_s: float
    """Seconds of a processor that it used for them."""


class SpareChanged(Fact, frozen=True):
    """This host can lend more or less memory than before."""

    spare_bytes: int
