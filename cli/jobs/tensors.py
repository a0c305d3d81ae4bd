"""Show who sums the gradients of which job, the time an aggregator reserves for them, and the traffic.

BY is who sums on that host: a rank of the job itself, to which the other ranks push directly, or the host's aggregator
`aggd`, with the reason why no rank does.

A job on several hosts has a line for each table of its tensors: `train`, `train/1`, ... D is the time of an iteration
of the job alone, WORK the aggregator's work in one iteration, LOAD the share of the aggregator reserved for it, LOSS
the planned loss of speed by sharing the aggregator and, in brackets, the measured one. A job on trial has none of
these.

--move asks another host to take over one line; that host may decline. Ranks keep training meanwhile.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cli.client import FAILED, NOT_FOUND, NOT_WHOLE, AgentctlError
from cli.context import Context, missing
from cli.lists import Listing, list_arguments, show
from cli.table import epoch_text, of, plural
from covey.core.ids import JobId
from covey.core.units import format_seconds, format_size
from covey.tensors.numbers.blocks import job_of

TITLES = (
    "JOB", "AGGREGATOR", "BY", "EPOCH", "JOINED", "TENSORS", "SIZE", "ROUNDS", "RECEIVED", "SENT",
    "D", "WORK", "LOAD", "LOSS",
)  # fmt: skip


LEAST = ("EPOCH", "SENT", "RECEIVED", "ROUNDS", "D", "WORK", "TENSORS", "LOSS", "LOAD", "SIZE")
"""The columns that a narrow terminal does without, the first of them first."""
WAITS_S, WAITS_TIMES = 5.0, 3.0
"""A round that takes so long, and so many times an iteration of its job, is waited for: who has not pushed is named."""
MOVE_S, LOOK_S = 15.0, 0.5
"""How long a move is waited for, and between two looks."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--move",
        nargs=2,
        metavar=("JOB", "HOST"),
        help="move the sums of a table to this host; JOB is j7, or j7/1 for a job with several tables",
    )

    list_arguments(parser)


def run(context: Context) -> int:
    if context.args.move is not None:
        return move(context, *context.args.move)
    answer = context.agent.gather("tensors")
    if not show(context, Listing(TITLES, cells, "job", TITLES[3:], LEAST), answer):
        return context.whole(answer)
    for job in answer.data:
        if why := job.get("not_direct"):
            context.say(f"{job['job']} is summed by aggd on {job['host']}, not by its own ranks: {why}")
        if job.get("refused"):
            context.say(f"{job['job']} was refused: {job['refused']}")
        if job.get("not_finite"):
            count = plural(job["not_finite"], "number")
            context.say(f"{job['job']}: {count} of its sums were NaN or infinite; {first_named(job)}")
        if awaited := silent([job]):
            context.say(f"{job['job']} {awaited}")
    jobs = {job_of(job["job"]) for job in answer.data}
    context.as_of(answer, plural(len(jobs), "job"), age_s=max((job["age_s"] for job in answer.data), default=0.0))
    return context.whole(answer)


def cells(job: Mapping[str, Any]) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a table of a job's tensors."""
    return (
        job["job"],
        job["host"],
        job.get("by", "aggd"),
        epoch_text(job["epoch"]),
        of(job["joined"], job["workers"]),
        job["tensors"],
        format_size(job["bytes"]),
        job["rounds"],
        format_size(job["received_bytes"]),
        format_size(job["sent_bytes"]),
        milliseconds(job.get("period_us")),
        milliseconds(job.get("work_us")),
        percent(job.get("load")),
        loss(job.get("loss"), job.get("loss_measured")),
    )


def first_named(job: Mapping[str, Any]) -> str:
    """Where the first tensor with a NaN is named."""
    by = job.get("by", "aggd")
    log = f"the log of aggd on {job['host']}" if by == "aggd" else f"the output of {by}"
    return f"{log} names the first"


def ways(rows: Sequence[Mapping[str, Any]]) -> str:
    """`rank 0 on gpu1, rank 2 on gpu2, aggd on gpu4 (none of its ranks is on gpu4)`: who sums a job's tables."""
    newest: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["job"] not in newest or newest[row["job"]]["epoch"] < row["epoch"]:
            newest[row["job"]] = row
    found: dict[str, None] = {}
    for _, row in sorted(newest.items()):
        why = f" ({row['not_direct']})" if row.get("not_direct") else ""
        found[f"{row.get('by', 'aggd')} on {row['host']}{why}"] = None
    return ", ".join(found)


def silent(rows: Sequence[Mapping[str, Any]], hosts: Mapping[int, str] | None = None) -> str:
    """`waits for rank 3 on gpu2, 41 s`, by a job's rows; empty where nobody waits for long. `hosts`: of ranks."""
    row = max((row for row in rows if row.get("missing")), key=lambda row: float(row["waits_s"]), default=None)
    usual_s = 0.0 if row is None else (row.get("period_us") or 0) / 1e6
    if row is None or row["waits_s"] < max(WAITS_S, WAITS_TIMES * usual_s):
        return ""
    each = [f"{rank} on {hosts[rank]}" if hosts and rank in hosts else str(rank) for rank in row["missing"]]
    return f"waits for rank {', '.join(each)}, {format_seconds(row['waits_s'] + row['age_s'])}"


def milliseconds(us: int | None) -> str:
    return "" if us is None else f"{us / 1000:.4g} ms"


def percent(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"


def loss(planned: float | None, measured: float | None) -> str:
    if planned is None:
        return "" if measured is None else f"({measured:.1%})"
    return f"{planned:.1%}" if measured is None else f"{planned:.1%} ({measured:.1%})"


def move(context: Context, job: str, host: str) -> int:
    now = row_of(context, job)
    if now is None:
        raise AgentctlError(
            NOT_FOUND, f"{job} was not moved", "no host sums tensors of a job of that name", "agentctl tensors"
        )
    body = {"job": job, "epoch": now["epoch"], "from": now["host"], "to": host}
    answer = context.agent.post("tensors", "move", body=body)
    end_s = time.monotonic() + MOVE_S
    while time.monotonic() < end_s:
        now = row_of(context, job)
        if now is not None and now["host"] == host:
            if context.json:
                return context.say_json(answer.whole)
            context.say(f"{job} is summed on {host} now, epoch {epoch_text(now['epoch'])}")
            return 0
        time.sleep(LOOK_S)
    why = f"{host} did not take it over within {MOVE_S:g} s; it may have declined"
    raise AgentctlError(FAILED, f"{job} was not moved", why, f"agentctl why {job_of(JobId(job))}")


def row_of(context: Context, job: str) -> dict[str, Any] | None:
    """The row of the newest owner that reports to sum the job's tensors; None: no owner does."""
    answer = context.agent.gather("tensors")
    rows = [row for row in answer.data if row["job"] == job]
    if not rows and answer.unanswered:
        why = "; ".join(map(missing, answer.unanswered))
        raise AgentctlError(NOT_WHOLE, f"the host that sums {job} is not known", why, "agentctl tensors --timeout 30s")
    return max(rows, key=lambda row: int(row["epoch"]), default=None)
