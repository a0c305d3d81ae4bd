"""Let the tuner divide an elastic job's ranks and tables among its hosts: `agentctl tune j1`; `agentctl tune j1 off`.

It measures the job's hosts, predicts which division has shorter steps, changes the job if that saves 5 %, and looks
whether it was right (`agentctl why j1` keeps both times). What the job computes does not change. On a job that is tuned
already this shows what was measured, and the best division known; a tuner that gave up begins anew.

PASS is what one process computes for one rank in a step, CARD what the host's card carries in one direction. A host
with ranks is a worker, one with tables a server (it sums), most are both. BEST is the division that the tuner would
choose now."""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cli.client import AgentctlError
from cli.context import Context, not_found
from cli.table import Paint, table
from covey.core.units import format_seconds, format_size

TITLES = ("HOST", "ROLE", "PROCESSES", "RANKS", "TABLES", "BEST", "PASS", "CARD")
BEGINS_S, LOOK_S = 5.0, 0.2
"""How long a tuner is waited for that has just been switched on, and between two looks."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")
    parser.add_argument("off", nargs="?", choices=("off",), help="stop tuning it; its division stays as it is")


def run(context: Context) -> int:
    job = context.args.job
    try:
        if context.args.off:
            context.agent.post("jobs", job, "tune", body={"on": False})
            return context.say_json({"job": job, "tuned": False}) if context.json else _off(context, job)
        known = context.agent.get("jobs", job)
        before = _now(context, job) if (known.data.get("elastic") or {}).get("tuned_by") else None
        if before is None or before["left_alone"]:
            context.agent.post("jobs", job, "tune", body={"on": True})
            answer = _seen(context, job, None if before is None else before["asked"])
        else:
            answer = _seen(context, job)
    except AgentctlError as error:
        not_found(context, error, job)
    if context.json:
        return context.say_json(answer.whole)
    for line in told(answer.data, context.paint):
        context.say(line)
    context.say(f"next: agentctl why {job} (what it changes, predicted and measured), agentctl tune {job} off")
    return 0


def _off(context: Context, job: str) -> int:
    context.say(f"{job} is not tuned; its division stays as it is: agentctl job {job}")
    return 0


def _now(context: Context, job: str) -> Mapping[str, Any]:
    """What the tuner of a job that is tuned knows now; nothing, where it has not begun."""
    try:
        data: Mapping[str, Any] = context.agent.get("jobs", job, "tuner").data
    except AgentctlError:
        return {"left_alone": False}
    return data


def _seen(context: Context, job: str, before: int | None = None) -> Any:
    """What the tuner knows, once its coordinator has begun; `before`: when the tuner was switched on that had given up,
    and whose answer is not waited for."""
    end_s = time.monotonic() + BEGINS_S
    while True:
        try:
            answer = context.agent.get("jobs", job, "tuner")
            if answer.data["asked"] != before or time.monotonic() > end_s:
                return answer
        except AgentctlError:
            if time.monotonic() > end_s:
                raise
        time.sleep(LOOK_S)


def told(view: Mapping[str, Any], paint: Paint) -> Sequence[str]:
    """The lines for people."""
    rows = [
        (
            host["host"],
            host["role"],
            host["processes"],
            host["ranks"],
            host["tables"],
            "-" if host["best_ranks"] is None else f"{host['best_ranks']} ranks, {host['best_tables']} tables",
            _seconds(host["pass_s"]),
            "-" if host["card_bytes_per_s"] is None else f"{format_size(int(host['card_bytes_per_s']))}/s",
        )
        for host in view["hosts"]
    ]
    step = f"a step takes {_seconds(view['step_s'])}, with the best division {_seconds(view['best_step_s'])}"
    size = format_size(view["model_bytes"]) if view["model_bytes"] else "a size that is not known"
    lines = [table(TITLES, rows, TITLES[2:5], paint), f"{step}; each rank pushes {size} in a step"]
    lines += [
        f"changed: predicted {_seconds(one['predicted_s'])} a step, measured {_seconds(one['measured_s'])}, "
        f"before {_seconds(one['before_s'])}"
        for one in view["predictions"]
    ]
    return [*lines, f"the tuner on {view['coordinator']} {view['doing']}"]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.1f} ms" if value < 10 else format_seconds(value)
