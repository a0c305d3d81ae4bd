"""One rank's side of the rounds in which all ranks gather every rank's own state (`covey.healing.owns`).

It is a machine: it begins rounds and never waits for one.
"""

from typing import Protocol

from covey.healing import owns
from covey.healing.owns import Owns, RowPlan
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.sum_order import Order
from covey.tensors.numbers.tensor_wire import Declared

UNREAD_MAX = 64
"""Most steps whose rows are kept before they are decoded."""


class Sums(Protocol):
    """Where rows are added: `covey.tensors.aggregator.block_rounds`. Rows given to `push_soon` leave with the next
    push."""

    part_bytes: int

    @property
    def order(self) -> Order: ...

    def is_declared(self, name: str) -> bool: ...
    def declare(self, declared: Declared, data: Array) -> None: ...
    def push_soon(self, name: str, data: Array) -> None: ...


class OwnGather:
    """The gathering of one rank. In each step call `begin` before anything else is pushed. Before any result is used,
    while rows are `awaited`, call `came`, and `push_again` if that returns True. One thread at a time does that;
    `begin` and `push_again` only begin rounds, so other threads may call the rest meanwhile."""

    def __init__(self, rank: int, ranks: int, step: int, sums: Sums) -> None:
        self.ranks, self._rank, self._sums = ranks, rank, sums
        self._is_under_way = False
        self._own: bytes | None = None
        """This rank's own state in the rows under way, which are those of `_step`."""
        self._step = 0
        self._plan, self._reached = RowPlan(), step
        """The plan after the newest rows, and the step at whose beginning it holds."""
        self._room = self._plan.room
        """Bytes of room in each row that is under way."""
        self._own_known = b""
        """This rank's own state as all others have it."""
        self._known = (b"",) * ranks
        self._unread: list[bytes] = []
        """Rows of the steps since `_known`, one after the other."""
        self._begun = self._plan, step, 0
        """At the beginning of this step: the plan, the step it belongs to, how many rows are not decoded."""

    # ---- the state of a step ----

    def step_begins(self) -> None:
        """Begin a step: the own states gathered by now belong to the state at its beginning."""
        self._begun = self._plan, self._reached, len(self._unread)
        if len(self._unread) >= UNREAD_MAX:
            self._known = self._read()
            self._unread.clear()
            self._begun = self._plan, self._reached, 0

    @property
    def owns(self) -> Owns:
        """Every rank's own state at the beginning of this step."""
        plan, step, _ = self._begun
        return Owns(step, self._read(), plan)

    def go_on_with(self, known: Owns) -> None:
        """Continue with the `owns` of another rank."""
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
        """Push this rank's row of a step. `own`: its own state at the step's end; None: it has none."""
        if self._plan.is_asked:
            self._step, self._own, self._room = step, own, self._plan.room
            self.push_again()
            self._is_under_way = True

    @property
    def awaited(self) -> str | None:
        """Name of the tensor whose result is needed before any other result of this step is used; None: it is here."""
        return owns.name_of(self._room) if self._is_under_way else None

    def came(self, rows: bytes) -> bool:
        """Take that result. Whether rows were too short: then call `push_again` and wait again."""
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
        """Push this rank's own state in rows that have the room known to be needed."""
        rows = owns.rows_of(self._rank, self.ranks, self._own_known, self._own, self._room)
        name, sums = owns.name_of(self._room), self._sums
        if not sums.is_declared(name):
            sums.declare(Declared(name, "grad", rows.shape, sums.part_bytes, sums.order), rows)
        sums.push_soon(name, rows)
