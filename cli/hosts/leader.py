"""Show which host leads, since when, and how old this host's copy of the log may be."""

import argparse

from cli.context import Context
from cli.table import ago, pairs
from covey.core.units import format_seconds


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    answer = context.agent.get("leader")
    if context.json:
        return context.say_json(answer.whole)
    leader = answer.data
    known_s = leader["since_s"]
    rows = [
        ("leader", leader["leader"] or "none now: running jobs continue, changes wait"),
        ("for", "" if known_s is None else format_seconds(known_s)),
        ("term", leader["term"]),
        ("voters", ", ".join(leader["voters"])),
        ("log", f"entry {leader['applied_index']}, confirmed {ago(leader['age_s'])}"),
    ]
    context.say(pairs(rows, context.paint))
    context.as_of(answer)
    return 0
