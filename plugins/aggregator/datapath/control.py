"""What an agent and its `aggd` say to one another on the unix socket (frames of `covey.wire.frames`).

Request and answer in turn: the agent sends one frame and reads one. `Serve` and `DropJob` may be repeated.
"""

from typing import Annotated

import msgspec

from covey.core.ids import JobId
from covey.tensors.numbers.tensor_wire import RANKS_MAX, SECRET_BYTES
from plugins.aggregator.messages import NextOwner

UNKNOWN = -1
"""A process that was started before there was `SetPace` says nothing of it, and is not to be told."""


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Sum this job under this epoch, from nothing. A lower epoch of the job ends."""

    job: JobId
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    workers: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    """Bytes of its tensors, as far as is known: memory for them is prepared."""


class DropJob(msgspec.Struct, frozen=True, tag=True):
    """Serve this job no more, if its epoch is at most `epoch`; `instead` is the epoch its workers are told."""

    job: JobId
    epoch: int
    instead: int = 0
    within_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """Go on for so long, until a moment between two iterations; 0: at once."""
    to: NextOwner | None = None
    """Then bring its state there, under the epoch `instead`."""


class SetPace(msgspec.Struct, frozen=True, tag=True):
    """How long an iteration of this job may take, for the order of additions alone; 0: it is on trial, and goes first;
    None: it was promised nothing, and goes last."""

    job: JobId
    epoch: int
    may_take_us: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] | None = 0


class RanksAway(msgspec.Struct, frozen=True, tag=True):
    """Processes of these ranks ended with 0: what they have not pushed they never will. In words, who that is."""

    job: JobId
    epoch: int
    ranks: Annotated[dict[int, str], msgspec.Meta(max_length=RANKS_MAX)]


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for `Now`, which is also the answer to `Serve` and `DropJob`."""


class Quit(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class JobCounters(msgspec.Struct, frozen=True):
    job: JobId
    epoch: int
    workers: int
    joined: int
    tensors: int
    bytes: int
    rounds: int
    received_bytes: int
    sent_bytes: int
    busy_us: int = 0
    """Time of a core spent for this job since it is served under this epoch."""
    iterations: int = 0
    """Rounds of its most frequent tensor."""
    largest_bytes: int = 0
    """Bytes of its largest tensor."""
    not_finite: int = 0
    """Numbers of its sums that were NaN or infinite, since it is served under this epoch."""
    may_take_us: int | None = UNKNOWN
    """Microseconds that an iteration may take, as in `SetPace`."""
    missing: list[int] = []
    """Ranks that have not pushed what the others wait for, the first ones."""
    waits_s: float = 0.0
    """Seconds for which the others have waited for them."""
    away: list[int] = []
    """Ranks that have left, as in `RanksAway`."""


class Now(msgspec.Struct, frozen=True, tag=True):
    """The state of the process; counters since its start."""

    address: str
    jobs: list[JobCounters]
    busy_s: float
    """Time of a core that this process spent for all jobs and between them."""
    bad_frames: int
    refused: int
    memory_bytes: int
    near: str = ""
    """Path of the unix socket for ranks of this host; empty: there is none."""
    lanes: int = 1
    """How many additions it does at a time."""
    lanes_s: float = 0.0
    """Time of a core spent by its lanes, which is not in `busy_s`."""
    copied: int = 0
    """Blocks whose state came from the owner before."""
    copies_failed: int = 0
    """Owners before that ended before they had brought all that they had said."""


Order = Serve | DropJob | SetPace | RanksAway | GetStatus | Quit
orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
answers: msgspec.msgpack.Decoder[Now] = msgspec.msgpack.Decoder(Now)
