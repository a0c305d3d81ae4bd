"""List the jobs that wait or run, and why each is in its state; with -a also ended ones that are still remembered.

Of a job of another user you see whose it is, its tenant, state and GPUs, and its place in the queue. USER is empty for
jobs of the agent's own user."""

import argparse
from typing import Any

from cli.context import Context
from cli.table import plural, table
from covey.core.units import format_seconds, format_size

TITLES = (
    "JOB",
    "NAME",
    "USER",
    "TENANT",
    "CLASS",
    "STATE",
    "WORKERS",
    "GPUS",
    "STEP",
    "EACH",
    "WAITS FOR",
    "MEMORY",
    "TIME",
    "WHERE",
    "WHY",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="ended jobs too")


def run(context: Context) -> int:
    answer = context.agent.get("jobs", all=1 if context.args.all else None)
    if context.json:
        return context.say_json(answer.whole)
    rows = [
        (
            job["id"],
            job["name"],
            job.get("user", ""),
            job["tenant"],
            class_of(job),
            job["state"],
            workers_of(job),
            job["gpus"],
            job["step"],
            *timed(job),
            how_long(job),
            " ".join(place["host"] for place in job["places"]),
            why(job),
        )
        for job in answer.data
    ]
    context.say(table(TITLES, rows, ("WORKERS", "GPUS", "STEP", "EACH", "MEMORY", "TIME"), context.paint))
    more = "" if context.args.all else " waiting or running"
    age_s = max((job["age_s"] for job in answer.data), default=0.0)
    context.as_of(answer, plural(len(rows), "job") + more, age_s=age_s)
    return 0


def why(job: dict[str, Any]) -> str:
    """Why the job is in its state, and what is wrong with its GPUs."""
    devices = [f"{host}: {words}" for host, words in (job["seen"].get("devices") or {}).items()]
    return "; ".join([job["reason"], *devices])


def workers_of(job: dict[str, Any]) -> str:
    """`4`; of an elastic job `4..16, now 7`, or `4..16` while it does not run."""
    elastic = job.get("elastic")
    if not elastic:
        return str(job["workers"])
    now = f", now {elastic['processes']}" if elastic["processes"] and not job["over"] else ""
    return f"{job['workers']}..{elastic['workers_max']}{now}"


def timed(job: dict[str, Any]) -> tuple[str, str, str]:
    """A step's duration, what of it is waiting (input, ranks, turns, device), and the memory of the largest rank."""
    timing = job["seen"]["timing"]
    if timing is None:
        return "", "", ""
    memory = format_size(timing["memory_bytes"]) if timing["memory_bytes"] else ""
    return step_time(timing["step_s"]), waits(timing, (job.get("metrics") or {}).get("device_wait_s", 0.0)), memory


def step_time(seconds: float) -> str:
    """A short duration for people: `8.3 ms`, `1.2 s`; less than a microsecond is none."""
    return f"{round(seconds * 1000, 3):.3g} ms" if seconds < 1 else format_seconds(seconds)


def waits(timing: dict[str, Any], device_s: float) -> str:
    """`input 40 %, ranks 12 %, turns 5 %`: shares of a step under one percent are left out. `device_s`: of the newest
    step, known of scripts whose jitted calls are counted."""
    waited_s = min(device_s, timing["step_s"])
    ranks_s, turns_s = timing["communicate_s"], timing.get("turns_s", 0.0)
    shares = (("input", timing["input_s"]), ("ranks", ranks_s), ("turns", turns_s), ("device", waited_s))
    found = [(word, round(100 * spent_s / timing["step_s"])) for word, spent_s in shares if timing["step_s"] > 0]
    return ", ".join(f"{word} {share} %" for word, share in found if share)


def class_of(job: dict[str, Any]) -> str:
    """What it runs as, and, when that is something else, what was asked for."""
    asked, now = str(job["job_class"]), str(job.get("runs_as") or job["job_class"])
    return asked if asked == now else f"{now} (was {asked})"


def how_long(job: dict[str, Any]) -> str:
    """Time waited, time running, or time it took."""
    return format_seconds(job["times"]["for_s"])
