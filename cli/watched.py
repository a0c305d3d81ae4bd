"""`-w` of lists: shows a list again whenever it changes, by the agent's event stream (`GET /v1/events`).

On a terminal the list is drawn anew; elsewhere each change is a line: the time, and the row as the list has it. Ctrl-C
ends it. A stream that breaks is opened again, at another agent where its own is gone, and goes on from what was seen.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cli.client import NO_AGENT, TRY_AGAIN, Agent, AgentctlError
from cli.context import Context
from cli.lists import Listing, Row, as_table, chosen, lines, titles_of
from cli.table import clock, folded, printable, shown

AGAIN_S, PATIENCE_S = 0.5, 30.0
"""Seconds between two tries to open a stream again, and after how many seconds without an agent this ends."""
DRAW_S = 0.2
"""Seconds between two drawings of a list, at least."""
TIMES = ("since_s", "up_s")
"""The fields of a row that count time, from the moment at which the stream says them."""
HOME, TO_LINE_END, TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"


class WatchedTable:
    """The rows of one table of a stream, as they are now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[str, Row] = {}
        self.unanswered: Sequence[Mapping[str, Any]] = ()
        self.said: set[str] = set()
        """The keys of rows of which a line was said."""
        self._as_of: dict[str, float] = {}

    def take(self, event: str, data: Mapping[str, Any]) -> list[str]:
        """The keys of the rows that an event of the stream changed."""
        before, as_of = dict(self.rows), data["as_of_wall_s"]
        self.unanswered = data["unanswered"]
        if event == "snapshot":
            self.rows = dict(data["rows"])
            self._as_of = dict.fromkeys(self.rows, as_of)
            return [key for key in {**before, **self.rows} if before.get(key) != self.rows.get(key)]
        for key, fields in data["set"].items():
            self.rows[key] = {**self.rows.get(key, {}), **fields}
            self._as_of[key] = as_of
        gone = [key for key in data["gone"] if self.rows.pop(key, None) is not None]
        return [*data["set"], *gone]

    def now(self, wall_s: float) -> list[Row]:
        """The rows, with the times that have gone by since they were told."""
        return [self._later(row, max(0.0, wall_s - self._as_of[key])) for key, row in self.rows.items()]

    def _later(self, row: Row, by_s: float) -> Row:
        later = {field: row[field] + by_s for field in TIMES if row.get(field) is not None}
        times = row.get("times")
        if times and not row.get("over"):
            later["times"] = {**times, "for_s": times["for_s"] + by_s}
        return {**row, **later}


def events(agent: Agent, table: str) -> Iterator[tuple[str, Mapping[str, Any]] | None]:
    """The events of a table's stream; None about once a second while there are none. AgentctlError where no stream can
    be opened, or no agent is there for `PATIENCE_S`."""
    seen, heard_s = "", time.monotonic()
    while True:
        try:
            for event in agent.stream("events", tables=table, since=seen or None):
                heard_s = time.monotonic()
                seen = seen if event is None else event[2] or seen
                yield None if event is None else event[:2]
        except AgentctlError as error:
            passes = seen and error.code in (NO_AGENT, TRY_AGAIN)
            if not passes or time.monotonic() - heard_s > PATIENCE_S:
                raise
        agent.address = None if len(agent.addresses) > 1 else agent.address
        time.sleep(AGAIN_S)


def watch(
    context: Context,
    name: str,
    listing: Callable[[Sequence[Row]], Listing],
    is_wanted: Callable[[Row], bool] = lambda _row: True,
) -> int:
    """Show a list of the agent until Ctrl-C. `listing`: how these rows are shown; `is_wanted`: whether a row is."""
    titles_of(context, listing([]))  # a wrong column is told before anything is shown
    table, redraws = WatchedTable(name), context.paint.width > 0 and not context.json
    drawn_s, is_stale, is_known = 0.0, False, False
    for event in events(context.agent, name):
        if event is not None and event[0] in ("snapshot", "change"):
            is_stale = is_known = True
            changed = table.take(*event)
            if not redraws:
                say_changes(context, table, changed, listing, is_wanted)
        now_s = time.monotonic()
        if redraws and is_known and now_s - drawn_s >= (DRAW_S if is_stale else 1.0):
            drawn_s, is_stale = now_s, False
            draw(context, table, listing, is_wanted)
    return 0


def draw(
    context: Context,
    table: WatchedTable,
    listing: Callable[[Sequence[Row]], Listing],
    is_wanted: Callable[[Row], bool],
) -> None:
    """Show the list in place of what the terminal shows, as far as it has room."""
    rows = [row for row in table.now(time.time()) if is_wanted(row)]
    how = listing(rows)
    text = as_table(context, how, chosen(context, how, rows)).splitlines()
    foot = [f"incomplete: {printable(each['host'])} ({printable(each['why'])})" for each in table.unanswered]
    foot = in_lines([*foot, f"{clock(time.time())[:8]}; Ctrl-C ends this"], context.paint.width)
    room = lines_of_terminal() - 1
    if len(text) + len(foot) > room:
        foot = in_lines(["more lines: --filter, or a taller terminal"], context.paint.width) + foot[-1:]
        text = text[: max(1, room - len(foot))]
    whole = "".join(f"{line}{TO_LINE_END}\n" for line in [*text, *foot])
    print(f"{HOME}{whole}{TO_SCREEN_END}", end="", flush=True)


def lines_of_terminal() -> int:
    try:
        return int(os.environ.get("LINES") or os.get_terminal_size().lines)
    except (OSError, ValueError):
        return 24


def in_lines(texts: Sequence[str], width: int) -> list[str]:
    """These texts in lines of at most this width."""
    return [line for each in texts for line in folded(each, 0, width).splitlines()]


def say_changes(
    context: Context,
    table: WatchedTable,
    changed: Sequence[str],
    listing: Callable[[Sequence[Row]], Listing],
    is_wanted: Callable[[Row], bool],
) -> None:
    """A line for each row that changed, as JSON where that was asked for; a row that was said and is not wanted any
    more, such as a job that has ended, has a last one."""
    there = [(key, table.rows[key]) for key in changed if key in table.rows]
    how = listing([row for _, row in there])
    wanted = chosen(context, how, [row for _, row in there if is_wanted(row)])
    said = {key for key, row in there if any(row is each for each in wanted)}
    last = table.said & (set(changed) - said)
    table.said = (table.said | said) - last
    for key in changed:
        if key in said or key in last:
            say_change(context, key, table.rows.get(key), how)


def say_change(context: Context, key: str, row: Row | None, how: Listing) -> None:
    """The line of a row; None: it is gone."""
    if context.json or context.args.output in ("json", "jsonl"):
        context.say(json.dumps({"key": key, "row": row}))
        return
    if row is None:
        cells = [key, "is gone"]
    else:
        cells = [text for cell in lines(how, titles_of(context, how), [row])[0] if (text := shown(cell)) != "-"]
    context.say("  ".join([clock(time.time())[:8], *cells]))
