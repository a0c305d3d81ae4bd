"""What a job and the agent of its host tell one another about one GPU, and what hosts say when a gang is upgraded.

    job                               agent                 home of the job                 each of its hosts
     |-- Report (each mini-batch) ----->|                        |-- AskUpgrade ------------------->|
     |<------------------ Limits -------|                        |<------------------ CanUpgrade ---|
     |   (applied at the next boundary; |                        |-- Retag (all said yes) --------->|
     |    the next Report says so)      |                        |<--- CanUpgrade (if it cannot) ---|

An upgrade of some ranks of a synchronous job would help nobody (AntMan §3.3), so the home agent asks all hosts first;
the grant's epoch fences both messages.
"""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core import ID_PATTERN, Message

LEASE_S = 2.0
"""How long limits are good for without a word from the agent."""

Id = Annotated[str, Meta(pattern=ID_PATTERN)]
Uuid = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}$")]
Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Bytes = Annotated[int, Meta(ge=0, lt=1 << 50)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Kind = Literal["guaranteed", "opportunistic"]


class Report(Message, frozen=True, tag="Report"):
    """A job at the end of a mini-batch."""

    job: Id
    acked: Epoch
    """The newest `Limits.epoch` it has applied."""
    step: Epoch
    step_s: Seconds
    idle_s: Seconds
    """Of these, without work on the device."""
    peak_bytes: Bytes
    """The most device memory it held in this mini-batch."""
    stable_bytes: Bytes
    """The least: model and optimizer; what it cannot give back between mini-batches."""
    spill_bytes: Bytes = 0
    """What it had to place in host memory because of its limit (AntMan §3.1.1)."""
    retries: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Allocations that failed at first because of its limit: it is about to spill."""


class Limits(Message, frozen=True, tag="Limits"):
    """The agent: from the next operation (rates) and the next mini-batch (memory) on."""

    job: Id
    epoch: Epoch
    idle: Share
    head_s: Annotated[float, Meta(ge=0, le=1e9)] | None
    """None: all of each idle phase. (JSON has no infinity.)"""
    busy: Share
    memory_bytes: Bytes
    failsafe: Annotated[float, Meta(gt=0, le=1)]
    """The rate to fall back to when the lease is over; never 0."""
    lease_s: Annotated[float, Meta(gt=0, le=60)] = LEASE_S

    @property
    def head(self) -> float:
        """`head_s` as `policy.ladder.Rates` has it, s."""
        return math.inf if self.head_s is None else self.head_s


class AskUpgrade(Message, frozen=True, tag="AskUpgrade"):
    """The home agent: could your ranks of this job be guaranteed from now on?"""

    job: Id
    epoch: Epoch
    gpus: Annotated[tuple[Uuid, ...], Meta(max_length=64)]


class CanUpgrade(Message, frozen=True, tag="CanUpgrade"):
    """The answer to `AskUpgrade`."""

    job: Id
    epoch: Epoch
    refused: Annotated[str, Meta(max_length=300)] = ""
    """Why not; empty: yes."""


class Retag(Message, frozen=True, tag="Retag"):
    """The home agent: from now on its ranks are of this kind."""

    job: Id
    epoch: Epoch
    kind: Kind


Messages = Report | Limits | AskUpgrade | CanUpgrade | Retag
_decoder: msgspec.msgpack.Decoder[Messages] = msgspec.msgpack.Decoder(Messages)


def decoded(data: bytes) -> Messages | None:
    """The message in these bytes, or None when they are none, or one out of bounds: to be dropped and counted."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
