"""Every GPU of the rack, and which job holds it. `--line` gives one line for a status bar, `--watch` shows who shares
each of them and what each may do there, again and again."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli import shared_gpus
from cli.context import Context
from cli.table import ago, plural, table
from covey.units import format_size

TITLES = ("HOST", "GPU", "MODEL", "MEMORY USED", "OF", "BUSY", "JOB", "SEEN")


AWAY = ("away", "gone", "left")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--line", action="store_true", help="one line for tmux and the like")
    said = "who shares each GPU, again every second or so"
    parser.add_argument("--watch", nargs="?", const=1.0, type=float, metavar="SECONDS", help=said)


def run(context: Context) -> int:
    if context.args.watch is not None:
        return shared_gpus.watch(context, max(0.2, context.args.watch))
    answer = context.agent.gather("gpus")
    if context.json:
        context.say_json(answer.whole)
        return context.whole(answer)
    gpus = answer.data
    uses = [use(gpu) for gpu in gpus]
    free, away = uses.count("free"), sum(name in AWAY for name in uses)
    summary = f"{plural(len(gpus), 'GPU')}: {len(gpus) - free - away} held, {free} free"
    summary += f", {away} on hosts that are gone" if away else ""
    if context.args.line:
        silent = len(answer.unanswered)
        context.say(summary + (f"; {plural(silent, 'host')} did not answer" if silent else ""))
        return context.whole(answer)
    rows = [
        (
            gpu["host"],
            gpu["index"],
            gpu["model"] + (" (simulated)" if gpu["simulated"] and "simulated" not in gpu["model"].lower() else ""),
            format_size(gpu["memory_used_bytes"]),
            format_size(gpu["memory_total_bytes"]),
            f"{gpu['utilization']:.0%}",
            name,
            ago(gpu["age_s"]),
        )
        for gpu, name in zip(gpus, uses, strict=True)
    ]
    context.say(table(TITLES, rows, ("GPU", "MEMORY USED", "OF", "BUSY"), context.paint))
    context.as_of(answer, summary, age_s=max((gpu["age_s"] for gpu in gpus), default=0.0))
    return context.whole(answer)


def use(gpu: Mapping[str, Any]) -> str:
    """Its job and those beside it (`j3 +j5`), `free`, or that its host is `gone` or has `left`: then no job holds it
    and none gets it."""
    state = gpu.get("host_state", "alive")
    if state in AWAY:
        return str(state)
    return " ".join([*([gpu["job"]] if gpu["job"] else []), *(f"+{id}" for id in gpu.get("beside", ()))]) or "free"
