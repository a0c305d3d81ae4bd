"""Who is in the rack, what state each host is in, and what it can spare, as the answering agent knows it by gossip."""

import argparse

from cli.context import Context
from cli.table import ago, of, plural, table
from covey.units import format_seconds

TITLES = ("HOST", "STATE", "LEADS", "FOR", "GPUS FREE", "SLABS FREE", "SLABS LENT", "SUMS FOR", "SEEN", "NOTE")


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    answer = context.agent.get("hosts")
    if context.json:
        return context.say_json(answer.whole)
    rows = [
        (
            host["host"],
            host["state"],
            "leader" if host["leads"] else "",
            format_seconds(host["since_s"]),
            of(host["gpus_free"], host["gpus_total"]),
            host["slabs_free"],
            host["slabs_lent"],
            plural(host["aggregator_jobs"], "job") if host["aggregator_jobs"] else "",
            ago(host["age_s"]),
            note(host),
        )
        for host in answer.data
    ]
    context.say(table(TITLES, rows, ("FOR", "GPUS FREE", "SLABS FREE", "SLABS LENT"), context.paint))
    alive = sum(host["state"] == "alive" for host in answer.data)
    leader = next((host["host"] for host in answer.data if host["leads"]), None)
    alive_text = f"{alive} of {plural(len(answer.data), 'host')} alive"
    context.as_of(answer, alive_text, f"{leader} leads" if leader else "no leader now")
    return 0


def note(host: dict[str, object]) -> str:
    failed, suspected_by = host["rooms_failed"], host["suspected_by"]
    parts = [f"suspected by {suspected_by}"] if suspected_by else []
    if isinstance(failed, list) and failed:
        parts.append(f"failed: {', '.join(map(str, failed))}")
    return "; ".join(parts)
