"""What another command of agentctl says, on a screen of its own, and the list of all keys."""

import asyncio
import contextlib
import os
import pty
import termios
from collections.abc import AsyncIterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Log, Static

from cli.table import printable

LINES_MAX = 20_000
"""The most lines that are kept of what a command says."""
LINE_MAX = 4096
"""The most letters of a line that are shown."""
ENDS_S = 2.0
"""Seconds within which a command ends that is told to."""
HELP = """\
Enter   go down: a job, its ranks, their hosts, a host's GPUs,
        the slabs that it lends or borrows
Esc     go back
l       logs of the job, or of the rank, as they are written
w       why: all events of the job, slab or host
s       a shell beside the job's rank; top goes on when it ends
/       show rows with these words alone; Esc drops the filter
a       jobs that have ended, too
1 to 4  all jobs, hosts, GPUs, slabs
j k     one row down, one row up
q       end

Columns are those of agentctl jobs, job, hosts, gpus and slabs.
A narrow terminal shows fewer. What the last one says of the
chosen row stands below the table."""


class HelpScreen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "app.leave", "back")]

    def compose(self) -> ComposeResult:
        yield Static(HELP, markup=False)
        yield Static("Esc back", id="keys", markup=False)


class ToldScreen(Screen[None]):
    """The lines of one command, while it runs. It ends with the screen."""

    CSS = """
    ToldScreen Static { height: 1; padding: 0 1; text-style: bold; }
    ToldScreen Log { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "app.leave", "back")]

    def __init__(self, argv: list[str], title: str, follows: bool = False) -> None:
        """`follows`: it goes on writing lines, which are shown as they are; else they are folded to the screen."""
        super().__init__()
        self._argv, self._heading, self._follows = argv, title, follows

    def compose(self) -> ComposeResult:
        yield Static(self._heading, id="way", markup=False)
        yield Log(max_lines=LINES_MAX)
        yield Static("Esc back  arrows, PgUp, PgDn", id="keys", markup=False)

    def on_mount(self) -> None:
        self.query_one(Log).focus()
        self.run_worker(self._read())

    async def _read(self) -> None:
        """Show what the command writes, until it ends or the screen goes."""
        async with self._begun() as (process, output):
            with contextlib.suppress(OSError):  # so the kernel says that nobody has the terminal open any more
                while part := await output.read(1 << 16):
                    self._show(part.decode(errors="replace"))
            code = await process.wait()
        for way in self.query("#way").results(Static):  # none, where the screen goes just now
            way.update(f"{self._heading}: ended with {code}" if code else self._heading)

    def _show(self, text: str) -> None:
        lines = "\n".join(printable(line.expandtabs())[:LINE_MAX] for line in text.replace("\r\n", "\n").split("\n"))
        for log in self.query(Log).results(Log):
            log.write(lines, scroll_end=self._follows)

    @contextlib.asynccontextmanager
    async def _begun(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
        """The command, and what it writes: to a pipe, or a terminal as wide as this screen. It is ended at the end."""
        ours, its = os.pipe() if self._follows else pty.openpty()
        if not self._follows:
            termios.tcsetwinsize(its, (24, max(20, self.size.width - 2)))
        output = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", buffering=0)
        )
        nothing = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*self._argv, stdin=nothing, stdout=its, stderr=its)
        os.close(its)
        try:
            yield process, output
        finally:
            transport.close()
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), ENDS_S)
