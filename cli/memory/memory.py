"""Show how long requests to remote memory take, and what tenants and jobs use of it.

For each volume: how long reads and writes took in the last minute (half of them took less than P50) and who answered:
`zeros` (nothing was written there), `ring` (memory on its way to the disk), `lender` or `disk`. Then the volumes of
each tenant on each host with its budget; and what the whole rack lends to each tenant and job, and where, as the
answering host heard it some seconds ago."""

import argparse
from collections.abc import Sequence
from typing import Any

from cli.client import Agent, AgentctlError
from cli.context import Context
from cli.lists import Listing, list_arguments, show
from cli.table import plural, table
from covey.core.units import format_size

ACCOUNTS = ("TENANT", "HOST", "HAS", "BUDGET", "VOLUMES (JOB)")
RACK = ("ON THE RACK", "HAS", "BUDGET", "LENT BY")
LENDERS_SHOWN = 4
TITLES = ("VOLUME", "HOST", "OP", "ANSWERED BY", "REQUESTS", "P50", "P99")


def arguments(parser: argparse.ArgumentParser) -> None:
    list_arguments(parser)


def run(context: Context) -> int:
    """Volumes that nobody used in the last minute have a line too."""
    answer = context.agent.gather("volumes")
    accounts = rack_accounts(context.agent)
    whole = answer._replace(whole={**answer.whole, "accounts": accounts})
    measured = [line for volume in answer.data for line in lines_of(volume)]
    if not show(context, LISTING, whole, measured, data_of=lambda found: of_lines(answer.data, found)):
        return context.whole(answer)
    for titles, lines in ((ACCOUNTS, accounts_of(answer.data)), (RACK, [account_line(row) for row in accounts])):
        if lines:
            context.say("")
            context.say(table(titles, lines, ("HAS", "BUDGET"), context.paint))
    for volume in answer.data:
        if text := swap_text(volume):
            context.say_folded(f"{volume['volume']} on {volume['host']}: swap {text}")
    for volume in answer.data:
        if text := links_text(volume):
            context.say_folded(f"{volume['volume']} on {volume['host']}: links to lenders: {text}")
    context.as_of(answer, plural(len(answer.data), "volume"))
    return context.whole(answer)


def lines_of(volume: dict[str, Any]) -> list[dict[str, Any]]:
    """What was measured of a volume in the last minute, by kind of request and who answered; one line of nothing where
    nobody used it."""
    of_volume = {field: volume.get(field) for field in ("volume", "host", "tenant", "job")}
    nothing = {"op": "-", "answered": "-", "requests": 0, "p50_s": None, "p99_s": None}
    return [{**of_volume, **each} for each in volume.get("latencies") or (nothing,)]


def of_lines(volumes: list[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The volumes of these lines."""
    kept = {(line["volume"], line["host"]) for line in lines}
    return [volume for volume in volumes if (volume["volume"], volume["host"]) in kept]


def cells(line: dict[str, Any]) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a line."""
    times = (latency_text(line["p50_s"]), latency_text(line["p99_s"])) if line["p50_s"] is not None else ("-", "-")
    return line["volume"], line["host"], line["op"], line["answered"], line["requests"], *times


LISTING = Listing(TITLES, cells, "volume", TITLES[4:], ("REQUESTS", "HOST", "P99", "ANSWERED BY", "P50", "OP"))


def swap_text(volume: dict[str, Any]) -> str:
    """`on, /dev/nbd0, 12 MiB used`; empty when the volume is not swap."""
    swap = volume.get("swap") or {"word": "off"}
    if swap["word"] == "off":
        return ""
    why = f": {swap['why']}" if swap["why"] else ""
    return f"{swap['word']}, {swap['device'] or 'no device'}, {format_size(swap['used_bytes'])} used{why}"


def links_text(volume: dict[str, Any]) -> str:
    """`3 open, 1 reopening`; empty when all links to lenders are open."""
    links = {state: count for state, count in (volume.get("links") or {}).items() if count}
    return ", ".join(f"{count} {state}" for state, count in links.items()) if set(links) - {"open"} else ""


def accounts_of(volumes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each tenant on each host: what its volumes may take, a mirrored one twice, its budget, its jobs."""
    mine: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for volume in volumes:
        if volume.get("tenant"):
            mine.setdefault((volume["tenant"], volume["host"]), []).append(volume)
    rows: list[tuple[str, ...]] = []
    for (tenant, host), theirs in sorted(mine.items()):
        has = sum(int(volume["taken_bytes"]) for volume in theirs)
        budget = theirs[0].get("budget_bytes")
        names = ", ".join(sorted(f"{v['volume']} ({v['job']})" if v.get("job") else v["volume"] for v in theirs))
        rows.append((tenant, host, format_size(has), "no limit" if budget is None else format_size(budget), names))
    return rows


def rack_accounts(agent: Agent) -> list[dict[str, Any]]:
    """What the rack lends to tenants and jobs; nothing where the agent does not say."""
    try:
        return list(agent.get("memory", "accounts").data)
    except AgentctlError:  # an agent without the plugin
        return []


def account_line(row: dict[str, Any]) -> tuple[str, ...]:
    """One account, and the hosts that lend most to it."""
    name = f"{row['kind']} {row['name']}" if row["kind"] else f"another ({row['name']})"
    if row["kind"] == "job" and row["tenant"]:
        name += f" of {row['tenant']}"
    lenders = sorted(row["lenders"].items(), key=lambda each: (-each[1], each[0]))
    where = ", ".join(f"{host} {format_size(size)}" for host, size in lenders[:LENDERS_SHOWN])
    more = f", and {len(lenders) - LENDERS_SHOWN} more" if len(lenders) > LENDERS_SHOWN else ""
    budget = row["budget_bytes"]
    said = "no limit" if budget is None else format_size(budget)
    if budget is not None and row["used_bytes"] > budget:
        said += " (over)"
    return name, format_size(row["used_bytes"]), said, where + more or "-"


def latency_text(seconds: float) -> str:
    """Two digits, in the unit that suits."""
    us = seconds * 1e6
    return f"{us:.0f} us" if us < 1000 else f"{us / 1e3:.2g} ms" if us < 1e5 else f"{seconds:.2g} s"
