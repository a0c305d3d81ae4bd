"""One slab lent, as its lender knows it, and one eviction under way."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from covey.core import HostId
from plugins.memory.messages import SlabRef
from plugins.memory.policy import mirroring

Key = tuple[HostId, str, int]
"""Borrower, volume, index."""


class LoanedSlab(msgspec.Struct, frozen=True):
    """One slab that the slab process holds."""

    borrower: HostId
    slab: SlabRef
    size_bytes: int
    secret: bytes


@dataclass(slots=True)
class Lent:
    """One slab lent."""

    borrower: HostId
    slab: SlabRef
    size_bytes: int
    secret: bytes
    expires_s: float
    """Not renewed by then: an orphan."""
    state: Literal["registering", "lent", "evicting", "freeing"] = "registering"
    deadline_s: float = 0.0
    """When `evicting`: the end of the grace."""
    members: int = 1
    """Of the slab: with several its borrower has no disk, and this is one of them."""
    tenant: str = ""
    """Whose volume it is; empty: nobody's, or not known yet since this host began anew."""
    asked_s: float = float("-inf")
    """When its borrower was asked whether it still uses it, since nobody renewed it."""

    @property
    def subject(self) -> str:
        return f"slab/{self.slab.volume}/{mirroring.slab_of(self.slab.index, self.members)}"


@dataclass
class Batch:
    """One eviction under way: the least active of these are to go, until so many bytes are."""

    round: int
    needed_bytes: int
    asked: list[Key]
    activities: dict[Key, float] = field(default_factory=dict)
    waiting: Counter[HostId] = field(default_factory=Counter)
    """Answers that each borrower still owes: one for each message that it was asked in."""
