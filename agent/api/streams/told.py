"""What one table of a stream was and is, and what has to be told to somebody who knows it as of an earlier number.

Every change of any table has a number, which only grows. Of a reader the number alone is remembered up to which it was
told everything, so one that does not read costs nothing more; what it has missed is merged:

    number known -----> the change before the newest ----> now
      whole rows that changed since         only the fields that changed

Rows that are gone are remembered for a while (`GONE_MAX`); whoever knows less than that gets the whole table again.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from agent.api.gathering import Unanswered
from agent.api.streams.tables import Difference, ListTable, Row, difference, fields_changed

GONE_MAX = 4096
"""The most keys of rows that are gone which a table remembers."""
Shown = Callable[[Row], Row]
"""What of a row its reader may see."""


class Kept(NamedTuple):
    """A row, the number of its newest change, and the wall clock then, s."""

    row: Row
    number: int
    wall_s: float


class ToldTable:
    """The machine of one table: `publish` takes what the list says now, `since` answers what a reader lacks."""

    def __init__(self, name: str, table: ListTable, number: int) -> None:
        """`number`: that of the newest change of any table."""
        self.name, self.table = name, table
        self.is_known = False
        """Whether the list has been read since somebody watches it."""
        self.number = self._before = number
        """The numbers of the table's newest change, and of the one before it."""
        self._forgotten = number
        """Whoever knows less than this number gets the whole table."""
        self._rows: dict[str, Kept] = {}
        self._gone: dict[str, int] = {}
        self._newest = Difference({}, ())
        self._unanswered: tuple[Unanswered, ...] = ()
        self._unanswered_at = number
        self.wall_s = 0.0
        """The wall clock at the newest change, s."""

    @property
    def rows(self) -> Mapping[str, Row]:
        return {key: kept.row for key, kept in self._rows.items()}

    def row(self, key: str) -> Row | None:
        kept = self._rows.get(key)
        return None if kept is None else kept.row

    def publish(
        self, rows: Mapping[str, Row] | None, unanswered: Sequence[Unanswered], number: int, wall_s: float
    ) -> bool:
        """Take what the list says; `rows`: None where it cannot be read now, then the rows stay as they were. Whether
        that is a change: then it has this number."""
        found = Difference({}, ()) if rows is None else difference(self.table, self.rows, rows)
        silent = [(each.host, each.why) for each in unanswered] != [(each.host, each.why) for each in self._unanswered]
        self.is_known = True
        if not (found.set or found.gone or silent):
            return False
        if silent:
            self._unanswered, self._unanswered_at = tuple(unanswered), number
        for key, (_, row) in found.set.items():
            self._rows[key] = Kept(row, number, wall_s)
            self._gone.pop(key, None)
        for key in found.gone:
            del self._rows[key]
            self._gone[key] = number
        for key in list(islice(self._gone, max(0, len(self._gone) - GONE_MAX))):
            self._forgotten = max(self._forgotten, self._gone.pop(key))
        self._before, self.number, self._newest, self.wall_s = self.number, number, found, wall_s
        return True

    def since(self, known: int | None, shown: Shown, wall_s: float) -> tuple[str, dict[str, Any]] | None:
        """The event and data of the message for whoever knows everything up to a number; `known`: None where that is
        nothing. None: there is nothing to tell."""
        if known is None or known < self._forgotten:
            return "snapshot", self._snapshot(shown, wall_s)
        if known >= self.number:
            return None
        if known >= self._before:
            changed = {key: _fields(shown, before, row) for key, (before, row) in self._newest.set.items()}
            gone, as_of = list(self._newest.gone), self.wall_s
            changed = {key: fields for key, fields in changed.items() if fields}
        else:
            changed = {
                key: _counted_on(self.table, msgspec.to_builtins(shown(kept.row)), wall_s - kept.wall_s)
                for key, kept in self._rows.items()
                if kept.number > known
            }
            gone, as_of = [key for key, at in self._gone.items() if at > known], wall_s
        if not changed and not gone and self._unanswered_at <= known:
            return None
        return "change", {
            "table": self.name,
            "as_of_wall_s": as_of,
            "set": changed,
            "gone": gone,
            "unanswered": self._unanswered,
        }

    def _snapshot(self, shown: Shown, wall_s: float) -> dict[str, Any]:
        rows = {
            key: _counted_on(self.table, msgspec.to_builtins(shown(kept.row)), wall_s - kept.wall_s)
            for key, kept in self._rows.items()
        }
        return {"table": self.name, "as_of_wall_s": wall_s, "rows": rows, "unanswered": self._unanswered}


def _fields(shown: Shown, before: Row | None, row: Row) -> dict[str, Any]:
    return fields_changed(None if before is None else shown(before), shown(row))


def _counted_on(table: ListTable, row: dict[str, Any], by_s: float) -> dict[str, Any]:
    """A row whose seconds since something are as they are so much later. A host's age is not among them: it has been
    heard of meanwhile, or its row had changed."""
    by_s = max(0.0, by_s)
    for field in ("since_s", "up_s"):
        if field in table.counting and row[field] is not None:
            row[field] += by_s
    if "times.for_s" in table.counting and not row["over"]:
        row["times"]["for_s"] += by_s
    return row
