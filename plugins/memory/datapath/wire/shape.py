"""What a volume is: its sizes, and its file `volume`."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

KEY_BYTES = 32
"""Of the key that a volume's pages are sealed with."""


class Undecided(OSError):
    """Not now: a lender that may have the newest content has not answered. Asked again later it may be there."""


GENERATION_BITS = 20
"""Upper bits of a version: how often this volume's process has started. The rest counts writes."""


class VolumeRecord(msgspec.Struct, frozen=True):
    """What a volume is; file `volume`."""

    size_bytes: int
    page_bytes: int
    slab_bytes: int
    generation: int
    """Counts starts of its process."""
    key: bytes = b""
    """Pages are sealed with it before they leave this host; empty: they are not sealed."""


record_decoder = msgspec.msgpack.Decoder(VolumeRecord)


class Shape(NamedTuple):
    """Sizes of a volume, bytes, and what its lenders know it by."""

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
    """What the next process of a volume writes down of which `known` is on the disk. A volume keeps its key. ValueError
    when it is another kind of volume than that."""
    if known is None:
        return VolumeRecord(*shape[1:], generation=1, key=entropy(KEY_BYTES) if sealed else b"")
    if (known.size_bytes, known.page_bytes, known.slab_bytes) != shape[1:]:
        sizes = known.size_bytes, known.page_bytes, known.slab_bytes
        raise ValueError(f"{shape.name} is on disk with other sizes: {sizes}")
    if bool(known.key) != sealed:
        raise ValueError(f"the disk holds {shape.name} {'' if known.key else 'not '}sealed")
    return VolumeRecord(*shape[1:], generation=known.generation + 1, key=known.key)
