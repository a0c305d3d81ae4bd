"""Show one volume: its kind and owner, its traffic, how long requests took, its swap, and what is wrong with it.

Latencies are those of the last minute; ANSWERED BY is `zeros` (nothing was written there), `ring` (memory on its way to
the disk), `lender` or `disk`."""

import argparse
from typing import Any

from cli.client import NOT_FOUND, NOT_WHOLE, AgentctlError, Answer
from cli.context import Context
from cli.memory.memory import latency_text, links_text, swap_text
from cli.table import of, pairs, plural, table
from cli.volume.ls import has_no_disk, process, troubles
from covey.core.units import format_size

TITLES = ("OP", "ANSWERED BY", "REQUESTS", "P50", "P99")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", metavar="NAME", help="name of the volume")
    parser.add_argument("--host", metavar="HOST", help="the volume of this host (default: all of that name)")


def run(context: Context) -> int:
    answer = context.agent.gather("volumes")
    name, host = context.args.volume, context.args.host
    found = [row for row in answer.data if row["volume"] == name and host in (None, row["host"])]
    if context.json and found:
        context.say_json({**answer.whole, "data": found})
        return context.whole(answer)
    if not found:
        raise unknown(answer, name, host)
    for volume in found:
        show(context, volume)
    context.as_of(answer, f"agentctl slabs {name}", f"agentctl why volume/{name}")
    return context.whole(answer)


def unknown(answer: Answer, name: str, host: str | None) -> AgentctlError:
    silent = ", ".join(each["host"] for each in answer.unanswered)
    why = f"{host or 'no host'} has {'none' if host else 'one'} of that name"
    why += f", as far as is known: {silent} did not answer" if silent else ""
    return AgentctlError(NOT_WHOLE if silent else NOT_FOUND, f"no volume {name}", why, "agentctl volume ls")


def show(context: Context, volume: dict[str, Any]) -> None:
    context.say(pairs(facts(volume), context.paint))
    measured = volume.get("latencies") or ()
    if measured:
        rows = [
            (each["op"], each["answered"], each["requests"], latency_text(each["p50_s"]), latency_text(each["p99_s"]))
            for each in measured
        ]
        context.say("")
        context.say(table(TITLES, rows, TITLES[2:], context.paint))
    for line in troubles(volume):
        context.say(line)
    context.say("")


def facts(volume: dict[str, Any]) -> list[tuple[str, object]]:
    budget = volume.get("budget_bytes")
    limit = "" if budget is None else f" of a budget of {format_size(budget)}"
    return [
        ("volume", volume["volume"]),
        ("host", volume["host"]),
        ("size", f"{format_size(volume['size_bytes'])} in {plural(volume['slabs'], 'slab')}"),
        ("kind", kind(volume)),
        ("tenant", f"{volume['tenant']}{limit}" if volume.get("tenant") else ""),
        ("job", volume.get("job")),
        ("socket", volume.get("path")),
        ("process", process(volume)),
        ("slabs mapped", of(volume["slabs_mapped"], volume["slabs"])),
        ("slabs whole", of(volume["slabs_whole"], volume["slabs"]) if has_no_disk(volume) else ""),
        ("lenders' memory", f"{format_size(volume['taken_bytes'])} when all slabs are mapped"),
        ("written", format_size(volume["written_bytes"])),
        ("read", reads(volume)),
        ("swap", swap_text(volume)),
        ("links", links_text(volume)),
    ]


def kind(volume: dict[str, Any]) -> str:
    """With a disk, mirrored, or with parity."""
    members = volume.get("members", 1)
    if members == 1:
        return "with a disk"
    return f"parity {members - 1}+1, no disk" if volume.get("parity") else f"mirrored on {members} hosts, no disk"


def reads(volume: dict[str, Any]) -> str:
    lenders, disk = format_size(volume["remote_read_bytes"]), format_size(volume["disk_read_bytes"])
    return f"{format_size(volume['read_bytes'])}, of that {lenders} from lenders and {disk} from disk"
