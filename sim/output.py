"""A `Report` as text for people, JSON for programs, Markdown and CSV for a repository; its figures as SVG (`plot`)."""

import csv
import io
import json
import math
from typing import Any

from cli.table import BOLD, DIM, Paint, table
from sim.plot import svg
from sim.report import Cell, Report, Table

__all__ = ["as_csv", "as_json", "as_markdown", "shown", "svg", "text"]


def shown(value: Cell) -> str:
    """A cell as text for people: whole numbers whole, others with about four digits that mean something; `-` for
    nothing."""
    if value is None or value == "":
        return "-"
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if not math.isfinite(value):
        return "-" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    if size >= 1000:
        return f"{value:.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    if size >= 0.001 or value == 0:
        return f"{value:.3f}"
    return f"{value:.2e}"


def numbers(of: Table) -> list[str]:
    """Titles of the columns that hold numbers only."""
    return [
        title
        for at, title in enumerate(of.columns)
        if any(isinstance(row[at], (int, float)) for row in of.rows)
        and all(row[at] is None or isinstance(row[at], (int, float)) for row in of.rows)
    ]


def text(report: Report, paint: Paint) -> str:
    """The report as text: every table with its notes; the plain data when a report has no table."""
    if not report.tables:
        return "\n".join(f"{name}  {value}" for name, value in report.data.items())
    parts = []
    for each in report.tables:
        rows = [[shown(cell) for cell in row] for row in each.rows]
        lines = [paint(each.title, BOLD), table(list(each.columns), rows, numbers(each), paint)]
        parts.append("\n".join([*lines, *(paint(note, DIM) for note in each.notes)]))
    return "\n\n".join(parts)


def as_json(report: Report) -> str:
    """The report as one JSON object: `schema` 1 and its data. Infinities and not-a-numbers, which JSON has not, become
    null."""
    return json.dumps({"schema": 1, "report": report.name, **_plain(report.data)}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        return _plain(value.item())
    return value


def as_markdown(report: Report, heading: str = "") -> str:
    """The report as Markdown: tables that GitHub shows, numbers to the right, notes and warnings as a list under
    each."""
    lines = [f"# {heading}", ""] if heading else []
    for each in report.tables:
        right = numbers(each)
        lines += [f"## {each.title}", "", "| " + " | ".join(map(_escaped, each.columns)) + " |"]
        lines.append("|" + "|".join("---:" if title in right else "---" for title in each.columns) + "|")
        lines += ["| " + " | ".join(_escaped(shown(cell)) for cell in row) + " |" for row in each.rows]
        lines += ["", *(f"- {note}" for note in each.notes), *([""] if each.notes else [])]
    lines += [f"- Left out: {warning}" for warning in report.warnings]
    return "\n".join(lines).rstrip() + "\n"


def _escaped(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")


def as_csv(report: Report) -> str:
    """The report as CSV: all tables under one another, each row led by its table's title: `table,column...`; numbers
    in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for number, each in enumerate(report.tables):
        if number:
            writer.writerow([])
        writer.writerow(["table", *each.columns])
        writer.writerows([each.title, *("" if cell is None else cell for cell in row)] for row in each.rows)
    return out.getvalue()
