"""Show or change which hosts vote on the log. `agentctl voters` shows them; changes are made one at a time.

  add HOST          HOST receives the log as a learner, and votes once it has caught up
  remove HOST       HOST stops voting and observes; a leader hands over its leadership first
  replace OLD NEW   add NEW, then remove OLD

A change continues under any leader, so waiting for it here may be interrupted. To cancel a change, type its opposite:
`remove` the learner, or `add` the host that is leaving."""

import argparse
import time
from collections.abc import Mapping
from typing import Any

from cli.client import TOO_LATE, USAGE, AgentctlError, Answer
from cli.context import Context
from cli.lists import Listing, list_arguments, show
from cli.table import ago

TITLES = ("HOST", "PART", "LEADS", "ENTRY", "SEEN", "ITS AGENT.TOML")
HOSTS = {"list": 0, "add": 1, "remove": 1, "replace": 2}
"""Verb -> how many hosts it names."""
WAIT_S = 60.0
"""How long a change is waited for unless `--timeout` says otherwise."""
LOOK_S = 0.3
"""Between two looks at it."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", default="list", choices=tuple(HOSTS))
    list_arguments(parser)
    parser.add_argument("hosts", nargs="*", metavar="HOST")
    parser.add_argument("--force", action="store_true", help="add a host that is away; it catches up when it returns")
    parser.add_argument(
        "--no-wait", action="store_true", help="return once the change has begun, without waiting for its end"
    )


def run(context: Context) -> int:
    verb, hosts = context.args.verb, context.args.hosts
    if len(hosts) != HOSTS[verb]:
        usage = {"list": "", "replace": " OLD NEW"}.get(verb, " HOST")
        why = f"`{verb}` takes {HOSTS[verb] or 'no'} host{'' if HOSTS[verb] == 1 else 's'}"
        raise AgentctlError(USAGE, f"voters {verb}: {len(hosts)} hosts given", why, f"agentctl voters {verb}{usage}")
    if verb == "list":
        return listed(context, context.agent.gather("voters"))
    wish = {"add": hosts[-1]} if verb != "remove" else {}
    wish |= {"remove": hosts[0]} if verb != "add" else {}
    answer = context.agent.post("voters", body={**wish, "force": context.args.force})
    if not context.json:
        context.say(answer.data["said"])
    if context.args.no_wait:
        return context.say_json(answer.whole) if context.json else 0
    listed(context, wait(context, wish.get("add", ""), wish.get("remove", "")))
    return 0  # the change is complete, also where the host that votes no more is dead, and said nothing of itself


def wait(context: Context, add: str, remove: str) -> Answer:
    """Until the log says so. AgentctlError when the time is over: the change goes on."""
    limit_s = WAIT_S if context.args.timeout is None else context.args.timeout
    end_s = time.monotonic() + limit_s
    while True:
        answer = context.agent.gather("voters")
        now = answer.data
        if not now["under_way"] and (not add or add in now["voters"]) and remove not in now["voters"]:
            return answer
        if time.monotonic() > end_s:
            why = now["under_way"] or "this host's copy of the log does not show it yet"
            raise AgentctlError(
                TOO_LATE,
                f"the change is not complete after {limit_s:g} s",
                why,
                "it continues; watch it with agentctl voters",
            )
        time.sleep(LOOK_S)


def listed(context: Context, answer: Answer) -> int:
    now = answer.data
    if not show(context, Listing(TITLES, line, "host", ("ENTRY",), ("ITS AGENT.TOML", "SEEN")), answer, now["rows"]):
        return context.whole(answer)
    notes = [f"{row['host']}: {note}" for row in now["rows"] for note in row["notes"]]
    for note in [now["under_way"], *notes]:
        if note:
            context.say(note)
    for row in now["rows"]:
        if row["part"] in ("away", "silent"):
            host = row["host"]
            context.say(f"next: agentctl why host/{host}; agentctl voters replace {host} OTHER, if it stays away")
    context.as_of(answer)
    return context.whole(answer)


def line(row: Mapping[str, Any]) -> tuple[object, ...]:
    away = row["part"] in ("away", "silent")
    return (
        row["host"],
        row["part"],
        "leads" if row["leads"] and not away else "",
        row["entry"] or "",
        "" if away and not row["entry"] else ago(row["age_s"]),
        ", ".join(row["names"]),
    )
