"""Jobs in Slurm's words: ids, states, names of hosts, times, and formats with `%`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from cli.client import USAGE, AgentctlError
from cli.table import printable

STATES = {
    "queued": ("PD", "PENDING"),
    "placing": ("CF", "CONFIGURING"),
    "running": ("R", "RUNNING"),
    "stopping": ("CG", "COMPLETING"),
    "done": ("CD", "COMPLETED"),
    "failed": ("F", "FAILED"),
    "cancelled": ("CA", "CANCELLED"),
}
"""State of a job -> Slurm's letters and word for it."""
PARTITION = "covey"
"""The one partition that there is."""


def id_of(job: Mapping[str, Any]) -> str:
    """`12`; `12_3` for a task of an array, and `12_[0-99%8]` for the array."""
    if job.get("task"):
        array, _, index = str(job["task"]).partition("[")
        return f"{array[1:]}_{index.rstrip(']')}"
    number = str(job["id"])[1:]
    return f"{number}_[{job['array']}]" if job.get("array") and not job["over"] else number


def ours(id: str) -> str:
    """Our id of `12`, `12_3` or `12_[3-7]`. AgentctlError: it is none."""
    found = re.fullmatch(r"j?(\d{1,18})(?:_(?:(\d{1,9})|\[([0-9,\-]+)\]))?", id)
    if found is None:
        raise AgentctlError(USAGE, f"invalid job id {id[:80]}", "expected 12, or 12_3 of an array", "squeue --me")
    tasks = found[2] or found[3]
    return f"j{found[1]}" + (f"[{tasks}]" if tasks else "")


def state_of(word: str) -> str:
    """Our state for `PD` or `PENDING`. AgentctlError: it is none."""
    for state, (letters, name) in STATES.items():
        if word.upper() in (letters, name):
            return state
    known = ", ".join(name for _, name in STATES.values())
    raise AgentctlError(USAGE, f"invalid state {word[:40]}", f"expected one of {known}", "squeue -t PENDING,RUNNING")


def nodes_of(job: Mapping[str, Any]) -> list[str]:
    return [str(place["host"]) for place in job["places"]]


def reason_of(job: Mapping[str, Any]) -> str:
    """The hosts of a job, or in brackets why it has none."""
    if job["state"] in ("running", "stopping"):
        return ",".join(nodes_of(job))
    if job.get("held"):
        return "(JobHeldUser)"
    if job.get("after"):
        return "(Dependency)"
    if job.get("begin_wall_s"):
        return "(BeginTime)"
    return f"({job['reason']})" if job["reason"] else ""


def elapsed(job: Mapping[str, Any]) -> str:
    """`1-02:03:04`, `2:03:04` or `3:04` of running; `0:00` before."""
    return clock(job["times"]["for_s"] if job["times"]["started_wall_s"] is not None else 0.0)


def clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def time_limit(job: Mapping[str, Any]) -> str:
    return "UNLIMITED" if job.get("time_limit_s") is None else clock(job["time_limit_s"])


Letters = Mapping[str, tuple[str, Callable[[Any], Any]]]
"""Letters of a format -> title, and what they show of what a line is about."""
LETTERS: Letters = {
    "i": ("JOBID", id_of),
    "A": ("JOBID", lambda job: job["id"][1:]),
    "F": ("ARRAY_JOB_ID", lambda job: id_of(job).partition("_")[0]),
    "K": ("ARRAY_TASK_ID", lambda job: id_of(job).partition("_")[2] or "N/A"),
    "P": ("PARTITION", lambda job: PARTITION),
    "j": ("NAME", lambda job: job["name"]),
    "u": ("USER", lambda job: job.get("user", "")),
    "a": ("ACCOUNT", lambda job: job["tenant"]),
    "q": ("QOS", lambda job: job["job_class"]),
    "t": ("ST", lambda job: STATES[job["state"]][0]),
    "T": ("STATE", lambda job: STATES[job["state"]][1]),
    "M": ("TIME", elapsed),
    "l": ("TIME_LIMIT", time_limit),
    "D": ("NODES", lambda job: len(nodes_of(job)) or 1),
    "C": ("CPUS", lambda job: job["workers"]),
    "b": ("TRES_PER_NODE", lambda job: f"gpu:{job['gpus']}" if job["gpus"] else "N/A"),
    "N": ("NODELIST", lambda job: ",".join(nodes_of(job))),
    "R": ("NODELIST(REASON)", reason_of),
    "r": ("REASON", reason_of),
    "Z": ("WORK_DIR", lambda job: job["cwd"]),
    "o": ("COMMAND", lambda job: " ".join(job["argv"])),
}
"""Letters of squeue's formats -> title, and what they show of a job."""
_FIELD = re.compile(r"%(\.?)(\d*)(.)")


def letters_of(form: str) -> set[str]:
    return {found[3] for found in _FIELD.finditer(form)}


def line(form: str, about: Any, letters: Letters = LETTERS) -> str:
    """A line in this format of squeue, or of whatever has these letters; its titles when it is about nothing (None).
    AgentctlError: a letter stands for nothing."""

    def part(found: re.Match[str]) -> str:
        if found[3] == "%":
            return "%"
        if found[3] not in letters:
            known = " ".join(f"%{letter}" for letter in letters)
            raise AgentctlError(USAGE, f"invalid format {found[0]}", f"expected some of {known}", "leave it out")
        title, shown = letters[found[3]]
        text, width = title if about is None else printable(str(shown(about))), int(found[2] or 0)
        if not width:
            return text
        return text[:width].rjust(width) if found[1] else text[:width].ljust(width)

    return _FIELD.sub(part, form).rstrip()


def one_cluster(program: str, said: Mapping[str, str]) -> None:
    """AgentctlError: another cluster than the one rack is asked for."""
    if said.get("clusters", "all") not in ("all", PARTITION):
        why = "there is one rack: agentctl --agent ADDRESS asks another one"
        raise AgentctlError(USAGE, f"invalid --clusters={said['clusters'][:40]}", why, f"{program} without --clusters")
