"""What is each rank's own, gathered by all of them in each step, as one more sum (`covey.healing.healing`).

A rank's random generators, its place in the data: bytes that no other rank has. Each rank pushes a row for every rank,
of which only its own is not zero, before it pushes anything else; the sum is all rows, and no other result of the step
is given to a script before that one. So whoever has a result of a step has what is every rank's own at its end, and
gives it to a successor as a part of the state.

    row   in decimal digits: bytes as before at its beginning, and at its end, how many differ between | these | zeros

Rows are added as float32, four characters in each. Characters of ASCII are below 128, so no four of them are infinite,
no number, or minus zero, and what is added to them is zero: they arrive as they left.

A row has room for `RowPlan.room` bytes that differ; where those of some rank are more, all of them see that in the sum,
and push rows with more room in the same step. Whatever is decided here follows from sums, which all ranks have alike.
Once a step it is only looked at how much room was needed; rows are read when somebody asks what is in them.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from covey.core.errors import StateLost
from covey.healing.state_pieces import CANNOT, FROM_CHECKPOINT
from covey.tensors.numbers.arrays import Array

RANKS_MAX = 16
"""With more, rows would be a large part of what travels; two neighbours keep what is a rank's own then."""
ROOM = 240
"""Bytes, at first: as of a generator's counter."""
CROWDED, CALM = 2, 8
"""After so many steps that need more room rows have more of it, and after so many that need half of it, half."""
SKIPS = (64, 192, 1024, 4096)
"""Bytes by which what is alike may be shorter than all."""
DIGITS = 5
HEAD = 3 * DIGITS
"""Characters before those that differ."""


class JsonText(str):
    """JSON, in ASCII, where a rank has its own so."""


class RowPlan(msgspec.Struct, frozen=True):
    """What all ranks push in a step."""

    room: int = ROOM
    crowded: int = 0
    """Steps one after the other that needed more room than rows had at first."""
    calm: int = 0
    """Likewise, half or less."""
    is_asked: bool = True
    """Whether they push rows: not once none of them had anything."""


class Owns(msgspec.Struct, frozen=True):
    """Of all ranks, at the beginning of a step; equal on all that are in it."""

    step: int
    """Of which it is the beginning."""
    each: tuple[bytes, ...]
    """By rank; empty: it never had any."""
    plan: RowPlan = RowPlan()


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Owns] = msgspec.msgpack.Decoder(Owns)


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


def row_bytes(room: int) -> int:
    return -(-(HEAD + room) // 4) * 4


def rows_of(rank: int, ranks: int, before: bytes, now: bytes | None, room: int) -> Array:
    """What a rank pushes, float32, flat: zeros but for its own row. `before`: what all others have of it; `now`: in
    ASCII; None when it has nothing."""
    size = row_bytes(room)
    rows = bytearray(ranks * size)
    if now is not None:
        begins, ends = unchanged(before, now)
        count = len(now) - begins - ends
        row = b"%05d%05d%05d" % (begins, ends, count)
        if count <= room:
            row += now[begins : begins + count]
        rows[rank * size : rank * size + len(row)] = row
    return np.frombuffer(rows, np.float32)


def unchanged(before: bytes, now: bytes) -> tuple[int, int]:
    """So many bytes at the beginning, and at the end, are as they were; none of few."""
    if len(now) <= ROOM:
        return 0, 0
    most = min(len(before), len(now))
    begins = _alike(before, now, most, False)
    return begins, _alike(before, now, most - begins, True)


def _alike(before: bytes, now: bytes, most: int, at_end: bool) -> int:
    """How many bytes, `most` at most, are alike at either end, or a few less: mostly it is nearly all."""
    for less in (0, *SKIPS, most // 2):
        count = most - less
        if count <= 0:
            break
        if before.endswith(now[len(now) - count :]) if at_end else before.startswith(now[:count]):
            return count
    return 0


def room_needed(rows: bytes, ranks: int) -> tuple[int, bool]:
    """Of the rows that all ranks pushed; and whether there is anything in them."""
    size = len(rows) // ranks
    heads = [rows[at + 2 * DIGITS : at + HEAD] for at in range(0, len(rows), size)]
    given = [int(head) for head in heads if head[0]]
    return max(given, default=0), bool(given)


def larger(room: int, needed: int) -> int:
    """Room for so much."""
    while room < needed:
        room *= 2
    return room


def next_plan(plan: RowPlan, needed: int, is_given: bool) -> RowPlan:
    """After a step that needed so much room."""
    is_more, is_less = needed > plan.room, plan.room > ROOM and 2 * needed <= plan.room
    if is_given and not is_more and not is_less and not plan.crowded and not plan.calm:
        return plan
    room = plan.room
    crowded, calm = plan.crowded + 1 if is_more else 0, plan.calm + 1 if is_less else 0
    if crowded == CROWDED:
        room, crowded = larger(room, needed), 0
    if calm == CALM:
        room, calm = room // 2, 0
    return RowPlan(room, crowded, calm, plan.is_asked and is_given)


def merged(each: Sequence[bytes], rows: bytes) -> tuple[bytes, ...]:
    """What is each rank's own after a step in which these rows were gathered."""
    size = len(rows) // len(each)
    return tuple(_changed(old, rows[at * size : (at + 1) * size]) for at, old in enumerate(each))


def _changed(old: bytes, row: bytes) -> bytes:
    if not row[0]:
        return old
    begins, ends, count = (int(row[at : at + DIGITS]) for at in range(0, HEAD, DIGITS))
    return old[:begins] + row[HEAD : HEAD + count] + old[len(old) - ends :]
