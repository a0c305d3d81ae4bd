"""Tables of states: which state may follow which, and why. A change that is not in the table is a defect, and raises.

State whose parts could contradict one another is one value. Its kinds are frozen classes, each with the fields that are
known in this state and in no other; or strings, when there is nothing to know. The machine's module declares the table,
and every change of the value goes through it:

    class Idle(msgspec.Struct, frozen=True): ...
    class Asking(msgspec.Struct, frozen=True):
        host: HostId
    Search = Idle | Asking
    TRANSITIONS: StateTable[Search] = StateTable("search for a lender", {
        Idle: {Asking: "the slab is hot"},
        Asking: {Asking: "the host declined: the next one is asked", Idle: "nobody has room"},
    })

    class Slab:
        search = CheckedState(TRANSITIONS)          # unannotated: it is no field of a dataclass
        def __init__(self) -> None:
            self.search = Idle()                    # the first kind in the table, or one of `begins`

Where the value is a field of a Struct, which has no descriptors: `job.state = TRANSITIONS.next(job.state, "placing")`,
in one function. Write one function for each transition; it takes what the next state must know. A value that replaces
another of the same kind is a transition too and has its row.

To add a machine: declare its table so; add a line to `MACHINES` in `tools/states.py` with the tests that take each
of its rows; `make states` draws `docs/design/STATES.md`. *Checked:* tests/tools/test_states.py fails for a page older
than the code, for a table that is not in the list, and for a row that none of these tests takes.
"""

from collections.abc import Collection, Mapping
from typing import Generic, Self, TypeVar, overload

S = TypeVar("S")
Kind = type | str
"""The kind of a state: its class, or the string that it is."""
Rows = Mapping[Kind, Mapping[Kind, str]]
"""A kind -> the kinds that may follow it, each with its cause in a few plain words; a last state has no followers."""


def kind_of(state: object) -> Kind:
    return state if isinstance(state, str) else type(state)


def name_of(kind: Kind) -> str:
    return kind if isinstance(kind, str) else kind.__name__


class StateTable(Generic[S]):
    """The kinds of one value and their transitions. ValueError when a row leads to a kind that has no line."""

    def __init__(self, title: str, rows: Rows, begins: Collection[Kind] = ()) -> None:
        self.title, self.rows = title, rows
        """Name of what has the state, for people."""
        self.begins: Collection[Kind] = begins or [next(iter(rows))]
        """The kinds that the first value may have."""
        if unknown := {*self.begins, *(to for following in rows.values() for to in following)} - rows.keys():
            raise ValueError(f"{title}: {', '.join(sorted(map(name_of, unknown)))} has no line in the table")

    def first(self, state: S) -> S:
        """`state`, after a check that a value may begin with it."""
        assert kind_of(state) in self.begins, f"{self.title} cannot begin as {name_of(kind_of(state))}"
        return state

    def next(self, before: S, after: S) -> S:
        """`after`, after a check that it may follow `before`."""
        old, new = kind_of(before), kind_of(after)
        assert new in self.rows.get(old, ()), f"{self.title}: no row leads from {name_of(old)} to {name_of(new)}"
        return after


class CheckedState(Generic[S]):
    """An attribute that changes only as its table allows. Its object needs a `__dict__`."""

    def __init__(self, table: StateTable[S]) -> None:
        self.table, self._name = table, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, of: None, owner: type) -> Self: ...
    @overload
    def __get__(self, of: object, owner: type) -> S: ...
    def __get__(self, of: object | None, owner: type) -> Self | S:
        if of is None:
            return self
        state: S = of.__dict__[self._name]
        return state

    def __set__(self, of: object, state: S) -> None:
        kept = of.__dict__
        kept[self._name] = self.table.next(kept[self._name], state) if self._name in kept else self.table.first(state)
