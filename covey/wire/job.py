"""Frames between a process on this host and its agent, on the unix socket `jobs.sock` (encoding: `covey.wire.frames`).

The process sends `Join` first; the agent answers `Joined` or `Refusal`. After that both sides may send at any time. A
process that loses the socket continues to work and joins again when the agent is back.
"""

from typing import Literal

import msgspec

from covey.core.ids import HostId, JobId
from covey.core.version import VERSION
from covey.ports.processes import ProcessId
from covey.wire.sums import Now, Order

PROTOCOL = 1
"""Version of these frames: one higher whenever one side can no longer decode the other. On a mismatch a side refuses
the other and names both versions; wheels of different versions with the same protocol work together, as during an
upgrade."""
VERSION_MAX = 32
SAVED_PATH_MAX = 1024
"""Most characters shown of the other side's version."""


class Frame(msgspec.Struct, frozen=True, tag=True):
    """One frame; the tag is the class name."""


class Join(Frame, frozen=True):
    """First frame of a process. A rank of a job gives what the runner put into its environment; a tool outside any job
    leaves `job` empty and is identified by its uid (SO_PEERCRED)."""

    pid: int
    job: JobId | None = None
    rank: int = 0
    epoch: int = 0
    """Fencing epoch of the grant under which this rank was started (COVEY_EPOCH)."""
    token: str = ""
    """COVEY_TOKEN: proves that the runner started this process."""
    kernel: str = ""
    """The kernel of `covey.healing.kernels.kernel()`; empty: not known yet."""
    protocol: int = 1
    """`PROTOCOL` of the process."""
    version: str = ""
    """Version of the covey-job that the process uses."""
    tensor_memory: int = 0
    """Whether this rank can share memory for tensors with the job's other ranks: 0 no, 1 yes, 2 it does already."""
    saves: bool = False
    """Whether the process answers `AskSave`."""


class Joined(Frame, frozen=True):
    host: HostId
    job: JobId | None = None
    rank: int = 0
    world_size: int = 1
    epoch: int = 0
    protocol: int = 1
    version: str = ""
    """Version of the agent."""
    tensor_memory: bool = False
    """Whether `TensorMemoryHere` or `NoTensorMemory` follows, once all ranks have joined."""
    heals: bool = False
    """Whether the agent handles `Heals`: ranks of this job may be lost one by one."""
    heartbeat_s: float = 0.0
    """Seconds between the `Heartbeat` frames that the process is to send; 0: it sends none."""
    memory_s: float = 0.0
    """Seconds between the `MemoryHeld` frames that the process is to send; 0: the agent does not know them."""
    leaves: bool = False
    """Whether the agent handles `ProcessLeaves`."""


class Refusal(Frame, frozen=True):
    """The agent refuses, with text for a person: one line what, one line why, one line what to do next."""

    what: str
    why: str
    next: str


class AggregatorAt(Frame, frozen=True):
    """Agent -> rank: push and pull at `address` under `epoch`. A higher epoch replaces a lower one, and the rank then
    pushes its unacknowledged round again there: at once, or, when it is `handed_over`, once the owner before has ended
    its connection."""

    job: JobId
    epoch: int
    host: HostId
    address: str
    """TCP `ip:port` of the aggregating process; empty: the rank's run of the job is over, and `epoch` is that of a
    newer run."""
    secret: bytes
    """16 bytes that a connection must prove to know; sent only to the ranks of this job."""
    table: int = 0
    """Number of the table that this aggregator owns (`covey.tensors.numbers.blocks`)."""
    handed_over: bool = False
    """The owner before continues until it ends the rank's connection, between two iterations."""
    near: str = ""
    """Path of a unix socket of the same process, when that runs on the rank's host; empty: there is none."""
    rdma: bool = False
    """Whether large parts may go to it and come from it over RDMA."""


class AggregatorLost(Frame, frozen=True):
    """Rank -> agent: the address of `epoch` does not serve; `AggregatorAt` answers once the agent knows another."""

    epoch: int
    why: str
    table: int = 0


class TableWanted(Frame, frozen=True):
    """Rank -> agent: this rank has Blocks in that table and needs its owner; the agent answers with `AggregatorAt`."""

    table: int
    may_own: bool = False
    """Whether this rank can own tables of its job itself, when it is told to by `SumsOrder`."""


class SumsOrder(Frame, frozen=True):
    """Agent -> rank that may own tables: what to sum, as told to an `aggd`. `SumsNow` answers each order."""

    order: Order
    ip: str
    """Address of this host at which the rank listens for other ranks, at a free port."""
    memory_bytes_max: int = 1 << 40
    """Most bytes of tensors that it may hold as an owner."""
    rdma: bool = False
    """Whether large parts may come to it and go from it over RDMA."""


class SumsNow(Frame, frozen=True):
    """Rank -> agent: what this rank sums, after each order, and when it has joined again; `now.address` is empty while
    it owns no table."""

    now: Now
    over: bool = False
    """All ranks of the job are done (`job.tensors.leave()`): what this rank owned needs no owner any more."""


class Stepped(Frame, frozen=True):
    """Rank -> agent: one mini-batch is done. Becomes the fact `StepTimed`."""

    step: int
    step_s: float
    compute_s: float = 0.0
    communicate_s: float = 0.0
    metrics: dict[str, float] = {}
    """Metrics shown in `agentctl job` (loss, accuracy): at most 16 names of at most 64 characters."""
    input_s: float = 0.0
    """Seconds of `step_s` spent waiting for input."""
    sending_s: float = 0.0
    """Seconds in which the process sent under a turn (COMM); 0 in a job that takes no turns."""
    turns_s: float = 0.0
    """Seconds of `step_s` in which the script waited for turns of other jobs; not in `communicate_s`."""
    memory_bytes: int = 0
    """Highest use of device memory in bytes; for a process without a device, its resident memory; 0: not known."""
    boundary: str = "script"
    """What a mini-batch is here: as the script says, or what `covey.hooks` counts; at most 32 characters."""
    added_s: float = 0.0
    """Seconds of a processor that the process used while its script waited for sums; 0 in a job that takes no turns."""


class Hooked(Frame, frozen=True):
    """Rank -> agent: what Covey sees of the script without its help. Becomes the fact `JobHooked`."""

    to: str = ""
    """The framework that is seen, such as `torch 2.13.0`; empty: none. At most 160 characters."""
    problem: str = ""
    """One line: why less is seen than could be; at most 400 characters."""


class CheckpointSaved(Frame, frozen=True):
    """Rank -> agent: a checkpoint is complete (`covey.healing.checkpoint`). Becomes the fact `JobSaved`."""

    step: int
    """The step with which ranks continue."""
    path: str
    """Its file; at most `SAVED_PATH_MAX` characters."""
    wall_s: float = 0.0
    """When it was complete, in seconds since 1970; 0: not known."""


class AskSave(Frame, frozen=True):
    """Agent -> rank: a person asks for a checkpoint. Sent only to a process that said `Join.saves`; a repeated one, of
    the same number, asks how far it is. `SaveIs` answers."""

    number: int


class SaveIs(Frame, frozen=True):
    """Rank -> agent, after each `AskSave`: how far the save of this number is."""

    number: int
    state: Literal["pending", "saved", "refused"]
    step: int = 0
    """The step that was saved."""
    path: str = ""
    """Its file; at most `SAVED_PATH_MAX` characters."""
    why: str = ""
    """Why it is refused; at most 400 characters, as `next`."""
    next: str = ""


class AskPages(Frame, frozen=True):
    """Rank -> agent: this rank can obey limits (`covey.kernel.pages`). The fields are the limits that it obeys now,
    from an agent before this one."""

    epoch: int = 0
    memory_limit_bytes: int = 0


class PagesHere(Frame, frozen=True):
    """Agent -> rank, with three descriptors (SCM_RIGHTS): the pages `limits`, `report` and `flag`."""


class PagesMapped(Frame, frozen=True):
    """Rank -> agent: `report` and `flag` are mapped; from now on no other process can become their writer."""


class TensorMemoryHere(Frame, frozen=True):
    """Agent -> rank, with a descriptor: memory in which all ranks of the job exchange tensors
    (`covey.tensors.same_host.layout`)."""


class NoTensorMemory(Frame, frozen=True):
    """Agent -> rank: there is no shared memory for tensors, or from now on none for more of them. Rank -> agent: it
    cannot use what it was given; the agent tells the others."""

    why: str


class Heals(Frame, frozen=True):
    """Rank -> agent: this process has the job's state at the beginning of `step`. If it is lost from then on, the agent
    starts its rank again alone: the others have what it needs (`job.state`)."""

    step: int
    over: bool = False
    """The rank needs no more healing: its script is done, and so are those of all other ranks."""
    modules: tuple[str, ...] = ()
    """Modules that a spare of this process imports ahead (`covey.hooks.warm`); none: it has no spare."""


class Heartbeat(Frame, frozen=True):
    """Rank -> agent, every `Joined.heartbeat_s`: how the script progresses (`covey.job.heartbeats`)."""

    step: int | None
    """Number of the newest step that the script did, reported or seen; None: none yet."""
    quiet_s: float
    """Seconds since the last sign of life: a step, a batch, a call of `tensors` that began or ended."""
    waits_s: float
    """Seconds that the rank has waited for other ranks, in `tensors`; 0: it does not wait."""
    begun: bool = False
    """The script did a step, or had the result of a tensor, so its start-up is over."""


class MemoryHeld(Frame, frozen=True):
    """Rank -> agent, every `Joined.memory_s`, of a job that has a limit of host memory (`submit --mem`) and of
    a process that has data Blocks: memory of this process, bytes. `HostMemory` answers."""

    blocks_bytes: int = 0
    """Data Blocks in memory."""
    arrays_bytes: int = 0
    """Arrays that the script registered as its state; 0: not known, as in a job without a limit."""
    beside_bytes: int = 0
    """The most that the process needed beside Blocks, its arrays included."""
    peak_bytes: int = 0
    """The most resident memory, as the kernel says; 0: it does not."""


class HostMemory(Frame, frozen=True):
    """Agent -> rank, after each `MemoryHeld`: what the job's processes on this host may take."""

    limit_bytes: int
    """Memory for all of them together; 0: not limited."""
    processes: int
    """The number of the job's processes on this host."""
    others_bytes: int = 0
    """What the others need beside Blocks (`MemoryHeld.beside_bytes`), together."""
    others: int = 0
    """The number of others that have said what they need."""


MEMORY_S = 1.0
"""Seconds between two `MemoryHeld` of a process (chosen: a share that is a second old is off by a few Blocks)."""

HEARTBEAT_S, HEARTBEAT_SHARE = (0.25, 5.0), 0.125
"""Least and most seconds between two heartbeats; and their interval as a share of the job's hang time."""


def heartbeat_s(hang_s: float | None) -> float:
    """Seconds between heartbeats of a job's processes. `hang_s`: seconds without progress after which the job's ranks
    count as hanging; None: nobody said, and their steps tell."""
    return HEARTBEAT_S[1] if hang_s is None else min(HEARTBEAT_S[1], max(HEARTBEAT_S[0], HEARTBEAT_SHARE * hang_s))


class TensorsShared(Frame, frozen=True):
    """Rank 0 -> agent: tensors in shared memory, sent again with each new one. Aggregators know of others."""

    largest_bytes: int
    total_bytes: int
    """Bytes of all tensors together, each counted once."""


class GoneRank(msgspec.Struct, frozen=True):
    """A rank whose process ended with 0."""

    host: HostId
    step: int | None
    """Newest step that the rank's host heard of; None: it heard of none."""


class RanksHaveLeft(Frame, frozen=True):
    """Agent -> rank: these ranks have ended with 0 while others run, and will never push what they have not pushed.
    Sent again, with all of them, when there are more, and to each process that joins."""

    ranks: dict[int, GoneRank]


class Carries(Frame, frozen=True):
    """Agent -> first rank of a process of an elastic job, after `Joined` and whenever it changes: the ranks that each
    process of the job carries in configuration `config`, by its first rank (`covey.job.carrying`). A higher
    configuration replaces a lower one."""

    config: int
    carried: dict[int, tuple[int, ...]]
    came: dict[int, int] = {}
    """The configuration in which each rank came to the process that carries it, by rank; 0 for one that is not
    named."""


class TurnsHere(Frame, frozen=True):
    """Agent -> rank of a job that shares its host in turns, with a descriptor: the page on which turns are taken
    (`covey.tensors.turns.page`). It replaces an earlier one."""

    slot: int
    """The process's place on the page."""
    use: int
    """Which use of this place is the process's: once the page has another number there, it is another process's."""


class InVain(Frame, frozen=True):
    """Rank -> agent: this rank waits for a rank that has left, and ends that wait with an error. Becomes the fact
    `RankWaitsInVain`."""

    why: str


class ProcessLeaves(Frame, frozen=True):
    """Rank -> agent, before a process that has pushed tensors closes its connection without an error: it pushes nothing
    more. What started it (a shell, a launcher) may run on."""


class NeighbourFlag(Frame, frozen=True):
    """Agent -> rank, with a descriptor when `there` is True: the `flag` of the guaranteed rank with which it shares a
    GPU; without: there is no such rank any more."""

    there: bool


class Stopping(Frame, frozen=True):
    """Agent -> rank: this job is asked to end here. Right after this, SIGTERM goes to the rank's main process; SIGKILL
    goes to all that is left of the rank when the time is over. Sent again when the time has changed."""

    left_s: float
    why: str
    may_extend: bool = True


class ExtendGrace(Frame, frozen=True):
    """Rank -> agent, once, after `Stopping`: `seconds` more are needed. Answer: `Stopping` to all ranks of the job on
    this host, or `Refusal` with what = `GRACE_KEPT`."""

    seconds: float


GRACE_KEPT = "the time to end was not extended"


Make = Literal["", "anew", "never"]
"""Whether a volume that does not exist is made. Empty: yes, unless other hosts hold pages of one with this name;
`anew`: yes in that case too, and empty; `never`: no."""


class VolumeWanted(Frame, frozen=True):
    """Process -> agent: open (or make) the remote memory volume of this name. Answer: `VolumeAt` or `Refusal`, and
    before it, while that takes long, `VolumeComing` every few seconds."""

    volume: str
    size_bytes: int
    mirror: int = 0
    """Copies of each slab on other hosts: 2, without a disk; 0: the volume stays as it is, or is made with a disk."""
    parity: str = ""
    """`K+1`: without a disk, each slab is divided among K other hosts, with its parity on one more."""
    job: JobId | None = None
    """Job that the volume belongs to and counts against, if the process did not join as its rank; None: no job."""
    epoch: int = 0
    token: str = ""
    """COVEY_TOKEN of the job's ranks on this host."""
    make: Make = ""
    scratch: ProcessId | None = None
    """The process for which the volume is made: it is removed once that process has ended. None: it stays."""


class VolumeComing(Frame, frozen=True):
    """Agent -> process: the volume is being made or opened; `why` says why it is not ready yet."""

    volume: str
    why: str


class VolumeAt(Frame, frozen=True):
    """Agent -> process: the volume's own process listens on this unix socket."""

    volume: str
    size_bytes: int
    page_bytes: int
    path: str
    token: bytes


class RemoveVolume(Frame, frozen=True):
    """Process -> agent: forget the volume and everything in it. Answer: `VolumeRemoved` or `Refusal`."""

    volume: str


class VolumeRemoved(Frame, frozen=True):
    volume: str


FrameUnion = (
    Join | Joined | Refusal | AggregatorAt | AggregatorLost | TableWanted | SumsOrder | SumsNow | Stepped | Hooked
    | CheckpointSaved | AskSave | SaveIs | AskPages | PagesHere | PagesMapped | NeighbourFlag
    | TensorMemoryHere | NoTensorMemory | TensorsShared | Heals | Heartbeat | Stopping | ExtendGrace
    | RanksHaveLeft | InVain | ProcessLeaves | Carries | TurnsHere | MemoryHeld | HostMemory
    | VolumeWanted | VolumeComing | VolumeAt | RemoveVolume | VolumeRemoved
)  # fmt: skip
decoder: msgspec.msgpack.Decoder[FrameUnion] = msgspec.msgpack.Decoder(FrameUnion)


def other_protocol(what: str, there: str, other: Join | Joined) -> Refusal | None:
    """The refusal, for either side, when `there` (covey-job or covey-agent) has another protocol than this process;
    None when the protocols are equal."""
    if other.protocol == PROTOCOL:
        return None
    here = "covey-agent" if there == "covey-job" else "covey-job"
    version = "".join(filter(str.isprintable, other.version[:VERSION_MAX])) or "of an unknown version"
    why = f"{there} {version} speaks version {other.protocol} of jobs.sock, {here} {VERSION} here speaks {PROTOCOL}"
    return Refusal(what, why, "install the covey-job of this host's agent where the script runs, and start it again")
