"""What the replicated log holds: every change of a job or a quota, in the order in which it became true.

Each command carries the wall clock of its proposer for people to read; no decision in `apply` looks at it. A command
about a grant carries the grant's epoch, and one of another epoch is refused: that is how a leader or coordinator that
was cut off cannot undo what happened since.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.ids import HostId, JobId
from plugins.facts import Place, StepTiming
from plugins.scheduler.messages.spec import JobSpec, Key, SealedEnv

Text = Annotated[str, Meta(max_length=1000)]
Epoch = Annotated[int, Meta(ge=0, le=1 << 62)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Step = Annotated[int, Meta(ge=0, le=1 << 53)]
"""A step's number, as large as jobs.sock takes it from a script, which may count samples."""
Wall = Annotated[float, Meta(ge=0, le=1e12)]
Id = Annotated[str, Meta(max_length=63)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]

COMMAND_BYTES_MAX = 256 * 1024
"""Longest encoded command that is offered to the log or looked at, bytes; the log takes no longer ones."""


UNREACHABLE_MAX = 64
"""Other hosts of a gang that a host asks when its ranks have failed."""


class CommandBase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One command of the log."""

    wall_s: Wall
    """Proposer's wall clock, for people."""
    rack_s: Seconds = 0.0
    """The rack's clock at the proposer (`service.rack_clock`), which does not step: durations are counted by it."""


class Submitted(CommandBase, frozen=True, kw_only=True):
    key: Key
    spec: JobSpec
    may_demote: bool = False
    """The rack demotes jobs of class auto that wait long, so one that is over its quota can run all the same."""
    numbers: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Ids below this number were given out, as far as the host that proposes this has ever seen. In a log that was
    begun anew they are not given out again, since ranks of the former one may still run under them."""
    env: SealedEnv | None = None
    """The submitter's environment; `spec.env` is empty here."""


class Granted(CommandBase, frozen=True, kw_only=True):
    """Leader: this job may run now; `coordinator` finds its GPUs."""

    job: JobId
    epoch: Epoch
    coordinator: HostId


class Placed(CommandBase, frozen=True, kw_only=True):
    """Coordinator: every host said yes. Applying this is the start, everywhere at once."""

    job: JobId
    epoch: Epoch
    places: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=4096)]
    """In rank order; the first holds rank 0."""
    master_addr: Id
    master_port: Annotated[int, Meta(ge=0, le=65535)]


class PlaceFailed(CommandBase, frozen=True, kw_only=True):
    """Coordinator: no room was found; back to the queue."""

    job: JobId
    epoch: Epoch
    reason: Text


class RanksReported(CommandBase, frozen=True, kw_only=True):
    """A host: all my ranks of this job have ended."""

    job: JobId
    epoch: Epoch
    host: HostId
    codes: Annotated[dict[int, int], Meta(max_length=4096)]
    reason: Text = ""
    asked: bool = False
    """This host had told them to stop before they ended."""
    step: Step | None = None
    metrics: Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=16)] = {}
    lost: bool = False
    """They did not end by themselves: the machine restarted, their supervisor died, or their lease ran out."""
    step_s: Seconds | None = None
    """Median time of its newest steps; None when there were few."""
    unreachable: Annotated[tuple[HostId, ...], Meta(max_length=UNREACHABLE_MAX)] = ()
    """Other hosts of the gang that did not answer this one when its ranks had failed."""
    since: Count = 0
    """`Place.since` of the place that these ranks had: a report of ranks that were replaced is not one of those that
    took over."""


class RanksDone(CommandBase, frozen=True, kw_only=True):
    """A host: these of my ranks ended with 0 some time ago, and others of mine run on."""

    job: JobId
    epoch: Epoch
    host: HostId
    steps: Annotated[dict[int, Step | None], Meta(max_length=4096)]
    """The newest step of each that this host heard of; None: of none."""


class PlacesLost(CommandBase, frozen=True, kw_only=True):
    """Leader: these hosts are lost, and nothing of this grant runs there any more. The rest of the gang goes on: it
    has what successors need. `coordinator` finds a host for each."""

    job: JobId
    epoch: Epoch
    hosts: Annotated[tuple[HostId, ...], Meta(max_length=4096)]
    coordinator: HostId
    reason: Text
    term: Count = 0
    """The term of the leader that judged so by the leases it gave: void once another one leads (`Leads`). 0: the word
    of somebody who knows."""


class MoveAsked(CommandBase, frozen=True, kw_only=True):
    """Somebody: this job's ranks on `host` are to go on elsewhere, while the rest of the gang waits for them."""

    job: JobId
    epoch: Epoch
    host: HostId
    to: HostId | None
    """None: wherever there is room."""
    coordinator: HostId
    by: Text = ""
    gang: JobId | None = None
    """That waits for it. Only told, in its events."""


class Replaced(CommandBase, frozen=True, kw_only=True):
    """Coordinator: a host said yes for each place that is lost or moves. Applying this starts these ranks there, under
    the same grant."""

    job: JobId
    epoch: Epoch
    places: Annotated[dict[HostId, Place], Meta(min_length=1, max_length=4096)]
    """Host that they leave -> where they go on."""
    master_addr: Id = ""
    """If rank 0 is among them."""
    master_port: Annotated[int, Meta(ge=0, le=65535)] = 0


class CancelAsked(CommandBase, frozen=True, kw_only=True):
    job: JobId
    by: Text = ""


class TimeLimitReached(CommandBase, frozen=True, kw_only=True):
    """Leader: the job has run for its time limit."""

    job: JobId
    epoch: Epoch


class TakenBack(CommandBase, frozen=True, kw_only=True):
    """Leader, or a host (`unfit`): stop this grant and queue the job again, or, when it is stopping already, wait no
    longer for `lost`."""

    job: JobId
    epoch: Epoch
    cause: Literal["preempted", "host lost", "coordinator lost", "placing took too long", "unfit"]
    """`unfit`: a host, whose GPUs are shared, says that it cannot be there, or stay."""
    reason: Text
    lost: Annotated[tuple[HostId, ...], Meta(max_length=4096)] = ()
    """Hosts that cannot report any more, and where nothing of this grant is left."""
    term: Count = 0
    """The term of the leader that judged so by the leases it gave: void once another one leads (`Leads`). 0: the word
    of somebody who knows."""
    harms: JobId | None = None
    """The guaranteed job beside which it must not be again."""


class Leads(CommandBase, frozen=True, kw_only=True):
    """A new leader, before its first decision and the first lease that it gives."""

    term: Count
    leases_over_s: Seconds
    """Within which every lease given by it, or still by an earlier one, is certainly over."""
    pauses_over_s: Seconds
    """Within which ranks that may be lost certainly stand still without such a lease."""


class Promoted(CommandBase, frozen=True, kw_only=True):
    """Leader: this job starved; it begins again in the highest queue (NSDI'19 §3.3)."""

    job: JobId
    epoch: Epoch


class Demoted(CommandBase, frozen=True, kw_only=True):
    """Leader: this job of class auto waited too long for its quota; it is opportunistic now (AntMan §3.3)."""

    job: JobId
    epoch: Epoch
    waited_s: Seconds


class Upgraded(CommandBase, frozen=True, kw_only=True):
    """Leader: this demoted job runs, and its tenant's quota has room: it is guaranteed now (AntMan §3.3)."""

    job: JobId
    epoch: Epoch


class GpusKept(CommandBase, frozen=True, kw_only=True):
    """Leader: this gang fits its quota and not yet the rack; no other guaranteed job gets these GPUs. All that it has,
    per host; none gives them back."""

    job: JobId
    epoch: Epoch
    gpus: Annotated[dict[HostId, Annotated[int, Meta(ge=1, le=1 << 31)]], Meta(max_length=4096)]


class Elapsed(CommandBase, frozen=True, kw_only=True):
    """Leader: so long has somebody waited on this rack since ever. Only ever grows (max-merge)."""

    clock_s: Seconds


class QuotaSet(CommandBase, frozen=True, kw_only=True):
    tenant: Annotated[str, Meta(pattern=r"^(\*|[a-z0-9][a-z0-9.-]{0,62})$", max_length=63)]
    """`*`: every tenant without a quota of its own."""
    gpus: Count | None
    """None: not limited."""
    if_absent: bool = False
    """Do nothing when this tenant's quota was ever set (initial quotas of agent.toml)."""


class HostDrained(CommandBase, frozen=True, kw_only=True):
    """Somebody: no rank starts on this host from now on, and those that are there leave it; or no more so."""

    host: HostId
    drained: bool = True
    stop_jobs: bool = False
    """Those of jobs that cannot go on elsewhere leave it too: such a job stops, and is queued again."""
    by: Text = ""


class JobSteps(msgspec.Struct, frozen=True):
    """Where a job is that runs, as one of its hosts sees it."""

    epoch: Epoch
    step: Step
    timing: StepTiming


class JobHeals(msgspec.Struct, frozen=True):
    """Whether a host that runs a job, and all its ranks there, may be lost."""

    epoch: Epoch
    since: Count
    """`Place.since` of these ranks' place."""
    may_be_lost: bool


class Attained(CommandBase, frozen=True, kw_only=True):
    """A host: what its GPUs have done for each job since ever, GPU·s. Only ever grows (max-merge)."""

    host: HostId
    service_gpu_s: Annotated[dict[JobId, Annotated[float, Meta(ge=0, le=1e15)]], Meta(max_length=4096)]
    barrier: Annotated[str, Meta(max_length=128)] = ""
    """Whoever sees this come out of its copy of the log knows that the copy is current."""
    tensors: Annotated[dict[JobId, tuple[Bytes, Bytes]], Meta(max_length=4096)] = {}
    """Bytes of the largest tensor and of all, of jobs whose tensors were seen there (the larger model wins)."""
    steps: Annotated[dict[JobId, JobSteps], Meta(max_length=4096)] = {}
    """Step times of jobs that run there and report steps."""
    heals: Annotated[dict[JobId, JobHeals], Meta(max_length=4096)] = {}
    """What changed of that."""


AboutPlaces = PlacesLost | MoveAsked | Replaced
AboutRanks = RanksReported | RanksDone
AboutGrant = Granted | Placed | PlaceFailed | AboutRanks | CancelAsked | TimeLimitReached | TakenBack | AboutPlaces
AboutClass = Promoted | Demoted | Upgraded | GpusKept
AboutJob = AboutGrant | AboutClass
Command = Submitted | AboutJob | QuotaSet | HostDrained | Attained | Elapsed | Leads


class Applied(msgspec.Struct, frozen=True, tag=True):
    """Done, or was done before."""

    job: JobId | None = None


class NotApplied(msgspec.Struct, frozen=True, tag=True):
    """The state did not allow it; nothing changed. `code` as in `plugins.base.Refused`."""

    code: int
    what: str
    why: str
    next: str


Result = Applied | NotApplied

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_results: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)


class MalformedCommand(ValueError):
    """Bytes that are no command or result."""


def pack(value: Command | Result) -> bytes:
    return _encoder.encode(value)


def open_command(data: bytes) -> Command:
    """Malformed when `data` is not one bounded command."""
    if len(data) > COMMAND_BYTES_MAX:
        raise MalformedCommand(f"a command of {len(data)} bytes; at most {COMMAND_BYTES_MAX} are accepted")
    try:
        return _commands.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedCommand(str(error)) from error


def open_result(data: bytes) -> Result:
    """Malformed when `data` is no result."""
    try:
        return _results.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedCommand(str(error)) from error
