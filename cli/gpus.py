"""Every GPU of the rack, and which job holds it. `--line` gives one line for a status bar."""

import argparse

from cli.context import Context
from cli.table import ago, plural, table
from covey.units import format_size

TITLES = ("HOST", "GPU", "MODEL", "MEMORY USED", "OF", "BUSY", "JOB", "SEEN")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--line", action="store_true", help="one line for tmux and the like")


def run(context: Context) -> int:
    answer = context.agent.get("gpus")
    if context.json:
        return context.say_json(answer.whole)
    gpus = answer.data
    held = sum(gpu["job"] is not None for gpu in gpus)
    summary = f"{plural(len(gpus), 'GPU')}: {held} held, {len(gpus) - held} free"
    if context.args.line:
        context.say(summary)
        return 0
    rows = [
        (
            gpu["host"],
            gpu["index"],
            gpu["model"] + (" (simulated)" if gpu["simulated"] and "simulated" not in gpu["model"].lower() else ""),
            format_size(gpu["memory_used_bytes"]),
            format_size(gpu["memory_total_bytes"]),
            f"{gpu['utilization']:.0%}",
            gpu["job"] or "free",
            ago(gpu["age_s"]),
        )
        for gpu in gpus
    ]
    context.say(table(TITLES, rows, ("GPU", "MEMORY USED", "OF", "BUSY"), context.paint))
    context.as_of(answer, summary, age_s=max((gpu["age_s"] for gpu in gpus), default=0.0))
    return 0
