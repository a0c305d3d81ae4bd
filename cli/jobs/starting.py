"""When jobs that wait will start, in words, for `jobs`, `job`, `why` and `submit --dry-run`."""

from collections.abc import Mapping
from typing import Any

from cli.client import AgentctlError
from cli.context import Context
from covey.core.units import format_seconds

BUSY = "start: being worked out; ask again in a few seconds"


LIST_S = 0.1
"""Seconds for which a list waits: what is not worked out by then is shown the next time."""


def starts_of(context: Context, id: str | None = None) -> dict[str, str]:
    """Job that waits -> when it will start, in words. `id`: of this job alone, for which a few seconds are waited. An
    agent that cannot say, such as an older one, says nothing."""
    try:
        found = context.agent.get("starts", job=id, wait_s=LIST_S if id is None else None).data
    except AgentctlError:
        return {}
    said = {each["id"]: words(each, found["age_s"]) for each in found["starts"]}
    return {id: BUSY} | said if id is not None and not found["whole"] else said


def words(start: Mapping[str, Any], age_s: float = 0.0) -> str:
    """`starts within 12 min (p50), 1 h 5 min (p90), from 34 jobs of ann named bert* ...`; or why that is not known."""
    p50_s, p90_s, basis = start["p50_s"], start["p90_s"], start["basis"]
    if p50_s is None:
        return f"start {basis}"
    if not p90_s and p90_s is not None:
        return f"starts at once: {basis}"
    p90 = "p90 not known" if p90_s is None else f"{soon(p90_s - age_s)} (p90)"
    return f"starts within {soon(p50_s - age_s)} (p50), {p90}, {basis}"


def soon(seconds: float) -> str:
    """Seconds from now, a few at least."""
    return format_seconds(float(max(1, round(seconds))))
