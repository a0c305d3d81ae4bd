"""What a volume is: its sizes, and its file `volume`."""

from typing import NamedTuple

import msgspec

GENERATION_BITS = 20
"""Upper bits of a version: how often this volume's process has started. The rest counts writes."""


class VolumeRecord(msgspec.Struct, frozen=True):
    """What a volume is; file `volume`."""

    size_bytes: int
    page_bytes: int
    slab_bytes: int
    generation: int
    """Counts starts of its process."""


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
