"""Traces of jobs: CSV, plain or gzip, one header line, one job a line.

    job_id,submit_time_s,num_gpus,duration_s[,tenant][,status][,time_limit_s][,...]

The first four columns are needed, in any order; others are kept out of the way. Three more are for clusters with hosts:
`skew` (0 to 1), `model` (its skew, when it is one of `engine_places.SKEWS`) and `spread_slowdown` say what it means to
a gang to be spread. What cannot be used is refused with line, column and what was expected there, because a run over a
trace that was half understood proves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path

from sim.files import rows_of
from sim.jobs.engine import SimJob
from sim.jobs.engine_places import SKEWS
from sim.report import Wrong

NEEDED = ("job_id", "submit_time_s", "num_gpus", "duration_s")
LIMIT, SKEW, SLOWDOWN, MODEL = "time_limit_s", "skew", "spread_slowdown", "model"
SLOWDOWN_MAX = 1000
ID_MAX = 200
GPUS_MAX = 1_000_000
SECONDS_MAX = 10_000_000_000


@dataclass(frozen=True)
class Trace:
    name: str
    jobs: list[SimJob]
    limits: int
    """Number of jobs that have a time limit."""
    extra: dict[str, list[str]]
    """Columns that are not for the order (`model`, `job_class`, ...), one value per job."""


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises Wrong when a line cannot be used, with where and why."""
    rows = rows_of(path)
    number, header = next(rows, (1, []))
    names = [name.strip() for name in header]
    for name in NEEDED:
        if name not in names:
            found = ", ".join(names) if any(names) else "nothing"
            what = f"{path}, line {number}: no column {name}"
            raise Wrong(what, f"the first line names the columns; it has {found}", f"begin with {','.join(NEEDED)}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Wrong(f"{path}, line {number}: column {twice} is there twice", "a name says one thing", "rename one")
    columns = {name: at for at, name in enumerate(names)}
    extra: dict[str, list[str]] = {name: [] for name in names if name not in (*NEEDED, LIMIT, SKEW, SLOWDOWN, "tenant")}
    jobs: list[SimJob] = []
    seen: dict[str, int] = {}
    limits = 0
    for number, row in rows:
        job = _job(path, number, row, columns)
        if str(job.id) in seen:
            what = f"{path}, line {number}, column job_id: {job.id} is there twice"
            raise Wrong(what, f"line {seen[str(job.id)]} has it already", "give every job an id of its own")
        seen[str(job.id)] = number
        limits += job.limit_s is not None
        jobs.append(job)
        for name, values in extra.items():
            values.append(row[columns[name]])
    if not jobs:
        raise Wrong(f"{path}: no job", "there is nothing after the first line", "give at least one job a line")
    return Trace(stem(path), jobs, limits, extra)


def stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".csv")


def _job(path: Path, line: int, row: Sequence[str], columns: dict[str, int]) -> SimJob:
    if len(row) != len(columns):
        what = f"{path}, line {line}: {len(row)} columns"
        raise Wrong(what, f"the first line has {len(columns)}", "correct the line; a field with a comma needs quotes")
    id = row[columns["job_id"]].strip()
    if not id or len(id) > ID_MAX or not id.isprintable():
        raise _wrong(path, line, "job_id", id, f"1 to {ID_MAX} printable characters")
    limit = None
    if LIMIT in columns and row[columns[LIMIT]].strip():
        limit = _whole(path, line, LIMIT, row[columns[LIMIT]], 1, SECONDS_MAX)
    return SimJob(
        id=id,
        submit_s=_whole(path, line, "submit_time_s", row[columns["submit_time_s"]], 0, SECONDS_MAX),
        gpus=_whole(path, line, "num_gpus", row[columns["num_gpus"]], 1, GPUS_MAX),
        duration_s=_whole(path, line, "duration_s", row[columns["duration_s"]], 1, SECONDS_MAX),
        limit_s=limit,
        tenant=row[columns["tenant"]].strip() if "tenant" in columns else "",
        skew=_skew(path, line, row, columns),
        spread_slowdown=_share(path, line, SLOWDOWN, row, columns, SLOWDOWN_MAX),
    )


def _skew(path: Path, line: int, row: Sequence[str], columns: dict[str, int]) -> float | None:
    said = _share(path, line, SKEW, row, columns, 1)
    if said is None and MODEL in columns:
        return SKEWS.get(row[columns[MODEL]].strip().lower())
    return None if said is None else float(said)


def _share(
    path: Path, line: int, column: str, row: Sequence[str], columns: dict[str, int], high: int
) -> Fraction | None:
    """An exact number from 0 to `high`, with or without a point; None when the column or the field is empty."""
    text = row[columns[column]].strip() if column in columns else ""
    if not text:
        return None
    try:
        number = Decimal(text) if text.isascii() and len(text) <= 20 else Decimal(-1)
    except InvalidOperation:
        number = Decimal(-1)
    if not (number.is_finite() and 0 <= number <= high):
        raise _wrong(path, line, column, text, f"a number from 0 to {high}")
    return Fraction(number).limit_denominator(10**6)


def _whole(path: Path, line: int, column: str, text: str, low: int, high: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 20) or not low <= int(text) <= high:
        raise _wrong(path, line, column, text, f"a whole number from {low} to {high}")
    return int(text)


def _wrong(path: Path, line: int, column: str, found: str, expected: str) -> Wrong:
    shown = repr(found if len(found) <= 60 else found[:57] + "...")
    return Wrong(f"{path}, line {line}, column {column}: {shown}", f"expected {expected}", "correct the line")


def read_services(path: Path) -> list[int]:
    """Total service of past jobs in GPU-seconds, from the one column `service_gpu_s`."""
    rows = rows_of(path)
    number, header = next(rows, (1, []))
    if [name.strip() for name in header] != ["service_gpu_s"]:
        what = f"{path}, line {number}: {','.join(header) or 'nothing'}"
        raise Wrong(what, "expected the one column service_gpu_s", "correct the first line")
    return [_whole(path, line, "service_gpu_s", row[0], 1, SECONDS_MAX * 1000) for line, row in rows]
