"""What people and programs see of a host and its plugins: the JSON of `/v1/...` and `agentctl --json`, schema version
1.

Times named `_wall_s` are seconds since 1970; everything else is in the unit its name says.
"""

from typing import Literal

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import HostState, MemoryInUse, Place, SavedAt, StepTiming
from plugins.gossiped import LateHost
from plugins.start_views import TurnView


class PluginHealth(msgspec.Struct, frozen=True):
    state: str
    """The plugin's state: `on`, `off` (switched off in agent.toml) or `failed`."""
    why: str = ""
    """Why the plugin failed, for people; for one that is on again, why it was restarted."""
    restarts: int = 0
    """The number of restarts since the agent started."""
    again_s: float | None = None
    """The pause before a failed plugin is started again, s; None: it stays as it is."""


class Trouble(msgspec.Struct, frozen=True):
    """Something that is wrong with a host and that a person has to mend."""

    what: str
    next: str
    """What to type or change to mend it."""


OtherUsersNow = Literal["", "limited", "unlimited", "no"]
"""Whether a host runs jobs as users other than the agent's: with limits of memory and processes that it enforces,
without, or not at all; empty: it has not said."""


class HostRow(msgspec.Struct, frozen=True):
    """One line of `agentctl hosts`."""

    host: HostId
    state: HostState
    age_s: float
    """The age of the newest word from the host, in seconds; 0 for the answering host itself."""
    address: str
    leads: bool
    since_s: float
    """Seconds for which the host has been in this state."""
    gpus_total: int | None = None
    gpus_free: int | None = None
    gpus_out: int = 0
    """The host's GPUs that no job holds and that take none: sick ones, and those whose state is not known."""
    gpus_why: str = ""
    """What is wrong with the host's GPUs, held or not, the worst first, or why it is not known which GPUs it has;
    empty: all take jobs."""
    gpus_known: bool = True
    gpus_held: dict[JobId, str] = {}
    """Jobs that hold GPUs of the host which are sick or which they do not use -> the condition, or `idle`; a few."""
    slabs_free: int | None = None
    slabs_lent: int | None = None
    aggregator_jobs: int | None = None
    suspected_by: HostId | None = None
    plugins_failed: tuple[str, ...] = ()
    no_room: str = ""
    """What the host's full disk keeps it from doing; empty: nothing."""
    away_s: float = 0.0
    """Seconds within which a host that is away announced to be back."""
    late: tuple[LateHost, ...] = ()
    """Jobs whose other ranks wait for this host again and again."""
    drained_by: str | None = None
    """Who drains the host; None: it is not drained."""
    drained_jobs: int = 0
    """Jobs that still have ranks on this host while it is drained or cordoned."""
    cordoned_by: str | None = None
    """Who cordons the host: no rank starts there, and what is there stays; None: it is not cordoned."""
    closed_why: str = ""
    """Why the host is drained or cordoned, cut short; empty: nobody says."""
    closed_wall_s: float = 0.0
    """When it was drained or cordoned, by the wall clock of whoever did it, s; 0: that is not known."""
    other_users: OtherUsersNow = ""
    """Whether jobs run there as users other than the agent's."""
    troubles: tuple[Trouble, ...] = ()
    """What is wrong with the host, as the answering agent knows: another rack, a name that two machines claim, and so
    on."""
    version: str = ""
    """The version of Covey that its agent has; empty: it does not say."""


class GpuRow(msgspec.Struct, frozen=True):
    """One line of `agentctl gpus`."""

    host: HostId
    index: int
    uuid: str
    model: str
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: float | None
    """Share of time in which it is in use, 0..1; None: its driver does not say."""
    job: JobId | None
    """The guaranteed job that holds the GPU; where GPUs are not shared, whichever job does."""
    simulated: bool
    age_s: float
    host_state: HostState = "alive"
    """The state of the GPU's host as the answering agent sees it: no job gets a GPU of a host that is gone."""
    beside: tuple[JobId, ...] = ()
    """The opportunistic jobs on parts of the GPU."""
    condition: str = "ok"
    """The GPU's condition, `ok`, `degraded`, `unknown`, `drain` or `lost`: a job starts on one that is `ok` or
    `degraded` only."""
    why: str = ""
    """What is wrong with the GPU, or why that is not known."""
    use: str = ""
    """How the GPU is used otherwise than the log says: by processes that no job started, or not at all although a job
    holds it; empty: not known to be."""


class LeaderView(msgspec.Struct, frozen=True):
    leader: HostId | None
    term: int
    since_s: float | None
    """Seconds since this host first knew this leader."""
    applied_index: int
    age_s: float
    """How old this host's copy of the log may be, in seconds."""
    voters: tuple[HostId, ...] = ()


class VoterRow(msgspec.Struct, frozen=True):
    """One host's part in the log, in its own words; one line of `agentctl voters`."""

    host: HostId
    part: str
    """`votes`, `learns` (will vote), `leaves` (will vote no more), `observes`, `away`, or `silent`: it is alive and has
    not answered."""
    leads: bool = False
    entry: int = 0
    """The index of the newest log entry that the host has applied."""
    names: tuple[HostId, ...] = ()
    """The voters that its agent.toml names."""
    notes: tuple[str, ...] = ()
    """What should be known of how this host votes."""
    age_s: float = 0.0


class VotersView(msgspec.Struct, frozen=True, kw_only=True):
    """Who votes, as the answering host's log says."""

    voters: tuple[HostId, ...]
    learner: str = ""
    """The host that receives the log, and votes when it has caught up."""
    leaving: str = ""
    under_way: str = ""
    """The change of voters under way, in words; empty when there is none."""
    rows: tuple[VoterRow, ...] = ()


class RankView(msgspec.Struct, frozen=True):
    rank: int
    host: HostId
    gpus: tuple[str, ...]
    state: str
    """The rank's state: `waiting`, `running`, `away` (its host is gone), `ended`."""
    pid: int | None = None
    code: int | None = None
    """The rank's exit status, 0..255, or -N when killed by signal N."""


class BesideView(msgspec.Struct, frozen=True):
    """A job that shares GPUs with another one."""

    job: JobId
    runs_as: str
    """The job's class now."""
    hosts: tuple[HostId, ...]


class JobTimesView(msgspec.Struct, frozen=True, kw_only=True):
    """When a job was submitted, started and ended, and how long it took."""

    submitted_wall_s: float
    started_wall_s: float | None = None
    ended_wall_s: float | None = None
    for_s: float = 0.0
    """Seconds for which the job has waited, or has run since its first start, or took: by clocks that do not step, so
    it need not be the difference of the times above. It leaves out the time while no agent of the rack ran."""


class JobTallyView(msgspec.Struct, frozen=True, kw_only=True):
    """How often a job was started, what happened to it, and how often it may happen."""

    attempt: int = 0
    """The number of starts so far."""
    preemptions: int = 0
    hosts_lost: int = 0
    """How often a host lost the job's ranks."""
    requeues: int = 0
    """How often the job asked to be started again (exit 75)."""
    failures: int = 0
    """How often the job failed by itself."""
    retries: dict[str, int | None] = {}
    """How often the job is started again after each of these: `preempted`, `host lost`, `exit 75`, `failed`; None:
    always."""
    unfit: int = 0
    """How often the job could not be, or stay, beside others on the GPUs where it was placed."""


class JobLossesView(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a job whose hosts or ranks are lost or hang, and which of its hosts are gone now."""

    on_lost: str = "heal"
    """What becomes of the job's ranks on a host that is cut off: `heal`, `restart` or `keep`."""
    heals_not: str = ""
    """Why the job would begin again if it lost a host now; empty: it would continue, or does not run."""
    away: dict[HostId, float] = {}
    """Hosts of the job that are gone, and for how many seconds."""
    spares: int = 0
    """The number of processes that wait on each of the job's hosts, and on one more, to become one of its ranks."""
    hang_s: float | None = None
    """Seconds for which others may wait for one rank, and all may stand still; None: for ever."""
    hang_unseen: str = ""
    """Why nothing is done about ranks that hang, in words; empty: something is, or hosts of the job did not answer."""
    stuck: str = ""
    """Which rank makes no progress for longer than its steps explain, in words, where nobody said `--hang`."""


class JobSeenView(msgspec.Struct, frozen=True, kw_only=True):
    """What the hosts of a job's ranks see of its computation; from hosts that answered."""

    timing: StepTiming | None = None
    """How long the job's mini-batches take, on its slowest host; None: too few were reported."""
    hooked: dict[int, str] = {}
    """What sees each rank's steps without the script's help (rank -> `torch 2.13.0`), or why nothing does."""
    aggregator: HostId | None = None
    """The host that sums the job's tensors; None while none does, or hosts did not answer."""
    unlike: str = ""
    """Which of the job's ranks compute with unlike kernels, in words; empty while none is known to."""
    host_memory: int = 0
    """Memory that its processes on one host may take together, bytes; 0: not said."""
    cpus: int = 0
    """Processors of each worker; 0: not said."""
    memory: dict[HostId, MemoryInUse] = {}
    """What its processes have of each host's memory, where they said so."""
    devices: dict[HostId, str] = {}
    """Hosts where GPUs of the job are sick, or held and not used, and what is known of them, in words."""
    saved: SavedAt | None = None
    """The newest checkpoint that ranks of the job wrote (`covey.healing.checkpoint`); None: none is known."""
    limited: dict[HostId, bool] = {}
    """Whether each host that answered limits memory and number of its processes there, whatever they do."""


class ElasticView(msgspec.Struct, frozen=True, kw_only=True):
    """How an elastic job is arranged now."""

    workers_max: int
    """The most processes that it may have, and the number of its ranks."""
    processes: int
    """The number of processes now; 0: it does not run."""
    config: int
    """The number of the configuration: it grows with each change of the job's places under one grant."""
    carried: dict[int, tuple[int, ...]]
    """The ranks that each process carries, its own first. A process is named by its first rank."""
    have: tuple[int, ...] = ()
    """The processes that have the job's state, as their hosts said last: the others begin, or take it over. When all of
    these are lost at once, the state is lost."""
    wanted: int = 0
    """The number of processes that it is about to grow to; 0: it is not to grow."""
    wanted_by: str = ""
    """Who wants that, and why."""
    shares: dict[HostId, int] = {}
    """How many of the job's ranks the processes of each host carry together."""
    equal: bool = True
    """Whether all processes carry equally many ranks, give or take one; False: somebody said other shares."""
    tables: int = 0
    """The number of tables of its tensors; 0: it does not run."""
    owners: tuple[HostId, ...] = ()
    """The host that somebody wants to own each table, in the order of tables; empty: nobody said, as is an empty name
    for one table. Who owns each now: `agentctl tensors`."""
    tuned_by: str = ""
    """Who switched the tuner on (`agentctl tune`); empty: it is off."""
    to_end: str = ""
    """Which processes are to end, and why they still run, in words; empty: its newest change is in force."""
    over_rack: str = ""
    """Why it never has as many processes as its range allows on this rack, in words; empty: it could have them, or
    nobody knows. A list of jobs does not say it."""


class TunedHostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host of a tuned job, as its tuner sees it; None: not measured yet."""

    host: HostId
    role: str
    """`worker`: it has ranks; `server`: it owns tables; `both`; or `none`."""
    processes: int
    ranks: int
    tables: int
    best_ranks: int | None = None
    """The ranks that it would have in the best division known."""
    best_tables: int | None = None
    pass_s: float | None = None
    """Seconds that one of its processes computes for one rank in a step."""
    card_bytes_per_s: float | None = None
    """Bytes per second that its card carries in one direction."""


class PredictionView(msgspec.Struct, frozen=True):
    """A change that the tuner made, in seconds of a step."""

    before_s: float
    predicted_s: float
    measured_s: float


class TunedJobView(msgspec.Struct, frozen=True, kw_only=True):
    """What the tuner of one job measured and decided: the answer of `agentctl tune JOB`."""

    job: JobId
    coordinator: HostId
    """The host whose agent runs the tuner."""
    asked: int
    """The index of the log at which somebody switched it on."""
    doing: str
    """What it does now, and what it lacks, in words."""
    left_alone: bool
    """Whether it has given up, since its predictions were wrong: it changes nothing before somebody asks again."""
    config: int
    hosts: list[TunedHostView]
    model_bytes: int
    """Bytes that a rank pushes in a step; 0: not known."""
    step_s: float | None = None
    """Seconds of a step, measured in the present configuration."""
    best_step_s: float | None = None
    """Seconds of a step predicted for the best division."""
    predictions: list[PredictionView] = []
    """The newest changes, oldest first."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `agentctl jobs`, and the whole answer of `agentctl job ID`."""

    id: JobId
    name: str
    tenant: str
    job_class: str
    """The class that was asked for: `guaranteed`, `auto` or `opportunistic`."""
    state: str
    """The job's state, one of `plugins.scheduler.machine.log.jobs.STATES`: `queued`, `placing`, `running`, `stopping`,
    `done`, `failed`, `cancelled`."""
    over: bool
    """Whether the job's state is one that a job never leaves. Read this, and not a list of states of your own."""
    reason: str
    """Why the job is in this state, in words: place in the queue, who is ahead, exit status by rank and signal name."""
    workers: int
    """The number of processes; of an elastic job the fewest."""
    gpus: int
    """The job's GPUs in all, as its quota counts them: workers x GPUs per worker."""
    argv: tuple[str, ...]
    cwd: str
    times: JobTimesView
    tally: JobTallyView
    losses: JobLossesView
    seen: JobSeenView
    queue: int = 0
    """The job's 2DAS queue; 0 is the highest."""
    attained_gpu_s: float = 0.0
    epoch: int = 0
    coordinator: HostId | None = None
    exit_code: int | None = None
    """The job's exit code: 0, the first failing rank's status, or 128+N for signal N; None until it ended."""
    ended_as: str = ""
    """How the job ended: `done`, `cancelled`, `timeout`, `oom, peak 31 GiB`, `node-lost`, `preempted`, `failed 3`;
    empty: it has not ended."""
    failed_rank: int | None = None
    """The rank whose failure ended the job, the first one; None: none did."""
    oom_bytes: int = 0
    """The most memory that ranks had of which the kernel killed a process at their limit, bytes; 0: it killed none."""
    places: tuple[Place, ...] = ()
    ranks: tuple[RankView, ...] = ()
    step: int | None = None
    """The newest step that any rank reported."""
    metrics: dict[str, float] = {}
    """The newest value of each metric that the script reported."""
    runs_as: str = ""
    """The job's class now: a demoted job of class auto is `opportunistic`, and `guaranteed` once it was upgraded."""
    beside: tuple[BesideView, ...] = ()
    """The jobs that share GPUs with it now."""
    reserved_gpus: int = 0
    """The number of GPUs that are kept for the job while it waits for the rest."""
    age_s: float = 0.0
    """How old this copy of the log may be, in seconds."""
    unanswered: tuple[HostId, ...] = ()
    """Hosts of the job that were asked what its ranks do, and have not answered in time."""
    elastic: ElasticView | None = None
    """How an elastic job is arranged now; None: the number of its processes does not change."""
    share_host: str = ""
    """The group of jobs with which it takes turns on hosts that they share; empty: it takes none."""
    image: str = ""
    """The image in whose container each rank runs; empty: in none."""
    user: str = ""
    """The user whose job it is; empty: the agent's own."""
    uid: int | None = None
    """That user's number; None: the agent's own user."""
    array: str = ""
    """The tasks of an array, as they were submitted; empty: it is none. How far it is stands in `reason`."""
    task: str = ""
    """Which task of which array the job is, such as `j12[3]`; empty: of none."""
    held: bool = False
    """Whether it is held until somebody releases it."""
    after: tuple[str, ...] = ()
    """Jobs for whose end it still waits: `ok:j3`, `any:j5`."""
    begin_wall_s: float | None = None
    """When it may start at the earliest, seconds since 1970; None: that time has come, or there is none."""
    time_limit_s: float | None = None
    """Seconds that it may run, all starts together; None: no limit."""
    stdout: str = ""
    """The file that gets its output as well, with words (`submit --output`); empty: none does."""
    turn: TurnView | None = None
    """Its place among the jobs that wait; None: it does not wait for GPUs."""


class QuotaView(msgspec.Struct, frozen=True):
    tenant: str
    gpus: int | None
    """The tenant's quota of GPUs; None: not limited."""
    used: int
    """GPUs that the tenant's guaranteed jobs hold, or are owed: an elastic one that lost hosts keeps its claim on its
    lower number of processes."""
    queued_jobs: int
    opportunistic: int = 0
    """GPUs that the tenant holds beyond its quota, until guaranteed jobs need them: those of opportunistic jobs, and of
    elastic jobs' processes over their lower number."""
    weight: float = 1.0
    """The tenant's weight among tenants without a quota."""
    recent_gpus: float = 0.0
    """GPUs that its guaranteed jobs held of late, in the mean; service counts half after a day."""


class SlabView(msgspec.Struct, frozen=True):
    """One slab of a volume, as its borrower knows it."""

    volume: str
    index: int
    borrower: HostId
    state: str
    """The slab's state: `cold` (on disk only), `asking`, `mapped` (a lender serves it), `moving`; `reopening`: its link
    ended, and is tried again; `filling`: it lacks pages that the other member has; `recovering`: its volume's process
    began anew, and its lender has not said yet what it holds; `lost`: no link any more, the disk is being brought up to
    date."""
    lender: HostId | None
    size_bytes: int
    pages_written: int
    pages_remote: int
    """Pages whose newest content the lender holds."""
    requests_per_s: float
    """Page activity as an EWMA, in requests per second (Infiniswap 2.4.1)."""
    epoch: int
    age_s: float = 0.0
    member: int = 0
    """Which place of a volume without a disk this is for the slab; the state is that place's."""
    members: int = 1


class WaitView(msgspec.Struct, frozen=True):
    """A lender that may hold pages which no other host has, and has not answered since the volume's process began."""

    lender: HostId
    slabs: tuple[int, ...]
    why: str


class LatencyView(msgspec.Struct, frozen=True):
    """Requests of one kind in the last minute."""

    op: str
    """`read` or `write`."""
    answered: str
    """What answered the requests: `zeros`, `ring`, `lender` or `disk`."""
    requests: int
    p50_s: float
    p99_s: float


class LinksView(msgspec.Struct, frozen=True):
    """The number of a volume's places at lenders, by how their links are."""

    open: int = 0
    reopening: int = 0
    """Places whose link ended, and is tried again."""
    recovering: int = 0
    """Places that may hold what the disk does not, and have not answered since the volume's process began anew."""
    leaving: int = 0
    """Places with which the disk is being brought up to date."""


class SwapView(msgspec.Struct, frozen=True):
    """A volume that its host uses as swap."""

    word: str = "off"
    """The swap's state: `off`, `on`, `waits` (the kernel keeps requests until the volume's process is back), `ending`
    or `lost`."""
    device: str = ""
    used_bytes: int = 0
    """Bytes of the swap device that hold pages."""
    why: str = ""
    """Why the swap waits, or did not end."""


class AccountView(msgspec.Struct, frozen=True):
    """The memory of the rack that a tenant or a job has, as one host hears it: some seconds old."""

    kind: str
    """The account's kind, `tenant` or `job`; empty: only the number under which hosts gossip of it is known here."""
    name: str
    tenant: str
    """The tenant of a job."""
    budget_bytes: int | None
    """The budget over the whole rack, bytes; None: not limited."""
    used_bytes: int
    """Bytes that are lent to the account."""
    lenders: dict[HostId, int]
    """The hosts that lend to it, and how many bytes each."""
    volumes_bytes: int = 0
    """Bytes that the account's volumes on the answering host may take."""


class VolumeView(msgspec.Struct, frozen=True):
    volume: str
    host: HostId
    size_bytes: int
    page_bytes: int
    slab_bytes: int
    slabs_mapped: int
    slabs: int
    read_bytes: int
    written_bytes: int
    remote_read_bytes: int
    disk_read_bytes: int
    process_alive: bool
    path: str = ""
    waits_for: tuple[WaitView, ...] = ()
    """Lenders that may hold newer pages: reads of these pages wait, then fail."""
    trouble: str = ""
    """What the volume's disk refuses now, or which slabs lack a member, in words."""
    members: int = 1
    """Members of each slab; with several there is no disk."""
    slabs_whole: int = 0
    """Slabs of a volume without a disk whose members all hold everything."""
    parity: bool = False
    """Whether one member of each slab has the parity of the others' pages."""
    tenant: str = ""
    """The tenant whose budget the volume counts against; empty: none."""
    job: str = ""
    """The job whose rank made the volume; empty: none."""
    budget_bytes: int | None = None
    """The budget of the volume's tenant over the rack, bytes, as its host knows it; None: not limited."""
    job_budget_bytes: int | None = None
    """The budget of the volume's job, bytes; None: not limited."""
    taken_bytes: int = 0
    """Bytes of other hosts' memory that the volume takes when all of it is there."""
    latencies: tuple[LatencyView, ...] = ()
    links: LinksView = LinksView()
    swap: SwapView = SwapView()
    uid: int = -1
    """The number of the user whose volume it is, on its host; -1: nobody's."""


class AggregatorJobView(msgspec.Struct, frozen=True):
    """One job's tensors at one aggregator."""

    job: JobId
    host: HostId
    epoch: int
    workers: int
    joined: int
    tensors: int
    bytes: int
    rounds: int
    """The number of completed rounds, summed over tensors."""
    received_bytes: int
    sent_bytes: int
    age_s: float = 0.0
    period_us: int | None = None
    """D, an iteration of the job when it runs alone, microseconds; None during its trial iterations."""
    work_us: int | None = None
    """e, the aggregator's work in one iteration, microseconds."""
    load: float | None = None
    """The part of the aggregator that the job was promised: e / d."""
    loss: float | None = None
    """The part of the job's speed that the aggregator's cycle takes from it, 0..1: (d - D) / d."""
    loss_measured: float | None = None
    """`loss` as measured over the job's last 100 iterations or so."""
    refused: str = ""
    """Why another aggregator last refused the job."""
    not_finite: int = 0
    """The count of numbers in the job's sums that were NaN or infinite."""
    missing: tuple[int, ...] = ()
    """The ranks that have not pushed what the others wait for, the first 16."""
    waits_s: float = 0.0
    """Seconds for which the others have waited."""
    by: str = "aggd"
    """Who sums it on the host: `aggd`, or a rank of the job, such as `rank 2`."""
    not_direct: str = ""
    """Why no rank of the job sums it; empty when one does."""


class EventLine(msgspec.Struct, frozen=True):
    """One line of `agentctl why ID`."""

    wall_s: float
    host: HostId
    subject: str
    event: str
    reason: str
    key: str = ""


class ErrorView(msgspec.Struct, frozen=True):
    """The body of every error of the HTTP API, that is of any status >= 400."""

    code: int
    """agentctl's exit code."""
    what: str
    why: str
    next: str


class GpuJobView(msgspec.Struct, frozen=True):
    """One job on a shared GPU."""

    job: JobId
    kind: str
    """The job's class: `guaranteed` or `opportunistic`."""
    stage: str
    may: str
    """What the job may do now, in words."""
    gate: bool | None
    """Whether something in the job can hold it back; None: not known yet."""
    flag: bool
    """Whether the job says when it has no work on the device."""
    memory_limit_bytes: int
    applied: bool
    """Whether the job goes by that limit; until then more may be charged to it."""
    spill_bytes: int
    """Bytes in host memory for want of device memory, in the job's newest mini-batch."""
    step_s: float
    """Seconds of a typical mini-batch; 0: none yet."""
    fixed: bool = False
    """Whether the job keeps the memory that it took at its start, whatever the limit (JAX)."""


class SharedGpuView(msgspec.Struct, frozen=True):
    """One GPU and the jobs that share it."""

    host: HostId
    gpu: str
    model: str
    backend: str
    """What shares the GPU: `nvml`, `cpu` or `sim`."""
    state: str
    condition: str
    """The GPU's condition: `ok`, `degraded`, `drain` or `lost`."""
    why: str
    utilization: float | None
    """Mean utilization over 10 s, 0..1; None: its driver does not say."""
    memory_bytes: int
    """Bytes of the GPU's memory that jobs may hold."""
    memory_free_bytes: int
    """Bytes of `memory_bytes` that are promised to no job."""
    jobs: tuple[GpuJobView, ...]
    age_s: float = 0.0


class InterferenceView(msgspec.Struct, frozen=True):
    """A guaranteed job on one GPU, measured against itself alone."""

    host: HostId
    gpu: str
    job: JobId
    beside: tuple[JobId, ...]
    state: str
    slowdown: float | None
    """How much slower a mini-batch is, as a share of the mini-batch alone (0.03: 3 % slower); None: not measured
    now."""
    error: float | None
    """One standard error of `slowdown`."""
    baseline_s: float
    """Seconds of the job's mini-batch alone; 0: not measured yet."""
    baseline_age_s: float | None
    """Seconds since the baseline was measured or confirmed."""
    audits: int
    """How often the baseline was measured or confirmed."""
    others: str
    """What the other jobs may do, in words."""
    age_s: float = 0.0
