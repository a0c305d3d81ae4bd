"""Other files of jobs that ended, read as `sim/jobs/sacct_lines.py` reads Slurm's: what `agentctl history -o csv`
writes, and the traces of clusters as they were published.

    covey    agentctl history -o csv: a job runs for as long as it held its GPUs, all its starts together
    philly   cluster_job_log of Microsoft's Philly (JSON): a job is as wide as its last attempt; the time of earlier
             ones counts as its time, by GPUs
    helios   cluster_log.csv of SenseTime's Helios: `duration` seconds on `gpu_num` GPUs, tenants are virtual clusters
    pai      pai_task_table.csv of Alibaba's PAI (2020): tasks of one name are one gang; shares of GPUs are rounded up
             to whole ones; a job comes when its first task begins, since this table does not say when it was submitted

Local times are taken as UTC, as Slurm's are.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sim.jobs.sacct_lines import SAID_MAX, Accounting
from sim.jobs.sacct_runs import Found, Run, with_earlier
from sim.jobs.trace import GPUS_MAX, ID_MAX, SECONDS_MAX
from sim.report import Wrong

COVEY = ("job_id", "submit_time_s", "num_gpus", "duration_s", "tenant", "status", "time_limit_s", "start_time_s")
HELIOS = ("job_id", "vc", "gpu_num", "state", "submit_time", "start_time", "duration")
PAI = (
    *("job_name", "task_name", "inst_num", "status", "start_time", "end_time"),
    *("plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)
GOES_ON = ("running", "waiting", "placing", "queued", "stopping", "suspended", "pending")


class Unusable(Exception):
    """A value that cannot be, with its place."""


def read_covey(text: str, name: str) -> Accounting:
    """Read what `agentctl history -o csv` wrote. Raises Wrong when it is something else, or no job is left."""
    return _read(name, (_covey(name, line, row) for line, row in _rows(text, name, COVEY)))


def read_helios(text: str, name: str) -> Accounting:
    return _read(name, (_helios(name, line, row) for line, row in _rows(text, name, HELIOS)))


def read_philly(text: str, name: str) -> Accounting:
    try:
        jobs = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"{name}: no JSON", str(error)[:200], "name the file cluster_job_log") from None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise Wrong(f"{name}: no list of jobs", "a list of objects is expected", "name the file cluster_job_log")
    return _read(name, (_philly(name, number, job) for number, job in enumerate(jobs, 1)))


def read_pai(text: str, name: str) -> Accounting:
    jobs: dict[str, list[tuple[int, Mapping[str, str]]]] = {}
    begins = text.startswith("job_name")  # its header is a file of its own
    for line, row in _rows(text if begins else ",".join(PAI) + "\n" + text, name, PAI):
        jobs.setdefault(row["job_name"], []).append((line if begins else line - 1, row))
    found = _read(name, (_pai(name, tasks) for tasks in jobs.values()))
    found.notes.append("a job comes when its first task begins: this table does not say when it was submitted")
    return found


READERS: Mapping[str, Callable[[str, str], Accounting]] = {
    "covey": read_covey,
    "philly": read_philly,
    "helios": read_helios,
    "pai": read_pai,
}


# ---- one job ---------------------------------------------------------------------------------------------------------

Job = tuple[str, Callable[[], Found]]
"""The kind of a job (`sacct_lines.WHY`), and what makes the job itself, if it is `kept`."""


def _covey(name: str, line: int, row: Mapping[str, str]) -> Job:
    at = f"{name}, line {line}"

    def made() -> Found:
        start, limit = row["start_time_s"], row["time_limit_s"]
        return Found(
            _id(at, row["job_id"]),
            _whole(at, "submit_time_s", row["submit_time_s"], 0, SECONDS_MAX),
            _whole(at, "num_gpus", row["num_gpus"], 1, GPUS_MAX),
            _whole(at, "duration_s", row["duration_s"], 1, SECONDS_MAX),
            max(1, round(_number(at, "time_limit_s", limit))) if limit else None,
            row["tenant"],
            row["status"],
            _whole(at, "start_time_s", start, 0, SECONDS_MAX) if start else None,
        )

    return _kind(row["num_gpus"], row["status"], row["start_time_s"] != "", row["duration_s"]), made


def _helios(name: str, line: int, row: Mapping[str, str]) -> Job:
    at = f"{name}, line {line}"

    def made() -> Found:
        return Found(
            _id(at, row["job_id"]),
            _moment(at, "submit_time", row["submit_time"]),
            _whole(at, "gpu_num", row["gpu_num"], 1, GPUS_MAX),
            _whole(at, "duration", row["duration"], 1, SECONDS_MAX),
            None,
            row["vc"],
            row["state"],
            _moment(at, "start_time", row["start_time"]),
        )

    return _kind(row["gpu_num"], row["state"], row["start_time"] != "", row["duration"]), made


def _philly(name: str, number: int, job: Mapping[str, Any]) -> Job:
    at = f"{name}, job {number}"
    attempts = [each for each in job.get("attempts") or () if isinstance(each, dict)]
    last = attempts[-1] if attempts else {}
    gpus = _philly_gpus(last)

    def made() -> Found:
        runs = [_philly_run(at, each) for each in attempts]
        (*earlier, now) = runs
        if now is None:
            raise Unusable(f"{at}: its last attempt has no times")
        submit_s = _moment(at, "submitted_time", str(job.get("submitted_time")))
        one = Found(
            _id(at, str(job.get("jobid"))), submit_s, gpus, now.ran_s, None, str(job.get("vc", "")), "", now.start_s
        )
        one.state = str(job.get("status", ""))
        return with_earlier(one, earlier)

    ended = str(last.get("end_time") or "None") != "None"
    ran = "1" if ended else ""
    return _kind(str(gpus), "running" if attempts and not ended else "done", bool(attempts), ran), made


def _philly_gpus(attempt: Mapping[str, Any]) -> int:
    hosts = [each for each in attempt.get("detail") or () if isinstance(each, dict)]
    return sum(len(each.get("gpus") or ()) for each in hosts)


def _philly_run(at: str, attempt: Mapping[str, Any]) -> Run | None:
    begin, end = str(attempt.get("start_time") or "None"), str(attempt.get("end_time") or "None")
    if "None" in (begin, end):
        return None
    start_s = _moment(at, "start_time", begin)
    ran_s = _moment(at, "end_time", end) - start_s
    if ran_s < 0:
        raise Unusable(f"{at}: an attempt ends before it begins")
    return Run(start_s, max(1, ran_s), max(1, _philly_gpus(attempt)))


def _pai(name: str, tasks: Sequence[tuple[int, Mapping[str, str]]]) -> Job:
    line, first = tasks[0]
    at = f"{name}, line {line}"
    asked = [(row["inst_num"], row["plan_gpu"]) for _, row in tasks if row["plan_gpu"] not in ("", "0", "0.0")]
    over = all(row["status"] in ("Terminated", "Failed") for _, row in tasks)
    started = all(row["start_time"] and row["end_time"] for _, row in tasks)

    def made() -> Found:
        parts = [_number(at, "inst_num", count) * _number(at, "plan_gpu", part) / 100 for count, part in asked]
        begin = min(round(_number(at, "start_time", row["start_time"])) for _, row in tasks)
        end = max(round(_number(at, "end_time", row["end_time"])) for _, row in tasks)
        if not begin <= end <= begin + SECONDS_MAX:
            raise Unusable(f"{at}: it ends before it begins")
        gpus = _whole(at, "plan_gpu", str(math.ceil(sum(parts) - 1e-9)), 1, GPUS_MAX)
        return Found(_id(at, first["job_name"]), begin, gpus, max(1, end - begin), None, "", first["status"], begin)

    return _kind("1" if asked else "0", "done" if over else "running", started, "1"), made


# ---- all of them -----------------------------------------------------------------------------------------------------


def _kind(gpus: str, state: str, started: bool, ran: str) -> str:
    if gpus.strip() in ("", "0"):
        return "without GPUs"
    if state.lower() in GOES_ON:
        return "still running"
    if not started:
        return "cancelled before it started"
    if ran.strip() == "0":
        return "ended at once"
    return "kept, cancelled while running" if state.lower().startswith("cancel") else "kept"


def _read(name: str, jobs: Iterator[Job]) -> Accounting:
    found, impossible, ids = Accounting(), list[str](), Counter[str]()
    for kind, made in jobs:
        if not kind.startswith("kept"):
            found.counts[kind] += 1
            continue
        try:
            job = made()
        except Unusable as error:
            found.counts["impossible"] += 1
            impossible.append(str(error))
            continue
        ids[job.id] += 1
        if ids[job.id] > 1:
            found.counts["repeated"] += 1
            continue
        found.counts[kind] += 1
        found.jobs.append(job)
    found.jobs.sort(key=lambda job: (job.submit_s, job.id))
    found.notes += [f"left out: {each}" for each in impossible[:SAID_MAX]]
    if not found.jobs:
        said = ", ".join(f"{count} {kind}" for kind, count in found.counts.items()) or "the file is empty"
        raise Wrong(f"{name}: no job that ended and held GPUs", said, "name another file, or another format")
    return found


def _rows(text: str, name: str, needed: Sequence[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        head = [each.strip() for each in next(reader, [])]
        missing = [column for column in needed if column not in head]
        if missing:
            why = f"the first line names the columns; it has {', '.join(head)[:200] or 'nothing'}"
            raise Wrong(
                f"{name}, line 1: no column {missing[0]}", why, "covey-sim import --help says what each format is"
            )
        for row in reader:
            if any(row):
                if len(row) != len(head):
                    what = f"{name}, line {reader.line_num}: {len(row)} columns"
                    raise Wrong(what, f"the first line has {len(head)}", "correct the line")
                yield reader.line_num, dict(zip(head, row, strict=True))
    except csv.Error as error:
        what = f"{name}, line {reader.line_num}: no CSV"
        raise Wrong(what, str(error), "correct the line; quotes come in pairs") from None


def _id(at: str, text: str) -> str:
    if not 0 < len(text) <= ID_MAX or not text.isprintable():
        raise Unusable(f"{at}: {text[:40]!r} is no id of a job")
    return text


def _number(at: str, column: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= SECONDS_MAX:
        raise Unusable(f"{at}, {column}: {text[:40]!r} is no number that it can be")
    return found


def _whole(at: str, column: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19 and low <= int(text) <= high):
        raise Unusable(f"{at}, {column}: {text[:40]!r} is no whole number from {low} to {high}")
    return int(text)


def _moment(at: str, column: str, text: str) -> int:
    """Seconds since 1970 of `2017-10-07 01:12:09`."""
    try:
        found = round(datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp())
    except ValueError:
        found = -1
    if not 0 <= found <= SECONDS_MAX:
        raise Unusable(f"{at}, {column}: {text[:40]!r} is no time such as 2017-10-07 01:12:09")
    return found
