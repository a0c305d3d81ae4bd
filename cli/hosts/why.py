"""Show the event log of one job (j1), slab (slab/VOLUME/N), volume or host: what happened, when, where and why.

HOST is where an event happened; `rack` means that the hosts agreed on it in their common log. Events about a host are
recorded by other hosts, so there the column names the host that recorded them."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cli.books.ending import ended, last_lines
from cli.client import AgentctlError
from cli.context import Context, not_found
from cli.job_ids import ids_of
from cli.jobs.starting import starts_of
from cli.lists import Listing, list_arguments, show
from cli.table import clock, plural

TITLES = ("TIME", "HOST", "OF", "EVENT", "WHY")
AGREED = "log/"
"""Key of an event that every host noted when it applied the log: which host's note is shown means nothing."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="j1, slab/VOLUME/N, a volume's or a host's name")
    list_arguments(parser)


def run(context: Context) -> int:
    if re.fullmatch(r"j\d+[\[_]\d+\]?", context.args.id):  # a task of an array: events are those of its job
        context.args.id = context.agent.get("jobs", *ids_of([context.args.id])).data["id"]
    try:
        answer = context.agent.gather("why", context.args.id)
    except AgentctlError as error:
        not_found(context, error, context.args.id)
    if show(context, listing_of(answer.data), answer):
        say_now(context)
        context.as_of(answer, plural(len(answer.data), "event"))
    return context.whole(answer)


def listing_of(lines: Sequence[Mapping[str, Any]]) -> Listing:
    """How these events are listed: whose each one is stands there only where they are of several, and of hosts the
    column HOST names who recorded them."""
    several = len({line["subject"] for line in lines}) > 1
    seen = all(line["subject"].startswith("host/") for line in lines)
    titles = tuple("SEEN BY" if seen and title == "HOST" else title for title in TITLES)

    def cells(line: Mapping[str, Any]) -> tuple[object, ...]:
        of = line["subject"] if several else ""
        return clock(line["wall_s"]), where(line), of, line["event"], line["reason"]

    return Listing(titles, cells, "event", least=("OF", titles[1], "WHY", "EVENT"))


def say_now(context: Context) -> None:
    """A job's state and the reason: what one waits for is no event, and of one that failed the last lines that its
    rank wrote say more."""
    try:
        view = context.agent.get("jobs", context.args.id).data
    except AgentctlError:
        return
    if not view["over"] or view["state"] == "failed":
        context.say_folded(f"{'' if view['over'] else 'now '}{ended(view, context.paint)}")
        for line in last_lines(context.agent, view):
            context.say(line)
    if view["state"] == "queued" and (starts := starts_of(context, view["id"])):
        context.say_folded(starts[view["id"]])


def where(line: Mapping[str, Any]) -> str:
    return "rack" if line.get("key", "").startswith(AGREED) else str(line["host"])
