"""What hosts say to one another about who sums which job's tensors.

        home of the job                    aggregator                        host of some ranks
           |-- Offer ------------------------>|                                      |
           |<------- Accepted, or Declined ---|                                      |
           |-- Assigned -------------------------------------------------------------->|
           |                                  |<== tensors ==========================| (its ranks)
           |<---------------------- Dropped --|                                      |
           |<----------------------------------------------------- Lost, or Wanted --|
           |-- Retire ----------------------->|  (another one sums it now, or the job is over)

An assignment's epoch orders it among all of its job (`covey.tensorwire`); the higher one wins wherever two meet, and
whoever hears a lower one answers with the higher.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core import ID_PATTERN, HostId, JobId, Message
from covey.tensorwire import RANKS_MAX, SECRET_BYTES
from plugins.views import AggregatorJobView

Job = Annotated[JobId, Meta(pattern=ID_PATTERN)]
Host = Annotated[HostId, Meta(pattern=ID_PATTERN)]
Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Workers = Annotated[int, Meta(ge=1, le=RANKS_MAX)]
Reason = Annotated[str, Meta(max_length=300)]
Address = Annotated[str, Meta(min_length=3, max_length=80)]
Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class Offer(Message, frozen=True):
    """Home -> aggregator: will you sum this job? Its ranks will present `secret`."""

    job: Job
    epoch: Epoch
    workers: Workers
    secret: Secret


class Accepted(Message, frozen=True):
    """Aggregator -> home: yes, its process serves it at `address` by now."""

    job: Job
    epoch: Epoch
    address: Address


class Declined(Message, frozen=True):
    """Aggregator -> home: no. `known` is the highest epoch of the job it has seen: a new offer must be above it."""

    job: Job
    epoch: Epoch
    reason: Reason
    known: Epoch = 0


class Assigned(Message, frozen=True):
    """Home -> hosts of the job's ranks: push and pull there. Also the answer to one that knows only a lower epoch."""

    job: Job
    epoch: Epoch
    owner: Host
    address: Address
    secret: Secret


class Retire(Message, frozen=True):
    """Home -> aggregator: do not sum this job under `epoch` or lower; `instead` is the epoch that holds now."""

    job: Job
    epoch: Epoch
    instead: Epoch
    reason: Reason


class Dropped(Message, frozen=True):
    """Aggregator -> home: I no longer sum it."""

    job: Job
    epoch: Epoch
    reason: Reason


class Lost(Message, frozen=True):
    """Host of ranks -> home: a rank cannot use the aggregator of `epoch`."""

    job: Job
    epoch: Epoch
    reason: Reason


class Wanted(Message, frozen=True):
    """Host of ranks -> home: I know `epoch` (0: nothing) of this job; tell me if there is a higher one."""

    job: Job
    epoch: Epoch


# ---- questions and answers -------------------------------------------------------------------------------------------


class WhoSums(Message, frozen=True):
    """Which assignment of this job do you know? Answer: `Known`."""

    job: Job


class Known(Message, frozen=True):
    assigned: Assigned | None


class DoYouServe(Message, frozen=True):
    """Does your process sum this job under this epoch right now? Answer: `Serving`."""

    job: Job
    epoch: Epoch


class Serving(Message, frozen=True):
    yes: bool


class TensorsHere(Message, frozen=True):
    """Which jobs do you sum? Answer: `Tensors`."""


class Tensors(Message, frozen=True):
    jobs: Annotated[list[AggregatorJobView], Meta(max_length=4096)]


Heard = Offer | Accepted | Declined | Assigned | Retire | Dropped | Lost | Wanted
Question = WhoSums | DoYouServe | TensorsHere
Answer = Known | Serving | Tensors
Any = Heard | Question | Answer


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[aggregator]` in agent.toml."""

    serve: bool = True
    """Sum tensors of jobs here. Off: this host only finds aggregators for its own jobs."""
    jobs_max: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Jobs summed here at once; ours: far above what one process keeps up with."""
    load_max: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """No new job is accepted when the process is busy for more than this part of the time: 1 - LossLimit
    (AutoPS §4.3.3.2)."""
    memory_bytes_max: Annotated[int, Meta(ge=1 << 20)] = 4 << 30
    """Tensor bytes the process may hold, a sum and a state for each; ours."""
