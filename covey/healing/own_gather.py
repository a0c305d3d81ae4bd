"""One rank's side of the rounds in which all ranks gather every rank's own state (`covey.healing.owns`).

It is a machine: it begins rounds and never waits for one.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from covey.core.errors import CoveyError
from covey.healing import owns
from covey.healing.owns import ASKS, KNOWS, QUIET_MAX, WANTS, Agreement, Owns, RowPlan, Says
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


class _Begun(NamedTuple):
    """What was gathered at the beginning of a step."""

    plan: RowPlan
    step: int
    """The step to which the plan belongs."""
    stop: Agreement
    unread: int
    """How many rows are not decoded."""


class OwnGather:
    """The gathering of one rank. In each step call `begin` before anything else is pushed. Before any result is used,
    while rows are `awaited`, call `came`, and `push_again` if that returns True. One thread at a time does that;
    `begin` and `push_again` only begin rounds, so other threads may call the rest meanwhile."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        step: int,
        sums: Sums,
        wants: Callable[[], bool] = lambda: False,
        has_owns: bool = True,
    ) -> None:
        """`wants`: whether this rank has heard that the job is to stop. `has_owns`: rows have room for own states;
        without it they have room for marks alone."""
        self.ranks, self.has_owns, self._rank, self._sums, self._wants = ranks, has_owns, rank, sums, wants
        self._asks = False
        """Whether the script asks whether to stop."""
        self._began = 0
        """Number of the checkpoint with which this rank began; 0: with none."""
        self._first: int | None = step
        """The step in which ranks compare with which checkpoint they began; None: this rank does not."""
        self._says = Says()
        """What this rank says in the rows under way."""
        self._stop = Agreement.NO
        """What ranks agreed on by the newest rows."""
        self._is_under_way = False
        self._own: bytes | None = None
        """This rank's own state in the rows under way, which are those of `_step`."""
        self._step = 0
        self._plan, self._reached = RowPlan() if has_owns else RowPlan(0), step
        """The plan after the newest rows, and the step at whose beginning it holds."""
        self._room = self._plan.room
        """Bytes of room in each row that is under way."""
        self._own_known = b""
        """This rank's own state as all others have it."""
        self._known = (b"",) * ranks
        self._unread: list[bytes] = []
        """Rows of the steps since `_known`, one after the other."""
        self._begun = _Begun(self._plan, step, self._stop, 0)

    def begins(self, began: int, is_new: bool, asks: bool) -> None:
        """This rank begins with that checkpoint (its number; 0: none). `is_new`: as the successor of a lost one, which
        takes its state from others. `asks`: its script ends once all ranks stop."""
        self._began, self._asks = began, asks
        if is_new:
            self._first = None

    def beside(self, rank: int, sums: Sums) -> "OwnGather":
        """The gathering of another rank that this process carries, which began where this one did."""
        step = 0 if self._first is None else self._first
        made = OwnGather(rank, self.ranks, step, sums, self._wants, self.has_owns)
        made.begins(self._began, self._first is None, self._asks)
        return made

    # ---- the state of a step ----

    def step_begins(self) -> None:
        """Begin a step: the own states gathered by now belong to the state at its beginning."""
        self._begun = _Begun(self._plan, self._reached, self._stop, len(self._unread))
        if len(self._unread) >= UNREAD_MAX:
            self._known = self._read()
            self._unread.clear()
            self._begun = self._begun._replace(unread=0)

    @property
    def owns(self) -> Owns:
        """Every rank's own state at the beginning of this step."""
        return Owns(self._begun.step, self._read(), self._begun.plan, self._begun.stop)

    @property
    def newest(self) -> tuple[bytes, ...]:
        """Every rank's own state by the newest rows: at the end of this step, once its rows are here."""
        return self._read(len(self._unread))

    @property
    def stops(self) -> bool:
        """Whether all ranks stop, by the newest rows: all have the same answer once a step's results are here, and
        until something of the next step is pushed. CoveyError when it was not asked in time."""
        if not self._asks and not self._plan.is_asked:
            why = f"no script asked in the first {QUIET_MAX} steps, and since then ranks do not tell one another"
            raise CoveyError("it is not known whether all ranks stop", why, "ask in every step from the first one on")
        self._asks = True
        return self._stop is Agreement.AGREED

    def go_on_with(self, known: Owns) -> None:
        """Continue with the `owns` of another rank."""
        self._plan, self._reached, self._own_known = known.plan, known.step, known.each[self._rank]
        self._known, self._stop = known.each, known.stop
        self._unread.clear()
        self._begun = _Begun(self._plan, self._reached, self._stop, 0)

    def _read(self, count: int | None = None) -> tuple[bytes, ...]:
        each = self._known
        for rows in self._unread[: self._begun.unread if count is None else count]:
            each = owns.merged(each, rows)
        return each

    # ---- in a step ----

    def begin(self, step: int, own: bytes | None) -> None:
        """Push this rank's row of a step. `own`: its own state at the step's end; None: it has none."""
        if self._plan.is_asked:
            self._step, self._own, self._room = step, own, self._plan.room
            known = self._begun.stop >= Agreement.KNOWN
            marks = WANTS * (known or self._wants()) + KNOWS * known + ASKS * self._asks
            self._says = Says(marks, self._began)
            self.push_again()
            self._is_under_way = True

    @property
    def said(self) -> bytes | None:
        """This rank's own state in the rows that it pushed last; None: none."""
        return self._own

    @property
    def awaited(self) -> str | None:
        """Name of the tensor whose result is needed before any other result of this step is used; None: it is here."""
        return owns.name_of(self._room) if self._is_under_way else None

    def came(self, rows: bytes) -> bool:
        """Take that result. Whether rows were too short: then call `push_again` and wait again. CoveyError where ranks
        began with different checkpoints."""
        needed, is_given = owns.room_needed(rows, self.ranks)
        if self._step == self._first:
            self._compare(owns.began_of(rows, self.ranks))
        if needed > self._room:
            self._room = owns.larger(self._room, needed)
            return True
        self._unread.append(rows)
        self._own_known, self._reached = self._own or b"", self._step + 1
        marks = owns.marks_of(rows, self.ranks)
        self._stop = owns.next_stop(self._stop, marks)
        self._plan = owns.next_plan(self._plan, needed, is_given or marks.is_asked)
        self._is_under_way = False
        return False

    def _compare(self, began: list[int]) -> None:
        """CoveyError where another rank began elsewhere than this one."""
        if all(each == self._began for each in began):
            return
        other = next(rank for rank, each in enumerate(began) if each != self._began)
        mine, theirs = (f"checkpoint {each:08x}" if each else "no checkpoint" for each in (self._began, began[other]))
        why = f"this rank found {mine}, and rank {other} {theirs}"
        next_ = "save in a folder that all hosts of the job share (COVEY_CHECKPOINTS), and give each rank the same"
        raise CoveyError("the ranks of this job do not go on together", why, next_)

    def push_again(self) -> None:
        """Push this rank's own state in rows that have the room known to be needed."""
        rows = owns.rows_of(self._rank, self.ranks, self._own_known, self._own, self._room, self._says)
        name, sums = owns.name_of(self._room), self._sums
        if not sums.is_declared(name):
            sums.declare(Declared(name, "grad", rows.shape, sums.part_bytes, sums.order), rows)
        sums.push_soon(name, rows)
