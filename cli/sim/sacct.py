"""Turn the accounting of Slurm into a trace, and see what that month would have been under Covey.

    sacct --allusers --allocations --parsable2 --starttime 2025-05-01 --endtime 2025-06-01 \\
          --format JobID,User,Account,State,Submit,Eligible,Start,End,ElapsedRaw,TimelimitRaw,AllocTRES,ReqTRES \\
          > may.txt
    covey-sim import sacct may.txt --output may.csv --gpus 64x8

Needed columns: JobID, State, Submit, and AllocTRES (or AllocGRES with NNodes), and ElapsedRaw, Elapsed or Start and
End. The rest is used when it is there. With --gpus it also runs both policies; FILE may be - for standard input;
without --output the trace goes to standard output and what was counted to standard error.
"""

import argparse
import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli.sim import jobs as simulator
from cli.sim.engine import SimJob
from cli.sim.report import Cell, Figure, Progress, Report, Series, Table, Wrong
from cli.sim.trace import BYTES_MAX, GPUS_MAX, ID_MAX, Trace

HELP = "turn Slurm's accounting into a trace: import sacct FILE"
NEEDED = ("JobID", "State", "Submit")
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
GOING_ON = ("RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")
STILL_WAITING = ("PENDING", "CONFIGURING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ELSEWHERE = ("REVOKED",)
NO_TIME = ("", "Unknown", "None", "N/A")

WHY = {
    "kept": "ended, with GPUs",
    "kept, cancelled while running": "it held its GPUs until then, so it counts with the time it ran",
    "steps": "part of a job (12.batch, 12.0), which counts as a whole",
    "without GPUs": "it asked for none",
    "cancelled before it started": "it never held a GPU",
    "requeued": "an attempt that began again; the last one counts, from the first submission on",
    "still running": "how long it takes is not known",
    "still waiting": "it did not start, or is an array with elements that did not; with GPUs, or nobody knows",
    "ended at once": "it ran for less than a second",
    "moved to another cluster": "its sibling there counts",
}


@dataclass
class Found:
    """One job as Slurm tells it. Seconds since 1970."""

    id: str
    submit_s: int
    gpus: int
    ran_s: int
    limit_s: int | None
    tenant: str
    state: str
    start_s: int | None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", choices=("sacct",), help="where it comes from")
    parser.add_argument("file", metavar="FILE", help="what sacct --parsable2 wrote; - for standard input")
    parser.add_argument("--output", "-o", type=Path, metavar="TRACE", help="the trace; default: standard output")
    parser.add_argument("--gpus", metavar="N[xM]", help="also run it under covey and under backfill on these GPUs")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    text = _read(options.file)
    found, counts = read_sacct(text, options.file)
    trace = as_trace(found, _stem(options.file))
    written = as_csv(found)
    aside = options.report_aside = options.output is None and not options.gpus and not options.json
    if options.output is not None:
        try:
            options.output.write_text(written, encoding="utf-8")
        except OSError as error:
            raise Wrong(f"{options.output} cannot be written", str(error), "name another file") from None
    elif aside:
        sys.stdout.write(written)
    report = _report(options, found, counts, trace, progress)
    if options.output is None and not aside:
        report.data["trace_csv"] = written
    return report


def _stem(file: str) -> str:
    return "sacct" if file == "-" else Path(file).stem


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read(BYTES_MAX + 1) if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise Wrong(f"{file} cannot be read", str(error), "name the file that sacct --parsable2 wrote") from None
    if len(data) > BYTES_MAX:
        raise Wrong(f"{file} is too large", f"at most {BYTES_MAX} bytes are read", "export fewer days")
    return data.decode("utf-8-sig", errors="replace")


# ---- reading ----


def read_sacct(text: str, name: str = "sacct") -> tuple[list[Found], Counter[str]]:
    """Every job that ended and held GPUs, by submission, and how many lines there were of each kind."""
    lines = text.splitlines()
    if not lines or "|" not in lines[0]:
        why = "fields with | between them and their names in the first line are expected"
        raise Wrong(f"{name}, line 1: this is not what sacct --parsable2 writes", why, "add --parsable2, and no -n")
    columns = {title.strip(): at for at, title in enumerate(lines[0].rstrip("|").split("|"))}
    _check_columns(name, columns)
    counts: Counter[str] = Counter()
    jobs: dict[str, Found] = {}
    first_submit: dict[str, int] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        fields = line.split("|")
        if len(fields) == len(columns) + 1 and not fields[-1]:
            fields.pop()
        if len(fields) != len(columns):
            what = f"{name}, line {number}: {len(fields)} fields"
            why = f"the first line names {len(columns)}"
            raise Wrong(what, why, "leave out JobName and Comment, which may hold a |")
        row = _Row(name, number, fields, columns)
        kind, job = _job(row)
        counts[kind] += 1
        submitted = row.time("Submit")
        id = row.get("JobID")
        if submitted is not None and kind != "steps":
            first_submit[id] = min(submitted, first_submit.get(id, submitted))
        if job is None:
            continue
        if job.id in jobs:
            counts["requeued"] += 1
            counts[_kept(jobs[job.id].state)] -= 1
        jobs[job.id] = job
    for id, job in jobs.items():
        if counts["requeued"]:
            job.submit_s = min(job.submit_s, first_submit.get(id, job.submit_s))
    if not jobs:
        seen = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no line"
        raise Wrong(f"{name}: no job to simulate", f"it holds {seen}", "export a longer time, with --allusers")
    return sorted(jobs.values(), key=lambda job: (job.submit_s, job.id)), counts


def _check_columns(name: str, columns: dict[str, int]) -> None:
    fix = "add it to --format (covey-sim import --help shows a whole command)"
    for needed in NEEDED:
        if needed not in columns:
            raise Wrong(f"{name}, line 1: no column {needed}", f"it has {', '.join(columns)}", fix)
    if not {"AllocTRES", "AllocGRES", "ReqTRES", "ReqGRES"} & set(columns):
        raise Wrong(f"{name}, line 1: no column AllocTRES", "without it nobody knows who had GPUs", fix)
    if not {"ElapsedRaw", "Elapsed"} & set(columns) and not {"Start", "End"} <= set(columns):
        raise Wrong(f"{name}, line 1: no column ElapsedRaw", "without it nobody knows how long a job ran", fix)


class _Row:
    """One line, by the names of its columns."""

    def __init__(self, name: str, number: int, fields: list[str], columns: dict[str, int]) -> None:
        self.where, self.fields, self.columns = f"{name}, line {number}", fields, columns

    def get(self, column: str) -> str:
        at = self.columns.get(column)
        return "" if at is None else self.fields[at].strip()

    def wrong(self, column: str, expected: str) -> Wrong:
        shown = repr(self.get(column)[:60])
        return Wrong(f"{self.where}, column {column}: {shown}", f"expected {expected}", "correct or remove the line")

    def time(self, column: str) -> int | None:
        """Seconds since 1970 of Slurm's local time, taken as UTC; None when there is none."""
        text = self.get(column)
        if text in NO_TIME:
            return None
        if text.isascii() and text.isdigit() and len(text) < 13:
            return int(text)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise self.wrong(column, "a time such as 2025-05-01T12:00:00, or seconds since 1970") from None
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())

    def span(self, raw: str, clock: str, unit_s: int) -> int | None:
        """Seconds from the column `raw` (a number of `unit_s`) or `clock` ([days-]hours:minutes:seconds)."""
        text = self.get(raw)
        if text.isascii() and text.isdigit() and len(text) < 13:
            return int(text) * unit_s
        text = self.get(clock)
        if not text or not text[0].isdigit():
            return None
        found = re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,2})(?:\.\d+)?", text)
        if found is None:
            raise self.wrong(clock, "a time such as 1-02:30:00")
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _job(row: _Row) -> tuple[str, Found | None]:
    """What kind of line it is, and the job if it is one to simulate."""
    id = row.get("JobID")
    if not id or len(id) > ID_MAX or not id.isprintable():
        raise row.wrong("JobID", "a job's number such as 123, 123_4 or 123.batch")
    if "." in id:
        return "steps", None
    state = row.get("State").split(" ")[0].rstrip("+")
    if not state.isupper():
        raise row.wrong("State", "a state such as COMPLETED or CANCELLED by 1000")
    gpus = gpus_of(row)
    if gpus == 0:
        unknown = not any(row.get(column) for column in ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES"))
        if unknown and state == "CANCELLED" and _ran(row) == 0:
            return "cancelled before it started", None
        if unknown and (state in STILL_WAITING or "[" in id):
            return "still waiting", None
        return "without GPUs", None
    if state in STILL_WAITING or "[" in id:
        return "still waiting", None
    if state in GOING_ON:
        return "still running", None
    if state == "REQUEUED":
        return "requeued", None
    if state in ELSEWHERE:
        return "moved to another cluster", None
    if state not in ENDED and state != "CANCELLED":
        raise row.wrong("State", f"one of {', '.join((*ENDED, 'CANCELLED', 'REQUEUED', *GOING_ON[:2]))}")
    ran = _ran(row)
    if ran == 0:
        return ("cancelled before it started" if state == "CANCELLED" else "ended at once"), None
    submit = row.time("Submit")
    if submit is None:
        raise row.wrong("Submit", "a time: an ended job was submitted")
    submit = max(submit, row.time("Eligible") or submit)
    start = row.time("Start")
    if start is not None:
        submit = min(submit, start)
    limit = row.span("TimelimitRaw", "Timelimit", 60)
    tenant = row.get("Account") or row.get("User")
    return _kept(state), Found(id, submit, gpus, ran, limit or None, tenant, state, start)


def _kept(state: str) -> str:
    return "kept, cancelled while running" if state == "CANCELLED" else "kept"


def _ran(row: _Row) -> int:
    ran = row.span("ElapsedRaw", "Elapsed", 1)
    if ran is not None:
        return ran
    start, end = row.time("Start"), row.time("End")
    if start is None or end is None:
        return 0
    if end < start:
        raise row.wrong("End", f"a time that is not before Start, {row.get('Start')}")
    return end - start


def gpus_of(row: _Row) -> int:
    """GPUs of the whole allocation; what was asked for when nothing was ever allocated."""
    for column in ("AllocTRES", "ReqTRES"):
        text = row.get(column)
        plain = re.findall(r"(?:^|,)gres/gpu=(\d{1,9})(?=,|$)", text)
        typed = re.findall(r"(?:^|,)gres/gpu:[^=,]+=(\d{1,9})(?=,|$)", text)
        if plain or typed:
            return _bounded(row, column, int(plain[0]) if plain else sum(map(int, typed)))
        if column == "AllocTRES" and text:
            return 0
    for column in ("AllocGRES", "ReqGRES"):
        each = re.findall(r"(?:^|,)(?:gres[:/])?gpu(?::[^:,=()]*[^:,=()\d][^:,=()]*)?[:=](\d{1,9})", row.get(column))
        if each:
            nodes = row.get("NNodes")
            if nodes and not nodes.isdigit():
                raise row.wrong("NNodes", "a number of nodes")
            return _bounded(row, column, sum(map(int, each)) * (int(nodes) if nodes else 1))
    return 0


def _bounded(row: _Row, column: str, gpus: int) -> int:
    if gpus > GPUS_MAX:
        raise row.wrong(column, f"at most {GPUS_MAX} GPUs")
    return gpus


# ---- writing ----


def as_trace(found: Sequence[Found], name: str) -> Trace:
    """The first job at second 0."""
    begin = found[0].submit_s
    jobs = [SimJob(job.id, job.submit_s - begin, job.gpus, job.ran_s, job.limit_s, job.tenant) for job in found]
    return Trace(name, jobs, sum(job.limit_s is not None for job in jobs), {})


def as_csv(found: Sequence[Found]) -> str:
    """A trace for `covey-sim jobs`."""
    begin, out = found[0].submit_s, io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["job_id", "submit_time_s", "num_gpus", "duration_s", "tenant", "status", "time_limit_s", "wait_in_trace_s"]
    )
    for job in found:
        waited = "" if job.start_s is None else max(0, job.start_s - job.submit_s)
        limit = "" if job.limit_s is None else job.limit_s
        writer.writerow([job.id, job.submit_s - begin, job.gpus, job.ran_s, job.tenant, job.state, limit, waited])
    return out.getvalue()


def busiest(found: Sequence[Found]) -> int:
    """The most GPUs that were held at once; 0 when nobody knows when jobs started."""
    changes: Counter[int] = Counter()
    for job in found:
        if job.start_s is not None:
            changes[job.start_s] += job.gpus
            changes[job.start_s + job.ran_s] -= job.gpus
    now = most = 0
    for _, change in sorted(changes.items()):
        now += change
        most = max(most, now)
    return most


def _report(
    options: argparse.Namespace, found: Sequence[Found], counts: Counter[str], trace: Trace, progress: Progress
) -> Report:
    rows: list[Sequence[Cell]] = [(kind, counts[kind], why) for kind, why in WHY.items() if counts[kind]]
    most = busiest(found)
    waits = [max(0, job.start_s - job.submit_s) for job in found if job.start_s is not None]
    notes = [f"{most} GPUs were held at once at the busiest moment"] if most else []
    if waits:
        notes.append(f"they waited {simulator.duration(sum(waits) / len(waits))} on average in Slurm itself")
    if not options.gpus and options.output is not None:
        size = most or max(job.gpus for job in found)
        for policy in ("backfill", "covey"):
            notes.append(f"next: covey-sim jobs --trace {options.output} --gpus {size} --policy {policy}")
    tables = [Table("what was found", ("lines", "count", "why"), rows, notes)]
    data: dict[str, Any] = {
        "trace": None if options.output is None else str(options.output),
        "jobs": len(found),
        "counted": {kind: counts[kind] for kind in WHY},
        "gpus_held_at_once_max": most,
        "wait_in_trace_s_mean": sum(waits) / len(waits) if waits else None,
    }
    figures: list[Figure] = []
    warnings: list[str] = []
    if options.gpus:
        compared, figure, warnings = compare(trace, *simulator.gpus_of(options.gpus), progress)
        tables.append(_comparison(compared, trace, options.gpus))
        figures.append(figure)
        data["compared"] = compared
    return Report("import", data, tables, figures, warnings)


def compare(
    trace: Trace, capacity: int, hosts: int | None, progress: Progress
) -> tuple[dict[str, dict[str, object]], Figure, list[str]]:
    """The same jobs under backfill and under covey."""
    found: dict[str, dict[str, object]] = {}
    series: list[Series] = []
    warnings: list[str] = []
    for policy in ("backfill", "covey"):
        report = simulator.simulate(trace, capacity, simulator.plan_of(policy, {}), progress, hosts)
        found[policy] = report.data
        series += report.figures[0].series
        warnings += report.warnings
    figure = replace(report.figures[0], series=series, title=f"{trace.name}, {capacity} GPUs")
    return found, figure, list(dict.fromkeys(warnings))


def _comparison(compared: dict[str, dict[str, object]], trace: Trace, gpus: str) -> Table:
    rows: list[Sequence[Cell]] = []
    for name, title in (
        ("jct_s_mean", "job completion time, mean"),
        ("jct_s_p50", "job completion time, median"),
        ("jct_s_p95", "job completion time, 95 %"),
        ("wait_s_mean", "waiting, mean"),
        ("makespan_s", "makespan"),
    ):
        before, after = (float(str(compared[policy][name])) for policy in ("backfill", "covey"))
        better = f"{before / after:.2f} x" if after else "-"
        rows.append((title, simulator.duration(before), simulator.duration(after), better))
    rows.append(("preemptions", 0, int(str(compared["covey"]["preemptions"])), ""))
    notes = (
        "durations are those of the accounting: what a job would gain or lose on other GPUs is not in it",
        "covey: 30 s for every checkpoint and 30 s for every restart from it; jobs must be able to do so",
    )
    return Table(f"{trace.name} on {gpus} GPUs", ("what", "fcfs + backfill", "covey", "better"), rows, notes)
