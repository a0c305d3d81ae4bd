"""What ranks tell one another when one of them is lost (`covey.healing`), and the pieces in which the state travels."""

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np

from covey.errors import StateLost
from covey.tensor_arrays import Array
from covey.tensorwire import Payload

ROUNDS_BYTES_MAX = 1 << 28
PIECE_BYTES = 256 << 10
AT_ONCE = 4
"""Pieces that are asked of one rank and are not here."""
ANSWER_S = 2.0
"""Who was asked for a piece has so long until another one is."""
CANNOT = "this rank cannot go on where it was lost"
FROM_CHECKPOINT = "start from its last checkpoint"
_PIECE = struct.Struct("<IQI")
"""Which array, the first byte, how many."""
Piece = tuple[int, int, int]


class About(enum.IntEnum):
    MIRROR = 1
    NEED = 2
    HAVE = 3
    FETCH = 4
    PIECE = 5
    DONE = 6
    MIRRORED = 7


class Item(msgspec.Struct, frozen=True):
    """An array of the state."""

    name: str
    type: str
    """As numpy writes it."""
    shape: tuple[int, ...]


class Have(msgspec.Struct, frozen=True):
    """What a rank says to a successor."""

    to: int = 0
    """Which process of that rank asked: what an earlier one was told does not count."""
    is_new: bool = False
    """It is a successor itself, and has nothing."""
    rounds_bytes: Annotated[int, msgspec.Meta(ge=0, le=ROUNDS_BYTES_MAX)] = 0
    """How long what it says of Blocks is: their declarations, and the last round before this step."""
    items: tuple[Item, ...] = ()
    own: dict[int, bytes] = {}
    """What it keeps of the lost rank's own: at the beginning of which step."""
    step: int = 0
    first: int = 0
    """The step with which the job began."""
    others: dict[int, dict[int, bytes]] = {}
    """What is this rank's own, and what else it keeps: the successor may be the only other one to keep it."""


encode_have = msgspec.msgpack.Encoder().encode
have_decoder: msgspec.msgpack.Decoder[Have] = msgspec.msgpack.Decoder(Have)


class PieceFetch:
    """Of who takes the state over: what is not here yet, and who was asked for it."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._into = into
        self._missing: dict[Piece, tuple[int, float] | None] = dict.fromkeys(_pieces(list(map(len, into))))
        """Whom each was asked of, and until when that one may answer."""

    @property
    def left(self) -> int:
        return len(self._missing)

    def asks(self, sources: Sequence[int], now_s: float) -> list[tuple[bytes, int]]:
        """What to ask for now, and of whom: each source has `AT_ONCE` on its way."""
        under_way, free = dict.fromkeys(sources, 0), []
        for piece, asked in self._missing.items():
            if asked is not None and asked[1] > now_s:
                under_way[asked[0]] += 1
            else:
                free.append(piece)
            if len(free) > AT_ONCE * len(sources):
                break
        asks = []
        for piece in free:
            rank = min(sources, key=lambda rank: under_way[rank])
            if under_way[rank] >= AT_ONCE:
                break
            under_way[rank] += 1
            self._missing[piece] = rank, now_s + ANSWER_S
            asks.append((_PIECE.pack(*piece), rank))
        return asks

    def came(self, data: Payload) -> None:
        """A piece, as `piece_of` made it. Anything else is left alone."""
        piece = _PIECE.unpack_from(data) if len(data) >= _PIECE.size else (0, 0, 0)
        if piece in self._missing and len(data) == _PIECE.size + piece[2]:
            at, first, size = piece
            self._into[at][first : first + size] = memoryview(data)[_PIECE.size :]
            del self._missing[piece]


def piece_of(state: Sequence[memoryview], asked: Payload) -> bytes | None:
    """What was asked for; None when there is no such piece."""
    if len(asked) != _PIECE.size:
        return None
    at, first, size = _PIECE.unpack(asked)
    if at >= len(state) or size > PIECE_BYTES or first + size > len(state[at]):
        return None
    return bytes(asked) + bytes(state[at][first : first + size])


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for at, size in enumerate(sizes):
        for first in range(0, size, PIECE_BYTES):
            yield at, first, min(PIECE_BYTES, size - first)


def array_of(item: Item) -> Array:
    """StateLost when it cannot be made here."""
    try:
        type = np.dtype(item.type)
        if type.kind not in "biufc":
            raise TypeError(f"elements of {type} do not travel")
        return np.empty(item.shape, type)
    except (TypeError, ValueError, MemoryError) as error:
        why = f"array {item.name!r} {item.shape}: {error}"
        raise StateLost(CANNOT, why, FROM_CHECKPOINT) from error


def bytes_of_state(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view("u1").data)
