"""Frames between a process on this host and its agent, on the unix socket `jobs.sock` (encoding: `covey.frames`).

The process says `Join` first; the agent answers `Joined` or `Refusal`. After that both sides may speak at any time.
A process that loses the socket keeps working and joins again when the agent is back.
"""

import msgspec

from covey.core import HostId, JobId


class Frame(msgspec.Struct, frozen=True, tag=True):
    """One frame; the tag is the class name."""


class Join(Frame, frozen=True, tag="Join"):
    """First word of a process. A rank of a job gives what the runner put into its environment; a tool outside any job
    leaves `job` empty and is known by its uid (SO_PEERCRED)."""

    pid: int
    job: JobId | None = None
    rank: int = 0
    epoch: int = 0
    """Fencing epoch of the grant this rank was started under (COVEY_EPOCH)."""
    token: str = ""
    """COVEY_TOKEN: proves that the runner started this process."""
    kernel: str = ""
    """`covey.kernels.kernel()`; empty: not known yet."""


class Joined(Frame, frozen=True, tag="Joined"):
    host: HostId
    job: JobId | None = None
    rank: int = 0
    world_size: int = 1
    epoch: int = 0


class Refusal(Frame, frozen=True, tag="Refusal"):
    """No, with what a person needs to go on: one line what, one line why, one line what to do next."""

    what: str
    why: str
    next: str


class AggregatorAt(Frame, frozen=True, tag="AggregatorAt"):
    """Agent -> rank: push and pull at `address` under `epoch`. A higher epoch replaces a lower one at once; the rank
    then pushes its unacknowledged round again there."""

    job: JobId
    epoch: int
    host: HostId
    address: str
    """TCP `ip:port` of the aggregating process."""
    secret: bytes
    """16 bytes that a connection must present; told only to the ranks of this job."""


class AggregatorLost(Frame, frozen=True, tag="AggregatorLost"):
    """Rank -> agent: nothing to be had at the address of `epoch`; please find out, and say where to go."""

    epoch: int
    why: str


class Stepped(Frame, frozen=True, tag="Stepped"):
    """Rank -> agent: one mini-batch done. Becomes the fact `StepTimed`."""

    step: int
    step_s: float
    compute_s: float = 0.0
    communicate_s: float = 0.0
    metrics: dict[str, float] = {}
    """What the script wants seen in `agentctl job` (loss, accuracy), at most 16 names of at most 64 characters."""


class Stopping(Frame, frozen=True, tag="Stopping"):
    """Agent -> rank: this job is asked to end here. SIGTERM goes to the rank's main process right after this, SIGKILL
    to all that is left of the rank when the time is over. Said again when the time has changed."""

    left_s: float
    why: str
    may_extend: bool = True


class ExtendGrace(Frame, frozen=True, tag="ExtendGrace"):
    """Rank -> agent, once, after `Stopping`: so many seconds more are needed. Answer: `Stopping` to all ranks of the
    job on this host, or `Refusal` with what = `GRACE_KEPT`."""

    seconds: float


GRACE_KEPT = "the time to end was not extended"


class Attach(Frame, frozen=True, tag="Attach"):
    """Process -> agent: open (or make) the remote memory volume of this name. Answer: `VolumeAt` or `Refusal`."""

    volume: str
    size_bytes: int


class VolumeAt(Frame, frozen=True, tag="VolumeAt"):
    """Agent -> process: the volume's own process listens on this unix socket."""

    volume: str
    size_bytes: int
    page_bytes: int
    path: str
    token: bytes


class Detach(Frame, frozen=True, tag="Detach"):
    """Process -> agent: forget the volume and everything in it. Answer: `Detached` or `Refusal`."""

    volume: str


class Detached(Frame, frozen=True, tag="Detached"):
    volume: str


FrameUnion = (
    Join | Joined | Refusal | AggregatorAt | AggregatorLost | Stepped
    | Stopping | ExtendGrace | Attach | VolumeAt | Detach | Detached
)  # fmt: skip
decoder: msgspec.msgpack.Decoder[FrameUnion] = msgspec.msgpack.Decoder(FrameUnion)
