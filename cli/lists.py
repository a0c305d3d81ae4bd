"""One way to show a list, for every command that has one: which columns, which rows, in which order and form.

-o table   as wide as the terminal: what matters least is left out when it is narrow
-o wide    every column, whatever the width       -o csv     the same cells, for programs
-o json    the API's answer                       -o jsonl   its rows, one a line     -o name   names alone
"""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from cli.client import USAGE, AgentctlError, Answer
from cli.context import Context
from cli.table import printable, shown, table

FORMS = ("table", "wide", "json", "jsonl", "csv", "name")
Row = Any
"""One row of a list, as the API's JSON has it."""


class Listing(NamedTuple):
    """How one list is shown."""

    titles: Sequence[str]
    cells: Callable[[Row], Sequence[object]]
    """What the columns show of a row."""
    name: str
    """The field of a row that is its name."""
    right: Collection[str] = ()
    """The columns that hold numbers."""
    least: Sequence[str] = ()
    """The columns that a narrow terminal does without, in the order in which they are left out; the others follow,
    from the right."""
    sorts: bool = True
    """Whether rows are sorted here; otherwise whoever answers does it."""
    called: Mapping[str, str] = {}
    """Column -> its name for `--columns`, where that is another word."""

    def names(self) -> dict[str, str]:
        """What `--columns` calls each column -> its title."""
        return {self.called.get(title, title.lower().replace(" ", "_")): title for title in self.titles}


def list_arguments(parser: argparse.ArgumentParser, sorts: bool = True, *more: str) -> None:
    """The options of a list. `sorts`: without `--sort`, which the command adds itself; `more`: forms of its own."""
    parser.add_argument("-o", "--output", choices=(*FORMS, *more), default="table", help="the form of the list")
    parser.add_argument("--columns", metavar="A,B", help="what is shown, in the order of the list: host,state ...")
    if sorts:
        parser.add_argument("--sort", metavar="FIELD", help="a column, or a field of the JSON; =-FIELD: the most first")
    said = (
        "rows with this value of a column or of a field of the JSON: state=alive,away, host='gpu1*'; again: all of them"
    )
    parser.add_argument("--filter", metavar="FIELD=VALUE", action="append", default=[], help=said)


def watch_argument(parser: argparse.ArgumentParser) -> None:
    said = "show the list again whenever it changes, until Ctrl-C; a line for each change where this is no terminal"
    parser.add_argument("-w", "--watch", action="store_true", help=said)


def chosen(context: Context, listing: Listing, rows: Sequence[Row]) -> list[Row]:
    """The rows that were asked for, in the order that was asked for. AgentctlError: there is no such field."""
    found = list(rows)
    for wanted in context.args.filter:
        field, equals, value = wanted.partition("=")
        if not (field and equals):
            why = "expected FIELD=VALUE, such as state=alive"
            raise AgentctlError(
                USAGE, f"invalid --filter {wanted[:40]!r}", why, f"{context.command} --filter state=alive"
            )
        reads = _reading(context, listing, field, rows, "filter")
        patterns = value.split(",")
        found = [row for row in found if any(fnmatchcase(_text(reads(row)), each) for each in patterns)]
    by = str(context.args.sort or "") if listing.sorts else ""
    if by:
        reads = _reading(context, listing, by.removeprefix("-"), rows, "sort")
        found.sort(key=lambda row: _order(reads(row)), reverse=by.startswith("-"))
    return found


def titles_of(context: Context, listing: Listing) -> tuple[str, ...]:
    """The titles of the columns that are shown. AgentctlError: there is no such column."""
    said = context.args.columns
    if said is None:
        return tuple(listing.titles)
    known = listing.names()
    wanted = [word.strip().lower() for word in said.split(",") if word.strip()]
    for word in wanted:
        if word not in known:
            raise _no_such(context, "columns", word, list(known))
    return tuple(title for name, title in known.items() if name in wanted)


def show(
    context: Context,
    listing: Listing,
    answer: Answer,
    rows: Sequence[Row] | None = None,
    json_too: bool = False,
    data_of: Callable[[Sequence[Row]], Any] | None = None,
) -> bool:
    """Show a list in the form that was asked for: the rows of the answer, or these of it, and with `json_too` JSON has
    these alone as well. `data_of`: the answer's JSON with these rows alone, where rows lie inside of others in it.
    Whether that was a table, of which more may be said in words."""
    form = "json" if context.json else context.args.output
    titles, found = titles_of(context, listing), chosen(context, listing, answer.data if rows is None else rows)
    if form == "json" and data_of is not None:
        context.say_json({**answer.whole, "data": data_of(found)})
    elif form == "json":
        context.say_json(with_rows(answer, found) if json_too or asked(context, listing) else answer.whole)
    elif form == "jsonl":
        for row in found:
            context.say(json.dumps(row))
    elif form == "name":
        for row in found:
            context.say(printable(str(row[listing.name])))
    elif form == "csv":
        import csv  # only where it is needed: agentctl's imports are a budget

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([name for name, title in listing.names().items() if title in titles])
        writer.writerows(
            [["" if cell is None else printable(str(cell)) for cell in line] for line in lines(listing, titles, found)]
        )
    else:
        context.say(as_table(context, listing, found))
        return True
    return False


def with_rows(answer: Answer, rows: Sequence[Row]) -> dict[str, Any]:
    """The answer's JSON with these rows alone."""
    data = {**answer.data, "rows": rows} if isinstance(answer.data, dict) else rows
    return {**answer.whole, "data": data}


def asked(context: Context, listing: Listing) -> bool:
    """Whether only some rows were asked for, or another order."""
    return bool(context.args.filter) or (listing.sorts and bool(context.args.sort))


def as_table(context: Context, listing: Listing, rows: Sequence[Row]) -> str:
    """These rows as a table, as wide as the terminal or, with `-o wide`, as it comes."""
    titles, paint = titles_of(context, listing), context.paint
    width = 0 if context.args.output == "wide" else paint.width
    return table(titles, lines(listing, titles, rows), listing.right, paint, listing.least, width)


def lines(listing: Listing, titles: Sequence[str], rows: Sequence[Row]) -> list[list[object]]:
    """The cells of these columns, row by row."""
    kept = [place for place, title in enumerate(listing.titles) if title in titles]
    return [[cells[place] for place in kept] for row in rows for cells in [listing.cells(row)]]


def _reading(context: Context, listing: Listing, field: str, rows: Sequence[Row], option: str) -> Callable[[Row], Any]:
    """What a field of the JSON, or a column, says of a row. AgentctlError: there is neither."""
    if rows and field in rows[0]:
        return lambda row: row.get(field)
    known = listing.names()
    if field in known:
        place = list(listing.titles).index(known[field])
        return lambda row: listing.cells(row)[place]
    if rows:
        raise _no_such(context, option, field, list(dict.fromkeys((*known, *rows[0]))))
    return lambda _row: None


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _order(value: Any) -> tuple[int, float, str]:
    """The place of a value: nothing first, numbers by size, all else by its letters."""
    if value is None or value == "":
        return 0, 0.0, ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return 2, 0.0, shown(value)


def _no_such(context: Context, option: str, word: str, known: Sequence[str]) -> AgentctlError:
    near = get_close_matches(word, known, 1, 0.5)
    step = (
        f"did you mean {near[0]}?" if near else f"{context.command} --{option} {known[0]}" + "=" * (option == "filter")
    )
    return AgentctlError(USAGE, f"invalid --{option} {word[:40]!r}", f"expected {', '.join(known)}", step)
