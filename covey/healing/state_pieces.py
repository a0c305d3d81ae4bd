"""What ranks tell one another when one of them is lost (`covey.healing.healing`), and the pieces in which the state
travels.

All arrays of the state are one stream of bytes, whatever their number; before it, another one says what they are. A
piece is a part of a stream, and goes where its arrays lie: nothing of the state is in memory twice.
"""

import enum
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from covey.core.errors import StateLost
from covey.core.units import format_seconds, format_size
from covey.healing.likeness import Likeness
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Payload
from covey.wire.checksum import crc32

CONTENTS_BYTES_MAX = 1 << 30
PIECE_BYTES = 256 << 10
AT_ONCE = 4
"""Pieces that are asked of one rank and are not here."""
ALL_AT_ONCE = 32
"""Likewise of all: half of what an aggregator keeps for one that reads slowly."""
ANSWER_S = 2.0
"""Who was asked for a piece has so long, at least, until another one is."""
ANSWERS = 4.0
"""So many times as long as the newest answer took: a link may be slow."""
JUDGED_AFTER = 0.1
"""Of the time allowed: then the rate is known."""
SUMMED_BYTES = 16 << 20
"""Of which a checksum is made at a time."""
SAME = "start it as the ranks that are there were started"
CANNOT = "this rank cannot go on where it was lost"
FROM_CHECKPOINT = "start from its last checkpoint"
_PIECE = struct.Struct("<BQI")
"""Of which stream, the first byte, how many."""


class About(enum.IntEnum):
    MIRROR = 1
    NEED = 2
    HAVE = 3
    FETCH = 4
    PIECE = 5
    DONE = 6
    MIRRORED = 7
    LIKE = 8
    LIKED = 9
    PAST = 10
    IS_PAST = 11


class Which(enum.IntEnum):
    """Of the two streams."""

    CONTENTS = 0
    STATE = 1


class Item(msgspec.Struct, frozen=True):
    """An array of the state."""

    name: str
    type: str
    """As numpy writes it."""
    shape: tuple[int, ...]


class Contents(msgspec.Struct, frozen=True):
    """What the state is."""

    items: tuple[Item, ...] = ()
    rounds: bytes = b""
    """Of each Block: its declaration, and the last round before this step."""


class Have(msgspec.Struct, frozen=True):
    """What a rank says to a successor; in several frames where it keeps much."""

    to: int = 0
    """Which process of that rank asked: what an earlier one was told does not count."""
    is_new: bool = False
    """It is a successor itself, and has nothing."""
    contents_bytes: Annotated[int, msgspec.Meta(ge=0, le=CONTENTS_BYTES_MAX)] = 0
    contents_sum: bytes = b""
    """A digest: those that are in the same step have the same."""
    own: dict[int, bytes] = {}
    """What it keeps of the lost rank's own: at the beginning of which step."""
    step: int = 0
    first: int = 0
    """The step with which the job began."""
    others: dict[int, dict[int, bytes]] = {}
    """What is this rank's own, and what else it keeps: the successor may be the only other one to keep it."""
    part: int = 0
    parts: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    """In which `others` come."""
    state_sum: int | None = None
    """CRC-32 of the state; None: it is being made."""
    like: Likeness | None = None
    """This rank's `covey.healing.likeness`."""
    yours: Likeness | None = None
    """That of the lost rank, if it was told."""
    host: str = ""
    """Where this rank is; empty: it does not know."""


encode_have = msgspec.msgpack.Encoder().encode
have_decoder: msgspec.msgpack.Decoder[Have] = msgspec.msgpack.Decoder(Have)
encode_contents = msgspec.msgpack.Encoder().encode
_contents_decoder: msgspec.msgpack.Decoder[Contents] = msgspec.msgpack.Decoder(Contents)


def contents_of(data: Payload, rank: int) -> Contents:
    """What `rank` said of its state. StateLost when that is no such thing."""
    try:
        return _contents_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = f"what rank {rank} says of its arrays cannot be read: {error}"
        raise StateLost(CANNOT, why, FROM_CHECKPOINT) from error


class Stream:
    """Bytes that lie in several places, one after the other."""

    def __init__(self, places: Sequence[memoryview]) -> None:
        self._places = list(places)
        self._starts = list(accumulate(map(len, places), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def cut(self, first: int, end: int) -> Iterator[memoryview]:
        """Where these bytes lie."""
        at = bisect_right(self._starts, first) - 1
        while first < end:
            start = self._starts[at]
            found = self._places[at][first - start : end - start]
            yield found
            first, at = first + len(found), at + 1

    def checksum(self) -> int:
        """CRC-32."""
        found = 0
        for first in range(0, len(self), SUMMED_BYTES):
            for each in self.cut(first, min(first + SUMMED_BYTES, len(self))):
                found = crc32(each, found)
        return found


class _Asked(NamedTuple):
    size: int
    rank: int
    until_s: float
    since_s: float
    """It was asked for, by the first one."""


class PieceFetch:
    """Of who takes a stream over: what was asked for, and of whom. No more of it is in memory than is on its way."""

    def __init__(self, which: Which, into: Stream) -> None:
        self._which, self._into = which, into
        self._next = 0
        """The first byte that nobody was asked for."""
        self._asked: dict[int, _Asked] = {}
        """Pieces on their way, by their first byte."""
        self._silent: set[int] = set()
        """Ranks that did not answer, and have said nothing since."""
        self._answer_s = ANSWER_S
        self.came_bytes = 0

    @property
    def left_bytes(self) -> int:
        return len(self._into) - self.came_bytes

    def asks(self, sources: Sequence[int], now_s: float) -> list[tuple[bytes, int]]:
        """What to ask for now, and of whom. A rank that is silent is asked where all are."""
        again, under_way = [], Counter[int]()
        for first, asked in self._asked.items():
            if asked.until_s <= now_s:
                self._silent.add(asked.rank)
            if asked.until_s <= now_s or asked.rank not in sources:
                again.append(first)
            else:
                under_way[asked.rank] += 1
        each = max(1, min(AT_ONCE, ALL_AT_ONCE // len(sources)))
        found = []
        while again or self._next < len(self._into):
            rank = min(sources, key=lambda rank: (rank in self._silent, under_way[rank]))
            if under_way[rank] >= each or sum(under_way.values()) >= ALL_AT_ONCE:
                break
            under_way[rank] += 1
            found.append((self._ask(again.pop(0) if again else None, rank, now_s), rank))
        return found

    def _ask(self, first: int | None, rank: int, now_s: float) -> bytes:
        if first is None:
            first, size, since_s = self._next, min(PIECE_BYTES, len(self._into) - self._next), now_s
            self._next += size
        else:
            size, since_s = self._asked[first].size, self._asked[first].since_s
        self._asked[first] = _Asked(size, rank, now_s + self._answer_s, since_s)
        return _PIECE.pack(self._which, first, size)

    def came(self, rank: int, data: Payload, now_s: float) -> None:
        """A piece, as `piece_of` made it. Anything else is left alone."""
        if len(data) < _PIECE.size:
            return
        which, first, size = _PIECE.unpack_from(data)
        asked = self._asked.get(first)
        if which != self._which or asked is None or size != asked.size or len(data) != _PIECE.size + size:
            return
        del self._asked[first]
        at = _PIECE.size
        for place in self._into.cut(first, first + size):
            place[:] = memoryview(data)[at : at + len(place)]
            at += len(place)
        self.came_bytes += size
        self._silent.discard(rank)
        self._answer_s = max(ANSWER_S, ANSWERS * (now_s - asked.since_s))


def piece_of(streams: Mapping[int, Stream], asked: Payload) -> bytes | None:
    """What was asked for; None when there is no such piece."""
    if len(asked) != _PIECE.size:
        return None
    which, first, size = _PIECE.unpack(asked)
    stream = streams.get(which)
    if stream is None or size > PIECE_BYTES or first + size > len(stream):
        return None
    return b"".join((asked, *stream.cut(first, first + size)))


def why_too_slow(came_bytes: int, all_bytes: int, took_s: float, allowed_s: float) -> str:
    """Why a state cannot come in time; empty: it can, or it is too early to say."""
    if took_s < JUDGED_AFTER * allowed_s:
        return ""
    needs_s = took_s * all_bytes / max(1, came_bytes)
    if took_s < allowed_s and needs_s < 2 * allowed_s:
        return ""
    came = f"{format_size(came_bytes)} of {format_size(all_bytes)} came in {format_seconds(took_s)}"
    return f"{came}, and {format_seconds(allowed_s)} are allowed for all"


def array_of(item: Item, known: Array | None) -> Array:
    """An array for this one: that which is `known` here, if it is like it. StateLost when it cannot be made."""
    if known is not None and (known.dtype.str, known.shape) == (item.type, item.shape) and _is_plain(known):
        return known
    try:
        type = np.dtype(item.type)
        if type.kind not in "biufc":
            raise TypeError(f"elements of {type} do not travel")
        return np.empty(item.shape, type)
    except (TypeError, ValueError, MemoryError) as error:
        why = f"array {item.name!r} {item.shape}: {error}"
        raise StateLost(CANNOT, why, FROM_CHECKPOINT) from error


def _is_plain(array: Array) -> bool:
    return bool(array.flags.c_contiguous and array.flags.writeable)


def bytes_of_state(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view("u1").data)
