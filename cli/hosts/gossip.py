"""Show how the hosts of the rack hear of one another: what each sent and received since its agent started, on average
per second; its own health (0 is healthy); probes, and those without an answer; datagrams that it dropped, by why; and
who suspects whom now."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.context import Context
from cli.lists import Listing, list_arguments, show
from covey.core.units import format_seconds

TITLES = (
    "HOST",
    "HEALTH",
    "SENT/s",
    "SENT KB/s",
    "HEARD/s",
    "HEARD KB/s",
    "PROBES",
    "FAILED",
    "REFUTED",
    "STALLS",
    "LONGEST",
)
RIGHT = TITLES[1:]
RATES = ("sent", "sent_bytes", "received", "received_bytes")
DROPPED = {
    "malformed": "that are no gossip",
    "oversized": "too large",
    "other_cluster": "of another rack",
    "other_version": "of another version",
    "reflected": "of its own",
    "replayed": "seen before",
    "unknown_key": "sealed with an unknown key",
    "unsealed": "with a broken seal",
}
"""Reasons for which datagrams are dropped -> words for them."""


def arguments(parser: argparse.ArgumentParser) -> None:
    list_arguments(parser)


def run(context: Context) -> int:
    answer = context.agent.gather("gossip")
    rows = sorted(answer.data, key=lambda row: str(row["host"]))
    if not show(context, Listing(TITLES, line, "host", RIGHT), answer, rows):
        return context.whole(answer)
    for row in rows:
        for note in notes(row):
            context.say(f"{row['host']}: {note}")
    context.as_of(answer)
    return context.whole(answer)


def line(row: Mapping[str, Any]) -> list[str]:
    up_s = max(1.0, row["up_s"])
    rates = [f"{row[name] / up_s / (1000 if 'bytes' in name else 1):.1f}" for name in RATES]
    counts = [str(row[name]) for name in ("probes", "probes_failed", "refutations", "stalls")]
    return [row["host"], str(row["health"]), *rates, *counts, f"{row['stalled_s']:.2f} s"]


def notes(row: Mapping[str, Any]) -> list[str]:
    """What should be known of a host's gossip besides its numbers."""
    found = ["no other host answers it"] if row["alone"] else []
    for each in row["suspects"]:
        by = f" by {each['by']}" if each["by"] else ""
        found.append(f"knows that {each['host']} is suspected{by}, for {format_seconds(each['since_s'])}")
    dropped = [f"{count} {DROPPED.get(why, why.replace('_', ' '))}" for why, count in sorted(row["dropped"].items())]
    if dropped:
        found.append(f"dropped datagrams: {', '.join(dropped)}")
    if row["full"]:
        found.append(f"its table is full, {row['full']} times a host was not taken; raise hosts_max on every host")
    return found
