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
JOBS_MAX = 4096
"""Most tables that one process sums."""
WORDS_MAX = 300
"""Most characters of a reason."""
MISSING_MAX = 16
"""Most ranks that have not pushed which are named."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
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
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    workers: Count
    joined: Count
    tensors: Count
    bytes: Count
    rounds: Count
    received_bytes: Count
    sent_bytes: Count
    busy_us: Count = 0
    """Microseconds of a core spent for this job since it is served under this epoch."""
    iterations: Count = 0
    """Count of rounds of its most frequent tensor."""
    largest_bytes: Count = 0
    """Bytes of its largest tensor."""
    not_finite: Count = 0
    """Count of numbers in its sums that were NaN or infinite, since it is served under this epoch."""
    may_take_us: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=1 << 60)] | None = UNKNOWN
    """Microseconds that an iteration may take, as in `SetPace`."""
    missing: Annotated[list[Rank], msgspec.Meta(max_length=MISSING_MAX)] = []
    """The first few ranks that have not pushed what the others wait for."""
    waits_s: Seconds = 0.0
    """Seconds for which the others have waited for them."""
    away: Annotated[list[Rank], msgspec.Meta(max_length=RANKS_MAX)] = []
    """Ranks that have left, as in `RanksAway`."""


class Now(msgspec.Struct, frozen=True, tag=True):
    """The state of the process; counters are since its start."""

    address: Annotated[str, msgspec.Meta(max_length=80)]
    jobs: Annotated[list[JobCounters], msgspec.Meta(max_length=JOBS_MAX)]
    busy_s: Seconds
    """Seconds of a core that this process spent for all jobs and between them."""
    bad_frames: Count
    refused: Count
    memory_bytes: Count
    near: Annotated[str, msgspec.Meta(max_length=108)] = ""
    """Path of the unix socket for ranks of this host; empty: there is none."""
    lanes: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """Number of additions that it does at a time."""
    lanes_s: Seconds = 0.0
    """Seconds of a core spent by its lanes, which are not in `busy_s`."""
    copied: Count = 0
    """Count of Blocks whose state came from the earlier owner."""
    copies_failed: Count = 0
    """Count of earlier owners that ended before they had brought all that they had announced."""
    pairs: Count = 0
    """Number of ranks on other hosts whose large parts go over RDMA."""
    no_rdma: Annotated[str, msgspec.Meta(max_length=WORDS_MAX)] = ""
    """Why those of another rank go over TCP, for people; empty: there is no such rank, or nobody asked."""


NOTHING = Now("", [], 0.0, 0, 0, 0)
"""What a rank says that owns no table."""
Order = Serve | DropJob | SetPace | RanksAway | GetStatus | Quit
orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
answers: msgspec.msgpack.Decoder[Now] = msgspec.msgpack.Decoder(Now)
