"""List own jobs that wait or run, and why each is in its state; with -a also ended ones that are still remembered.

--everyone shows those of others too (root and the agent's own user see all anyway). Of a job of another user you see
whose it is, its tenant, state and GPUs, and its place in the queue. USER is empty for jobs of the agent's own user.

Filters take several values with commas between them: --state running,held. --name takes patterns: --name 'bert*'. -o
csv and -o jsonl are for programs, and --columns names what is shown: id,name,state."""

import argparse
import csv
import json
import sys
import time
from difflib import get_close_matches
from typing import Any

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.jobs.starting import starts_of
from cli.table import plural, printable, table
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


FILTERS = ("user", "state", "name", "tenant")
FORMATS = ("table", "json", "jsonl", "csv", "name")
RIGHT = ("WORKERS", "GPUS", "STEP", "EACH", "MEMORY", "TIME")


def filter_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--user", metavar="NAME", help="jobs of these users")
    parser.add_argument("--state", metavar="STATE", help="jobs in these states: queued, held, running, failed ...")
    parser.add_argument("--name", metavar="PATTERN", help="jobs of these names, such as 'bert*'")
    parser.add_argument("--tenant", metavar="TENANT", help="jobs of these tenants")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="ended jobs too")
    parser.add_argument("--everyone", action="store_true", help="jobs of all users")
    filter_arguments(parser)
    parser.add_argument(
        "--sort", metavar="FIELD", help="id, name, user, state, gpus, time ...; =-time: the longest first"
    )
    parser.add_argument("--limit", metavar="N", help="the first N only")
    parser.add_argument("-o", "--output", choices=FORMATS, default="table", help="the form of the list")
    parser.add_argument("--columns", metavar="A,B", help="what is shown: id,name,state ...")


def filters(context: Context) -> dict[str, str]:
    """The filters that were given."""
    return {name: said for name in FILTERS if (said := getattr(context.args, name)) is not None}


def run(context: Context) -> int:
    args, said = context.args, filters(context)
    columns = columns_of(args.columns)
    mine = None if args.everyone or "user" in said else 1
    answer = context.agent.get("jobs", all=1 if args.all else None, mine=mine, sort=args.sort, limit=args.limit, **said)
    if context.json or args.output == "json":
        return context.say_json(answer.whole)
    if args.output == "jsonl":
        for job in answer.data:
            context.say(json.dumps(job))
        return 0
    if args.output == "name":
        for job in answer.data:
            context.say(job["id"])
        return 0
    if "WHY" in columns and any(job["state"] == "queued" for job in answer.data):
        starts = starts_of(context)
        for job in answer.data:
            if job["id"] in starts:
                job["reason"] = "; ".join([starts[job["id"]], *([job["reason"]] if job["reason"] else [])])
    rows = [[shown for title, shown in zip(TITLES, row(job), strict=True) if title in columns] for job in answer.data]
    if args.output == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([title.lower().replace(" ", "_") for title in columns])
        writer.writerows([["" if cell is None else printable(str(cell)) for cell in each] for each in rows])
        return 0
    context.say(table(columns, rows, RIGHT, context.paint))
    more = "" if args.all else " waiting or running"
    age_s = max((job["age_s"] for job in answer.data), default=0.0)
    context.as_of(answer, plural(len(rows), "job") + more, age_s=age_s)
    return 0


def columns_of(said: str | None) -> tuple[str, ...]:
    """The titles of the columns that are shown. AgentctlError: there is no such column."""
    if said is None:
        return TITLES
    known = {("id" if title == "JOB" else title.lower().replace(" ", "_")): title for title in TITLES}
    wanted = [word.strip().lower() for word in said.split(",") if word.strip()]
    for word in wanted:
        if word not in known:
            near = get_close_matches(word, known, 1, 0.5)
            step = f"did you mean {near[0]}?" if near else "agentctl jobs --columns id,name,state"
            raise AgentctlError(USAGE, f"invalid --columns {word[:40]!r}", f"expected {', '.join(known)}", step)
    return tuple(title for name, title in known.items() if name in wanted)


def row(job: dict[str, Any]) -> tuple[Any, ...]:
    """What the columns of `TITLES` show of a job."""
    return (
        job["id"],
        name_of(job),
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


def name_of(job: dict[str, Any]) -> str:
    """`sweep[3]` for a task of an array, `sweep[0-99%8]` for the array."""
    tasks = job.get("array") or (job.get("task") or "").partition("[")[2].rstrip("]")
    return f"{job['name']}[{tasks}]" if tasks and job["name"] else job["name"]


def why(job: dict[str, Any]) -> str:
    """Why the job is in its state, and what is wrong with its GPUs."""
    devices = [f"{host}: {words}" for host, words in (job["seen"].get("devices") or {}).items()]
    begin_s = job.get("begin_wall_s")
    begins = [time.strftime("not before %Y-%m-%d %H:%M:%S", time.localtime(begin_s))] if begin_s else []
    return "; ".join([job["reason"], *begins, *devices])


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
