"""Who is in the rack, what state each host is in, and what it can spare, as the answering agent knows it by gossip.

`agentctl hosts give-up NAME` says that nothing runs any more on a host that is gone (its power is off, say): jobs that
wait for it are taken back and placed again at once, those submitted with --on-lost keep too."""

import argparse
from collections.abc import Sequence

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.table import ago, of, plural, table
from covey.units import format_seconds

TITLES = ("HOST", "STATE", "LEADS", "FOR", "GPUS FREE", "SLABS FREE", "SLABS LENT", "SUMS FOR", "SEEN", "NOTE")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="give-up NAME", help="say that a host is lost for good")


def run(context: Context) -> int:
    if context.args.words:
        return give_up(context, context.args.words)
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


def give_up(context: Context, words: Sequence[str]) -> int:
    verb, host, *rest = [*words, ""][: max(2, len(words))]
    if verb != "give-up" or rest:
        word = rest[0] if verb == "give-up" else verb
        raise AgentctlError(
            USAGE, f"{word!r} is one word too many", "agentctl hosts does not take it", "agentctl hosts --help"
        )
    if not host:
        example = "agentctl hosts give-up gpu2"
        raise AgentctlError(USAGE, "no host is named", "one that is gone is to be given up", example)
    answer = context.agent.post("hosts", host, "give-up")
    if context.json:
        return context.say_json(answer.whole)
    jobs = ", ".join(job["id"] for job in answer.data)
    context.say(f"{host} is given up; {f'taken back: {jobs}' if jobs else 'no job waited for it'}")
    return 0


def note(host: dict[str, object]) -> str:
    failed, suspected_by = host["plugins_failed"], host["suspected_by"]
    parts = [f"suspected by {suspected_by}"] if suspected_by else []
    if host["state"] == "away":
        parts.append(f"back within {format_seconds(float(str(host.get('away_s', 0))))}")
    if isinstance(failed, list) and failed:
        parts.append(f"failed: {', '.join(map(str, failed))}")
    return "; ".join(parts)
