"""The state that a rank holds for successors while it waits for them: its state at the beginning of its step."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from covey.healing.likeness import Likeness
from covey.healing.state_pieces import Contents, Have, Item, Stream, Which, bytes_of_state, encode_contents, piece_of
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Payload

OTHERS_BYTES_MAX = 256 << 10
"""Most bytes of other ranks' own states in one frame."""
SUM_BYTES = 16
Kept = dict[int, dict[int, bytes]]
"""Own states of ranks, by rank and step."""


class HeldState:
    """The state in the script's own memory, which must not change while successors need it."""

    def __init__(self, state: Mapping[str, Array], rounds: bytes, host: str = "") -> None:
        """`rounds`: the round of each Block before the step; `host`: that of the process that gives."""
        self.by, self._host = 0, host
        """The least incarnation that stands for its carrying of this rank (`HealingMachine.carried_here`)."""
        items = tuple(Item(name, array.dtype.str, array.shape) for name, array in state.items())
        contents = encode_contents(Contents(items, rounds))
        each = [bytes_of_state(np.ascontiguousarray(array)) for array in state.values()]
        self._state = Stream(each)
        self._streams = {int(Which.CONTENTS): Stream([memoryview(contents)]), int(Which.STATE): self._state}
        self._contents_bytes, self._contents_sum = len(contents), contents_sum(contents)
        self._state_sum: int | None = None

    def piece(self, asked: Payload) -> bytes | None:
        """The piece that is asked for, as in `piece_of`."""
        return piece_of(self._streams, asked)

    def make_sum(self) -> None:
        """Compute the state's checksum, by any thread: it takes a second for 10 GB."""
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
    ) -> list[Have]:
        """The frames for process `to` of a lost rank: its `own` states, those `kept` of others, the likeness of this
        rank and of the lost one."""
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
                self._host,
                self.by,
            )
            for part, others in enumerate(each)
        ]


def contents_sum(contents: Payload) -> bytes:
    return hashlib.blake2b(contents, digest_size=SUM_BYTES).digest()


def _frames(kept: Kept) -> Iterator[Kept]:
    """Divide the own states among frames, at least one."""
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
