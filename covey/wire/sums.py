"""Orders of an agent to who sums tensors for it, and the answers: to its `aggd` on a unix socket (frames of
`covey.wire.frames`), or to a rank that owns a table (`covey.wire.job.SumsOrder`).

Request and answer in turn: the agent sends one frame and reads one. `Serve` and `DropJob` may be repeated.
"""

from typing import Annotated

import msgspec

from covey.core.ids import JobId

RANKS_MAX = 0xFFFF
"""Most ranks of a job."""
SECRET_BYTES = 16
Address = Annotated[str, msgspec.Meta(min_length=3, max_length=80)]
Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
UNKNOWN = -1
"""Value of a process older than `SetPace`, which says nothing of it, and is not to be told."""


class NextOwner(msgspec.Struct, frozen=True):
    """The next owner, to which the state of Blocks is brought by a peer that proves to know `secret`."""

    address: Address
    secret: Secret


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Sum this job under this epoch, from nothing. A lower epoch of the job ends."""

    job: JobId
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    workers: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
    secret: Secret
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    """Bytes of its tensors, as far as is known: memory for them is prepared."""


class DropJob(msgspec.Struct, frozen=True, tag=True):
    """Stop serving this job, if its epoch is at most `epoch`; `instead` is the epoch that its workers are told."""

    job: JobId
    epoch: int
    instead: int = 0
    within_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """Seconds for which to keep serving, until a moment between two iterations; 0: stop at once."""
    to: NextOwner | None = None
    """Owner to which the job's state is then brought, under the epoch `instead`."""


class SetPace(msgspec.Struct, frozen=True, tag=True):
    """Microseconds that an iteration of this job may take, for the order of additions alone; 0: it is on trial, and
    goes first; None: it was promised nothing, and goes last."""

    job: JobId
    epoch: int
    may_take_us: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] | None = 0


class RanksAway(msgspec.Struct, frozen=True, tag=True):
    """Processes of these ranks ended with 0: what they have not pushed they never will. `ranks`: rank -> who that is,
    in words."""

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
    """Microseconds of a core spent for this job since it is served under this epoch."""
    iterations: int = 0
    """Count of rounds of its most frequent tensor."""
    largest_bytes: int = 0
    """Bytes of its largest tensor."""
    not_finite: int = 0
    """Count of numbers in its sums that were NaN or infinite, since it is served under this epoch."""
    may_take_us: int | None = UNKNOWN
    """Microseconds that an iteration may take, as in `SetPace`."""
    missing: list[int] = []
    """The first few ranks that have not pushed what the others wait for."""
    waits_s: float = 0.0
    """Seconds for which the others have waited for them."""
    away: list[int] = []
    """Ranks that have left, as in `RanksAway`."""


class Now(msgspec.Struct, frozen=True, tag=True):
    """The state of the process; counters are since its start."""

    address: str
    jobs: list[JobCounters]
    busy_s: float
    """Seconds of a core that this process spent for all jobs and between them."""
    bad_frames: int
    refused: int
    memory_bytes: int
    near: str = ""
    """Path of the unix socket for ranks of this host; empty: there is none."""
    lanes: int = 1
    """Number of additions that it does at a time."""
    lanes_s: float = 0.0
    """Seconds of a core spent by its lanes, which are not in `busy_s`."""
    copied: int = 0
    """Count of Blocks whose state came from the earlier owner."""
    copies_failed: int = 0
    """Count of earlier owners that ended before they had brought all that they had announced."""


Order = Serve | DropJob | SetPace | RanksAway | GetStatus | Quit
orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
answers: msgspec.msgpack.Decoder[Now] = msgspec.msgpack.Decoder(Now)
