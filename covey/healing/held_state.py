"""What a rank gives to the successors of others while it waits for them: its state at the beginning of its step."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from covey.healing.likeness import Likeness
from covey.healing.state_pieces import Contents, Have, Item, Stream, Which, bytes_of_state, encode_contents, piece_of
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Payload

OTHERS_BYTES_MAX = 256 << 10
"""Of what is kept of others, in one frame."""
SUM_BYTES = 16
Kept = dict[int, dict[int, bytes]]
"""What is a rank's own, by rank and step."""


class HeldState:
    """In the script's own memory, which stays as it is while successors need it."""

    def __init__(self, state: Mapping[str, Array], rounds: bytes) -> None:
        items = tuple(Item(name, array.dtype.str, array.shape) for name, array in state.items())
        contents = encode_contents(Contents(items, rounds))
        each = [bytes_of_state(np.ascontiguousarray(array)) for array in state.values()]
        self._state = Stream(each)
        self._streams = {int(Which.CONTENTS): Stream([memoryview(contents)]), int(Which.STATE): self._state}
        self._contents_bytes, self._contents_sum = len(contents), contents_sum(contents)
        self._state_sum: int | None = None

    def piece(self, asked: Payload) -> bytes | None:
        """As of `piece_of`."""
        return piece_of(self._streams, asked)

    def make_sum(self) -> None:
        """Takes a second for 10 GB; by any thread."""
        self._state_sum = self._state.checksum()

    def haves(
        self,
        to: int,
        step: int,
        first: int,
        own: dict[int, bytes],
        kept: Kept,
        like: Likeness | None = None,
        yours: Likeness | None = None,
        host: str = "",
    ) -> list[Have]:
        """What is said to process `to` of a lost rank: what is its `own`, what is `kept` of others, this rank's
        likeness and that of the lost one, and where this rank is."""
        each = list(_frames(kept))
        return [
            Have(
                to,
                False,
                self._contents_bytes,
                self._contents_sum,
                own,
                step,
                first,
                others,
                part,
                len(each),
                self._state_sum,
                like,
                yours,
                host,
            )
            for part, others in enumerate(each)
        ]


def contents_sum(contents: Payload) -> bytes:
    return hashlib.blake2b(contents, digest_size=SUM_BYTES).digest()


def _frames(kept: Kept) -> Iterator[Kept]:
    """At least one."""
    found: Kept = {}
    size = 0
    for rank, own in kept.items():
        bytes_here = sum(map(len, own.values()))
        if found and size + bytes_here > OTHERS_BYTES_MAX:
            yield found
            found, size = {}, 0
        found[rank] = own
        size += bytes_here
    yield found
