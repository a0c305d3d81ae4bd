"""Messages that ranks send one another when one of them is lost (`covey.healing.healing`), and the pieces in which the
state travels.

All arrays of the state form one stream of bytes; before it, a stream of contents says what the arrays are. A piece is a
part of a stream and is copied straight into its arrays: nothing of the state is in memory twice.
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
"""Most pieces that are asked of one rank and have not arrived."""
ALL_AT_ONCE = 32
"""Most pieces that are asked of all ranks and have not arrived: half of what an aggregator keeps for a slow reader."""
ANSWER_S = 2.0
"""Least number of seconds that a rank has to answer before another one is asked."""
ANSWERS = 4.0
"""Factor on the time of the newest answer, for the next time limit: a link may be slow."""
JUDGED_AFTER = 0.1
"""Share of the allowed time after which the rate is judged."""
SUMMED_BYTES = 16 << 20
"""Bytes of which a checksum is made at a time."""
SAME = "start it as the ranks that are there were started"
CANNOT = "this rank cannot go on where it was lost"
FROM_CHECKPOINT = "start from its last checkpoint"
_PIECE = struct.Struct("<BQI")
"""A piece: number of the stream, first byte, number of bytes."""


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
    NOTHING = 12


class Which(enum.IntEnum):
    """Number of one of the two streams."""

    CONTENTS = 0
    STATE = 1


class Item(msgspec.Struct, frozen=True):
    """One array of the state."""

    name: str
    type: str
    """Type of the elements, as numpy writes it (`dtype.str`)."""
    shape: tuple[int, ...]


class Contents(msgspec.Struct, frozen=True):
    """What the state consists of."""

    items: tuple[Item, ...] = ()
    rounds: bytes = b""
    """For each Block, its declaration and the last round before this step, packed."""


class Have(msgspec.Struct, frozen=True):
    """A rank's answer to a successor; in several frames when it keeps much."""

    to: int = 0
    """Incarnation of the process that asked: answers to an earlier process do not count."""
    is_new: bool = False
    """Whether the answering rank is a successor itself, and has nothing."""
    contents_bytes: Annotated[int, msgspec.Meta(ge=0, le=CONTENTS_BYTES_MAX)] = 0
    contents_sum: bytes = b""
    """Digest of the contents: equal for all ranks that are in the same step."""
    own: dict[int, bytes] = {}
    """The lost rank's own states that this rank keeps, by step at whose beginning they hold."""
    step: int = 0
    first: int = 0
    """The step with which the job began."""
    others: dict[int, dict[int, bytes]] = {}
    """Own states of this rank and those it keeps, by rank and step: the successor may be the only other keeper."""
    part: int = 0
    parts: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    """Number of frames that carry `others`."""
    state_sum: int | None = None
    """CRC-32 of the state; None: it is being computed."""
    like: Likeness | None = None
    """Likeness of this rank (`covey.healing.likeness`)."""
    yours: Likeness | None = None
    """Likeness of the lost rank, if it sent one."""
    host: str = ""
    """Host of this rank; empty: not known."""
    by: int = 0
    """Incarnation of the process that answers, or what stands for it (`HealingMachine.carried_here`)."""


encode_have = msgspec.msgpack.Encoder().encode
have_decoder: msgspec.msgpack.Decoder[Have] = msgspec.msgpack.Decoder(Have)
encode_contents = msgspec.msgpack.Encoder().encode
_contents_decoder: msgspec.msgpack.Decoder[Contents] = msgspec.msgpack.Decoder(Contents)


def contents_of(data: Payload, rank: int) -> Contents:
    """The contents that `rank` sent. StateLost when they cannot be read."""
    try:
        return _contents_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = f"what rank {rank} says of its arrays cannot be read: {error}"
        raise StateLost(CANNOT, why, FROM_CHECKPOINT) from error


class Stream:
    """Bytes in several places that form one sequence."""

    def __init__(self, places: Sequence[memoryview]) -> None:
        self._places = list(places)
        self._starts = list(accumulate(map(len, places), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def cut(self, first: int, end: int) -> Iterator[memoryview]:
        """The views that hold these bytes, in order."""
        at = bisect_right(self._starts, first) - 1
        while first < end:
            start = self._starts[at]
            found = self._places[at][first - start : end - start]
            yield found
            first, at = first + len(found), at + 1

    def checksum(self) -> int:
        """CRC-32 of all bytes."""
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
    """When the piece was asked for first, of any rank."""


class PieceFetch:
    """The fetching of one stream by a successor: which pieces were asked for, and of which rank. Memory beside the
    arrays holds only pieces that are on their way."""

    def __init__(self, which: Which, into: Stream) -> None:
        self._which, self._into = which, into
        self._next = 0
        """First byte that was not asked for yet."""
        self._asked: dict[int, _Asked] = {}
        """Pieces on their way, by their first byte."""
        self._silent: set[int] = set()
        """Ranks that did not answer in time, and have sent nothing since."""
        self._answer_s = ANSWER_S
        self.came_bytes = 0

    @property
    def left_bytes(self) -> int:
        return len(self._into) - self.came_bytes

    def asks(self, sources: Sequence[int], now_s: float) -> list[tuple[bytes, int]]:
        """The pieces to ask for now, and the rank to ask. A silent rank is asked only when all are silent."""
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
        """Copy a piece that `piece_of` made to its place. Anything else is ignored."""
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
    """The piece that was asked for; None when there is no such piece."""
    if len(asked) != _PIECE.size:
        return None
    which, first, size = _PIECE.unpack(asked)
    stream = streams.get(which)
    if stream is None or size > PIECE_BYTES or first + size > len(stream):
        return None
    return b"".join((asked, *stream.cut(first, first + size)))


def why_too_slow(came_bytes: int, all_bytes: int, took_s: float, allowed_s: float) -> str:
    """Why a state cannot arrive in time; empty when it can, or when it is too early to say."""
    if took_s < JUDGED_AFTER * allowed_s:
        return ""
    needs_s = took_s * all_bytes / max(1, came_bytes)
    if took_s < allowed_s and needs_s < 2 * allowed_s:
        return ""
    came = f"{format_size(came_bytes)} of {format_size(all_bytes)} came in {format_seconds(took_s)}"
    return f"{came}, and {format_seconds(allowed_s)} are allowed for all"


def array_of(item: Item, known: Array | None) -> Array:
    """An array for this item: the one `known` here, if type and shape are equal. StateLost when none can be made."""
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
