"""`agentctl gpus --shared`: who shares each GPU and what each may do there, again every second."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cli.context import Context
from cli.jobs.jobs import step_time
from cli.table import plural, table
from covey.core.units import format_size

TITLES = ("HOST", "GPU", "STATE", "BUSY", "FREE", "JOB", "CLASS", "MAY", "LIMIT", "ON HOST", "STEP", "HELD BY")
RIGHT = ("BUSY", "FREE", "LIMIT", "ON HOST", "STEP")
CLEAR = "\x1b[H\x1b[2J"


def watch(context: Context, every_s: float) -> int:
    """Until it is interrupted; on something that is no terminal one table after the other."""
    while True:
        once(context)
        time.sleep(every_s)


def once(context: Context) -> None:
    answer = context.agent.gather("shared_gpus")
    if context.paint.width:
        context.say(CLEAR + _text(context, answer.data))
    else:
        context.say(_text(context, answer.data))
    shared = sum(len(gpu["jobs"]) > 1 for gpu in answer.data)
    said = f"{plural(len(answer.data), 'GPU')}, {shared} shared"
    context.as_of(answer, said, age_s=max((gpu["age_s"] for gpu in answer.data), default=0.0))
    context.whole(answer)


def _text(context: Context, gpus: Sequence[Mapping[str, Any]]) -> str:
    return table(TITLES, [row for gpu in gpus for row in rows(gpu)], RIGHT, context.paint)


def rows(gpu: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """One for each job; the GPU itself is named in the first."""
    state = gpu["state"] if gpu["condition"] in ("ok", gpu["state"]) else f"{gpu['state']}, {gpu['condition']}"
    busy = None if gpu["utilization"] is None else f"{gpu['utilization']:.0%}"
    head = (gpu["host"], gpu["gpu"], state, busy, format_size(gpu["memory_free_bytes"]))
    if not gpu["jobs"]:
        yield (*head, *[None] * 7)
    for place, job in enumerate(gpu["jobs"]):
        yield (*(head if place == 0 else ("", "", "", "", "")), *_job(job))


def _job(job: Mapping[str, Any]) -> tuple[object, ...]:
    limit = format_size(job["memory_limit_bytes"]) + _obeyed(job)
    spilled = format_size(job["spill_bytes"]) if job["spill_bytes"] else None
    gate = {True: "itself", False: "nothing", None: None}[job["gate"]]
    step = step_time(job["step_s"]) if job["step_s"] else None
    return (job["job"], job["kind"], job["may"], limit, spilled, step, gate)


def _obeyed(job: Mapping[str, Any]) -> str:
    """Whether it goes by its memory limit, where that needs a word."""
    if job.get("fixed"):
        return " (at its start)" if job["applied"] else " (ignored)"
    return "" if job["applied"] else " (not yet)"
