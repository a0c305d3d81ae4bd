"""What a simulation found: tables for people, one object for programs, figures as SVG, all from one `Report`.

Every `covey-sim` command and every `make tables` experiment is a function that returns a `Report`; `sim.output`
writes it as text, JSON, Markdown, CSV or SVG.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = str | int | float | None
Progress = Callable[[float, str], None]
"""A function that gets the share done, 0..1, and what is being done; called often, shows it now and then."""


@dataclass(frozen=True)
class Table:
    """Rows for people. Numbers are numbers here; the writer chooses how many digits."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    """Notes that a reader must know to judge the table: sizes, seeds, what is assumed, what the paper says."""


@dataclass(frozen=True)
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Figure:
    """Lines over one pair of axes."""

    name: str
    """File name without ending: `a-z0-9-`."""
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    steps: bool = False
    """Whether to draw a staircase (a distribution) instead of straight lines."""


@dataclass(frozen=True)
class Report:
    name: str
    """Name of the report, of `a-z0-9-`, and of its files."""
    data: dict[str, Any]
    """The JSON for programs: stable names, units last, schema version 1."""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    warnings: Sequence[str] = field(default_factory=tuple)
    """Warnings about what was left out and counted."""


class Wrong(Exception):
    """Input that cannot be used: one line what (with file, line and column), one line why, one line what to do next."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what, self.why, self.next = what, why, next


def quantile(ascending: Sequence[int], share: float) -> int:
    """Nearest rank: the smallest value that at least this share does not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


def duration(seconds: float) -> str:
    """Seconds in words: `45 s`, `12.3 min`, `4.5 h`, `3.2 days`."""
    for size, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size * (1 if word != "days" else 2):
            return f"{seconds / size:.1f} {word}"
    return f"{seconds:.0f} s"
