"""What became of the GPU-hours that jobs held, by user, tenant or GPU; or, `agentctl report JOB`, of one job's.

HELD is the sum of all that follow. USED: GPUs computed, by their driver's utilization. IDLE: they computed nothing.
NOT KNOWN: no driver said. PREEMPTION, FAILURES: what was computed since the newest checkpoint that Covey knows of, and
then preempted, or ended by a failure, a lost host or a time limit. RESTARTS: from a start after the first to its first
step. Jobs that have not ended are counted up to now. A GPU's USED to RESTARTS are its part, by time, of its jobs'."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cli.books.history import filters, hours, not_whole, query
from cli.client import USAGE, AgentctlError
from cli.context import Context, not_found
from cli.table import clock, pairs, plural, table
from covey.core.units import format_seconds, format_size

PARTS = ("used", "idle", "unknown", "preempted", "failed", "restarts")
TITLES = ("JOBS", "HELD", "USED", "IDLE", "NOT KNOWN", "PREEMPTION", "FAILURES", "RESTARTS")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB", help="such as j1; without it, all jobs are added up")
    parser.add_argument("--by", choices=("user", "tenant", "gpu"), default="user", help="default: user")
    filters(parser)


def run(context: Context) -> int:
    if context.args.job is not None:
        return of_job(context, context.args.job)
    answer = context.agent.get("report", by=context.args.by, **query(context, "user", "tenant", "name"))
    if context.json:
        context.say_json(answer.whole)
        return context.whole(answer)
    data = answer.data
    each, by = data["rows"], data["by"]
    rows: list[Sequence[object]] = [(of(row["of"], by), row["jobs"], *sums(row["seconds"])) for row in each]
    if len(rows) > 1:
        rows.append(("all", None if by == "gpu" else sum(row["jobs"] for row in each), *sums(data["total"])))
    context.say(table((by.upper(), *TITLES), rows, TITLES, context.paint))
    live = [f"{plural(data['live'], 'job')} of these not ended"] if data["live"] else []
    context.as_of(answer, "GPU-hours", *live, *not_whole(data))
    return context.whole(answer)


def of(name: str, by: str) -> str:
    return name or ("the agents' own user" if by == "user" else "-")


def sums(seconds: Mapping[str, float]) -> list[str]:
    return [hours(seconds[f"{part}_gpu_s"]) for part in ("held", *PARTS)]


def of_job(context: Context, id: str) -> int:
    given = [flag for flag in ("user", "tenant", "name", "since") if getattr(context.args, flag) is not None]
    if given:
        why = f"{id} is one job; --{given[0]} chooses among many"
        raise AgentctlError(USAGE, f"unexpected option --{given[0]}", why, f"agentctl report {id}")
    try:
        answer = context.agent.get("jobs", id, "report")
    except AgentctlError as error:
        not_found(context, error, id)
    if context.json:
        return context.say_json(answer.whole)
    context.say(pairs(rows_of(answer.data["job"], answer.data["over"]), context.paint))
    return 0


def rows_of(job: Mapping[str, Any], over: bool) -> Sequence[tuple[str, object]]:
    began = f"{format_seconds(job['waited_s'])} until its first start"
    return (
        ("job", f"{job['id']} {job['name']}"),
        ("user", of(job["user"], "user")),
        ("tenant", job["tenant"]),
        ("ended", f"{job['ended_as']}, {clock(job['ended_wall_s'])}" if over else f"not yet: {job['state']}"),
        ("why", job["reason"] if over else ""),
        ("waited", began if job["attempts"] else "it never started"),
        ("took", format_seconds(job["took_s"]) if job["attempts"] else ""),
        ("starts", happened(job)),
        ("GPU-hours", gpu_hours(job)),
        ("GPUs in use", in_use(job)),
        ("step", step(job)),
        ("GPU memory", memory(job["gpu_bytes"], bool(job["gpus"]))),
        ("host memory", memory(job["host_bytes"], True)),
        ("hosts", " ".join(job["hosts"])),
    )


def happened(job: Mapping[str, Any]) -> str:
    """`3: preempted 2 times, host lost 1 time`."""
    counts = {"preempted": "preemptions", "host lost": "hosts_lost", "failed": "failures", "exit 75": "requeues"}
    each = [f"{cause} {plural(job[field], 'time')}" for cause, field in counts.items() if job[field]]
    return f"{job['attempts']}{': ' if each else ''}{', '.join(each)}"


def gpu_hours(job: Mapping[str, Any]) -> str:
    """`held 12.00: used 9.10, idle 0.90, lost to preemption 2.00`; parts that are zero are left out."""
    if not job["gpus"]:
        return "it has no GPUs"
    seconds = job["seconds"]
    words = ("used", "idle", "not known", "lost to preemption", "lost to failures", "spent on restarts")
    told = [(word, seconds[f"{part}_gpu_s"]) for part, word in zip(PARTS, words, strict=True)]
    parts = [f"{word} {hours(gpu_s)}" for word, gpu_s in told if gpu_s]
    return f"held {hours(seconds['held_gpu_s'])}{': ' if parts else ''}{', '.join(parts)}"


def in_use(job: Mapping[str, Any]) -> str:
    """`92 % of the time that was seen`."""
    if not job["gpus"]:
        return ""
    used, idle = job["seconds"]["used_gpu_s"], job["seconds"]["idle_gpu_s"]
    if not used + idle:
        return "not known: no driver said" if job["seconds"]["unknown_gpu_s"] else ""
    return f"{100 * used / (used + idle):.0f} % of the time that was seen and not lost"


def step(job: Mapping[str, Any]) -> str:
    """`210 ms, of which it waited for data 62 %, for other ranks 5 %`."""
    if not job["step_s"]:
        return "not known: too few steps were seen"
    parts = {"for data": "input_s", "for other ranks": "communicate_s", "for turns": "turns_s"}
    shares = {what: 100 * job[field] / job["step_s"] for what, field in parts.items()}
    waits = [f"{what} {share:.0f} %" for what, share in shares.items() if share >= 0.5]
    waited = f", of which it waited {', '.join(waits)}" if waits else ""
    took_s = job["step_s"]
    return f"{format_seconds(took_s) if took_s >= 1 else f'{took_s * 1000:.3g} ms'}{waited}"


def memory(size: int, has: bool) -> str:
    return "" if not has else f"at most {format_size(size)} on one" if size else "not known"
