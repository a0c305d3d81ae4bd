"""The sizes of a volume, and its file `volume`."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

KEY_BYTES = 32
"""Bytes of the key that a volume's pages are sealed with."""


class Undecided(OSError):
    """A read cannot be decided now: a lender that may have the newest content has not answered. A later try may
    succeed."""


GENERATION_BITS = 20
"""Upper bits of a version: how often this volume's process has started. The other bits count writes."""


class VolumeRecord(msgspec.Struct, frozen=True):
    """Record of a volume's sizes and key; file `volume`."""

    size_bytes: int
    page_bytes: int
    slab_bytes: int
    generation: int
    """Number of starts of its process."""
    key: bytes = b""
    """Key with which pages are sealed before they leave this host; empty: they are not sealed."""


record_decoder = msgspec.msgpack.Decoder(VolumeRecord)


class Shape(NamedTuple):
    """Sizes of a volume in bytes, and the name by which its lenders know it."""

    name: str
    size_bytes: int
    page_bytes: int
    slab_bytes: int

    @property
    def pages(self) -> int:
        return -(-self.size_bytes // self.page_bytes)

    @property
    def slab_pages(self) -> int:
        return self.slab_bytes // self.page_bytes

    @property
    def slabs(self) -> int:
        return -(-self.pages // self.slab_pages)


def next_life(known: VolumeRecord | None, shape: Shape, sealed: bool, entropy: Callable[[int], bytes]) -> VolumeRecord:
    """The record that the next process of a volume writes; `known` is the one on disk. A volume keeps its key.
    ValueError when it is another kind of volume."""
    if known is None:
        return VolumeRecord(*shape[1:], generation=1, key=entropy(KEY_BYTES) if sealed else b"")
    if (known.size_bytes, known.page_bytes, known.slab_bytes) != shape[1:]:
        sizes = known.size_bytes, known.page_bytes, known.slab_bytes
        raise ValueError(f"{shape.name} is on disk with other sizes: {sizes}")
    if bool(known.key) != sealed:
        raise ValueError(f"the disk holds {shape.name} {'' if known.key else 'not '}sealed")
    return VolumeRecord(*shape[1:], generation=known.generation + 1, key=known.key)
