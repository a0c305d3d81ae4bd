"""How a job ended, in one line, and the last lines of the rank that failed first: said by `job`, `wait` and `why`."""

import base64
from typing import Any

from cli.client import Agent, AgentctlError
from cli.table import Paint, printable

LINES = 20
"""The last lines of the failed rank that are shown."""
LINE_MAX = 400
"""The most characters of a line that are shown."""
READ_BYTES = 16 * 1024
"""Bytes of output in which these lines are looked for."""


def ended(job: dict[str, Any], paint: Paint) -> str:
    """`failed 3: rank 1 on gpu2 exited with 3`; a job that runs: its state, and why."""
    word = job.get("ended_as") or job["state"]
    state, rest = job["state"], ""
    if state == "failed" and word != "failed":
        rest = word.removeprefix("failed") if word.startswith("failed") else f" ({word})"
    why = f": {job['reason']}" if job["reason"] else ""
    return f"{paint.state(state)}{rest}{why}"


def last_lines(agent: Agent, job: dict[str, Any]) -> list[str]:
    """The last lines of the rank whose failure ended the job, below a line that names it; or why they cannot be shown;
    nothing where no rank failed."""
    rank = job.get("failed_rank")
    if job["state"] != "failed" or rank is None:
        return []
    try:
        size = agent.get("jobs", job["id"], "logs", rank=rank, offset=0).data["size"]
        start = max(0, size - READ_BYTES)
        data = base64.b64decode(agent.get("jobs", job["id"], "logs", rank=rank, offset=start).data["data"])
    except AgentctlError as error:
        return [f"the last lines of rank {rank} cannot be shown: {error.why}"]
    shown = lines_of(data, whole=start == 0)
    first = ", which failed first" if job["ended_as"].startswith(("failed", "oom")) else ""
    if not shown:
        return [f"rank {rank} wrote nothing"]
    return [f"the last lines of rank {rank}{first}:", *(f"  {line}" for line in shown)]


def lines_of(data: bytes, whole: bool) -> list[str]:
    """The last lines of this output, as a terminal would show them. `whole`: it begins with a line."""
    found = data.split(b"\n")
    found = found if whole or len(found) == 1 else found[1:]
    text = [
        printable(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").expandtabs()).rstrip()
        for line in found
    ]
    kept = [line if len(line) <= LINE_MAX else f"{line[:LINE_MAX]}..." for line in text]
    while kept and not kept[-1]:
        kept.pop()
    return kept[-LINES:]
