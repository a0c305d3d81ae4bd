"""Curves in a terminal, of plain characters: values over steps, as wide as there is room."""

import math
from collections.abc import Sequence

WIDTH_MIN, WIDTH_MAX, HEIGHT = 40, 200, 10
"""Columns of a chart with its labels, and rows of its values."""


def chart(title: str, points: Sequence[tuple[int, float]], width: int) -> str:
    """A chart of values over steps, which ascend: a mark in each column for the mean of its values, joined where values
    of neighbouring columns are apart. `width` is held between `WIDTH_MIN` and `WIDTH_MAX`."""
    width = max(WIDTH_MIN, min(WIDTH_MAX, width))
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = [number(high), number((low + high) / 2), number(low)]
    indent = max(map(len, labels))
    columns = width - indent - 3
    rows = [[" "] * columns for _ in range(HEIGHT)]
    before: tuple[int, int] | None = None
    for column, value in means(points, columns):
        row = HEIGHT - 1 - round((HEIGHT - 1) * share(value, low, high))
        if before is not None and before[0] == column - 1:
            step = 1 if row > before[1] else -1
            for between in range(before[1] + step, row, step):
                rows[between][column] = "|"
        rows[row][column] = "*"
        before = column, row
    beside = {0: labels[0], HEIGHT // 2: labels[1], HEIGHT - 1: labels[2]}
    lines = [f"{beside.get(place, ''):>{indent}} |{''.join(row)}".rstrip() for place, row in enumerate(rows)]
    first, last = f"step {points[0][0]}", str(points[-1][0])
    axis = f"{'':{indent}} +{'-' * columns}"
    if len(first) + 1 + len(last) > columns:
        first, last = "", f"to step {last}"
    return "\n".join([title, *lines, axis, f"{'':{indent}}  {first}{last:>{columns - len(first)}}"])


def means(points: Sequence[tuple[int, float]], columns: int) -> list[tuple[int, float]]:
    """The mean of the values in each column that has some: steps lie evenly from the first column to the last."""
    first, last = points[0][0], points[-1][0]
    found: dict[int, list[float]] = {}
    for step, value in points:
        found.setdefault(round((columns - 1) * share(step, first, last)), []).append(value)
    return [(column, math.fsum(value / len(each) for value in each)) for column, each in sorted(found.items())]


def share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others, from 0 to 1; 0 when these are equal. Halves, since values may be so large
    that their difference is infinite."""
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.0


def number(value: float) -> str:
    return f"{value:.4g}"
