"""What people and programs see of a host and its plugins: the JSON of `/v1/...` and `agentctl --json`, schema version
1.

Times named `_wall_s` are seconds since 1970; everything else is in the unit its name says.
"""

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import HostState, LateHost, Place, StepTiming


class PluginHealth(msgspec.Struct, frozen=True):
    state: str
    """`on`, `off` (switched off in agent.toml) or `failed`."""
    why: str = ""
    """Why it failed, for people; of a plugin that is on again, why it was restarted."""
    restarts: int = 0
    """Since the agent started."""
    again_s: float | None = None
    """Of a failed plugin: the pause before it is started again; None: it stays as it is."""


class Trouble(msgspec.Struct, frozen=True):
    """Something that is wrong with a host and that somebody has to mend."""

    what: str
    next: str
    """What to type or change."""


class HostRow(msgspec.Struct, frozen=True):
    """One line of `agentctl hosts`."""

    host: HostId
    state: HostState
    age_s: float
    """How old the newest word from it is; 0 for the answering host itself."""
    address: str
    leads: bool
    since_s: float
    """Seconds in this state."""
    gpus_total: int | None = None
    gpus_free: int | None = None
    gpus_out: int = 0
    """GPUs of it that no job holds and that take none: sick ones, and those of which nobody knows how they are."""
    gpus_why: str = ""
    """What is wrong with the worst one of its GPUs, held or not, or why nobody knows which GPUs it has; empty: all take
    jobs."""
    gpus_known: bool = True
    slabs_free: int | None = None
    slabs_lent: int | None = None
    aggregator_jobs: int | None = None
    suspected_by: HostId | None = None
    plugins_failed: tuple[str, ...] = ()
    no_room: str = ""
    """What its full disk keeps it from; empty: nothing."""
    away_s: float = 0.0
    """Of one that is away: seconds within which it announced to be back."""
    late: tuple[LateHost, ...] = ()
    """Jobs whose other ranks wait for it again and again."""
    drained_by: str | None = None
    """Who has everything leave it; None: nobody."""
    drained_jobs: int = 0
    """Of a host that is drained: jobs that still have ranks there."""
    troubles: tuple[Trouble, ...] = ()
    """What is wrong with it, as the answering agent knows: another rack, a name that two machines claim, and so on."""


class GpuRow(msgspec.Struct, frozen=True):
    """One line of `agentctl gpus`."""

    host: HostId
    index: int
    uuid: str
    model: str
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: float
    job: JobId | None
    """The guaranteed job that holds it; where GPUs are not shared, whichever job does."""
    simulated: bool
    age_s: float
    host_state: HostState = "alive"
    """As the answering agent sees its host: nobody gets a GPU of a host that is gone."""
    beside: tuple[JobId, ...] = ()
    """Opportunistic jobs on parts of it."""
    condition: str = "ok"
    """`ok`, `degraded`, `unknown`, `drain` or `lost`: no job starts on one that is neither of the first two."""
    why: str = ""
    """What is wrong with it, or why that is not known."""


class LeaderView(msgspec.Struct, frozen=True):
    leader: HostId | None
    term: int
    since_s: float | None
    """Seconds since this host first knew this leader."""
    applied_index: int
    age_s: float
    """How old this host's copy of the log may be."""
    voters: tuple[HostId, ...] = ()


class VoterRow(msgspec.Struct, frozen=True):
    """One host's part in the log, in its own words; one line of `agentctl voters`."""

    host: HostId
    part: str
    """`votes`, `learns` (will vote), `leaves` (will vote no more), `observes`, `away`, or `silent`: it is alive and has
    not answered."""
    leads: bool = False
    entry: int = 0
    """How far it has applied the log."""
    names: tuple[HostId, ...] = ()
    """Voters that its agent.toml names."""
    notes: tuple[str, ...] = ()
    """What should be known of who votes there."""
    age_s: float = 0.0


class VotersView(msgspec.Struct, frozen=True, kw_only=True):
    """Who votes, as the answering host's log says."""

    voters: tuple[HostId, ...]
    learner: str = ""
    """Receives the log, and votes when it has caught up."""
    leaving: str = ""
    under_way: str = ""
    """The change in words; empty when there is none."""
    rows: tuple[VoterRow, ...] = ()


class RankView(msgspec.Struct, frozen=True):
    rank: int
    host: HostId
    gpus: tuple[str, ...]
    state: str
    """`waiting`, `running`, `away` (its host is gone), `ended`."""
    pid: int | None = None
    code: int | None = None
    """0..255, or -N when killed by signal N."""


class BesideView(msgspec.Struct, frozen=True):
    """A job that is on GPUs with another one."""

    job: JobId
    runs_as: str
    """Its class now."""
    hosts: tuple[HostId, ...]


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `agentctl jobs`, and all of `agentctl job ID`."""

    id: JobId
    name: str
    tenant: str
    job_class: str
    """As asked for: `guaranteed`, `auto` or `opportunistic`."""
    state: str
    """One of `plugins.scheduler.machine.log.jobs.STATES`: `queued`, `placing`, `running`, `stopping`, `done`, `failed`,
    `cancelled`."""
    over: bool
    """Its state is one that a job never leaves. Read this, and not a list of states of your own."""
    reason: str
    """Why it is in this state, in words: place in the queue, who is ahead, exit status by rank and signal name."""
    workers: int
    gpus: int
    """In all: workers x GPUs per worker."""
    argv: tuple[str, ...]
    cwd: str
    submitted_wall_s: float
    started_wall_s: float | None = None
    ended_wall_s: float | None = None
    for_s: float = 0.0
    """How long it has waited, or has run since its first start, or took: by clocks that do not step, so it need not be
    the difference of the times above. It leaves out what passed while no agent of the rack ran."""
    queue: int = 0
    """2DAS queue, 0 is the highest."""
    attained_gpu_s: float = 0.0
    epoch: int = 0
    attempt: int = 0
    """Starts so far."""
    preemptions: int = 0
    hosts_lost: int = 0
    """Times that a host lost its ranks."""
    requeues: int = 0
    """Times that it asked to be started again (exit 75)."""
    failures: int = 0
    """Times that it failed by itself."""
    retries: dict[str, int | None] = {}
    """How often it is started again after each of these: `preempted`, `host lost`, `exit 75`, `failed`;
    None: always."""
    hang_s: float | None = None
    """How long others may wait for one rank, and all may stand still; None: for ever."""
    spares: int = 0
    """Processes that wait on each of its hosts, and on one more, to become one of its ranks."""
    hang_unseen: str = ""
    """Why nothing is done about ranks that hang, in words; empty: it is, or hosts of it did not answer."""
    on_lost: str = "heal"
    """What becomes of its ranks on a host that is cut off: `heal`, `restart` or `keep`."""
    heals_not: str = ""
    """Why it would begin again if it lost a host now; empty: it would go on, or does not run."""
    away: dict[HostId, float] = {}
    """Hosts of it that are gone, and for how many seconds."""
    coordinator: HostId | None = None
    exit_code: int | None = None
    """The job's own: 0, the first failing rank's status, or 128+N for signal N; None until it ended."""
    places: tuple[Place, ...] = ()
    ranks: tuple[RankView, ...] = ()
    step: int | None = None
    """Newest step that any rank reported."""
    metrics: dict[str, float] = {}
    """Newest value of each metric the script reported."""
    timing: StepTiming | None = None
    """How long its mini-batches take, on its slowest host; None: too few were reported."""
    hooked: dict[int, str] = {}
    """Rank -> what sees its steps without the script's help (`torch 2.13.0`), or why nothing does; of hosts that
    answered."""
    aggregator: HostId | None = None
    """Who sums its tensors, as the hosts of its ranks say; None while none does, or they did not answer."""
    unlike: str = ""
    """Which of its ranks compute with unlike kernels, in words; empty while none is known to."""
    runs_as: str = ""
    """Its class now: a demoted job of class auto is `opportunistic`, and `guaranteed` once it was upgraded."""
    beside: tuple[BesideView, ...] = ()
    """Jobs that are on GPUs with it now."""
    unfit: int = 0
    """Times that it could not be, or stay, on the GPUs where it was placed, beside others."""
    reserved_gpus: int = 0
    """GPUs that are kept for it while it waits for the rest."""
    age_s: float = 0.0
    """How old this copy may be."""
    unanswered: tuple[HostId, ...] = ()
    """Hosts of it that were asked what its ranks do, and have not answered in time."""


class QuotaView(msgspec.Struct, frozen=True):
    tenant: str
    gpus: int | None
    """None: not limited."""
    used: int
    """GPUs that its guaranteed jobs hold."""
    queued_jobs: int
    opportunistic: int = 0
    """GPUs that it holds beyond its quota, until guaranteed jobs need them."""


class SlabView(msgspec.Struct, frozen=True):
    """One slab of a volume, as its borrower knows it."""

    volume: str
    index: int
    borrower: HostId
    state: str
    """`cold` (on disk only), `asking`, `mapped` (a lender serves it), `moving`; `reopening`: its link ended, and is
    tried again; `filling`: it lacks pages that the other member has; `recovering`: its volume's process began anew, and
    its lender has not said yet what it holds; `lost`:
    no link any more, the disk is being brought up to date."""
    lender: HostId | None
    size_bytes: int
    pages_written: int
    pages_remote: int
    """Pages whose newest content the lender holds."""
    requests_per_s: float
    """EWMA of page activity (Infiniswap 2.4.1)."""
    epoch: int
    age_s: float = 0.0
    member: int = 0
    """Of a volume without a disk: which of its places for this slab; the state is that one's."""
    members: int = 1


class WaitView(msgspec.Struct, frozen=True):
    """A lender that may hold pages which nobody else has, and has not answered since the volume's process began."""

    lender: HostId
    slabs: tuple[int, ...]
    why: str


class LatencyView(msgspec.Struct, frozen=True):
    """Requests of one kind in the last minute."""

    op: str
    """`read` or `write`."""
    answered: str
    """By whom: `zeros`, `ring`, `lender` or `disk`."""
    requests: int
    p50_s: float
    p99_s: float


class LinksView(msgspec.Struct, frozen=True):
    """Places of a volume at lenders, by how their links are."""

    open: int = 0
    reopening: int = 0
    """The link ended, and is tried again."""
    recovering: int = 0
    """It may hold what the disk does not, and has not answered since the volume's process began anew."""
    leaving: int = 0
    """The disk is being brought up to date with what it holds."""


class SwapView(msgspec.Struct, frozen=True):
    """A volume as swap of its host."""

    word: str = "off"
    """`off`, `on`, `waits` (the kernel keeps requests until the volume's process is back), `ending` or `lost`."""
    device: str = ""
    used_bytes: int = 0
    """Of it, that hold pages."""
    why: str = ""
    """Why it waits, or did not end."""


class AccountView(msgspec.Struct, frozen=True):
    """What a tenant or a job has of the rack's memory, as one host hears it: some seconds old."""

    kind: str
    """`tenant` or `job`; empty: only the number under which hosts tell of it is known here."""
    name: str
    tenant: str
    """Of a job."""
    budget_bytes: int | None
    """Over the whole rack; None: not limited."""
    used_bytes: int
    """Lent to it."""
    lenders: dict[HostId, int]
    """Where, bytes each."""
    volumes_bytes: int = 0
    """What its volumes on the host that answers may take."""


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
    """Reads of what these may hold newer wait, then fail."""
    trouble: str = ""
    """What its disk refuses now, or which slabs lack a member, in words."""
    members: int = 1
    """Of each slab; with several there is no disk."""
    slabs_whole: int = 0
    """Of a volume without a disk: slabs whose members all hold everything."""
    parity: bool = False
    """One member of each slab has the parity of the others' pages."""
    tenant: str = ""
    """Against whose budget it counts; empty: nobody's."""
    job: str = ""
    """Whose rank made it; empty: nobody's."""
    budget_bytes: int | None = None
    """That of its tenant over the rack, as its host knows it; None: not limited."""
    job_budget_bytes: int | None = None
    """That of its job; None: not limited."""
    taken_bytes: int = 0
    """Of other hosts' memory, when all of it is there."""
    latencies: tuple[LatencyView, ...] = ()
    links: LinksView = LinksView()
    swap: SwapView = SwapView()


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
    """Completed rounds, summed over tensors."""
    received_bytes: int
    sent_bytes: int
    age_s: float = 0.0
    period_us: int | None = None
    """An iteration when it runs alone, D; None during its trial iterations."""
    work_us: int | None = None
    """The aggregator's work in one iteration, e."""
    load: float | None = None
    """Part of the aggregator that it was promised: e / d."""
    loss: float | None = None
    """Part of its speed that the aggregator's cycle takes from it, 0..1: (d - D) / d."""
    loss_measured: float | None = None
    """The same, measured over its last 100 iterations or so."""
    refused: str = ""
    """Why another aggregator would not take it, last."""
    not_finite: int = 0
    """Numbers of its sums that were NaN or infinite."""
    missing: tuple[int, ...] = ()
    """Ranks that have not pushed what the others wait for, the first 16."""
    waits_s: float = 0.0
    """For how long the others have waited."""


class EventLine(msgspec.Struct, frozen=True):
    """One line of `agentctl why ID`."""

    wall_s: float
    host: HostId
    subject: str
    event: str
    reason: str
    key: str = ""


class ErrorView(msgspec.Struct, frozen=True):
    """Every error of the HTTP API: body of any status >= 400."""

    code: int
    """agentctl's exit code."""
    what: str
    why: str
    next: str


class GpuJobView(msgspec.Struct, frozen=True):
    """One job on a shared GPU."""

    job: JobId
    kind: str
    """`guaranteed` or `opportunistic`."""
    stage: str
    may: str
    """What it may do now, in words."""
    gate: bool | None
    """Something in it can hold it back; None: not known yet."""
    flag: bool
    """It says when it has no work on the device."""
    memory_limit_bytes: int
    applied: bool
    """It goes by that limit; until then more may be charged to it."""
    spill_bytes: int
    """In host memory for want of device memory, in its newest mini-batch."""
    step_s: float
    """Typical mini-batch; 0: none yet."""
    fixed: bool = False
    """It keeps the memory it took at its start, whatever the limit (JAX)."""


class SharedGpuView(msgspec.Struct, frozen=True):
    """One GPU and who shares it."""

    host: HostId
    gpu: str
    model: str
    backend: str
    """`nvml`, `cpu` or `sim`."""
    state: str
    condition: str
    """`ok`, `degraded`, `drain` or `lost`."""
    why: str
    utilization: float
    """Mean over 10 s, 0..1."""
    memory_bytes: int
    """What jobs may hold."""
    memory_free_bytes: int
    """Of it, promised to nobody."""
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
    """Share of its mini-batch alone, 0.03: 3 % slower; None: not measured now."""
    error: float | None
    """One standard error of it."""
    baseline_s: float
    """Its mini-batch alone; 0: not measured yet."""
    baseline_age_s: float | None
    """Since that was measured or confirmed."""
    audits: int
    """How often it was."""
    others: str
    """What the others may do, in words."""
    age_s: float = 0.0
