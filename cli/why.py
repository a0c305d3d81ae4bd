"""The story of one job (j1), slab (slab/VOLUME/N), volume or host: every event, when, where and why."""

import argparse

from cli.client import AgentctlError
from cli.context import Context, not_found
from cli.table import clock, plural, table

TITLES = ("TIME", "HOST", "OF", "EVENT", "WHY")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="j1, slab/VOLUME/N, a volume's or a host's name")


def run(context: Context) -> int:
    try:
        answer = context.agent.get("why", context.args.id)
    except AgentctlError as error:
        not_found(context, error, context.args.id)
    if context.json:
        return context.say_json(answer.whole)
    several = len({line["subject"] for line in answer.data}) > 1
    rows = [
        (clock(line["wall_s"]), line["host"], line["subject"] if several else "", line["event"], line["reason"])
        for line in answer.data
    ]
    context.say(table(TITLES, rows, (), context.paint))
    context.as_of(answer, plural(len(rows), "event"))
    return 0
