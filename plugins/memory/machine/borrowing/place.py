"""Where a slab is placed, and the state of the link to it."""

from dataclasses import dataclass
from typing import Literal

from covey.core.ids import HostId

Link = Literal["", "open", "filling", "reopening", "recovering", "leaving"]
"""State of the link to a place, by the volume's process; empty while the process does not answer. `filling`: the link
works, and the place does not hold everything yet that a member of a mirrored slab must."""


@dataclass(frozen=True)
class SlabPlace:
    """One mapping of a slab at a lender, under one epoch."""

    epoch: int
    lender: HostId
    address: str
    secret: bytes
