"""What is each rank's own, gathered by all of them in each step, as one more sum (`covey.healing`).

A rank's random generators, its place in the data: bytes that no other rank has. Each rank pushes a row for every rank,
of which only its own is not zero, before it pushes anything else; the sum is all rows, and no other result of the step
is given to a script before that one. So whoever has a result of a step has what is every rank's own at its end, and
gives it to a successor as a part of the state.

    row   is there one | bytes as before at its beginning | at its end | how many differ between | these, 3 in a float32

Integers below 2 ** 24 are exact in float32, and nothing but zeros is added to them. A row has room for `Owns.room`
bytes that differ; where those of some rank are more, all of them see that in the sum, and push rows with more room in
the same step. Whatever is decided here follows from sums, which all ranks have alike.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from covey.errors import StateLost
from covey.state_pieces import CANNOT, FROM_CHECKPOINT
from covey.tensor_arrays import Array

RANKS_MAX = 16
"""With more, rows would be a large part of what travels; two neighbours keep what is a rank's own then."""
ROOM = 96
"""Bytes, at first: as of a generator's counter."""
CROWDED, CALM = 2, 8
"""After so many steps that need more room rows have more of it, and after so many that need half of it, half."""
HEAD = 4
"""Numbers before the bytes."""
NOTHING, GIVEN = 0, 1
PER_FLOAT = 3
"""Bytes."""


class Owns(msgspec.Struct, frozen=True):
    """Of all ranks, at the beginning of a step; equal on all that are in it."""

    step: int
    """Of which it is the beginning."""
    each: tuple[bytes, ...]
    """By rank; empty: it never had any."""
    room: int = ROOM
    crowded: int = 0
    """Steps one after the other that needed more room than rows had at first."""
    calm: int = 0
    """Likewise, half or less."""
    is_asked: bool = True
    """Whether ranks push rows: not once none of them had anything."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Owns] = msgspec.msgpack.Decoder(Owns)


def none_yet(ranks: int, step: int) -> Owns:
    """When the job begins."""
    return Owns(step, (b"",) * ranks)


def array_of_owns(owns: Owns) -> Array:
    """As a part of the state."""
    return np.frombuffer(_encoder.encode(owns), np.uint8)


def owns_of_array(array: Array, ranks: int) -> Owns:
    """StateLost when that is not what `array_of_owns` made for so many ranks."""
    try:
        found = _decoder.decode(array.tobytes())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise StateLost(CANNOT, f"what is each rank's own cannot be read: {error}", FROM_CHECKPOINT) from error
    if len(found.each) != ranks:
        raise StateLost(CANNOT, f"what came is the own of {len(found.each)} ranks, not {ranks}", FROM_CHECKPOINT)
    return found


def name_of(room: int) -> str:
    """Of the tensor whose rows have this room."""
    return f"covey/own {room}"


def rows_of(rank: int, ranks: int, before: bytes, now: bytes | None, room: int) -> Array:
    """What a rank pushes, shape (ranks, numbers): zeros but for its own row. `now`: None when it has nothing."""
    rows = np.zeros((ranks, HEAD + -(-room // PER_FLOAT)), np.float32)
    if now is None:
        return rows
    begins, ends = unchanged(before, now)
    middle = now[begins : len(now) - ends]
    rows[rank, :HEAD] = GIVEN, begins, ends, len(middle)
    if len(middle) <= room:
        rows[rank, HEAD:] = _numbers(middle, rows.shape[1] - HEAD)
    return rows


def room_needed(rows: Array) -> int:
    """Of the rows that all ranks pushed."""
    return int(rows[:, 3].max())


def larger(room: int, needed: int) -> int:
    """Room for so much."""
    while room < needed:
        room *= 2
    return room


def merged(owns: Owns, rows: Array, step: int) -> Owns:
    """After a step in which these rows were gathered, at the beginning of `step`."""
    heads: list[list[float]] = rows[:, :HEAD].tolist()
    each = tuple(_changed(old, head, row) for old, head, row in zip(owns.each, heads, rows, strict=True))
    needed, room = room_needed(rows), owns.room
    crowded = owns.crowded + 1 if needed > room else 0
    calm = owns.calm + 1 if room > ROOM and 2 * needed <= room else 0
    if crowded == CROWDED:
        room, crowded = larger(room, needed), 0
    if calm == CALM:
        room, calm = room // 2, 0
    is_asked = owns.is_asked and any(head[0] == GIVEN for head in heads)
    return Owns(step, each, room, crowded, calm, is_asked)


def unchanged(before: bytes, now: bytes) -> tuple[int, int]:
    """How many bytes at the beginning, and at the end, are as they were."""
    if before == now:
        return len(now), 0
    short = min(len(before), len(now))
    one, other = np.frombuffer(before, np.uint8), np.frombuffer(now, np.uint8)
    begins = _first_other(one[:short], other[:short])
    left = short - begins
    ends = _first_other(one[len(one) - left :][::-1], other[len(other) - left :][::-1])
    return begins, ends


def _first_other(one: Array, other: Array) -> int:
    differ = one != other
    at = int(differ.argmax()) if len(differ) else 0
    return at if len(differ) and differ[at] else len(differ)


def _changed(old: bytes, head: Sequence[float], row: Array) -> bytes:
    is_given, begins, ends, size = map(int, head)
    if is_given == NOTHING or (size == 0 and begins + ends == len(old)):
        return old
    return old[:begins] + _bytes(row[HEAD:], size) + old[len(old) - ends :]


def _numbers(data: bytes, count: int) -> Any:
    """Three bytes in each."""
    whole = np.zeros((count, 4), np.uint8)
    flat = np.frombuffer(data.ljust(-(-len(data) // PER_FLOAT) * PER_FLOAT, b"\0"), np.uint8)
    whole[: len(flat) // PER_FLOAT, :PER_FLOAT] = flat.reshape(-1, PER_FLOAT)
    return whole.view("<u4").reshape(-1).astype(np.float32)


def _bytes(numbers: Array, size: int) -> bytes:
    """What `_numbers` was given."""
    used = numbers[: -(-size // PER_FLOAT)].astype("<u4").view(np.uint8).reshape(-1, 4)
    return used[:, :PER_FLOAT].tobytes()[:size]
