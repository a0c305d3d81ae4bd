"""List jobs that have ended, the newest first: of all for operators, your own otherwise. Any agent answers, also for
jobs that the log has forgotten; each agent keeps the newest 200,000 or so.

STATE is how the job ended: done, cancelled, timeout, oom, node-lost, preempted, or failed with its exit code. GPU-HOURS
is what it held, over all its starts; `agentctl report` says what became of them. `-o csv` without --columns,
`-o sacct` and `-o parquet` print what `covey-sim import` reads; the last needs the package pyarrow, and a file to go
to."""

import argparse
import csv
import io
import sys
import time
from argparse import SUPPRESS
from collections.abc import Sequence
from typing import Any

from cli.books import parquet
from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.lists import FORMS, Listing, chosen, list_arguments, show
from cli.table import clock, plural
from covey.core.units import format_seconds, parse_seconds

TITLES = (
    *("JOB", "NAME", "USER", "TENANT", "STATE", "ENDED", "WAITED", "TOOK", "GPUS", "GPU-HOURS", "STARTS"),
    *("WHERE", "WHY"),
)
NUMBERS = ("WAITED", "TOOK", "GPUS", "GPU-HOURS", "STARTS")
LIMIT = 1000
"""How many jobs an agent shows unless it is told otherwise (`plugins.scheduler.machine.books.asked_for`)."""
DATES = ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S")
CSV = (
    *("job_id", "submit_time_s", "num_gpus", "duration_s", "tenant", "status", "time_limit_s", "wait_in_trace_s"),
    *("user", "name", "ended_as", "exit_code", "start_time_s", "end_time_s", "starts", "preemptions", "hosts"),
    *("held_gpu_s", "used_gpu_s", "idle_gpu_s", "unknown_gpu_s", "preempted_gpu_s", "failed_gpu_s", "restarts_gpu_s"),
)
"""The first columns are those of a trace for `covey-sim jobs`."""
SACCT = (
    *("JobID", "JobName", "User", "Account", "Partition", "State", "ExitCode", "Submit", "Eligible", "Start", "End"),
    *("ElapsedRaw", "TimelimitRaw", "AllocTRES", "NodeList"),
)
SLURM = {
    "done": "COMPLETED",
    "cancelled": "CANCELLED",
    "timeout": "TIMEOUT",
    "oom": "OUT_OF_MEMORY",
    "node-lost": "NODE_FAIL",
    "preempted": "PREEMPTED",
    "failed": "FAILED",
}
"""How a job ended -> the state that `sacct` shows."""


def arguments(parser: argparse.ArgumentParser) -> None:
    filters(parser)
    parser.add_argument(
        "--state", help="jobs that ended so: done, failed, cancelled, timeout, oom, node-lost or preempted"
    )
    parser.add_argument("--host", help="jobs that last ran on this host")
    parser.add_argument("--limit", type=int, metavar="N", help="the newest N (default 1000, at most 100000)")
    list_arguments(parser, True, "sacct", "parquet")
    parser.add_argument(
        "--format", dest="output", choices=(*FORMS, "sacct", "parquet"), default=SUPPRESS, help=SUPPRESS
    )


def filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--user", help="jobs of this user")
    parser.add_argument("--tenant", help="jobs of this tenant")
    parser.add_argument("--name", help="jobs of this name; * stands for any characters")
    parser.add_argument("--since", metavar="TIME", help="jobs that ended since: 7d, 12h, 2026-11-01, 2026-11-01T08:30")


def query(context: Context, *fields: str) -> dict[str, object]:
    """What is asked of an agent."""
    args = context.args
    return {field: getattr(args, field) for field in fields} | {"since_wall_s": since(args.since, time.time())}


def since(text: str | None, now_s: float, flag: str = "--since") -> float | None:
    """Seconds since 1970 of `7d` (ago), or of a date in local time. AgentctlError: it is neither."""
    if text is None:
        return None
    for each in DATES:
        try:
            return time.mktime(time.strptime(text, each))
        except (ValueError, OverflowError):
            continue
    try:
        return max(0.0, now_s - parse_seconds(text))
    except ValueError:
        why = "expected how long ago, such as 7d or 12h, or a date such as 2026-11-01 or 2026-11-01T08:30"
        raise AgentctlError(USAGE, f"invalid {flag} {text}", why, f"{flag} 7d") from None


def run(context: Context) -> int:
    args = context.args
    form = "json" if context.json else args.output
    if form in ("sacct", "parquet") and args.columns is not None:
        why = f"the columns of {form} are always the same"
        raise AgentctlError(USAGE, f"-o {form} takes no --columns", why, "agentctl history -o csv --columns job,ended")
    if form == "parquet":
        parquet.refuse_terminal()
        parquet.library()
    answer = context.agent.get("history", **query(context, "user", "tenant", "name", "state", "host", "limit"))
    jobs = answer.data["jobs"]
    more = cut(len(jobs), context.args.limit)
    if more and form in ("csv", "jsonl", "name", "sacct", "parquet"):
        print(more, file=sys.stderr)  # whoever adds these up is to know
    if form in ("csv", "sacct", "parquet") and args.columns is None:
        found = chosen(context, LISTING, jobs)
        if form == "parquet":
            parquet.write(CSV, rows_of(found))
        else:
            context.say(as_csv(found) if form == "csv" else as_sacct(found))
    elif show(context, LISTING, answer, jobs, data_of=lambda found: {**answer.data, "jobs": list(found)}):
        context.as_of(answer, *([more] if more else [plural(len(jobs), "job")]), *not_whole(answer.data))
    return context.whole(answer)


def cut(count: int, limit: int | None) -> str:
    """What is said where there may be more jobs than are shown; empty: there are not."""
    most = LIMIT if limit is None else limit
    return f"the newest {plural(count, 'job')}, there may be more: --limit N" if count >= most else ""


def not_whole(data: dict[str, Any]) -> list[str]:
    """What these records lack, in words; nothing is counted as zero that is not known."""
    said = []
    if data["missing"]:
        said.append(f"{plural(data['missing'], 'more job')} of which no record was found")
    if data["trimmed"]:
        said.append(f"jobs up to j{data['trimmed']} were dropped to make room")
    if data["damaged"]:
        said.append(data["damaged"])
    return said


def row(job: dict[str, Any]) -> Sequence[object]:
    return (
        job["id"],
        job["name"],
        job["user"],
        job["tenant"],
        job["ended_as"],
        clock(job["ended_wall_s"]).rpartition(".")[0],
        format_seconds(job["waited_s"]),
        format_seconds(job["took_s"]) if job["attempts"] else None,
        job["gpus"],
        hours(job["seconds"]["held_gpu_s"]) if job["gpus"] else None,
        job["attempts"],
        " ".join(job["hosts"]),
        job["reason"],
    )


LISTING = Listing(
    TITLES, row, "id", NUMBERS,
    ("WHY", "WHERE", "STARTS", "WAITED", "TENANT", "USER", "GPUS", "NAME", "TOOK", "ENDED", "GPU-HOURS"),
    called={"JOB": "id", "GPU-HOURS": "gpu_hours"},
)  # fmt: skip


def hours(gpu_s: float) -> str:
    """GPU-hours of GPU·s, for people."""
    return f"{gpu_s / 3600:.3f}" if gpu_s < 36_000 else f"{gpu_s / 3600:.1f}"


# ---- for programs ----


def as_csv(jobs: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV)
    for known in rows_of(jobs):
        writer.writerow(["" if known[column] is None else known[column] for column in CSV])
    return out.getvalue().rstrip("\n")


def rows_of(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row with the columns of `CSV`, and others, for each job."""
    return [
        {
            **job,
            **job["seconds"],
            "job_id": job["id"],
            "submit_time_s": round(job["submitted_wall_s"]),
            "num_gpus": job["gpus"],
            "duration_s": ran_s(job),
            "status": job["state"],
            "wait_in_trace_s": round(job["waited_s"]),
            "start_time_s": None if job["started_wall_s"] is None else round(job["started_wall_s"]),
            "end_time_s": round(job["ended_wall_s"]),
            "starts": job["attempts"],
            "hosts": " ".join(job["hosts"]),
        }
        for job in jobs
    ]


def as_sacct(jobs: Sequence[dict[str, Any]]) -> str:
    """What `sacct --parsable2` would print of them, with times in seconds since 1970 (SLURM_TIME_FORMAT=%s)."""
    lines = ["|".join(SACCT)]
    for job in jobs:
        code = job["exit_code"]
        signal = code - 128 if code > 128 else 0
        limit = "" if job["time_limit_s"] is None else max(1, round(job["time_limit_s"] / 60))
        started = "Unknown" if job["started_wall_s"] is None else round(job["started_wall_s"])
        gpus = f"billing={job['gpus']},gres/gpu={job['gpus']},node={max(1, len(job['hosts']))}" if job["gpus"] else ""
        lines.append(
            "|".join(
                str(value).replace("|", "/")
                for value in (
                    *(job["id"][1:], job["name"], job["user"] or "covey", job["tenant"], "covey", slurm_state(job)),
                    *(f"{0 if signal else code}:{signal}", round(job["submitted_wall_s"])),
                    *(round(job["submitted_wall_s"]), started, round(job["ended_wall_s"]), ran_s(job), limit, gpus),
                    ",".join(job["hosts"]) or "None assigned",
                )
            )
        )
    return "\n".join(lines)


def slurm_state(job: dict[str, Any]) -> str:
    word = str(job["ended_as"]).replace(",", " ").split(" ")[0]
    return SLURM.get(word, "FAILED")


def ran_s(job: dict[str, Any]) -> int:
    """Whole seconds for which the job held its GPUs, all its starts together; of one without GPUs, from its first start
    to its end."""
    ran = job["seconds"]["held_gpu_s"] / job["gpus"] if job["gpus"] else job["took_s"] if job["attempts"] else 0.0
    return max(1, round(ran)) if job["attempts"] else 0
