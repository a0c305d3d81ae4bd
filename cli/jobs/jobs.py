"""List own jobs that wait or run, and why each is in its state; with -a also ended ones that are still remembered.

--everyone shows those of others too (root and the agent's own user see all anyway). Of a job of another user you see
whose it is, its tenant, state and GPUs, and its place in the queue. USER is empty for jobs of the agent's own user.

Filters take several values with commas between them: --state running,held. --name takes patterns: --name 'bert*'. -o
csv and -o jsonl are for programs, and --columns names what is shown: id,name,state."""

import argparse
import os
import pwd
import time
from typing import Any

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.jobs.starting import starts_of
from cli.lists import Listing, chosen, list_arguments, show, titles_of, watch_argument
from cli.table import plural
from covey.core.units import format_seconds, format_size
from plugins.listed_jobs import JobsWanted, ListedJob, is_wanted, words_of

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
    list_arguments(parser, sorts=False)
    watch_argument(parser)


def filters(context: Context) -> dict[str, str]:
    """The filters that were given."""
    return {name: said for name in FILTERS if (said := getattr(context.args, name)) is not None}


def run(context: Context) -> int:
    args, said = context.args, filters(context)
    mine = None if args.everyone or "user" in said else 1
    if args.watch:
        from cli.watched import watch  # only where it is needed: agentctl's imports are a budget

        if args.sort or args.limit:
            why = "a list that is watched has all jobs that were asked for, in the order of the agent"
            raise AgentctlError(USAGE, "jobs -w takes no --sort and no --limit", why, "agentctl jobs -w")
        context.agent.get("jobs", limit=1, **said)  # a wrong filter is refused as in a list that is shown once
        return watch(context, "jobs", lambda _rows: LISTING, lambda job: is_listed(context, job, mine is not None))
    columns = titles_of(context, LISTING)
    answer = context.agent.get("jobs", all=1 if args.all else None, mine=mine, sort=args.sort, limit=args.limit, **said)
    rows = answer.data
    for_people = not context.json and args.output in ("table", "wide", "csv")
    if for_people and "WHY" in columns and any(job["state"] == "queued" for job in rows):
        starts = starts_of(context)
        for job in rows:
            if job["id"] in starts:
                job["reason"] = "; ".join([starts[job["id"]], *([job["reason"]] if job["reason"] else [])])
    if show(context, LISTING, answer):
        more = "" if args.all else " waiting or running"
        age_s = max((job["age_s"] for job in rows), default=0.0)
        context.as_of(answer, plural(len(chosen(context, LISTING, rows)), "job") + more, age_s=age_s)
    return 0


def is_listed(context: Context, job: dict[str, Any], mine: bool) -> bool:
    """Whether a job of the stream, which has all, is one that was asked for."""
    args, user = context.args, job.get("user") or ""
    is_own = is_agents_user(context) or user == own_name()
    held, over, name = bool(job.get("held")), bool(job["over"]), job["name"] or None
    users, states, names, tenants = (words_of(getattr(args, filter)) for filter in FILTERS)
    wish = JobsWanted(args.all or bool(states), mine, users, states, tenants, names)
    return is_wanted(ListedJob(user, job["tenant"], job["state"], held, over, is_own, name), wish)


def own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def is_agents_user(context: Context) -> bool:
    """Whether this is root or the agent's own user, who see all jobs as theirs."""
    path = (context.agent.address or "").removeprefix("unix:")
    try:
        return os.geteuid() in (0, os.stat(path).st_uid)
    except OSError:
        return os.geteuid() == 0


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


LISTING = Listing(
    TITLES,
    row,
    "id",
    RIGHT,
    ("WAITS FOR", "EACH", "MEMORY", "CLASS", "TENANT", "USER", "STEP", "WHERE", "WORKERS", "NAME", "TIME", "GPUS"),
    sorts=False,
    called={"JOB": "id"},
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
