"""Messages between hosts about which host sums which job's tensors.

     job coordinator                       aggregator                        host of some ranks
           |-- Offer ------------------------>|                                      |
           |<------- Accepted, or Declined ---|                                      |
           |-- Assigned -------------------------------------------------------------->|
           |                                  |<== tensors ==========================| (its ranks)
           |-- Profiled --------------------->|  (after its trial iterations: what it needs)
           |<-- AssignmentKept, or Declined --|
           |-- LossReport ------------------->|  (each 100 iterations: what sharing costs it)
           |-- Coordinates ------------------>|  (from another host, which is the job's coordinator now)
           |<--------------------- Handover --|  (it hurts another job here, this host empties itself, or a person
           |                                  |  wants it elsewhere: MoveTensors, from any host)
           |<------------ AssignmentDropped --|                                      |
           |<------------------------------------------------ Lost, or OwnerWanted --|
           |-- Retire ----------------------->|  (another one sums it now, to which it brings what it holds; or the job
           |                                  |  is over)

Whoever takes an offer is the table's *owner*: the aggregator of a host, which is its process `aggd`, or, for a `direct`
offer, a rank of the job on that host.

The job coordinator here is the agent of the host of the job's lowest live rank, whatever host the grant names.

An aggregator that empties itself asks the others first, all or nothing: `ReserveCycle`, then `CycleReserved` or
`CycleNotReserved`; then `Handover` to the coordinators, or `ReleaseCycle`. Each attempt has a number; messages
about another attempt come too late.

An assignment's epoch orders it among all of its job (`covey.tensors.numbers.tensor_wire`); the higher one wins wherever
two meet, and a host that hears a lower one answers with the higher.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.events import Message
from covey.core.ids import ID_PATTERN, HostId, JobId
from covey.tensors.numbers.blocks import TABLE_PATTERN
from covey.wire.sums import RANKS_MAX, Address, NextOwner, Secret
from plugins.views import AggregatorJobView

Job = Annotated[JobId, Meta(pattern=TABLE_PATTERN)]
"""Unit that is summed under one assignment: a table of a job (`covey.tensors.numbers.blocks.table_id`), table 0 under
the job's own id."""
Host = Annotated[HostId, Meta(pattern=ID_PATTERN)]
Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Workers = Annotated[int, Meta(ge=1, le=RANKS_MAX)]
Reason = Annotated[str, Meta(max_length=300)]
Micros = Annotated[int, Meta(ge=1, le=1 << 50)]
Attempt = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Time at which an aggregator began to empty itself, microseconds of its clock: no two attempts of a host are the same
one."""


class JobMessage(Message, frozen=True):
    """A message about one job, under one epoch of its assignments."""

    job: Job
    epoch: Epoch


class HoldMessage(Message, frozen=True):
    """A message about room that an aggregator holds for one job of another, in this attempt of the other to empty
    itself."""

    job: Job
    attempt: Attempt


class Demand(msgspec.Struct, frozen=True):
    """The demand of a job on its aggregator, known after its trial iterations (AutoPS §4.3.3.1)."""

    period_us: Micros
    """D: microseconds of an iteration when the job runs alone."""
    work_us: Annotated[int, Meta(ge=0, le=1 << 50)]
    """The aggregator's work in one iteration in microseconds, the sum of its tensors' e."""
    limit_permille: Annotated[int, Meta(ge=1, le=1000)] = 100
    """Part of its speed, in thousandths, that it may lose less than."""


class Offer(JobMessage, frozen=True):
    """Coordinator -> aggregator: will you sum this job? Its ranks prove that they know `secret`."""

    workers: Workers
    secret: Secret
    demand: Demand | None = None
    """The need of the job. None: not known yet, for trial iterations; or no host had room for it, and one must sum
    it."""
    refused: Reason = ""
    """The last refusal that the coordinator heard, for people."""
    stays: bool = False
    """The table is one of several of its job, which share its hosts' cards: the aggregator must not hand it over to
    empty itself."""
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    """Bytes of its tensors, so that memory for them is ready when its ranks come; 0: not known."""
    unpromised: bool = False
    """The job's demand is known, and no host had room for it: its sums wait for those of all others."""
    direct: bool = False
    """A rank of the job on that host is to own the table, not the host's `aggd`."""
    not_direct: Reason = ""
    """Why no rank of the job owns the table, for people; empty in a direct offer."""


class Accepted(JobMessage, frozen=True):
    """Aggregator -> coordinator: yes, the process serves the job at `address` by now."""

    address: Address


class Declined(JobMessage, frozen=True):
    """Aggregator -> coordinator: no. A new offer must be above `known`, the highest epoch of the job that the
    aggregator has seen."""

    reason: Reason
    known: Epoch = 0
    no_ranks: bool = False
    """No rank of the job is there that has tensors: it needs nobody for its sake who sums them."""


class Profiled(JobMessage, frozen=True):
    """Coordinator -> aggregator: this is what the job you sum needs; will you keep it? Answer: `AssignmentKept` or
    `Declined`."""

    demand: Demand


class AssignmentKept(JobMessage, frozen=True):
    """Aggregator -> coordinator: yes, I keep the job with what it needs."""


class LossReport(JobMessage, frozen=True):
    """Coordinator -> aggregator: what the job measured over a window of iterations. With `hurt` one job has to go: the
    newest of this one and those beside it."""

    iterations: Annotated[int, Meta(ge=1, le=1 << 40)]
    lost_permille: Annotated[int, Meta(ge=0, le=1000)]
    hurt: bool


class Coordinates(JobMessage, frozen=True):
    """New coordinator of a job -> its aggregator: messages about the job go to me now."""


class Handover(JobMessage, frozen=True):
    """Aggregator -> coordinator: find the job another aggregator. `to` holds room for it; None: choose one."""

    to: Host | None
    reason: Reason
    wished: bool = False
    """A person wants the job on `to`: it stays there."""


class MoveTensors(JobMessage, frozen=True):
    """Any host -> aggregator: a person wants the job's sums on `to`."""

    to: Host


class ReserveCycle(JobMessage, frozen=True):
    """Aggregator that empties itself -> another: hold room for this job of mine. Answer: `CycleReserved`,
    `CycleNotReserved`."""

    attempt: Attempt
    demand: Demand | None


class CycleReserved(HoldMessage, frozen=True):
    """The room is held until a higher epoch of the job arrives to use it, `ReleaseCycle`, or for some seconds."""


class CycleNotReserved(HoldMessage, frozen=True):
    reason: Reason


class ReleaseCycle(HoldMessage, frozen=True):
    """Aggregator that empties itself -> another: the room held for this job in this attempt is not needed."""


class Assigned(JobMessage, frozen=True):
    """Coordinator -> hosts of the job's ranks: push and pull there. It is also the answer to a host that knows only a
    lower epoch."""

    owner: Host
    address: Address
    secret: Secret
    handed_over: bool = False
    """The earlier owner keeps summing until it ends the connections of ranks, between two iterations."""
    direct: bool = False
    """A rank of the job on `owner` sums it, not the `aggd` of that host."""


class Retire(JobMessage, frozen=True):
    """Coordinator -> aggregator: do not sum this job under `epoch` or lower; `instead` is the epoch that holds now."""

    instead: Epoch
    reason: Reason
    handed_over: bool = False
    """This aggregator keeps summing until a moment between two iterations, and then ends the connections of ranks."""
    to: NextOwner | None = None
    """Owner to which it then brings what it holds, under epoch `instead`."""


class AssignmentDropped(JobMessage, frozen=True):
    """Aggregator -> coordinator: I no longer sum the job."""

    reason: Reason


class Lost(JobMessage, frozen=True):
    """Host of ranks -> coordinator: a rank cannot use the aggregator of `epoch`."""

    reason: Reason


class OwnerWanted(JobMessage, frozen=True):
    """Host of ranks -> coordinator: I know `epoch` (0: nothing) of this job; tell me if there is a higher one."""


# ---- questions and answers -------------------------------------------------------------------------------------------


class GetOwner(Message, frozen=True):
    """Which assignment of this job do you know? Answer: `KnownOwner`."""

    job: Job


class KnownOwner(Message, frozen=True):
    assigned: Assigned | None


class Probe(JobMessage, frozen=True):
    """Does your process sum this job under this epoch right now? Answer: `Serving`."""


class Serving(Message, frozen=True):
    yes: bool


class WorkOf(JobMessage, frozen=True):
    """How much have you worked for this job under this epoch? Answer: `WorkCounters`."""


class WorkCounters(Message, frozen=True):
    """Counters since the job was taken on under its epoch; `known` is False when it is not summed here under it."""

    known: bool
    busy_us: Annotated[int, Meta(ge=0)] = 0
    iterations: Annotated[int, Meta(ge=0)] = 0
    """Count of rounds of its most frequent tensor."""
    largest_bytes: Annotated[int, Meta(ge=0)] = 0
    total_bytes: Annotated[int, Meta(ge=0)] = 0
    beside: Annotated[int, Meta(ge=0)] = 0
    """Count of other jobs summed there."""
    changes: Annotated[int, Meta(ge=0)] = 0
    """Number that grows when a job comes there or leaves."""
    demand: Demand | None = None
    """Demand of the job as the aggregator was told; None: it was not."""


class CycleHere(Message, frozen=True):
    """Which jobs have you promised to sum, and with how much room? Answer: `CycleNow`."""


class JobDemand(msgspec.Struct, frozen=True):
    job: Job
    demand: Demand


class CycleNow(Message, frozen=True):
    """An aggregator's plan, exactly as it has it itself."""

    takes: bool
    """The aggregator accepts jobs now."""
    cycle_us: Annotated[int, Meta(ge=0)] = 0
    lanes: Annotated[int, Meta(ge=1, le=4096)] = 1
    cycles_max: Annotated[int, Meta(ge=1, le=64)] = 1
    jobs: Annotated[list[JobDemand], Meta(max_length=4096)] = []
    barred: Annotated[list[Job], Meta(max_length=4096)] = []
    """Jobs that hurt another one there, or were hurt."""


class TensorsHere(Message, frozen=True):
    """Which jobs do you sum? Answer: `Tensors`."""


class Tensors(Message, frozen=True):
    jobs: Annotated[list[AggregatorJobView], Meta(max_length=4096)]


ToOwner = (
    Offer
    | Profiled
    | LossReport
    | Coordinates
    | Retire
    | MoveTensors
    | ReserveCycle
    | CycleReserved
    | CycleNotReserved
    | ReleaseCycle
)
ToCoordinator = Accepted | Declined | AssignmentKept | Handover | AssignmentDropped | Lost | Assigned
ToDirectory = Assigned | OwnerWanted | Lost
"""Messages by the machine that takes them; two machines take `Assigned` and `Lost`."""
Heard = ToOwner | ToCoordinator | ToDirectory
FromOwner = (
    Accepted
    | Declined
    | AssignmentKept
    | Handover
    | AssignmentDropped
    | ReserveCycle
    | CycleReserved
    | CycleNotReserved
    | ReleaseCycle
)
FromCoordinator = Offer | Profiled | LossReport | Coordinates | Retire | Assigned
"""Messages by the machine that sends them, and that hears when they were not delivered."""
Question = GetOwner | Probe | WorkOf | CycleHere | TensorsHere
Answer = KnownOwner | Serving | WorkCounters | CycleNow | Tensors
Any = Heard | Question | Answer


class AggregatorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[aggregator]` in agent.toml."""

    direct: Literal["auto", "never"] = "auto"
    """Who sums the tensors of a job on several hosts: `auto`, its own ranks where they can, each host a part, so that
    ranks exchange tensors directly; `never`, aggregators, which pack jobs on few hosts (AutoPS)."""
    rdma: Literal["auto", "never"] = "auto"
    """`auto`: ranks that exchange tensors directly do so over RDMA where both hosts have a device and both ranks
    pyverbs (`apt install python3-pyverbs`), over TCP elsewhere (AutoPS §4.4). Each connection locks 8 MiB at both
    ends."""
    serve: bool = True
    """Sum tensors of jobs here. Off: this host only finds aggregators for its own jobs."""
    jobs_max: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Jobs summed here at once; ours: far above what one process keeps up with."""
    load_max: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """No new job is accepted when the process is busy for more than this part of the time: 1 - LossLimit
    (AutoPS §4.3.3.2)."""
    memory_bytes_max: Annotated[int, Meta(ge=1 << 20)] = 4 << 30
    """Tensor bytes the process may hold, and each rank that sums for its job; a sum and a state for each tensor. A
    quarter of it more may be shared with ranks of this host, for what they push; ours."""
    lanes: Annotated[int, Meta(ge=0, le=64)] = 0
    """How many additions the process does at a time, each on a core of its own. 0: half of the cores that neither GPUs
    (4 for each) nor reading and writing need, at most 8, and 1 where none are spare; ours."""
    loss_limit: Annotated[float, Meta(ge=0.001, le=1)] = 0.1
    """A job whose coordinator is here may lose less than this part of its speed by sharing (LossLimit, AutoPS
    §4.3.3.2)."""
    trial_iterations: Annotated[int, Meta(ge=2, le=10_000)] = 30
    """After which a job's iteration and work are known (AutoPS §4.3.3.1: several; ours)."""
    revert_iterations: Annotated[int, Meta(ge=2, le=100_000)] = 100
    """After which its loss is judged, and the newest assignment reverted (AutoPS §4.5.2.3)."""
    cycles_max: Annotated[int, Meta(ge=1, le=64)] = 8
    """How many of its longest iterations a cycle here may cover where one would hurt somebody. 1: the thesis; 8 saves
    more at half the loss (docs/results/aggregator.md)."""
    scale_s: Annotated[float, Meta(ge=1)] = 60.0
    """How often the least loaded aggregator tries to empty itself into others, and after a job's end, seconds
    (AutoPS §4.3.3.3; the period is ours)."""
