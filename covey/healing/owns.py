"""Every rank's own state, gathered by all ranks in each step as one more sum (`covey.healing.healing`).

A rank's own state (its random generators, its place in the data) is bytes that no other rank has. Each rank pushes a
row for every rank, of which only its own is not zero, before it pushes anything else. The sum has all rows, and a
script gets no other result of the step before that one. So a rank that has a result of a step also has every rank's own
state at its end, and gives it to a successor as a part of the state.

    row   in digits: unchanged bytes at the beginning, and at the end, number of changed bytes | marks, a digit |
          where the rank began, in hex | changed bytes | zeros

Rows are added as float32, four characters in each. ASCII characters are below 128, so no four of them are infinity, NaN
or minus zero, and only zeros are added to them: they arrive unchanged.

A row has room for `RowPlan.room` changed bytes. When a rank needs more, all ranks see that in the sum, and push rows
with more room in the same step. All decisions follow from sums, which are the same on all ranks. Each step only looks
at how much room was needed; rows are decoded when their content is asked for.

The marks let all ranks stop after the same step, though each hears at another time that its job is to stop. A rank that
has heard of it `WANTS`. Once a step is done in which some rank did, all ranks know, as a part of their state at the
beginning of the next step. In that one all say that they know (`KNOWS`), and they stop after the first step in which
all did. A lost rank's successor may want to stop where the lost rank did not, or not yet; but it gets to know with the
state what all others know, so that it says again what the lost rank had said.

Where a rank began is the same for all: the beginning, or one checkpoint (`covey.healing.checkpoint`). In the first step
each says it, so that ranks that found different files do not go on together.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from covey.core.errors import StateLost
from covey.healing.state_pieces import CANNOT, FROM_CHECKPOINT
from covey.tensors.numbers.arrays import Array

RANKS_MAX = 16
"""Most ranks that gather their own states: with more, rows would be a large part of the traffic, and two neighbours
keep a rank's own state instead."""
ROOM = 240
"""Bytes of room in a row at first: enough for a generator's counter."""
CROWDED, CALM = 2, 8
"""After how many steps that need more room rows grow, and after how many that need at most half they shrink to half."""
SKIPS = (64, 192, 1024, 4096)
"""Bytes by which the compared beginning or end is shortened in search of an unchanged run."""
DIGITS = 5
MARK_AT = 3 * DIGITS
BEGAN_AT = MARK_AT + 1
HEAD = BEGAN_AT + 8
"""Characters in a row before the changed bytes."""
NO_MARK = ord("0")
WANTS, KNOWS, ASKS = 1, 2, 4
"""Marks of a rank: it heard that the job is to stop; it knew at the beginning of the step that some rank had heard; its
script asks whether to stop."""
QUIET_MAX = 2
"""After how many steps in which nobody needs rows, none are pushed any more."""


class JsonText(str):
    """JSON text in ASCII, for a rank whose own state is JSON already."""


class RowPlan(msgspec.Struct, frozen=True):
    """The shape of the rows that all ranks push in a step."""

    room: int = ROOM
    crowded: int = 0
    """How many steps in a row needed more room than rows had at first."""
    calm: int = 0
    """How many steps in a row needed half of the room or less."""
    quiet: int = 0
    """How many steps in a row no rank had own state, and no script asked whether to stop."""

    @property
    def is_asked(self) -> bool:
        """Whether ranks push rows."""
        return self.quiet < QUIET_MAX


class Agreement(enum.IntEnum):
    """What all ranks have agreed on at the beginning of a step."""

    NO = 0
    KNOWN = 1
    """Some rank has heard that the job is to stop."""
    AGREED = 2
    """All ranks stop now."""


class Says(NamedTuple):
    """What a rank says in its row beside its own state."""

    marks: int = 0
    """A sum of WANTS, KNOWS, ASKS."""
    began: int = 0
    """Number of the checkpoint with which it began (`covey.healing.checkpoint`); 0: with none."""


class Marks(NamedTuple):
    """What the marks of all ranks say together."""

    is_wanted: bool
    """Some rank wants to stop."""
    is_known: bool
    """All ranks know that some rank does."""
    is_asked: bool
    """Some script asks whether to stop."""


class Owns(msgspec.Struct, frozen=True):
    """The own states of all ranks at the beginning of a step; equal on all ranks that are in it."""

    step: int
    """Number of the step."""
    each: tuple[bytes, ...]
    """Own state by rank; empty: the rank never had any."""
    plan: RowPlan = RowPlan()
    stop: Agreement = Agreement.NO


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Owns] = msgspec.msgpack.Decoder(Owns)


def array_of_owns(owns: Owns) -> Array:
    """The own states as an array, a part of the state."""
    return np.frombuffer(_encoder.encode(owns), np.uint8)


def owns_of_array(array: Array, ranks: int) -> Owns:
    """The own states in an array. StateLost when `array_of_owns` did not make it for so many ranks."""
    try:
        found = _decoder.decode(array.tobytes())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise StateLost(CANNOT, f"what is each rank's own cannot be read: {error}", FROM_CHECKPOINT) from error
    if len(found.each) != ranks:
        raise StateLost(CANNOT, f"what came is the own of {len(found.each)} ranks, not {ranks}", FROM_CHECKPOINT)
    return found


def name_of(room: int) -> str:
    """Name of the tensor whose rows have this room."""
    return f"covey/own {room}"


def row_bytes(room: int) -> int:
    return -(-(HEAD + room) // 4) * 4


def rows_of(rank: int, ranks: int, before: bytes, now: bytes | None, room: int, says: Says = Says()) -> Array:
    """The rows that a rank pushes, flat float32: zeros except for its own row. `before`: its own state as all others
    have it; `now`: its own state in ASCII; None when it has none."""
    size = row_bytes(room)
    rows = bytearray(ranks * size)
    said = b"%d%08x" % says
    rows[rank * size + MARK_AT : rank * size + HEAD] = said
    if now is not None:
        begins, ends = unchanged(before, now)
        count = len(now) - begins - ends
        row = b"%05d%05d%05d%s" % (begins, ends, count, said)
        if count <= room:
            row += now[begins : begins + count]
        rows[rank * size : rank * size + len(row)] = row
    return np.frombuffer(rows, np.float32)


def unchanged(before: bytes, now: bytes) -> tuple[int, int]:
    """How many bytes at the beginning, and at the end, are unchanged; 0 and 0 for a short state."""
    if len(now) <= ROOM:
        return 0, 0
    most = min(len(before), len(now))
    begins = _alike(before, now, most, False)
    return begins, _alike(before, now, most - begins, True)


def _alike(before: bytes, now: bytes, most: int, at_end: bool) -> int:
    """A lower bound of how many bytes, at most `most`, are equal at either end: mostly nearly all are."""
    for less in (0, *SKIPS, most // 2):
        count = most - less
        if count <= 0:
            break
        if before.endswith(now[len(now) - count :]) if at_end else before.startswith(now[:count]):
            return count
    return 0


def room_needed(rows: bytes, ranks: int) -> tuple[int, bool]:
    """The most room that a row needs, in bytes, by the sum of all rows; and whether any row has own state."""
    size = len(rows) // ranks
    heads = [rows[at + 2 * DIGITS : at + MARK_AT] for at in range(0, len(rows), size)]
    given = [int(head) for head in heads if head[0]]
    return max(given, default=0), bool(given)


def marks_of(rows: bytes, ranks: int) -> Marks:
    """What the marks of all ranks say, by the sum of all rows."""
    each = [mark - NO_MARK for mark in rows[MARK_AT :: len(rows) // ranks]]
    return Marks(any(mark & WANTS for mark in each), all(mark & KNOWS for mark in each), any(m & ASKS for m in each))


def began_of(rows: bytes, ranks: int) -> list[int]:
    """Number of the checkpoint with which each rank began, by the sum of all rows."""
    size = len(rows) // ranks
    return [int(rows[at + BEGAN_AT : at + HEAD], 16) for at in range(0, len(rows), size)]


def next_stop(stop: Agreement, marks: Marks) -> Agreement:
    """What all ranks have agreed on after a step with these marks; `stop`: at its beginning."""
    if marks.is_known:
        return Agreement.AGREED
    return max(stop, Agreement.KNOWN) if marks.is_wanted else stop


def larger(room: int, needed: int) -> int:
    """Smallest room, doubling from `room`, that holds `needed` bytes."""
    while room < needed:
        room *= 2
    return room


def next_plan(plan: RowPlan, needed: int, is_needed: bool) -> RowPlan:
    """The plan after a step that needed `needed` bytes of room; `is_needed`: somebody needs rows at all."""
    is_more, is_less = needed > plan.room, plan.room > ROOM and 2 * needed <= plan.room
    if is_needed and not is_more and not is_less and plan == RowPlan(plan.room):
        return plan
    room = plan.room
    crowded, calm = plan.crowded + 1 if is_more else 0, plan.calm + 1 if is_less else 0
    if crowded == CROWDED:
        room, crowded = larger(room, needed), 0
    if calm == CALM:
        room, calm = room // 2, 0
    return RowPlan(room, crowded, calm, 0 if is_needed else plan.quiet + 1)


def merged(each: Sequence[bytes], rows: bytes) -> tuple[bytes, ...]:
    """Every rank's own state after a step in which these rows were gathered."""
    size = len(rows) // len(each)
    return tuple(_changed(old, rows[at * size : (at + 1) * size]) for at, old in enumerate(each))


def _changed(old: bytes, row: bytes) -> bytes:
    if not row[0]:
        return old
    begins, ends, count = (int(row[at : at + DIGITS]) for at in range(0, MARK_AT, DIGITS))
    return old[:begins] + row[HEAD : HEAD + count] + old[len(old) - ends :]
