"""Jobs that the log has forgotten, from the records of ended jobs (`agentctl history`), for `sacct`."""

import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from cli.books import history
from cli.client import NOT_FOUND, REFUSED, AgentctlError
from cli.context import Context

LIMIT_MAX = 100_000
"""The most jobs that an agent lists (`plugins.scheduler.machine.books.asked_for`)."""
ONE = {"user": "user", "account": "tenant", "name": "name"}
"""Options of sacct with which records are asked for -> the field of a job."""

UNITS_S = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86_400, "weeks": 604_800}
"""Slurm's units of time -> seconds."""


def of_books(context: Context, said: Mapping[str, str], since_s: float | None) -> list[dict[str, Any]]:
    """Jobs with a record, in the words of the log: the newest that these options name, or that ended since. What could
    not be read is said on stderr."""
    limit = history.LIMIT if since_s is None else LIMIT_MAX
    asks = {field: said[name] for name, field in ONE.items() if name in said and "," not in said[name]}
    try:
        answer = context.agent.get("history", since_wall_s=since_s, limit=limit, **asks)
    except AgentctlError as error:
        _left_out(error)
        return []
    rows = answer.data["jobs"]
    more = [each for each in (history.cut(len(rows), limit), *history.not_whole(answer.data)) if each]
    if more:
        print(f"sacct: {'; '.join(more).replace('--limit N', '-S TIME')}", file=sys.stderr)
    context.whole(answer)
    return [as_job(row) for row in rows if _is_wanted(row, said)]


def of_ids(context: Context, ids: Sequence[str], said: Mapping[str, str]) -> list[dict[str, Any]]:
    """The jobs of these ids that have a record, and that these options name."""
    found = []
    for id in ids:
        try:
            told = context.agent.get("jobs", id, "report").data
        except AgentctlError as error:
            _left_out(error)
            continue
        if told["over"] and _is_wanted(told["job"], said):
            found.append(as_job(told["job"]))
    return found


def _left_out(error: AgentctlError) -> None:
    if error.code not in (NOT_FOUND, REFUSED):
        raise error
    print(f"sacct: without jobs that the log has forgotten: {error.what}: {error.why}", file=sys.stderr)


def _is_wanted(row: Mapping[str, Any], said: Mapping[str, str]) -> bool:
    """Whether a job is one of those whose users, tenants and names were listed."""
    return all(
        any(fnmatchcase(row[field], word) if field == "name" else row[field] == word for word in said[name].split(","))
        for name, field in ONE.items()
        if name in said
    )


def as_job(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record in the words of a job of the log. A record has no directory, and of a task no array."""
    times = {name: row[name] for name in ("submitted_wall_s", "started_wall_s", "ended_wall_s")}
    places = [{"host": host} for host in row["hosts"]]
    return {**row, "times": {**times, "for_s": row["took_s"]}, "places": places, "over": True, "cwd": ""}


def moment(text: str | None) -> float | None:
    """Seconds since 1970 of a time that sacct takes: ours, and Slurm's `now`, `now-2days`, `today` and `midnight`."""
    if text is None:
        return None
    now_s, word = time.time(), text.strip().lower()
    if word in ("today", "midnight"):
        return time.mktime((*time.localtime(now_s)[:3], 0, 0, 0, 0, 0, -1))
    if found := re.fullmatch(r"now(?:([+-])(\d{1,9})([a-z]*))?", word):
        unit = UNITS_S.get(found[3] or "seconds") or UNITS_S.get(f"{found[3]}s")
        if unit is not None:
            return now_s + int(found[2] or 0) * unit * (-1 if found[1] == "-" else 1)
    return history.since(text, now_s, "--starttime")


def within(job: Mapping[str, Any], since_s: float | None, until_s: float | None) -> bool:
    """Whether a job had not ended by `since_s`, and was submitted by `until_s`."""
    times = job["times"]
    ended_s = times["ended_wall_s"]
    after = since_s is None or ended_s is None or ended_s >= since_s
    return after and (until_s is None or times["submitted_wall_s"] <= until_s)


def without(rows: Sequence[dict[str, Any]], jobs: Collection[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of those that are none of these jobs."""
    known = {job["id"] for job in jobs}
    return [row for row in rows if row["id"] not in known]
