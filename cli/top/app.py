"""`agentctl top` on the screen: one view at a time, the way there, a line about the chosen row, and the keys."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Input, Static

from cli.client import Agent, AgentctlError
from cli.table import TONE_COLOURS, printable
from cli.top.columns import Column, cut, fitting, keys_that_fit
from cli.top.feed import Feed, Tables
from cli.top.told import HelpScreen, ToldScreen
from cli.top.views import VIEWS, Line, Place, below, heading, lines, matches, rows
from covey.core.tones import TONES

LOOK_S, COUNT_S = 0.2, 1.0
"""Seconds between two looks at whether something was told; between two counts of times where nothing was."""
ROWS_MAX = 500
"""The most rows that are shown: a filter finds the others."""
RANKS_S = 2.0
"""Seconds between two questions for the ranks of the job that is shown: they are in no list."""
STYLES = {"32": "green", "31": "red", "33": "yellow", "2": "dim"}
"""Colour of a tone, as `cli.table` has it -> its name here."""
KEYS = (
    ("q", "quit"),
    ("?", "keys"),
    ("Enter", "down"),
    ("Esc", "back"),
    ("l", "logs"),
    ("w", "why"),
    ("s", "shell"),
    ("/", "filter"),
    ("a", "ended too"),
    ("1-4", "jobs, hosts, GPUs, slabs"),
)
"""The keys in the last line, those that count most first."""
ROOTS = ("jobs", "hosts", "gpus", "slabs")
"""The views that the keys 1 to 4 lead to."""


class TopApp(App[None]):
    TITLE = "agentctl top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #way, #about, #keys { height: auto; padding: 0 1; }
    #about { max-height: 3; color: $text-muted; }
    #way { text-style: bold; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    DataTable { height: 1fr; scrollbar-size-horizontal: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("escape", "leave", "back", priority=True),
        Binding("l", "logs", "logs"),
        Binding("w", "why", "why"),
        Binding("s", "shell", "shell"),
        Binding("slash", "filter", "filter"),
        Binding("question_mark", "keys", "keys"),
        Binding("a", "ended", "ended too"),
        Binding("j", "cursor(1)", "next"),
        Binding("k", "cursor(-1)", "previous"),
        *(Binding(str(number), f"root('{view}')", view) for number, view in enumerate(ROOTS, 1)),
    ]

    def __init__(self, agent: Agent, wall: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._agent, self._wall, self.tables = agent, wall, Tables()
        self._feed = Feed(agent, self.tables)
        self._way: list[tuple[Place, str]] = [(Place(), "")]
        """The views from the first to the one that is shown, each with the key of the row that was chosen there."""
        self._ranks: Sequence[dict[str, Any]] = ()
        self._ranks_why, self._ranks_s = "", -RANKS_S
        """Why the ranks are not known, and when they were asked for last."""
        self._wanted = ""
        """The filter."""
        self._lines: dict[str, Line] = {}
        self._columns: list[Column] = []
        self._drawn: tuple[int, float] = (-1, 0.0)
        """The version of the tables that is shown, and when it was drawn."""

    @property
    def place(self) -> Place:
        return self._way[-1][0]

    @property
    def _main(self) -> Screen[Any]:
        """The screen with the table, under whatever else is shown."""
        return self.screen_stack[0]

    def compose(self) -> ComposeResult:
        yield Static(id="way", markup=False)
        yield DataTable(id="rows", cursor_type="row", cell_padding=1)
        yield Static(id="about", markup=False)
        yield Input(id="filter", placeholder="words that a row must have; Enter keeps them, Esc drops them")
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        self._feed.start()
        self.set_interval(LOOK_S, self._look)
        self._main.query_one(DataTable).focus()
        self._draw()

    def on_unmount(self) -> None:
        self._feed.stop()

    def on_resize(self, event: events.Resize) -> None:
        self._columns = []
        self.call_after_refresh(self._draw)

    # ---- rows ----

    def _look(self) -> None:
        now_s = time.monotonic()
        if self.place.view == "ranks" and now_s - self._ranks_s >= RANKS_S:
            self._ranks_s = now_s
            self.run_worker(self._ask_ranks, thread=True, exclusive=True)
        version, drawn_s = self._drawn
        if version != self.tables.version or now_s - drawn_s > COUNT_S:
            self._draw()

    def _ask_ranks(self) -> None:
        job = self.place.job
        try:
            found, why = self._agent.get("jobs", job).data["ranks"], ""
        except (AgentctlError, KeyError, TypeError) as error:
            found, why = (), getattr(error, "what", str(error))
        self.call_from_thread(self._have_ranks, job, found, why)

    def _have_ranks(self, job: str, ranks: Sequence[dict[str, Any]], why: str) -> None:
        if self.place.job == job:
            self._ranks, self._ranks_why = ranks, why
            self._draw()

    def _draw(self) -> None:
        now_s = time.monotonic()
        self._drawn = (self.tables.version, now_s)
        tables = self.tables.now({"jobs", self.place.view}, self._wall())
        found = rows(self.place, tables, self._ranks)
        if self._wanted:
            wanted = [line for line in lines(self.place, tables, found) if matches(line, self._wanted)]
            kept, many = wanted[:ROWS_MAX], len(wanted)
        else:
            kept, many = lines(self.place, tables, found[:ROWS_MAX]), len(found)
        self._lines = {line.key: line for line in kept}
        self._fill(kept)
        self._main.query_one("#way", Static).update(self._said_above(heading(self.place, len(kept), many, len(found))))
        self._main.query_one("#keys", Static).update(keys_that_fit(KEYS, self.size.width - 2))
        self._say_about()

    def _said_above(self, what: str) -> str:
        way = " > ".join(filter(None, (_name(place) for place, _ in self._way)))
        known = self.tables.is_known(self.place.view) or self.place.view == "ranks"
        silent = ", ".join(str(each.get("host")) for each in self.tables.unanswered(self.place.view))
        parts = [f"{way}: {what}" if known else way]
        parts += [f"no answer: {printable(silent)}"] if silent else []
        parts += [f"as it was: {printable(self.tables.trouble)}"] if self.tables.trouble else []
        parts += [f"ranks not known: {printable(self._ranks_why)}"] * (
            self.place.view == "ranks" and bool(self._ranks_why)
        )
        return "; ".join(parts)

    def _fill(self, kept: Sequence[Line]) -> None:
        """Show these rows: change the cells that are different, or, where rows or columns are others, all anew."""
        table, view = self._main.query_one(DataTable), VIEWS[self.place.view]
        width = self.size.width - 2
        columns = fitting(view.titles, [line.cells for line in kept], view.drops, width)
        if columns != self._columns or [str(key.value) for key in table.rows] != [line.key for line in kept]:
            chosen, top = self._chosen(), table.scroll_y
            self._columns = columns
            table.clear(columns=True)
            for place, wide in columns:
                title = view.titles[place]
                table.add_column(
                    Text(title, justify="right" if title in view.right else "left"), width=wide, key=str(place)
                )
            for line in kept:
                table.add_row(*(self._cell(line, column) for column in columns), key=line.key)
            self._choose(chosen or self._way[-1][1], top)
            return
        for line in kept:
            for column in columns:
                cell = self._cell(line, column)
                if table.get_cell(line.key, str(column.place)) != cell:
                    table.update_cell(line.key, str(column.place), cell)

    def _cell(self, line: Line, column: Column) -> Text:
        view = VIEWS[self.place.view]
        text, title = line.cells[column.place], view.titles[column.place]
        tone = TONES.get(text.strip())
        style = STYLES.get(TONE_COLOURS[tone], "") if tone is not None else ""
        right = "right" if title in view.right else "left"
        return Text(cut(text, column.width), style=style, justify=right, no_wrap=True)  # type: ignore[arg-type]

    def _chosen(self) -> str:
        """The key of the row under the cursor; empty: there is none."""
        table = self._main.query_one(DataTable)
        if not table.row_count or not table.is_valid_row_index(table.cursor_row):
            return ""
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def _choose(self, key: str, top: float) -> None:
        table = self._main.query_one(DataTable)
        if key in self._lines:
            table.move_cursor(row=list(self._lines).index(key), animate=False)
            table.scroll_to(y=top, animate=False)

    def _line(self) -> Line | None:
        return self._lines.get(self._chosen())

    @on(DataTable.RowHighlighted)
    def _say_about(self) -> None:
        """Below the table: what the chosen row's last column says, in full, where the table has no room for it."""
        line, said = self._line(), ""
        if line is not None and self._columns:
            last, text = len(line.cells) - 1, line.cells[-1]
            widths = {column.place: column.width for column in self._columns}
            said = "" if text == "-" or len(text) <= widths.get(last, 0) else f"{line.cells[0]}: {text}"
        self._main.query_one("#about", Static).update(said)

    # ---- keys ----

    @on(DataTable.RowSelected)
    def _down(self) -> None:
        line = self._line()
        to = None if line is None else below(self.place, line)
        if line is None or to is None:
            return
        self._way[-1] = (self.place, line.key)
        self._go([*self._way, (to, to.host)])

    async def action_leave(self) -> None:
        if isinstance(self.screen, (ToldScreen, HelpScreen)):
            await self.pop_screen()
        elif self._main.query_one("#filter").display or self._wanted:
            self._wanted = self._main.query_one(Input).value = ""
            self._end_filter()
        elif len(self._way) > 1:
            self._go(self._way[:-1])

    def action_root(self, view: str) -> None:
        self._go([(Place(view), "")])

    def action_ended(self) -> None:
        if self.place.view == "jobs":
            self._way[-1] = (self.place._replace(ended=not self.place.ended), self._chosen())
            self._draw()

    def _go(self, way: list[tuple[Place, str]]) -> None:
        self._way, self._wanted, self._columns = way, "", []
        self._ranks, self._ranks_why, self._ranks_s = (), "", -RANKS_S
        table = self._main.query_one(DataTable)
        table.clear(columns=True)
        self._draw()
        self._look()

    def action_cursor(self, by: int) -> None:
        table = self._main.query_one(DataTable)
        table.move_cursor(row=table.cursor_row + by)

    def action_filter(self) -> None:
        field = self._main.query_one(Input)
        field.display = True
        field.focus()

    @on(Input.Changed)
    def _filtered(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._draw()

    @on(Input.Submitted)
    def _end_filter(self) -> None:
        field = self._main.query_one(Input)
        field.display = bool(self._wanted)
        self._main.query_one(DataTable).focus()
        self._draw()

    async def action_keys(self) -> None:
        await self.push_screen(HelpScreen())

    def _agentctl(self, *words: str) -> list[str]:
        """A command line that runs this agentctl at the same agent."""
        call = "import sys; from cli.main import main; sys.exit(main())"
        addresses = ",".join(self._agent.addresses)
        return [sys.executable, "-c", call, "--agent", addresses, "--color", "never", *words]

    async def action_logs(self) -> None:
        line = self._line()
        if line is None or not line.job:
            self.notify("no job is in this row", severity="warning")
            return
        rank = () if line.rank is None else ("--rank", str(line.rank))
        words = ("logs", line.job, "-f", "--tail", "200", *rank)
        await self.push_screen(ToldScreen(self._agentctl(*words), f"agentctl {' '.join(words)}", follows=True))

    async def action_why(self) -> None:
        if (line := self._line()) is not None:
            await self.push_screen(ToldScreen(self._agentctl("why", line.why), f"agentctl why {line.why}"))

    def action_shell(self) -> None:
        line = self._line()
        if line is None or not line.job:
            self.notify("no job is in this row", severity="warning")
            return
        beside = line.job if line.rank is None else f"{line.job}.{line.rank}"
        with self.suspend():
            code = subprocess.run(self._agentctl("shell", beside), check=False).returncode
            if code:
                print(f"agentctl shell {beside} ended with {code}; Enter goes back to top", flush=True)
                sys.stdin.readline()
        self.refresh()


def _name(place: Place) -> str:
    """One step of the way: `j1`, `gpu2`, or the view."""
    return {"ranks": place.job, "gpus": place.host or "GPUs"}.get(place.view, place.view)
