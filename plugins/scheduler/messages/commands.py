"""What the replicated log holds: every change of a job or a quota, in the order in which it became true.

Each command carries the wall clock of its proposer for people to read; no decision in `apply` looks at it. A command
about a grant carries the grant's epoch, and one of another epoch is refused: that is how a leader or coordinator that
was cut off cannot undo what happened since.
"""

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from covey.core.ids import HostId, JobId
from covey.core.version import is_newer
from plugins.facts import Place, SavedAt, StepTiming
from plugins.scheduler.messages.arrays import INDEX_MAX, PARTS_MAX
from plugins.scheduler.messages.spec import JobSpec, Key, SealedEnv, UserName, within

Text = Annotated[str, Meta(max_length=1000)]
Epoch = Annotated[int, Meta(ge=0, le=1 << 62)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Step = Annotated[int, Meta(ge=0, le=1 << 53)]
"""A step's number, as large as jobs.sock takes it from a script, which may count samples."""
Index = Annotated[int, Meta(ge=0, le=INDEX_MAX)]
"""The index of a task of an array."""
Wall = Annotated[float, Meta(ge=0, le=1e12)]
Id = Annotated[str, Meta(max_length=63)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]
GpuS = Annotated[float, Meta(ge=0, le=1e15)]

COMMAND_BYTES_MAX = 256 * 1024
"""The longest encoded command that is proposed to the log or decoded, in bytes; the log takes no longer ones."""


USERS_MAX = 200
"""The most users of one tenant."""
WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0
"""The bounds of a tenant's weight."""
NAME_MAX = 40
"""The most characters of a command's name, of one that is not known here, that are told to people."""
UNREACHABLE_MAX = 64
"""The most other hosts of a gang that a host asks when its ranks have failed."""


class CommandBase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One command of the log."""

    wall_s: Wall
    """The proposer's wall clock in seconds, for people."""
    rack_s: Seconds = 0.0
    """The rack's clock at the proposer (`service.log`) in seconds, which does not step: durations are counted by
    it."""
    needs: Annotated[str, Meta(max_length=24)] = ""
    """The oldest release, such as 0.2, that applies this command as it is meant (`messages.releases`); empty: all."""


class Submitted(CommandBase, frozen=True, kw_only=True):
    key: Key
    spec: JobSpec
    may_demote: bool = False
    """Whether the rack demotes jobs of class auto that wait long, so that one that is over its quota can run all the
    same."""
    numbers: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Job ids below this number were given out, as far as the host that proposes this has ever seen. In a log that was
    begun anew they are not given out again, since ranks of the former one may still run under them."""
    env: SealedEnv | None = None
    """The submitter's environment; `spec.env` is empty here."""
    by: Text = ""
    """Who submitted it."""


class Granted(CommandBase, frozen=True, kw_only=True):
    """Leader: this job may run now; `coordinator` finds its GPUs."""

    job: JobId
    epoch: Epoch
    coordinator: HostId


class Placed(CommandBase, frozen=True, kw_only=True):
    """Coordinator: every host said yes. Applying this starts the gang, everywhere at once."""

    job: JobId
    epoch: Epoch
    places: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=4096)]
    """The gang's places in rank order; the first holds rank 0."""
    master_addr: Id
    master_port: Annotated[int, Meta(ge=0, le=65535)]


class PlaceFailed(CommandBase, frozen=True, kw_only=True):
    """Coordinator: no room was found; the job goes back to the queue."""

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
    """Whether this host had told the ranks to stop before they ended."""
    step: Step | None = None
    metrics: Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=16)] = {}
    lost: bool = False
    """The ranks did not end by themselves: the machine restarted, their supervisor died, or their lease ran out."""
    step_s: Seconds | None = None
    """Median time in seconds of the job's newest steps; None when there were few."""
    unreachable: Annotated[tuple[HostId, ...], Meta(max_length=UNREACHABLE_MAX)] = ()
    """Other hosts of the gang that did not answer this one when its ranks had failed."""
    since: Count = 0
    """`Place.since` of the place that these ranks had: a report of ranks that were replaced is not one of those that
    took over."""
    oom_bytes: Bytes = 0
    """The most memory that these ranks had, bytes, where the kernel killed one of their processes at their limit; 0: it
    killed none, or it is not known."""


class RanksDone(CommandBase, frozen=True, kw_only=True):
    """A host: these of my ranks ended with 0 some time ago, and others of mine keep running."""

    job: JobId
    epoch: Epoch
    host: HostId
    steps: Annotated[dict[int, Step | None], Meta(max_length=4096)]
    """The newest step of each such rank that this host heard of; None: it heard of none."""


class PlacesLost(CommandBase, frozen=True, kw_only=True):
    """Leader: these hosts are lost, and nothing of this grant runs there any more. The rest of the gang continues: it
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
    """Somebody: this job's ranks on `host` are to continue elsewhere, while the rest of the gang waits for them."""

    job: JobId
    epoch: Epoch
    host: HostId
    to: HostId | None
    """The host where the ranks are to go; None: wherever there is room."""
    coordinator: HostId
    by: Text = ""
    gang: JobId | None = None
    """The gang that waits for the move. It is only named in its events."""
    replaces: Count | None = None
    """The number of the configuration on which this was decided (`JobHealing.healed`): the job must still have it.
    None: nobody says."""


class Replaced(CommandBase, frozen=True, kw_only=True):
    """Coordinator: a host said yes for each place that is lost or moves. Applying this starts these ranks there, under
    the same grant."""

    job: JobId
    epoch: Epoch
    places: Annotated[dict[HostId, Place], Meta(min_length=1, max_length=4096)]
    """The exchanged places: the host that ranks leave -> the place where they continue."""
    master_addr: Id = ""
    """The address of rank 0's new host, if rank 0 is among the ranks that move."""
    master_port: Annotated[int, Meta(ge=0, le=65535)] = 0


class ScaleAsked(CommandBase, frozen=True, kw_only=True):
    """Somebody: this elastic job is to have `workers` processes. If it has more, applying this ends the others; if it
    has fewer, `coordinator` finds hosts for new ones."""

    job: JobId
    epoch: Epoch
    workers: Annotated[int, Meta(ge=1, le=4096)]
    coordinator: HostId
    by: Text = ""
    why: Text = ""
    replaces: Count | None = None
    """The number of the configuration on which this was decided (`JobHealing.healed`): the job must still have it.
    None: nobody says."""
    sought: Count | None = None
    """How often places for the job had been looked for then (`JobHealing.sought`): nobody may have asked for more
    processes since. None: nobody says."""


class TuneAsked(CommandBase, frozen=True, kw_only=True):
    """Somebody: measure this elastic job from now on, and divide its ranks and tables among its hosts anew where steps
    are shorter then; or (`on` false) leave it as it is."""

    job: JobId
    epoch: Epoch
    on: bool
    by: Text = ""


class Arrangement(msgspec.Struct, frozen=True):
    """Where the processes of one elastic job are from now on."""

    epoch: Epoch
    replaces: Count
    """The number of the configuration that this one replaces (`JobHealing.healed`): the job must still have it."""
    places: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=4096)]
    """All places of the job. `Place.ranks` names processes: those that stay are where they were, with the same GPUs;
    new ones have the names that `plugins.scheduler.policy.carrying` gives them."""
    shares: Annotated[dict[HostId, Annotated[int, Meta(ge=1, le=4096)]], Meta(max_length=4096)] = {}
    """Host -> how many of the job's ranks its processes carry together; empty: all processes carry equally many."""
    owners: Annotated[tuple[HostId, ...], Meta(max_length=16)] | None = None
    """The host that is to own each table, in the order of tables; empty: nobody says, as an empty name does for one
    table; None: as before."""


class Arranged(CommandBase, frozen=True, kw_only=True):
    """Somebody whom hosts said yes for each new process: these jobs are arranged anew, all of them or none."""

    jobs: Annotated[dict[JobId, Arrangement], Meta(min_length=1, max_length=64)]
    by: Text = ""
    why: Text = ""


class CancelAsked(CommandBase, frozen=True, kw_only=True):
    job: JobId
    by: Text = ""
    tasks: Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=PARTS_MAX)] = ()
    """The tasks of an array that are meant, as ranges of indices; none: all, and the array."""


class HoldAsked(CommandBase, frozen=True, kw_only=True):
    """Somebody: this job does not start before it is released."""

    job: JobId
    by: Text = ""


class ReleaseAsked(CommandBase, frozen=True, kw_only=True):
    """Somebody: this job may start, whoever held it, and whatever became of jobs that it waited for."""

    job: JobId
    by: Text = ""


class RequeueAsked(CommandBase, frozen=True, kw_only=True):
    """Somebody: this job stops under this grant, and is queued again."""

    job: JobId
    epoch: Epoch
    hold: bool = False
    """Whether it is held then."""
    by: Text = ""
    test: bool = False
    """Whether that is to see what its ranks do when they are told to stop."""


class PriorityAsked(CommandBase, frozen=True, kw_only=True):
    """Somebody: this job comes before, or behind, all others of its tenant that wait."""

    job: JobId
    up: bool
    own: bool = False
    """Whether only jobs of the same owner are others: nobody moves before jobs of somebody else by this."""
    by: Text = ""


class TimeLimitSet(CommandBase, frozen=True, kw_only=True):
    """Somebody: this is the job's time limit from now on."""

    job: JobId
    time_limit_s: Annotated[float, within("time_limit_s")] | None
    """Seconds that the job may run, all attempts together; None: no limit."""
    by: Text = ""


class BeginReached(CommandBase, frozen=True, kw_only=True):
    """Leader: the time has come before which this job was not to start."""

    job: JobId


class TaskBegun(CommandBase, frozen=True, kw_only=True):
    """Leader: this task of an array, the next one, becomes a job."""

    job: JobId
    index: Index


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
    """Why the grant is taken back. `unfit`: a host, whose GPUs are shared, says that the job cannot be there, or
    stay."""
    reason: Text
    lost: Annotated[tuple[HostId, ...], Meta(max_length=4096)] = ()
    """Hosts that cannot report any more, and where nothing of this grant is left."""
    term: Count = 0
    """The term of the leader that judged so by the leases it gave: void once another one leads (`Leads`). 0: the word
    of somebody who knows."""
    harms: JobId | None = None
    """The guaranteed job beside which the job must not be again."""


class Leads(CommandBase, frozen=True, kw_only=True):
    """A new leader, before its first decision and the first lease that it gives."""

    term: Count
    leases_over_s: Seconds
    """Seconds within which every lease given by this leader, or still by an earlier one, is certainly over."""
    pauses_over_s: Seconds
    """Seconds within which ranks that may be lost certainly stand still without such a lease."""


class Promoted(CommandBase, frozen=True, kw_only=True):
    """Leader: this job starved; it begins again in the highest queue (NSDI'19 §3.3)."""

    job: JobId
    epoch: Epoch
    lasts: bool = False
    """Whether it stays before all others until it ends, as a wide gang that waited too long."""


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
    """Leader: this gang fits its quota and not yet the rack; no other guaranteed job gets these GPUs. `gpus` are all
    that it keeps, per host; empty: it gives them back."""

    job: JobId
    epoch: Epoch
    gpus: Annotated[dict[HostId, Annotated[int, Meta(ge=1, le=1 << 31)]], Meta(max_length=4096)]


class Elapsed(CommandBase, frozen=True, kw_only=True):
    """Leader: the seconds during which any job has waited on this rack, in all. They only grow (max-merge)."""

    clock_s: Seconds


class QuotaSet(CommandBase, frozen=True, kw_only=True):
    tenant: Annotated[str, Meta(pattern=r"^(\*|[a-z0-9][a-z0-9.-]{0,62})$", max_length=63)]
    """The tenant's name; `*`: every tenant without a quota of its own."""
    gpus: Count | None
    """The quota in GPUs; None: not limited."""
    if_absent: bool = False
    """Do nothing when this tenant's quota was ever set (initial quotas of agent.toml)."""
    by: Text = ""


class WeightSet(CommandBase, frozen=True, kw_only=True):
    """Somebody: a tenant without a quota gets GPUs in this proportion to others without one."""

    tenant: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$", max_length=63)]
    weight: Annotated[float, Meta(ge=WEIGHT_MIN, le=WEIGHT_MAX)]
    """1: as if nobody had set it."""
    by: Text = ""


class TenantSet(CommandBase, frozen=True, kw_only=True):
    """Somebody: exactly these users may submit jobs for this tenant from now on."""

    tenant: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$", max_length=63)]
    users: Annotated[tuple[UserName, ...], Meta(max_length=USERS_MAX)]
    """The users' names, ascending; none: the tenant has no users any more."""
    sets_quota: bool = False
    """Whether the tenant's quota becomes `gpus`; otherwise it stays."""
    gpus: Count | None = None
    """The quota in GPUs; None: not limited."""
    before: Annotated[tuple[UserName, ...], Meta(max_length=USERS_MAX)] | None = None
    """The users on which this was decided: the tenant must still have them. None: whoever they are."""
    by: Text = ""


class HostDrained(CommandBase, frozen=True, kw_only=True):
    """Somebody, or the host itself: no rank starts on this host from now on, and those that are there leave it, or stay
    (`cordon`); or (`drained` False) the host is used again."""

    host: HostId
    drained: bool = True
    stop_jobs: bool = False
    """Whether ranks of jobs that cannot continue elsewhere leave the host too: such a job stops, and is queued
    again."""
    by: Text = ""
    cordon: bool = False
    """Whether what is there stays. With `drained` False: a host that is drained is not used again by this."""
    why: Text = ""
    """Why, in words; empty: nobody says."""
    closed: Count | None = None
    """How many hosts were drained or cordoned when this was decided: as many still are. None: however many are."""


class HostForgotten(CommandBase, frozen=True, kw_only=True):
    """Somebody: this host will never come back, and nothing of it is to be remembered."""

    host: HostId
    boot: Count
    """The latest boot that is meant; one that began later is another host of that name."""
    by: Text = ""


class JobSteps(msgspec.Struct, frozen=True):
    """How far a running job is, as one of its hosts sees it."""

    epoch: Epoch
    step: Step
    timing: StepTiming


class JobUse(msgspec.Struct, frozen=True):
    """What a host measured of a job's use of GPUs there, under one epoch, so far. Each number only grows."""

    epoch: Epoch
    seen_gpu_s: GpuS = 0.0
    """GPU·s in which the driver said how much the job's GPUs were in use."""
    used_gpu_s: GpuS = 0.0
    """GPU·s in which they were in use: seconds times utilization."""
    starting_gpu_s: GpuS = 0.0
    """GPU·s from when ranks ran to their first step; 0 also while no step has been seen."""
    gpu_bytes: Bytes = 0
    """The most memory in use on one of its GPUs, or told by one of its ranks, bytes; 0: not known."""
    host_bytes: Bytes = 0
    """The most memory of this host that its processes had, bytes; 0: not known."""

    def up_to(self, other: "JobUse") -> "JobUse":
        """The larger of each number."""
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return JobUse(*(max(one, more) for one, more in zip(mine, others, strict=True)))


class JobHeals(msgspec.Struct, frozen=True):
    """Whether a host that runs a job, and all its ranks there, may be lost."""

    epoch: Epoch
    since: Count
    """`Place.since` of these ranks' place."""
    may_be_lost: bool
    have: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    """In an elastic job: the processes there that have the job's state now (`plugins.facts.RanksHeal`)."""


class StateStays(msgspec.Struct, frozen=True):
    """On a host, a process of an elastic job that stays where it is in this configuration has the job's state."""

    epoch: Epoch
    config: Count
    """`JobHealing.healed`."""


class Attained(CommandBase, frozen=True, kw_only=True):
    """A host: what its GPUs have done for each job since its submission, GPU·s. It only grows (max-merge)."""

    host: HostId
    service_gpu_s: Annotated[dict[JobId, Annotated[float, Meta(ge=0, le=1e15)]], Meta(max_length=4096)]
    barrier: Annotated[str, Meta(max_length=128)] = ""
    """A name for this command: a host that sees it come out of its copy of the log knows that the copy is current."""
    tensors: Annotated[dict[JobId, tuple[Bytes, Bytes]], Meta(max_length=4096)] = {}
    """Bytes of the largest tensor and of all, of jobs whose tensors were seen there (the larger model wins)."""
    steps: Annotated[dict[JobId, JobSteps], Meta(max_length=4096)] = {}
    """Step times of jobs that run there and report steps."""
    saved: Annotated[dict[JobId, SavedAt], Meta(max_length=4096)] = {}
    """The newest checkpoints that ranks there wrote."""
    heals: Annotated[dict[JobId, JobHeals], Meta(max_length=4096)] = {}
    """Changes in whether the host and its ranks may be lost, by job."""
    stays: Annotated[dict[JobId, StateStays], Meta(max_length=4096)] = {}
    """Jobs of which processes are to end, and of which one that stays there has the state now."""
    uses: Annotated[dict[JobId, JobUse], Meta(max_length=4096)] = {}
    """What the host measured of the use of its GPUs by jobs that run there."""


AboutPlaces = PlacesLost | MoveAsked | Replaced | ScaleAsked | TuneAsked
AboutRanks = RanksReported | RanksDone
AboutGrant = Granted | Placed | PlaceFailed | AboutRanks | TimeLimitReached | TakenBack | AboutPlaces
AboutHost = HostDrained | HostForgotten
AboutClass = Promoted | Demoted | Upgraded | GpusKept
ByPeople = CancelAsked | HoldAsked | ReleaseAsked | RequeueAsked | PriorityAsked | TimeLimitSet
AboutWaiting = ByPeople | BeginReached | TaskBegun
"""Commands that find their job in any state, and say themselves which one they change."""
AboutJob = AboutGrant | AboutClass | AboutWaiting
Command = Submitted | AboutJob | Arranged | QuotaSet | WeightSet | TenantSet | AboutHost | Attained | Elapsed | Leads


class Applied(msgspec.Struct, frozen=True, tag=True):
    """The command was applied, or had been before."""

    job: JobId | None = None


class NotApplied(msgspec.Struct, frozen=True, tag=True):
    """The command was not applied since the state did not allow it; nothing changed. `code` as in
    `plugins.base.Refused`."""

    code: int
    what: str
    why: str
    next: str


Result = Applied | NotApplied

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_results: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(Result)


class CommandHead(msgspec.Struct, frozen=True):
    """What agents of all releases read of any command."""

    type: str
    needs: str = ""


_heads: msgspec.msgpack.Decoder[CommandHead] = msgspec.msgpack.Decoder(CommandHead)
KNOWN: frozenset[str] = frozenset(kind.__name__ for kind in get_args(Command))
"""The names of all commands."""


class MalformedCommand(ValueError):
    """Bytes that are no command or result."""


class NewerCommand(MalformedCommand):
    """A command of a release that this one does not know, or that needs a newer one: whoever applies nothing in its
    place comes to another state than the rack. `needs`: the release, such as 0.2; empty: the command does not say."""

    def __init__(self, name: str, needs: str) -> None:
        super().__init__(f"{name} is a command of {f'Covey {needs}' if needs else 'a newer version'}")
        self.name, self.needs = name, needs


def pack(value: Command | Result) -> bytes:
    return _encoder.encode(value)


def open_command(data: bytes) -> Command:
    """The command in `data`. MalformedCommand when it is not one bounded command, NewerCommand when this release cannot
    apply it."""
    if len(data) > COMMAND_BYTES_MAX:
        raise MalformedCommand(f"a command of {len(data)} bytes; at most {COMMAND_BYTES_MAX} are accepted")
    try:
        command = _commands.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        _refuse_newer(data)
        raise MalformedCommand(str(error)) from error
    if is_newer(command.needs):
        raise NewerCommand(type(command).__name__, command.needs)
    return command


def _refuse_newer(data: bytes) -> None:
    """NewerCommand when these bytes, which are no command of this release, are one of another."""
    try:
        head = _heads.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    if head.type not in KNOWN or is_newer(head.needs):
        raise NewerCommand(head.type[:NAME_MAX], head.needs[:NAME_MAX])


def open_result(data: bytes) -> Result:
    """Malformed when `data` is no result."""
    try:
        return _results.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedCommand(str(error)) from error
