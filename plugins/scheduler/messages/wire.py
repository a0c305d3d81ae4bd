"""What hosts tell one another: the two-step reservation of a gang, and questions about what runs where.

    coordinator              each host of the plan
      | -- Reserve ------------> |   holds the GPUs, writes that down, then answers
      | <- Reserved/NotReserved -|
      | -- Release ------------> |   when any of them said no, or too late

Every message names (job, epoch, attempt): a later pair wins, an earlier one is stale and changes nothing.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.carried import ENV_BYTES_MAX, VARIABLES_MAX
from covey.core.events import Message
from covey.core.hidden import SHOWN_MAX
from covey.core.ids import HostId, JobId
from covey.core.job_records import JobRecord, Range
from plugins.facts import MemoryInUse, StepTiming
from plugins.scheduler.messages.commands import Bytes, Count, Epoch, Id, Step, Text
from plugins.scheduler.messages.options import CPUS_MAX

Uuid = Annotated[str, Meta(max_length=128)]
GRANTS_MAX = 4096
"""The most grants in one question about leases."""
CURVE_POINTS_MAX, CURVE_METRICS_MAX = 512, 16
"""The most points of one job's curve, and metrics of one point."""
RANGES_MAX, RECORDS_MAX = 64, 256
"""The most ranges of numbers in one question for records of jobs, and records in one answer."""
APART_MAX = 64
"""The most jobs in one question that the asked-for job must not be beside."""
Job = Annotated[JobId, Meta(max_length=63)]
Age = Annotated[float, Meta(ge=0, le=1e9)]
"""An age in seconds."""
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$", max_length=32)]
SEALED_BYTES_MAX = ENV_BYTES_MAX + 16 * VARIABLES_MAX
"""The longest environment as it travels, with what msgpack needs for each variable and the seal, bytes."""
SealedBytes = Annotated[bytes, Meta(max_length=SEALED_BYTES_MAX)]


class Reserve(Message, frozen=True):
    """Coordinator -> host: reserve `workers` times `gpus_per_worker` GPUs for this gang."""

    job: Job
    epoch: Epoch
    attempt: Epoch
    workers: Annotated[int, Meta(ge=1, le=4096)]
    gpus_per_worker: Annotated[int, Meta(ge=0, le=64)]
    master: bool
    """Whether rank 0 will be here: reserve a TCP port too."""
    lease_s: Annotated[float, Meta(gt=0, le=3600)]
    opportunistic: bool = False
    """Whether the job may be beside others, where GPUs are shared."""
    memory_bytes: Bytes = 0
    """Bytes that it asks for on each of its GPUs; 0: it did not say."""
    apart_from: Annotated[tuple[Job, ...], Meta(max_length=APART_MAX)] = ()
    """Guaranteed jobs that were measured to suffer from it, or from one of its name."""
    joins: bool = False
    """Whether ranks of this grant run there already, and more are to join them."""
    host_memory: Bytes = 0
    """Memory of the host that the job may use, bytes; 0: it did not say."""
    cpus: Annotated[int, Meta(ge=0, le=CPUS_MAX)] = 0
    """Processors of each worker; 0: it did not say."""


class Reserved(Message, frozen=True):
    """Host -> coordinator: I hold these GPUs for you until the lease ends without news of the grant."""

    job: Job
    epoch: Epoch
    attempt: Epoch
    gpus: Annotated[tuple[Uuid, ...], Meta(max_length=4096)]
    address: Id
    port: Annotated[int, Meta(ge=0, le=65535)]


class NotReserved(Message, frozen=True):
    """Host -> coordinator: no, and how many GPUs it might really have here."""

    job: Job
    epoch: Epoch
    attempt: Epoch
    free: Count
    reason: Text
    beside: bool = False
    """Whether `free` counts parts of GPUs, beside others."""
    memory_short: bool = False
    """Whether the host has no room for the job's memory or processors, however many GPUs are free."""


class Release(Message, frozen=True):
    """Coordinator -> host: this attempt, and any earlier one, is over."""

    job: Job
    epoch: Epoch
    attempt: Epoch


ToHost = Reserve | Release
"""What a gang's coordinator says to the hosts that it wants."""
ToGang = Reserved | NotReserved
"""What the hosts say to the gang's coordinator."""


class JobNow(Message, frozen=True):
    """Question: what do you know of this job's ranks on your host?"""

    job: Job


class JobNowAnswer(Message, frozen=True):
    epoch: Epoch
    pids: dict[int, int]
    """The ranks that run now: rank -> pid."""
    step: Step | None
    metrics: dict[str, float]
    aggregator: HostId | None = None
    """The host that sums the job's tensors."""
    kernels: Annotated[dict[Count, Annotated[str, Meta(max_length=64)]], Meta(max_length=4096)] = {}
    """The kernels of the ranks that said so: rank -> what it computes with (`covey/healing/kernels.py`)."""
    timing: StepTiming | None = None
    """How long steps take there; None: too few steps were reported."""
    hooked: Annotated[dict[Count, Annotated[str, Meta(max_length=400)]], Meta(max_length=4096)] = {}
    """What sees each rank's steps: rank -> `torch 2.13.0`, or why nothing does."""
    joined: bool = False
    """Whether a rank is connected to its agent there."""
    reports: bool = False
    """Whether a rank reported a step, or used tensors: then it can be seen to stand still."""
    memory: MemoryInUse | None = None
    """What the job's processes there have of the host's memory; None: they did not say."""
    limited: bool | None = None
    """Whether their memory and number are limited there, whatever they do; None: none run there."""
    devices: Annotated[str, Meta(max_length=400)] = ""
    """What is wrong with the GPUs that it holds there, or that it does not use them, in words; empty: nothing."""
    codes: Annotated[dict[Count, int], Meta(max_length=4096)] = {}
    """How each rank ended that has ended for good while others of that host run: rank -> exit status, or -N when killed
    by signal N."""
    stuck: Annotated[str, Meta(max_length=400)] = ""
    """Which of the job's ranks makes no progress, in words, where nobody said `--hang`; from the host that looks."""


class CurvePoint(msgspec.Struct, frozen=True, array_like=True):
    """A step of a job, as a rank reported it."""

    step: Step
    step_s: Age
    """How long it took, seconds; 0: not known."""
    epoch: Epoch
    rank: Count
    metrics: Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=CURVE_METRICS_MAX)] = {}


class JobCurveWanted(Message, frozen=True):
    """Question: which steps of this job did ranks on your host report?"""

    job: Job


class JobCurveAnswer(Message, frozen=True):
    points: Annotated[tuple[CurvePoint, ...], Meta(max_length=CURVE_POINTS_MAX)] = ()
    """In order of their steps."""


class SaveWanted(Message, frozen=True):
    """Question: let this process of a job on your host save a checkpoint; asked again with the same number, how far
    that is."""

    job: Job
    epoch: Epoch
    rank: Count
    number: Count


class SaveAnswer(Message, frozen=True):
    state: Literal["pending", "saved", "refused"]
    step: Step = 0
    path: Annotated[str, Meta(max_length=1024)] = ""
    why: Text = ""
    next: Text = ""


class LogTail(Message, frozen=True):
    """Question: up to `limit` bytes of a rank's output from `offset` on; a negative one counts from the end."""

    job: Job
    rank: Count
    offset: int
    limit: Annotated[int, Meta(ge=0, le=65536)]
    since_s: Age | None = None
    """Instead of `offset`: from what was written so many seconds ago on; None: by `offset`."""


class LogTailAnswer(Message, frozen=True):
    data: Annotated[bytes, Meta(max_length=65536)]
    offset: int
    size: int
    ended: bool
    """Whether no rank of this job runs here any more."""
    host: HostId
    kept: bool = True
    """Whether there is a file of the output, be it empty."""
    timed: bool = False
    """Whether `since_s` was asked for, and all before `offset` is known to be older."""


class RenewLeases(Message, frozen=True):
    """Question to the leader, or to another host that asks it for us: may these ranks of `host` go on running?"""

    host: HostId
    grants: Annotated[tuple[tuple[Job, Epoch], ...], Meta(max_length=GRANTS_MAX)]
    relayed: bool = False


class LeasesRenewed(Message, frozen=True):
    """Answer: these ranks may run for `lease_s` seconds from when it was asked."""

    grants: Annotated[tuple[tuple[Job, Epoch], ...], Meta(max_length=GRANTS_MAX)]
    lease_s: Annotated[float, Meta(gt=0, le=1e9)] | None
    """Seconds of the lease; None: without end, as `host` is the only voter and no other host can ever lead."""
    grace_s: Annotated[float, Meta(ge=0, le=1e9)]
    pause_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Seconds after which ranks that may be lost are suspended; None: not before the lease is over."""


class Leaderless(Message, frozen=True):
    """A voter's answer to `RenewLeases`: I have known no leader for so long that no leader can still live on my
    vote."""

    over: Annotated[tuple[tuple[Job, Epoch], ...], Meta(max_length=GRANTS_MAX)] = ()
    """Grants among those asked for that, by this voter's log, are over on that host, or may be."""


class KeepEnv(Message, frozen=True):
    """Submitting agent -> host: keep this environment, which is sealed, until its job is over."""

    digest: Digest
    data: SealedBytes


class EnvOf(Message, frozen=True):
    """Question of a host that is to run this job: what is its environment, as it was sealed?"""

    job: Job
    epoch: Epoch
    digest: Digest


class EnvAnswer(Message, frozen=True):
    data: SealedBytes
    """The sealed environment; empty: it is not here, or the log as it is known here does not say that you run this
    job."""


ShownText = Annotated[str, Meta(max_length=2 * SHOWN_MAX)]
"""The name of a variable, or what is shown of its value."""


class ShownEnvOf(Message, frozen=True):
    """Question of an agent whose user may see this job's environment: what is in it, without its secrets?"""

    job: Job


class ShownEnv(Message, frozen=True):
    variables: Annotated[dict[ShownText, ShownText], Meta(max_length=VARIABLES_MAX)] | None
    """By name, with secrets hidden; None: it is not here, or cannot be opened any more."""


class RankHangs(Message, frozen=True):
    """Host that sums a job, or looks after it -> host of a rank: the others have waited for it for `waits_s`
    seconds."""

    job: Job
    epoch: Epoch
    rank: Count
    waits_s: Age
    why: Text = ""
    """How that is known, if it is not the host that sums the job that says so."""


class RankNow(msgspec.Struct, frozen=True):
    """How one rank is doing, as its host knows it. Times are ages, in seconds, and none is older than what disturbed
    the gang last."""

    rank: Count
    runs: bool
    """Whether the rank has a process. False: it has ended, or has not begun."""
    age_s: Age
    """Seconds for which it has had this process, or none."""
    says: bool
    """Whether a process of the rank is connected there."""
    step: Step | None = None
    quiet_s: Age | None = None
    """Seconds since its last sign of life; None: it does not say."""
    waits_s: Age = 0.0
    """Seconds for which it has waited for other ranks; 0: it does not, or does not say."""
    begun: bool = False
    """Whether it did a step, or had the result of a tensor."""


class GangNow(Message, frozen=True):
    """Question to a host of a job: how are its ranks there doing?"""

    job: Job
    epoch: Epoch


class GangNowAnswer(Message, frozen=True):
    known: bool
    """Whether the host can say how they are; False: they are on their way, or have ended there."""
    ranks: Annotated[tuple[RankNow, ...], Meta(max_length=4096)] = ()


class GangStands(Message, frozen=True):
    """To the host of the lowest rank: all ranks have stood still for `quiet_s` seconds, and none can be blamed."""

    job: Job
    epoch: Epoch
    quiet_s: Age
    why: Text


class StacksWanted(Message, frozen=True):
    """Host that sums a job -> hosts of the others: have your ranks of it write down where they are."""

    job: Job
    epoch: Epoch


ModuleName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,199}$")]


class SparesWanted(Message, frozen=True):
    """Host that has ranks of a job -> another one: keep `count` processes waiting there for ranks of it. It is repeated
    while they are wanted."""

    job: Job
    epoch: Epoch
    count: Annotated[int, Meta(ge=1, le=4096)]
    modules: Annotated[tuple[ModuleName, ...], Meta(max_length=256)]
    """The modules that they import meanwhile."""


class SparesWarm(Message, frozen=True):
    """The answer, to all hosts of the job: `warm` processes wait."""

    job: Job
    epoch: Epoch
    warm: Count
    why: Annotated[str, Meta(max_length=200)] = ""
    """Why there are no spares, or fewer, for good."""


class RecordsWanted(Message, frozen=True):
    """Question: which of these jobs' records do you have? The newest numbers first, as many as one answer takes."""

    numbers: Annotated[tuple[Range, ...], Meta(min_length=1, max_length=RANGES_MAX)]


class RecordsAnswer(Message, frozen=True):
    records: Annotated[tuple[JobRecord, ...], Meta(max_length=RECORDS_MAX)] = ()
    more: bool = False
    """Whether there are more of them than one answer takes."""


Talk = (
    Reserve
    | Reserved
    | NotReserved
    | Release
    | JobNow
    | JobNowAnswer
    | JobCurveWanted
    | JobCurveAnswer
    | SaveWanted
    | SaveAnswer
    | LogTail
    | LogTailAnswer
    | RenewLeases
    | LeasesRenewed
    | Leaderless
    | KeepEnv
    | EnvOf
    | EnvAnswer
    | ShownEnvOf
    | ShownEnv
    | RankHangs
    | StacksWanted
    | SparesWanted
    | SparesWarm
    | GangNow
    | GangNowAnswer
    | GangStands
    | RecordsWanted
    | RecordsAnswer
)
"""Everything the plugin hears and answers with (`Plugin.messages`)."""

decoder: msgspec.msgpack.Decoder[Talk] = msgspec.msgpack.Decoder(Talk)
