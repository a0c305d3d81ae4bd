"""What ranks wrote, in lines: which are whole, which one is begun, and how both are shown.

A line ends with a newline. Of one that was overwritten (`\\r`, as progress bars do) only the last state is shown. A
begun line is shown once it has not changed for a second:

    on a terminal           below the others, redrawn in place until it ends (`Redrawn`)
    anywhere else           as a line, and whole once more if it was continued; where there is one rank, without
                            newline, so that what follows completes it (`Appended`)
    as JSON                 once it ends
"""

import json
import re
import shutil
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

STILL_S = 1.0
"""Seconds without change after which a begun line is shown."""
BEGUN_MAX = 1 << 16
"""The most bytes of a begun line that are kept; one that is longer is shown in pieces, after an overwritten state if it
has one (`--raw`)."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.|[\x00-\x1f\x7f-\x9f]")


def last_state(line: bytes) -> bytes:
    """What a terminal shows last of a line that was overwritten: `b"2 %"` of `b"1 %\\r2 %\\r"`."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


@dataclass
class RankLines:
    """One rank's output: how far it was read, whole lines that are not shown yet, and the begun one. `raw`: lines stay
    as they were."""

    rank: int
    raw: bool = False
    offset: int = 0
    begun: bytes = b""
    overwritten: bool = False
    """Whether the begun line was."""
    lines: list[bytes] = field(default_factory=list)
    changed_s: float = 0.0
    """When the begun line changed last."""
    new: bytes = b""
    """What came since it was written last, for who wants no lines."""

    def take(self, data: bytes, now_s: float) -> None:
        self.offset += len(data)
        self._add(data, now_s)

    def skip_to(self, offset: int, now_s: float) -> None:
        """What lay in between was dropped by its host (`[jobs] output_rank_max`)."""
        end = b"\n" if self.begun else b""
        self._add(end + b"[covey: %d bytes of output are no longer kept]\n" % (offset - self.offset), now_s)
        self.offset = offset

    def flush(self) -> None:
        """The begun line is all there will be."""
        if self.begun:
            self.lines.append(self.state)
            self.begun = b""

    @property
    def state(self) -> bytes:
        return self.begun if self.raw else last_state(self.begun)

    def is_still(self, now_s: float) -> bool:
        """Whether there is a begun line that has not changed for `STILL_S`."""
        return bool(self.state) and now_s - self.changed_s >= STILL_S

    def _add(self, data: bytes, now_s: float) -> None:
        self.new += data
        if not data:
            return
        *whole, begun = (self.begun + data).split(b"\n")
        self.lines += whole if self.raw else map(last_state, whole)
        self.overwritten = b"\r" in begun or (self.overwritten and not whole)
        if not self.raw and b"\r" in begun:
            begun = last_state(begun) + (b"\r" if begun.endswith(b"\r") else b"")
        while len(begun) > BEGUN_MAX:
            at = begun.rfind(b"\r", 0, BEGUN_MAX) + 1 or BEGUN_MAX
            self.lines.append(begun[:at])
            begun = begun[at:]
        self.begun, self.changed_s = begun, now_s


class Shows(Protocol):
    """Where lines go. `show` is called whenever there may be something new, `end` when nothing follows."""

    def show(self, ranks: Sequence[RankLines], now_s: float) -> None: ...
    def end(self) -> None: ...


def taken(rank: RankLines) -> list[bytes]:
    lines, rank.lines, rank.new = rank.lines, [], b""
    return lines


class Unchanged:
    """The bytes of one rank as they were."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def show(self, ranks: Sequence[RankLines], now_s: float) -> None:
        for rank in ranks:
            self._out.write(rank.new)
            taken(rank)
        self._out.flush()

    def end(self) -> None:
        """Nothing is left."""


class Objects:
    """A JSON object for each whole line; what is not UTF-8 in it is replaced."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def show(self, ranks: Sequence[RankLines], now_s: float) -> None:
        for rank in ranks:
            for line in taken(rank):
                text = json.dumps({"rank": rank.rank, "line": line.decode(errors="replace")})
                self._out.write(text.encode() + b"\n")
        self._out.flush()

    def end(self) -> None:
        """Nothing is left."""


class Appended:
    """Lines that are written once and stay: a pipe, a file. `prefixes`: what each rank's lines begin with; empty where
    there is one rank, whose begun line is then written without a newline."""

    def __init__(self, out: BinaryIO, prefixes: Mapping[int, bytes]) -> None:
        self._out, self._prefixes = out, prefixes
        self._shown: dict[int, bytes] = {}
        """What was written of each rank's begun line."""
        self._open = b""
        """The line that was written without a newline."""

    def show(self, ranks: Sequence[RankLines], now_s: float) -> None:
        for rank in ranks:
            for line in taken(rank):
                if self._shown.pop(rank.rank, None) != line:
                    self._whole(rank.rank, line)
            state = rank.state
            if rank.is_still(now_s) and self._shown.get(rank.rank) != state and self._open != state:
                if self._prefixes[rank.rank] or rank.overwritten:
                    self._whole(rank.rank, state)
                    self._shown[rank.rank] = state
                else:
                    self._write_open(state)
        self._out.flush()

    def end(self) -> None:
        """What is begun stays so: `flush` made lines of the rest."""

    def _whole(self, rank: int, line: bytes) -> None:
        if self._open:
            self._write_open(line)
            self._out.write(b"\n")
            self._open = b""
        else:
            self._out.write(self._prefixes[rank] + line + b"\n")

    def _write_open(self, line: bytes) -> None:
        continued = line.startswith(self._open)
        self._out.write(line[len(self._open) :] if continued else b"\n" + line)
        self._open = line


class Redrawn:
    """A terminal: whole lines scroll, and below them the begun line of each rank is redrawn in place."""

    def __init__(self, out: BinaryIO, prefixes: Mapping[int, bytes]) -> None:
        self._out, self._prefixes = out, prefixes
        self._rows: list[bytes] = []
        """What stands below the lines, one for each rank that has begun one."""
        self._below: set[int] = set()
        """The ranks among them."""

    def show(self, ranks: Sequence[RankLines], now_s: float) -> None:
        lines = [self._prefixes[rank.rank] + line for rank in ranks for line in taken(rank)]
        size = shutil.get_terminal_size()
        begun = [rank for rank in ranks if self._is_below(rank, now_s)][-max(1, size.lines - 1) :]
        self._below = {rank.rank for rank in begun}
        rows = [self._row(rank, size.columns) for rank in begun]
        if not lines and rows == self._rows:
            return
        self._out.write(self._erased() + b"".join(line + b"\n" for line in lines) + b"\r\n".join(rows))
        self._out.flush()
        self._rows = rows

    def end(self) -> None:
        """Leave the cursor on a line of its own."""
        if self._rows:
            self._out.write(b"\r\n")
            self._out.flush()
            self._rows = []

    def _is_below(self, rank: RankLines, now_s: float) -> bool:
        if not rank.state:
            return False
        return rank.rank in self._below or rank.overwritten or rank.is_still(now_s)

    def _row(self, rank: RankLines, columns: int) -> bytes:
        before = self._prefixes[rank.rank]
        room = columns - 1 - len(_CONTROL.sub("", before.decode()))
        return before + cut(rank.state.decode(errors="replace"), room).encode()

    def _erased(self) -> bytes:
        up = len(self._rows) - 1
        return (b"\r" + (b"\x1b[%dA" % up if up > 0 else b"") + b"\x1b[J") if self._rows else b""


def cut(text: str, columns: int) -> str:
    """The beginning of a text without control characters that takes at most so many columns."""
    found, room = "", columns
    for each in _CONTROL.sub("", text):
        room -= 0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        if room < 0:
            break
        found += each
    return found


def shown_on(out: BinaryIO, prefixes: Mapping[int, bytes], raw: bool, as_json: bool, follows: bool) -> Shows:
    """How lines are shown there."""
    if as_json:
        return Objects(out)
    if raw and not any(prefixes.values()):
        return Unchanged(out)
    return Redrawn(out, prefixes) if follows and not raw and out.isatty() else Appended(out, prefixes)


def ended(ranks: Iterable[RankLines], shows: Shows, now_s: float) -> None:
    """Show the rest: no rank writes any more."""
    each = list(ranks)
    for rank in each:
        rank.flush()
    shows.show(each, now_s)
    shows.end()
