"""One job as every host knows it from the log: its states, and in `TRANSITIONS` what may follow each.

`placing`, `running` and `stopping` hold quota. `running` ends by itself when every host reported zeros; anything else
passes through `stopping`, and the job is over only when each of its hosts has said that nothing of it runs there any
more, or is lost.
"""

from collections.abc import Collection, Container, Iterable
from typing import Literal, assert_never, get_args

import msgspec

from covey.core.ids import HostId, JobId
from covey.core.transitions import StateTable
from covey.wire.job import GoneRank
from plugins.facts import Place, SavedAt, StepTiming
from plugins.scheduler.machine.log.bills import JobBill
from plugins.scheduler.messages.spec import JobClass, JobSpec, SealedEnv
from plugins.scheduler.policy.order import Row, queue_of

Holding = Literal["placing", "running", "stopping"]
Over = Literal["done", "failed", "cancelled"]
State = Literal["queued", Holding, Over]
"""The states of a job. A new one is written into one of these three types: what it counts against and what waits for it
follow from that."""
After = Literal["queued", "failed", "cancelled"]
Cause = Literal["preempted", "host lost", "exit 75", "failed", "unfit"]
"""Why a job that ran is to run again: each cause is counted by itself, and has a limit of its own."""
StopCause = Literal["", Cause, "time limit", "cancelled", "requeued"]
"""Why a job's ranks are told to stop; empty: they are not, or an older version did not say."""
STATES: tuple[State, ...] = get_args(State)
"""All states, in the order in which a job passes through them."""
HOLDING: tuple[State, ...] = get_args(Holding)
"""The states that count against the tenant's quota."""
OVER: tuple[Over, ...] = get_args(Over)
"""The states that a job never leaves. Nothing else says which these are: programs read `JobView.over`."""
TRANSITIONS: StateTable[State] = StateTable(
    "a job in the log",
    {
        "queued": {
            "placing": "the leader grants it GPUs of its tenant's quota and names its coordinator",
            "cancelled": "it is cancelled",
            "done": "it is an array, and none of its tasks failed",
            "failed": "it is an array, and some of its tasks failed",
        },
        "placing": {
            "running": "its coordinator reserved GPUs for every worker",
            "queued": "no hosts could be reserved, or the leader takes the grant back",
            "cancelled": "it is cancelled",
        },
        "running": {
            "stopping": "cancelled, its time limit reached, preempted, a host or a worker lost, a worker failed, "
            "or it cannot be beside others on its GPUs",
            "done": "each of its hosts reported that all workers exited with 0",
        },
        "stopping": {
            "stopping": "cancelled while it stopped in order to run again",
            "queued": "all hosts reported or are lost, and it is to run again",
            "failed": "all hosts reported or are lost; it failed, or reached its time limit",
            "cancelled": "all hosts reported or are lost, and it was cancelled",
            "done": "all workers exited with 0, before a host told any of them to stop",
        },
        "done": {},
        "failed": {},
        "cancelled": {},
    },
)


class FirstFailure(msgspec.Struct, frozen=True):
    """The failure that decided how the job ends."""

    host: HostId
    rank: int
    code: int
    words: str


class JobTimes(msgspec.Struct):
    """When the job was submitted, first started and ended: by wall clocks, for people, and by the rack's clock
    (`JobTable.rack_s`), by which durations are counted."""

    submitted_wall_s: float
    started_wall_s: float | None = None
    ended_wall_s: float | None = None
    submitted_rack_s: float = 0.0
    started_rack_s: float | None = None
    ended_rack_s: float | None = None
    began_rack_s: float | None = None
    """In an elastic job: when its present start began; None: it does not run."""
    ran_s: float = 0.0
    """In an elastic job: seconds that its earlier starts ran."""
    limit_from_s: float = 0.0
    """Seconds that it had run when a person queued it again: its time limit counts from there."""


class JobTally(msgspec.Struct):
    """How often each thing happened to the job."""

    attempt: int = 0
    """The number of starts so far."""
    preemptions: int = 0
    requeues: int = 0
    """How often the job asked to be started again (exit 75)."""
    hosts_lost: int = 0
    """How often a host lost the job's ranks."""
    failures: int = 0
    """How often the job failed by itself."""
    unfit: int = 0
    """How often the job could not be, or stay, on the GPUs that it was placed on."""
    place_failures: int = 0
    """Failed attempts to place the job in a row, since it last started."""


class JobPriority(msgspec.Struct):
    """What the order of jobs goes by, beside the job's attained service. Moments are indices of the log."""

    first: int | None = None
    """Index of the job's first start."""
    promoted: int | None = None
    """Index of the newest promotion."""
    lasts: bool = False
    """Whether that lasts until the job ends; else until it sinks out of the highest queue."""
    base_gpu_s: float = 0.0
    """Attained service at the newest promotion, GPU·s."""
    base_ran_s: float = 0.0
    """In an elastic job: seconds that it had run at the newest promotion."""
    demoted: int | None = None
    """Index at which this job of class auto became opportunistic."""
    upgraded: int | None = None
    """Index at which the job became guaranteed again, for good."""
    queued_s: float = 0.0
    """The log's clock (`JobTable.clock_s`) when the present wait began."""
    waited_s: float = 0.0
    """Seconds of the waits before the present one, since the job's last promotion."""
    turn: int | None = None
    """The number in whose place the job is in the order of admission; None: its own."""


class JobHolds(msgspec.Struct):
    """What keeps a queued job from starting, beside GPUs."""

    held: str = ""
    """Why it is held until somebody releases it, in words; empty: it is not."""
    after: tuple[str, ...] = ()
    """The jobs that it still waits for (`JobSpec.after`)."""
    begin_wall_s: float | None = None
    """The time that it still waits for (`JobSpec.begin_wall_s`)."""
    ended: dict[JobId, str] = {}
    """How each job ended that it waited for: `done`, `failed 3` with its exit code."""


class JobArray(msgspec.Struct):
    """How far an array is."""

    begun: int = 0
    """The number of tasks that began or were passed over, in their order."""
    live: dict[int, JobId] = {}
    """Index -> the job of each task that has begun and not ended."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Tasks that are never to begin, by their places in that order."""
    closed: str = ""
    """Why no more tasks begin, in words; empty: they do."""
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    failed_tasks: tuple[int, ...] = ()
    """The first of them, by index."""
    code: int = 0
    """The exit code of the first that failed."""


class JobTask(msgspec.Struct, frozen=True):
    """Which task of which array a job is."""

    array: JobId
    index: int
    tasks: str
    """The tasks of that array, as it was submitted."""


class JobGrant(msgspec.Struct):
    """The newest grant of a job."""

    epoch: int = 0
    """The grant's epoch, its fencing token."""
    coordinator: HostId | None = None
    index: int = 0
    """Log index of this grant, or of its start: it tells one `placing` from the next."""


class JobStart(msgspec.Struct):
    """The newest start of a job, also after it is over."""

    places: tuple[Place, ...] = ()
    tables: int = 0
    """The number of tables of this start's tensors (`covey.tensors.numbers.blocks`): fixed when its places were first
    found, whatever becomes of these later, since every rank cuts its tensors by it, and of an elastic job by the number
    of its ranks; 0: it has not started."""
    carried: dict[int, tuple[int, ...]] = {}
    """In an elastic job: for each process, named by its first rank, the ranks that it carries
    (`plugins.scheduler.policy.carrying`). `Place.ranks` names processes then."""
    master_addr: str = ""
    master_port: int = 0
    step: int | None = None
    """The newest step that the log knows."""
    metrics: dict[str, float] = {}
    step_s: float | None = None
    """Median step time of the slowest host, seconds."""
    timings: dict[HostId, StepTiming] = {}
    """How long the job's steps take, by host."""
    owners: tuple[HostId, ...] = ()
    """In an elastic job: the host that is to own each table; empty: nobody said, as is an empty name for one table."""
    owners_since: int = 0
    """The number of the configuration that said so (`JobHealing.healed`)."""
    came: dict[int, int] = {}
    """In an elastic job: the configuration in which each rank came to the process that carries it, by rank; 0 for a
    rank that is not named: it is where it started."""


class JobEnding(msgspec.Struct):
    """How a grant ends, or ended."""

    codes: dict[HostId, dict[int, int]] = {}
    """The exit codes that each host reported: host -> rank -> code."""
    asked: bool = False
    """Whether some of the ranks had been told to stop."""
    lost: tuple[HostId, ...] = ()
    """Hosts whose reports are not awaited any more."""
    after: After | None = None
    """The state that follows `stopping`."""
    blame: FirstFailure | None = None
    oom_bytes: int = 0
    """Memory of the host's ranks whose failure came first, where the kernel killed a process of them at their limit,
    bytes; 0: it did not."""
    exit_code: int | None = None
    """The exit code of a job that is over."""
    cause: StopCause = ""
    """Why it was told to stop."""
    told_rack_s: float | None = None
    """When it was told to stop, by the rack's clock in seconds; None: it was not, or an older version did not say."""


class SureStart(msgspec.Struct, frozen=True):
    """An elastic job before processes of it were to end: hosts leave it so until some host has said that a process that
    stays has the job's state. The log may not have heard yet that all of those have died."""

    config: int
    """The number of this configuration."""
    places: tuple[Place, ...]
    leaving: tuple[Place, ...]
    """Places of earlier configurations whose processes were to end already."""
    carried: dict[int, tuple[int, ...]]
    came: dict[int, int]
    owners: tuple[HostId, ...]
    owners_since: int
    may_be_lost: tuple[HostId, ...]
    have: dict[HostId, tuple[int, ...]]
    """What its hosts said last, those too whose processes are to end."""


class JobHealing(msgspec.Struct):
    """What a gang that continues without some of its hosts, or on others, remembers under this grant
    (`machine/log/replacing.py`)."""

    may_be_lost: tuple[HostId, ...] = ()
    """Hosts that may be lost, with all the job's ranks there: others have what their successors need."""
    have: dict[HostId, tuple[int, ...]] = {}
    """In an elastic job: for each host, the processes that have the job's state, as it said last."""
    awaited: tuple[int, ...] = ()
    """In an elastic job: processes that did not have its state yet when others ended: nobody else may carry their ranks
    meanwhile, and then all wait for them."""
    healed: int = 0
    """How often places were exchanged (`Place.since`)."""
    missing: tuple[HostId, ...] = ()
    """Hosts among the job's places that are lost; their ranks are to continue elsewhere, and all others wait for
    them."""
    moving: dict[HostId, HostId] = {}
    """Hosts that the job's ranks are to leave -> the host where they are to go; empty: wherever there is room."""
    leaving: tuple[Place, ...] = ()
    """Earlier places of the job: ranks there end, and their successors, which are in `places`, start after that."""
    sought: int = 0
    """How often new places for some of the job's ranks were to be found."""
    at_most: int = 0
    """The number of processes that a person asked for last, or a plugin (the tuner), over which the leader lets the job
    not grow; 0: nobody has asked."""
    wanted: int = 0
    """The number of processes that an elastic job is to grow to; 0: it is not to grow."""
    wanted_by: str = ""
    """Who wants that, and why, in words."""
    gone: dict[int, GoneRank] = {}
    """Ranks that ended with 0, while others run: those would wait for them in vain (`covey.tensors.owner.leaving`)."""
    tuned: tuple[str, int] = ("", 0)
    """Who switched the tuner on for an elastic job, and the index of the log then; ("", 0): it is off. Another grant
    keeps it."""
    losses: tuple[int, int] = (0, 0)
    """The newest step that was known when the job last lost a host, and how many hosts it has lost since that step."""
    sure: SureStart | None = None
    """In an elastic job: how it was before processes were to end that may be the last with its state; None: a host has
    said since that one that stays has it, or none ends."""


class JobMeasured(msgspec.Struct):
    """What hosts measured of a job."""

    attained: dict[HostId, float] = {}
    """Attained service per host, GPU·s, max-merged."""
    tensors: tuple[int, int] = (0, 0)
    """Bytes of the job's largest tensor, and of all; (0, 0): not seen."""
    saved: SavedAt | None = None
    """The newest checkpoint that ranks of the job wrote; None: none is known."""
    saves_at_stop: bool = False
    """Whether the job completed a checkpoint after it was told to stop."""
    harms: tuple[JobId, ...] = ()
    """The newest guaranteed jobs that were measured to suffer from this one on their GPUs."""


class Job(msgspec.Struct, kw_only=True):
    """The record of a job in the replicated state; only commands of the log change it (`machine/log/queue.py`)."""

    id: JobId
    number: int
    key: str
    spec: JobSpec
    env: SealedEnv | None = None
    """The submitter's environment, sealed on some hosts; None: it is empty."""
    state: State = "queued"
    reason: str = ""
    times: JobTimes
    tally: JobTally = msgspec.field(default_factory=JobTally)
    priority: JobPriority = msgspec.field(default_factory=JobPriority)
    grant: JobGrant = msgspec.field(default_factory=JobGrant)
    start: JobStart = msgspec.field(default_factory=JobStart)
    ending: JobEnding = msgspec.field(default_factory=JobEnding)
    healing: JobHealing = msgspec.field(default_factory=JobHealing)
    measured: JobMeasured = msgspec.field(default_factory=JobMeasured)
    holds: JobHolds = msgspec.field(default_factory=JobHolds)
    bill: JobBill = msgspec.field(default_factory=JobBill)
    array: JobArray | None = None
    """How far its tasks are; None: it is no array."""
    task: JobTask | None = None
    """Which task it is; None: of no array."""

    @property
    def is_free(self) -> bool:
        """Whether nothing but GPUs, quota and order keeps it from starting, or tasks of it from beginning."""
        return not self.holds.held and not self.holds.after and self.holds.begin_wall_s is None

    @property
    def may_start(self) -> bool:
        """Whether the job waits for GPUs, quota and order alone."""
        return self.state == "queued" and self.array is None and self.is_free

    @property
    def turn(self) -> int:
        """The job's place in the order of admission."""
        return self.number if self.priority.turn is None else self.priority.turn

    @property
    def attained_gpu_s(self) -> float:
        return sum(self.measured.attained.values(), 0.0)

    def ran_s(self, rack_s: float) -> float:
        """Seconds that the job has run, all attempts together, when the rack's clock shows `rack_s`. That follows from
        its attained service, unless its width changes."""
        if not self.spec.elastic:
            return self.attained_gpu_s / self.spec.width
        began_s = self.times.began_rack_s
        return self.times.ran_s + (0.0 if began_s is None else max(0.0, rack_s - began_s))

    def ran_of_limit_s(self, rack_s: float) -> float:
        """Seconds of its time limit that the job has used; `rack_s` as in `ran_s`."""
        return max(0.0, self.ran_s(rack_s) - self.times.limit_from_s)

    def ran_since_promotion_s(self, rack_s: float) -> float:
        """Seconds that the job has run since its newest promotion; `rack_s` as in `ran_s`."""
        if not self.spec.elastic:
            return max(0.0, self.attained_gpu_s - self.priority.base_gpu_s) / self.spec.width
        return max(0.0, self.ran_s(rack_s) - self.priority.base_ran_s)

    @property
    def grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL of ranks that are told to stop now: up to its time limit for a job that
        is warned of it."""
        warned = self.ending.cause == "time limit" and self.spec.signal_before_s
        return self.spec.signal_before_s if warned else self.spec.grace_s

    @property
    def job_class(self) -> JobClass:
        """The job's class now, whatever was asked for."""
        if self.priority.upgraded is not None:
            return "guaranteed"
        return self.spec.job_class if self.priority.demoted is None else "opportunistic"

    @property
    def counts(self) -> bool:
        """Whether the job's GPUs count against a quota when it holds any."""
        return self.job_class != "opportunistic"

    @property
    def over(self) -> bool:
        """Whether the job will never run again."""
        return self.state in OVER

    @property
    def placed(self) -> bool:
        """Whether the job's ranks run, or are being stopped, under `epoch`."""
        return self.state in ("running", "stopping")

    def happened(self, cause: Cause) -> tuple[int, int | None]:
        """How often the job was stopped for this cause, and how often it is started again for it (None: always)."""
        spec = self.spec
        match cause:
            case "preempted":
                return self.tally.preemptions, spec.retries_preempted
            case "host lost":
                return self.tally.hosts_lost, spec.retries_lost
            case "exit 75":
                return self.tally.requeues, spec.retries_again
            case "failed":
                return self.tally.failures, spec.retries
            case "unfit":
                return self.tally.unfit, None
            case _:
                assert_never(cause)

    def awaits(self, host: HostId) -> bool:
        """Whether this host still has to report the end of its ranks."""
        return any(place.host == host for place in self.awaited)

    @property
    def awaited(self) -> list[Place]:
        """Places of the hosts that still have to report the end of their ranks."""
        if not self.placed:
            return []
        away = {*self.ending.codes, *self.ending.lost, *self.healing.missing}
        return [*(place for place in self.start.places if place.host not in away), *self.healing.leaving]

    def place_on(self, host: HostId) -> Place | None:
        return next((place for place in self.start.places if place.host == host), None)

    def left_on(self, host: HostId) -> Place | None:
        """The place that the job had on this host, and is about to leave."""
        return next((place for place in self.healing.leaving if place.host == host), None)

    @property
    def seeks(self) -> bool:
        """Whether the job's coordinator looks for hosts: for ranks that are to continue elsewhere, or for new processes
        of an elastic job."""
        return self.state == "running" and bool(self.healing.missing or self.healing.moving or self.healing.wanted)

    @property
    def processes(self) -> int:
        """The number of processes that carry the job's ranks now, or at its newest start; 0: it has not started."""
        return sum(len(place.ranks) for place in self.start.places)

    def as_sure(self) -> "Job":
        """The job as its hosts are to have it: as it was, while nobody knows that processes that stay have its state
        (`JobHealing.sure`)."""
        sure, healing = self.healing.sure, self.healing
        if sure is None:
            return self
        start = msgspec.structs.replace(
            self.start,
            places=sure.places,
            carried=sure.carried,
            came=sure.came,
            owners=sure.owners,
            owners_since=sure.owners_since,
        )
        leaving = tuple(place for place in sure.leaving if place in healing.leaving)
        said = {"may_be_lost": sure.may_be_lost, "have": sure.have}
        was = msgspec.structs.replace(healing, healed=sure.config, leaving=leaving, sure=None, **said)
        return msgspec.structs.replace(self, start=start, healing=was)

    @property
    def width(self) -> int:
        """What the job's service grows by per second: the GPUs of its processes, or their number where they use none;
        before it runs, those that it starts with."""
        if not (self.placed and self.spec.elastic):
            return self.spec.width
        return self.processes * (self.spec.gpus_per_worker or 1)

    @property
    def extras(self) -> int:
        """The number of processes over the job's lower number, which count against no quota; 0: it does not run, or is
        not elastic."""
        return max(0, self.processes - self.spec.workers) if self.placed and self.spec.elastic else 0

    def carriers(self, ranks: Collection[int]) -> list[int]:
        """The processes that carry these ranks; in a job that is not elastic a rank is its own process."""
        if not self.spec.elastic:
            return sorted(ranks)
        return sorted(process for process, carries in self.start.carried.items() if set(carries) & set(ranks))

    def carried_by(self, processes: Iterable[int]) -> list[int]:
        """The ranks that these processes carry."""
        if not self.spec.elastic:
            return sorted(processes)
        return sorted(rank for process in processes for rank in self.start.carried.get(process, ()))

    @property
    def arriving(self) -> dict[HostId, int]:
        """GPUs per host that somebody wants for some of the job's ranks, and that it has not reserved yet."""
        if self.state != "running":
            return {}
        wanted = [(to, self.place_on(host)) for host, to in self.healing.moving.items() if to]
        return {to: len(place.gpus) for to, place in wanted if place is not None and place.gpus}

    @property
    def bound_for(self) -> dict[HostId, int]:
        """Ranks per host that somebody wants there, and that have not moved yet."""
        if self.state != "running":
            return {}
        wanted = [(to, self.place_on(host)) for host, to in self.healing.moving.items() if to]
        return {to: len(place.ranks) for to, place in wanted if place is not None}

    def heals_without(self, hosts: Container[HostId], ends: Container[int] = ()) -> bool:
        """Whether the rest of the gang can continue when all these hosts are lost: some rank left has what their
        successors need, and those that took over from others, and do not have it yet, get it from there, too. `ends`:
        processes of an elastic job that are not left either."""
        may_be_lost, missing, places = self.healing.may_be_lost, self.healing.missing, self.start.places
        rest = [place.host for place in places if place.host not in hosts and place.host not in missing]
        ready = all(place.host in (*may_be_lost, *missing) or place.since for place in places)
        if self.spec.elastic:
            left = (process for place in places if place.host in rest for process in place.ranks if process not in ends)
            known = {process for processes in self.healing.have.values() for process in processes}
            have = any(process in known for process in left)
        else:
            have = any(host in may_be_lost for host in rest)
        ended = self.ending.codes or (self.spec.elastic and self.healing.gone)  # who would carry the ranks?
        return self.state == "running" and not ended and self.spec.on_lost == "heal" and ready and have


def row_of(job: Job, thresholds: tuple[float, ...]) -> Row:
    """The job as the order sees it. A promotion lasts until the job ends, or sinks out of the highest queue again."""
    attained = max(0.0, job.attained_gpu_s - job.priority.base_gpu_s)
    promoted = job.priority.promoted
    lasting = promoted is not None and (job.priority.lasts or queue_of(attained, thresholds) == 0)
    return Row(
        id=job.id,
        number=job.number,
        tenant=job.spec.tenant,
        job_class=job.job_class,
        gpus=job.spec.gpus,
        submitted=job.turn,
        attained_gpu_s=attained,
        running=job.state in HOLDING,
        first=job.priority.first,
        promoted=promoted if lasting else None,
    )
