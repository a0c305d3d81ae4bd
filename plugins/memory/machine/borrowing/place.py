"""Where a slab lies, and what its volume's process says of the link there."""

from dataclasses import dataclass
from typing import Literal

from covey.core.ids import HostId

Link = Literal["", "open", "filling", "reopening", "recovering", "leaving"]
"""What the volume's process says of the link to a place; empty while it does not answer. `filling`: it has a working
one, and does not hold everything yet that a member of a mirrored slab must."""


@dataclass(frozen=True)
class SlabPlace:
    """One mapping of a slab, under one epoch."""

    epoch: int
    lender: HostId
    address: str
    secret: bytes
