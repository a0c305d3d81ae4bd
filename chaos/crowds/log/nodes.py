"""What a world of logs is made of: hosts, their clients, and what the seed draws for them."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agent.raft.machine import SessionTable
from agent.raft.machine.session_table import AppliedRequest
from agent.raft.machine.types import Persist, Proposal, SaveSnapshot
from agent.raft.messages import Configuration
from chaos.crowds.memory_disk import MemoryDisk
from covey.core.ids import HostId

SNAPSHOT_ENTRIES = 12
SLOW_S_MAX = 2.0
"""Most seconds that a write on a slow disk takes."""


class Violation(AssertionError):
    """Something that must hold did not."""


class State(msgspec.Struct, array_like=True):
    """The replicated state: which commands were executed, in order, and a digest of them."""

    done: list[bytes]
    digest: int


class Body(msgspec.Struct, array_like=True):
    kept: list[AppliedRequest]
    state: State


@dataclass(frozen=True)
class WorldConditions:
    """Rates and chances of a seed's world."""

    voters: int
    observers: int
    loss: float
    double: float
    slow: float
    fault_every_s: float
    slow_disk: float
    codec: bool
    commands_per_s: float
    files_lost: float
    """Part of the faults that take a voter's log away, or a part of it."""
    changes_per_s: float

    @staticmethod
    def draw(rng: random.Random) -> "WorldConditions":
        voters = rng.choices((1, 3, 5), (3, 12, 4))[0]
        return WorldConditions(
            voters=voters,
            observers=rng.choice((0, 0, 1, 2, 3)),
            loss=rng.choice((0.0, 0.0, 0.02, 0.15)),
            double=rng.choice((0.0, 0.05, 0.3)),
            slow=rng.choice((0.0, 0.02, 0.2)),
            fault_every_s=rng.choice((0.25, 0.6, 1.5)),
            slow_disk=rng.choice((0.0, 0.02, 0.2)),
            codec=rng.random() < 0.15,
            commands_per_s=rng.choice((0.3, 12.0, 12.0)),
            files_lost=rng.choice((0.0, 0.15, 0.5)),
            changes_per_s=rng.choice((0.0, 0.3, 2.0)),
        )


@dataclass
class Client:
    """A client with one command on its way."""

    proposal: Proposal
    tries: int = 0
    acknowledged: bool = False


@dataclass
class Node:
    name: HostId
    disk: MemoryDisk
    offset_s: float
    rate: float
    up: bool = False
    life: int = 0
    paused_until_s: float = 0.0
    raft: Any = None
    store: Any = None
    once: SessionTable = field(default_factory=SessionTable)
    state: State = field(default_factory=lambda: State([], 0))
    executed: set[bytes] = field(default_factory=set)
    applied: int = 0
    snapshot_due: int = SNAPSHOT_ENTRIES
    writes: deque[Persist | SaveSnapshot] = field(default_factory=deque)
    writing: list[Persist | SaveSnapshot] = field(default_factory=list)
    wake_at_s: float = float("inf")
    copy: dict[str, bytes] = field(default_factory=dict)
    """Files of the log as they once were."""
    configuration: Configuration = field(default_factory=Configuration)
    commit: int = 0
    """Commit index as the host last knew it; `configuration` is of that time too."""
    toml: tuple[HostId, ...] = ()
    """The host's leader.voters; empty: the founders."""
    forgot: bool = False
    """Whether something of the host's log was taken away, and it does not vote yet."""
    prefix: dict[int, int] = field(default_factory=dict)
    """Index -> digest of this host's log up to that entry."""

    def clock(self, world_s: float) -> float:
        return self.offset_s + self.rate * world_s

    def world(self, clock_s: float) -> float:
        return (clock_s - self.offset_s) / self.rate
