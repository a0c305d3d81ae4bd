"""Which columns of a table a terminal has room for, and how cells look in them. All pure."""

from collections.abc import Sequence
from typing import NamedTuple

GAP = 2
"""Columns of the terminal between two columns of the table."""
CELL_MAX = 28
"""The most letters of a cell that is not in the last column."""
LAST_MIN = 24
"""Fewest letters of the last column, which takes what is left: with less room it is not shown."""
ELLIPSIS = "…"


class Column(NamedTuple):
    place: int
    """Its number among all columns."""
    width: int


SHRINKS, SHRUNK_MIN = ("NAME", "WHERE"), 10
"""Columns that are shortened to what room there is, before they are left out, and to how many letters at least."""


def fitting(titles: Sequence[str], rows: Sequence[Sequence[str]], drops: Sequence[str], width: int) -> list[Column]:
    """The columns that fit into `width`, each as wide as its cells need. `drops`: in this order they are left out.
    A column without any content is left out anyway, except the first. The last column takes what is left."""
    last = len(titles) - 1
    needs = {
        place: min(CELL_MAX, max(len(title), *(len(row[place]) for row in rows))) if rows else len(title)
        for place, title in enumerate(titles[:last])
        if place == 0 or not rows or any(row[place] not in ("", "-") for row in rows)
    }
    for title in drops:
        if sum(needs.values()) + GAP * len(needs) <= width:
            break
        has = needs.pop(titles.index(title), 0)
        room = width - sum(needs.values()) - GAP * (len(needs) + 1)
        if title in SHRINKS and SHRUNK_MIN <= room < has:
            needs[titles.index(title)] = room
            break
    kept = [Column(place, need) for place, need in sorted(needs.items())]
    left = width - sum(each.width for each in kept) - GAP * (len(kept) + 1)
    longest = max((len(row[last]) for row in rows if row[last] != "-"), default=0)
    if longest and (left >= LAST_MIN or left >= longest):
        kept.append(Column(last, left))
    return kept


def cut(text: str, width: int) -> str:
    """`text` in at most `width` letters: whole words, or, of one that alone is longer, its beginning."""
    if len(text) <= width:
        return text
    if width < 2:
        return text[:width]
    head = text[: width - 1]
    space = head.rfind(" ")
    if text[width - 1] != " " and space > 0:
        head = head[:space]
    return head.rstrip(" ,;") + ELLIPSIS


def keys_that_fit(keys: Sequence[tuple[str, str]], width: int) -> str:
    """`Enter down  Esc back  ...`: the keys that fit into a line; the first counts most."""
    line = ""
    for key, what in keys:
        more = f"{line}  {key} {what}" if line else f"{key} {what}"
        if len(more) <= width:
            line = more
    return line
