"""A rank's side of the rounds in which all ranks gather what is each one's own (`covey.healing.owns`).

A machine: it begins rounds and never waits for one.
"""

from typing import Protocol

from covey.healing import owns
from covey.healing.owns import Owns, RowPlan
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.sum_order import Order
from covey.tensors.numbers.tensor_wire import Declared

UNREAD_MAX = 64
"""Steps whose rows are kept as they came."""


class Sums(Protocol):
    """Where rows are added: `covey.tensors.aggregator.block_rounds`. What is pushed soon goes out with what is pushed
    next."""

    part_bytes: int

    @property
    def order(self) -> Order: ...

    def is_declared(self, name: str) -> bool: ...
    def declare(self, declared: Declared, data: Array) -> None: ...
    def push_soon(self, name: str, data: Array) -> None: ...


class OwnGather:
    """Of one rank. In each step `begin`, before anything else is pushed; and before any result is used, for as long as
    rows are `awaited`: `came`, and if that says so `push_again`. Of threads, one at a time does that; `begin` and
    `push_again` only begin rounds, so others may call the rest meanwhile."""

    def __init__(self, rank: int, ranks: int, step: int, sums: Sums) -> None:
        self.ranks, self._rank, self._sums = ranks, rank, sums
        self._is_under_way = False
        self._own: bytes | None = None
        """What is under way, of which step."""
        self._step = 0
        self._plan, self._reached = RowPlan(), step
        """After the newest rows; of which step that is the beginning."""
        self._room = self._plan.room
        """Of the rows that are under way."""
        self._own_known = b""
        """What all others have of this rank."""
        self._known = (b"",) * ranks
        self._unread: list[bytes] = []
        """Rows of steps since then, one after the other."""
        self._begun = self._plan, step, 0
        """At the beginning of this step: plan, of which step it is, how many are unread."""

    # ---- the state of a step ----

    def step_begins(self) -> None:
        """What was gathered by now is the state at its beginning."""
        self._begun = self._plan, self._reached, len(self._unread)
        if len(self._unread) >= UNREAD_MAX:
            self._known = self._read()
            self._unread.clear()
            self._begun = self._plan, self._reached, 0

    @property
    def owns(self) -> Owns:
        """At the beginning of this step."""
        plan, step, _ = self._begun
        return Owns(step, self._read(), plan)

    def go_on_with(self, known: Owns) -> None:
        """What another rank had as `owns`."""
        self._plan, self._reached, self._own_known = known.plan, known.step, known.each[self._rank]
        self._known = known.each
        self._unread.clear()
        self._begun = self._plan, self._reached, 0

    def _read(self) -> tuple[bytes, ...]:
        each = self._known
        for rows in self._unread[: self._begun[2]]:
            each = owns.merged(each, rows)
        return each

    # ---- in a step ----

    def begin(self, step: int, own: bytes | None) -> None:
        """In this step; `own`: as it is at its end."""
        if self._plan.is_asked:
            self._step, self._own, self._room = step, own, self._plan.room
            self.push_again()
            self._is_under_way = True

    @property
    def awaited(self) -> str | None:
        """The tensor whose result is needed before any other one of this step is used; None: it was."""
        return owns.name_of(self._room) if self._is_under_way else None

    def came(self, rows: bytes) -> bool:
        """That result. Whether rows were too short: it is to be pushed again, and awaited."""
        needed, is_given = owns.room_needed(rows, self.ranks)
        if needed > self._room:
            self._room = owns.larger(self._room, needed)
            return True
        self._unread.append(rows)
        self._own_known, self._reached = self._own or b"", self._step + 1
        self._plan = owns.next_plan(self._plan, needed, is_given)
        self._is_under_way = False
        return False

    def push_again(self) -> None:
        """What is this rank's own, in rows that have the room that is known to be needed."""
        rows = owns.rows_of(self._rank, self.ranks, self._own_known, self._own, self._room)
        name, sums = owns.name_of(self._room), self._sums
        if not sums.is_declared(name):
            sums.declare(Declared(name, "grad", rows.shape, sums.part_bytes, sums.order), rows)
        sums.push_soon(name, rows)
