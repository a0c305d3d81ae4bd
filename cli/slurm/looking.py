"""squeue and sacct: lists of jobs in Slurm's form. `sacct` shows jobs of the log, and of the records of ended ones."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cli.books.history import slurm_state
from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.slurm import books, states
from cli.slurm.options import read
from cli.slurm.states import PARTITION
from cli.table import printable
from cli.tls import SCHEME

SQUEUE = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
SQUEUE_LONG = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
SACCT = "JobID,JobName,Partition,Account,State,ExitCode"
_LISTS = {"user": "u", "jobs": "j", "states": "t", "name": "n", "account": "A", "format": "o", "sort": "S",
          "partition": "p",
          "clusters": "M"}  # fmt: skip
_FLAGS = {"noheader": "h", "long": "l", "all": "a", "array": "r", "me": ""}


def squeue(context: Context, words: Sequence[str]) -> int:
    said = read("squeue", words, _LISTS, _FLAGS)
    no_words("squeue", said.words)
    states.one_cluster("squeue", said.values)
    jobs = found(context, said.values, False)
    form = said.values.get("format") or (SQUEUE_LONG if "long" in said.values else SQUEUE)
    if "noheader" not in said.values:
        context.say(states.line(form, None))
    for job in jobs:
        context.say(states.line(form, job))
    return 0


def found(context: Context, said: Mapping[str, str], everything: bool) -> list[dict[str, Any]]:
    """The jobs that these options of Slurm name. `mine` is none of Slurm's: own ones, and for operators all."""
    wish: dict[str, Any] = {"all": 1 if everything else None}
    if "me" in said or "mine" in said:
        wish["mine"] = 1
    elif "user" in said:
        wish["user"] = said["user"]
    if "name" in said:
        wish["name"] = said["name"]
    if "account" in said:
        wish["tenant"] = said["account"]
    if said.get("states", "all").lower() != "all":
        wish["state"] = ",".join(states.state_of(word) for word in said["states"].split(","))
    jobs: list[dict[str, Any]] = context.agent.get("jobs", **wish).data
    if "me" in said:
        jobs = [job for job in jobs if _is_own(context, job)]
    if "jobs" not in said:
        return jobs
    wanted = [states.ours(id) for id in said["jobs"].split(",") if id]
    return [job for job in jobs if any(_is(job, id) for id in wanted)]


def _is_own(context: Context, job: Mapping[str, Any]) -> bool:
    """Whether a job is the caller's, among those that the agent calls own: for root and its own user these are all.
    What these two submit has no user. A certificate may name somebody else than this host does: then it is the agent
    that knows."""
    by_certificate = str(context.agent.address).startswith(SCHEME)
    return by_certificate or job.get("uid") in (None, os.geteuid())


def _is(job: Mapping[str, Any], id: str) -> bool:
    """Whether a job is this one, or a task of it."""
    return id in (job["id"], job.get("task")) or str(job.get("task", "")).startswith(f"{id}[")


FIELDS: Mapping[str, Any] = {
    "jobid": states.id_of,
    "jobidraw": lambda job: job["id"][1:],
    "jobname": lambda job: job["name"],
    "partition": lambda job: PARTITION,
    "account": lambda job: job["tenant"],
    "user": lambda job: job.get("user", ""),
    "state": lambda job: slurm_state(job) if job.get("ended_as") else states.STATES[job["state"]][1],
    "exitcode": lambda job: _exit_code(job["exit_code"]),
    "nodelist": lambda job: ",".join(states.nodes_of(job)) or "None assigned",
    "nnodes": lambda job: len(states.nodes_of(job)) or 1,
    "ntasks": lambda job: job["workers"],
    "elapsed": states.elapsed,
    "timelimit": states.time_limit,
    "submit": lambda job: _moment(job["times"]["submitted_wall_s"]),
    "start": lambda job: _moment(job["times"]["started_wall_s"]),
    "end": lambda job: _moment(job["times"]["ended_wall_s"]),
    "workdir": lambda job: job["cwd"],
    "reason": lambda job: job.get("ended_as") or states.reason_of(job) or "None",
}
"""Fields of sacct, in lower case -> what they show of a job."""


def sacct(context: Context, words: Sequence[str]) -> int:
    values = {**_LISTS, "state": "s", "starttime": "S", "endtime": "E"}
    values |= {"states": "", "sort": ""}
    flags = {"noheader": "n", "parsable2": "P", "parsable": "p", "allocations": "X", "allusers": "a", "me": ""}
    values |= {"name": "", "partition": "r"}
    said = read("sacct", words, values, flags)
    no_words("sacct", said.words)
    states.one_cluster("sacct", said.values)
    asked = {**said.values, **({"states": said.values["state"]} if "state" in said.values else {})}
    asked_for = [name.partition("%") for name in (asked.get("format") or SACCT).split(",") if name]
    names, widths = [name for name, _, _ in asked_for], [_width(width) for _, _, width in asked_for]
    for name in names:
        if name.lower() not in FIELDS:
            why = f"expected some of {', '.join(FIELDS)}"
            raise AgentctlError(USAGE, f"invalid field {name[:40]}", why, "sacct -o JobID,State")
    jobs = _accounted(context, asked)
    between = "|" if "parsable2" in asked or "parsable" in asked else " "
    rows = [] if "noheader" in asked else [names]
    rows += [[str(FIELDS[name.lower()](job)) for name in names] for job in jobs]
    for row in (list(map(printable, row)) for row in rows):
        cells = row if between == "|" else [_in(cell, width) for cell, width in zip(row, widths, strict=True)]
        context.say(between.join(cells).rstrip() + ("|" if "parsable" in asked else ""))
    return 0


def _width(text: str) -> int:
    """The width of a column, in characters: `%20` fills on the left, `%-20` on the right, as Slurm has it. 20 to the
    right unless it is said. AgentctlError: it is none."""
    if not re.fullmatch(r"-?[1-9]\d{0,4}|", text):
        raise AgentctlError(USAGE, f"invalid width {text[:40]}", "expected a number after %", "sacct -o JobName%30")
    return int(text or -20)


def _in(cell: str, width: int) -> str:
    return cell[:width].rjust(width) if width > 0 else cell[:-width].ljust(-width)


def _accounted(context: Context, asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """The jobs of the log, and the ended ones that it has forgotten, that these options name, in order of their ids."""
    since_s, until_s = (books.moment(asked.get(name)) for name in ("starttime", "endtime"))
    if "jobs" in asked:
        asked = {**asked, "jobs": ",".join(_without_step(id) for id in asked["jobs"].split(","))}
    jobs = found(context, asked, True)
    if "jobs" in asked:
        ids = [states.ours(id) for id in asked["jobs"].split(",") if id]
        known = {name for job in jobs for name in (job["id"], job.get("task"))}
        forgotten = books.of_ids(context, [id for id in ids if "[" not in id and id not in known], asked)
    else:
        forgotten = books.without(books.of_books(context, asked, since_s), jobs)
    if "me" in asked:
        forgotten = [job for job in forgotten if _is_own(context, job)]
    if asked.get("states", "all").lower() != "all":
        wanted = [states.state_of(word) for word in asked["states"].split(",")]
        forgotten = [job for job in forgotten if job["state"] in wanted]
    jobs = [job for job in (*forgotten, *jobs) if books.within(job, since_s, until_s)]
    return sorted(jobs, key=lambda job: int(job["id"][1:]))


def _without_step(id: str) -> str:
    """The job of `12.0` or `12.batch`: a job has one step here. Empty for a later one, which no job has."""
    job, _, step = id.partition(".")
    return job if step in ("", "0", "batch") else ""


def _exit_code(code: int | None) -> str:
    """`3:0`, or `0:15` of a job that a signal ended."""
    return f"0:{code - 128}" if code is not None and code > 128 else f"{code or 0}:0"


def _moment(wall_s: float | None) -> str:
    return "Unknown" if wall_s is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(wall_s))


def no_words(program: str, words: Sequence[str]) -> None:
    if words:
        raise AgentctlError(USAGE, f"unexpected argument {words[0]!r}", f"{program} takes options", f"{program} --me")
