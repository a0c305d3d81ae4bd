"""Tables, ages and colours for people. Colour only ever repeats what a word already says."""

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TextIO

from covey.core.tones import TONES, Tone
from covey.core.units import format_seconds

GREEN, RED, YELLOW, DIM, BOLD = "32", "31", "33", "2", "1"

TONE_COLOURS: Mapping[Tone, str] = {"good": GREEN, "waiting": YELLOW, "warning": YELLOW, "bad": RED, "quiet": DIM}


FOLD_MIN = 24
"""Narrowest last column that is folded."""


class Paint:
    """Colours, or none: only on a terminal, not with NO_COLOR, always with FORCE_COLOR or `--color always`."""

    def __init__(self, when: str = "auto", out: TextIO | None = None) -> None:
        out = sys.stdout if out is None else out
        if when == "auto":
            self.on = bool(os.environ.get("FORCE_COLOR")) or (out.isatty() and not os.environ.get("NO_COLOR"))
        else:
            self.on = when == "always"
        self.width = 0
        """Columns of the terminal; 0 when it is none, and lines may be as long as they are."""
        with contextlib.suppress(OSError, ValueError):
            self.width = os.get_terminal_size(out.fileno()).columns if out.isatty() else 0

    def __call__(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self.on and text else text

    def state(self, word: str) -> str:
        tone = TONES.get(word.strip())
        return word if tone is None else self(word, TONE_COLOURS[tone])


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Collection[str],
    paint: Paint,
    least: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """Aligned text. Columns named in `right` hold numbers; a column without any content is left out. A terminal of
    `width` columns (None: this one's; 0: any) that is too narrow shows no column of `least`, the first of them first,
    then the others from the right; the last column that is shown goes on in the next line, under itself."""
    width = paint.width if width is None else width
    cells = [[shown(value) for value in row] for row in rows]
    kept = [i for i in range(len(titles)) if i == 0 or not cells or any(row[i] != "-" for row in cells)]
    widths = {i: max(len(titles[i]), *(len(row[i]) for row in cells)) if cells else len(titles[i]) for i in kept}
    kept = columns_within(titles, kept, widths, least, width)

    def line(row: Sequence[str], heading: bool = False) -> str:
        parts = []
        for place, i in enumerate(kept):
            last = place == len(kept) - 1
            text = row[i].rjust(widths[i]) if titles[i] in right else row[i] if last else row[i].ljust(widths[i])
            if last and not heading:
                text = folded(text, sum(widths[each] for each in kept[:-1]) + 2 * place, width)
            painted = paint(text, BOLD) if heading else text.replace(row[i], paint.state(row[i]), 1)
            parts.append(text if titles[i] in right and not heading else painted)
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(titles), heading=True), *(line(row) for row in cells)])


def columns_within(
    titles: Sequence[str], kept: Sequence[int], widths: Mapping[int, int], least: Sequence[str], width: int
) -> list[int]:
    """The columns that a terminal has room for, of these: the first always, and as many of the others as fit, without
    those of `least` first. The last one may be folded."""
    found = list(kept)
    goes = [titles.index(title) for title in least if title in titles]
    goes += [i for i in reversed(kept) if i not in goes]
    for i in goes:
        last = found[-1]
        needs = sum(widths[each] for each in found[:-1]) + 2 * (len(found) - 1) + min(widths[last], FOLD_MIN)
        if not width or needs < width or len(found) == 1:
            break
        if i in found and i != found[0]:
            found.remove(i)
    return found


def folded(text: str, indent: int, width: int) -> str:
    """`text` in lines that end before column `width`, all but the first indented; as it is when there is no room."""
    room = width - indent - 1
    if not width or len(text) <= room or (indent and room < FOLD_MIN):
        return text
    import textwrap  # only where it is needed: agentctl's imports are a budget

    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(parts)


def shown(value: object) -> str:
    """`-` for nothing. Control characters from the other side never reach the terminal."""
    if value is None or value == "" or value == ():
        return "-"
    text = str(value)
    return text if text.isprintable() else printable(text)


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def pairs(rows: Iterable[tuple[str, object]], paint: Paint) -> str:
    """`name  value` lines; what has no value is left out."""
    kept = [(name, shown(value)) for name, value in rows if shown(value) != "-"]
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{paint(name.ljust(width), DIM)}  {paint.state(value)}" for name, value in kept)


def ago(seconds: float | None) -> str:
    """`now`, `3.2 s ago`."""
    if seconds is None:
        return "-"
    return "now" if seconds < 0.05 else f"{format_seconds(seconds)} ago"


def clock(wall_s: float) -> str:
    """Local time of day to the millisecond; with the date when it was not today."""
    moment = time.localtime(wall_s)
    text = time.strftime("%H:%M:%S", moment) + f".{int(wall_s % 1 * 1000):03d}"
    return text if moment[:3] == time.localtime()[:3] else time.strftime("%Y-%m-%d ", moment) + text


def of(part: Any, whole: Any) -> str:
    """`3/8`, or `-` when nothing is known."""
    return "-" if part is None or whole is None else f"{part}/{whole}"


def plural(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}es" if noun.endswith("s") else f"{count} {noun}s"


def epoch_text(epoch: int) -> str:
    """`2.5`: an epoch of two halves of 32 bits, the one that counts more first; a small one as it is."""
    return f"{epoch >> 32}.{epoch & 0xFFFFFFFF}" if epoch >> 32 else str(epoch)
