"""Messages of one job's hosts about its configuration: measurements, and the steps of a plan (Cruise §3.3).

The coordinator of a job decides. Workers report their mini-batches to it, servers their network; it sends each host the
steps that are due there, and a host reports when one is done. A step is named by the plan's number and its index in
the plan, so a repeated order or answer is recognised.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.events import Message
from covey.core.ids import ID_PATTERN, HostId

Role = Literal["worker", "server"]
Kind = Literal["data", "model"]
"""Kind of blocks: training data is held by workers and never changes; the model is held by servers and does."""

Name = Annotated[str, Meta(pattern=ID_PATTERN)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53))]


class Add(msgspec.Struct, frozen=True, tag=True):
    """Start an executor on a host that joins."""

    host: HostId
    role: Role


class Delete(msgspec.Struct, frozen=True, tag=True):
    """End the executor of a host that leaves; it owns nothing any more."""

    host: HostId
    role: Role


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Change the role of a host: its executor stays, nothing is set up or cleared away."""

    host: HostId
    before: Role
    after: Role


class Move(msgspec.Struct, frozen=True, tag=True):
    """Hand blocks to another host: ownership first, then the content, block by block (Cruise §3.3.2)."""

    kind: Kind
    source: HostId
    target: HostId
    blocks: tuple[int, ...]
    """Ids of the blocks, ascending."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish the present mini-batch, flush the pushes, and compute no more: its data is about to leave."""

    host: HostId


class Start(msgspec.Struct, frozen=True, tag=True):
    """Begin to compute: the data is here."""

    host: HostId


class Recover(msgspec.Struct, frozen=True, tag=True):
    """Hold these blocks, which a lost host owned or was to get: read training data again from where it came from, take
    the newest version of the model that any host or checkpoint has."""

    kind: Kind
    host: HostId
    blocks: tuple[int, ...]
    """Ids of the blocks, ascending."""


Operation = Add | Delete | Switch | Move
"""The four operations of the paper's Table 3.2."""
Step = Operation | Stop | Start | Recover
"""Step of a plan, as hosts perform it."""


class BatchTimed(Message, frozen=True):
    """Worker -> coordinator: one mini-batch was computed."""

    job: Name
    samples: Annotated[int, Meta(ge=1, le=(1 << 53))]
    compute_s: Seconds


class NicMeasured(Message, frozen=True):
    """Worker or server -> coordinator: bytes per second that its network carries."""

    job: Name
    bytes_per_s: Annotated[float, Meta(gt=0, le=1e15)]


class PlanStep(Message, frozen=True):
    """Coordinator -> host: do this step of this plan now."""

    job: Name
    plan: Count
    at: Count
    step: Step


class Did(Message, frozen=True):
    """Host -> coordinator: the step is done, or why not."""

    job: Name
    plan: Count
    at: Count
    failure: Annotated[str, Meta(max_length=300)] = ""


Messages = BatchTimed | NicMeasured | PlanStep | Did
