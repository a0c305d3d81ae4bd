"""How remote memory does, and a volume as a block device (NBD on a unix socket).

Without an action: how long reads and writes of each volume took in the last minute (half of them took less than P50)
and who answered: `zeros` (nothing was there), `ring` (memory on its way to the disk), `lender` or `disk`. Then what the
volumes of each tenant may take on each host; and what the whole rack lends to each tenant and job, of which budget, and
where, as the host that answers heard it some seconds ago.

`agentctl memory attach --size 64G --swap` makes a volume (NAME, or `swap`) and has the kernel of its host swap to it,
which takes `covey-swapd` on that host. With `--mirror 2` or `--parity K+1` it has no disk of its own, as with
`agentctl attach`. `agentctl memory detach` brings its pages back into memory and then forgets the
volume; where there is no room for them it says so, and the swap stays on.

`agentctl memory export NAME --socket PATH` serves any NBD client (qemu, nbdfuse, nbdcopy, fio), also after a restart of
the volume's process; `agentctl memory unexport NAME --socket PATH` ends it. The socket belongs to the agent's user."""

import argparse
import os
import time
from typing import Any

from cli.client import NOT_FOUND, REFUSED, TRY_AGAIN, USAGE, Agent, AgentctlError
from cli.context import Context, on_host
from cli.memory.attach import asked_kind, kind_arguments
from cli.memory.detach import say_where
from cli.table import plural, table
from covey.core.units import format_size, parse_size

SWAP = "swap"
"""A volume that is swap, where no name is given."""
LOOK_S = 0.5
ACCOUNTS = ("TENANT", "HOST", "HAS", "BUDGET", "VOLUMES (JOB)")
RACK = ("ON THE RACK", "HAS", "BUDGET", "LENT BY")
LENDERS_SHOWN = 4
TITLES = ("VOLUME", "HOST", "OP", "ANSWERED BY", "REQUESTS", "P50", "P99")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("attach", "detach", "export", "unexport"))
    parser.add_argument("volume", nargs="?", metavar="NAME", help=f"(attach, detach: default {SWAP})")
    parser.add_argument("--size", metavar="SIZE", help="of a volume that is attached, such as 64G")
    parser.add_argument("--swap", action="store_true", help="it is swap of its host")
    kind_arguments(parser)
    parser.add_argument("--socket", metavar="PATH", help="of the unix socket that clients connect to")
    parser.add_argument("--host", metavar="NAME", help="whose volume it is (default: of the agent that answers)")


def run(context: Context) -> int:
    match context.args.action:
        case None:
            return show(context)
        case "attach":
            return attach_swap(context)
        case "detach":
            return detach(context)
        case _:
            return export(context)


def export(context: Context) -> int:
    """Start serving the volume over NBD, or stop (`unexport`)."""
    if context.args.volume is None or context.args.socket is None:
        what = f"{context.args.action} of which volume, at which socket?"
        step = f"agentctl memory {context.args.action} NAME --socket PATH"
        raise AgentctlError(USAGE, what, "its name or --socket is missing", step)
    name, end = context.args.volume, context.args.action == "unexport"
    path = os.path.abspath(context.args.socket)
    try:
        agent = on_host(context, context.args.host)
        answer = agent.post("volumes", name, "export", body={"socket": path, "end": end})
    except AgentctlError as error:
        if error.code == NOT_FOUND and context.args.host is None:
            say_where(context, error, f"agentctl memory {context.args.action} {name} --socket {path}")
        raise
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{name} is served at {path} no more" if end else f"{name}: nbd+unix:///?socket={path}")
    return 0


def attach_swap(context: Context) -> int:
    """Idempotent: a volume of that name and size that is there is used."""
    name = context.args.volume or SWAP
    step = f"agentctl memory attach {name} --size 64G --swap"
    if context.args.size is None or not context.args.swap:
        what = "--size is missing" if context.args.size is None else "without --swap it is agentctl attach NAME SIZE"
        raise AgentctlError(USAGE, "no volume is attached", what, step)
    try:
        size_bytes = parse_size(context.args.size)
    except ValueError as error:
        raise AgentctlError(USAGE, "that volume cannot be made", str(error), step) from None
    agent = on_host(context, context.args.host)
    was_there = bool(row_of(agent, name))
    agent.post("volumes", body={"volume": name, "size_bytes": size_bytes, **asked_kind(context.args)})
    try:
        answer = agent.post("volumes", name, "swap", body={})
    except AgentctlError:
        if not was_there and not row_of(agent, name)["swap"]["device"]:
            agent.delete("volumes", name)  # nobody else uses it
        raise
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{name}: {format_size(size_bytes)}, swap of {answer.host}; next: agentctl memory")
    return 0


def detach(context: Context) -> int:
    """Swap ends first, however long that takes; then the volume is forgotten."""
    name = context.args.volume or SWAP
    try:
        agent = on_host(context, context.args.host)
        word = agent.post("volumes", name, "swap", body={"end": True}).data["swap"]
    except AgentctlError as error:
        if error.code == NOT_FOUND and context.args.host is None:
            say_where(context, error, f"agentctl memory detach {name}")
        raise
    while word == "ending":
        time.sleep(LOOK_S)
        now = row_of(agent, name).get("swap", {"word": "off"})
        word = now["word"]
        if word in ("on", "waits"):
            why, _, step = now["why"].partition("; next: ")
            again = f"agentctl memory detach {name}"
            raise AgentctlError(REFUSED, f"volume {name} stays swap", why or "it was not given up", step or again)
    answer = agent.delete("volumes", name)
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{name} is forgotten on {answer.host}")
    return 0


def row_of(agent: Agent, name: str) -> dict[str, Any]:
    """The volume of that name on that agent's host; empty: it has none."""
    answer = agent.gather("volumes")
    for each in answer.unanswered:
        if each["host"] == answer.host:
            raise AgentctlError(TRY_AGAIN, f"the state of volume {name} is not known", each["why"], "agentctl status")
    return next((row for row in answer.data if (row["volume"], row["host"]) == (name, answer.host)), {})


def show(context: Context) -> int:
    """Volumes that nobody used in the last minute have a line too."""
    answer = context.agent.gather("volumes")
    accounts = rack_accounts(context.agent)
    if context.json:
        context.say_json({**answer.whole, "accounts": accounts})
        return context.whole(answer)
    rows = []
    for volume in answer.data:
        name = volume["volume"], volume["host"]
        measured = volume.get("latencies") or ()
        for each in measured:
            times = latency_text(each["p50_s"]), latency_text(each["p99_s"])
            rows.append((*name, each["op"], each["answered"], each["requests"], *times))
        if not measured:
            rows.append((*name, "-", "-", 0, "-", "-"))
    context.say(table(TITLES, rows, TITLES[4:], context.paint))
    for titles, lines in ((ACCOUNTS, accounts_of(answer.data)), (RACK, [account_line(row) for row in accounts])):
        if lines:
            context.say("")
            context.say(table(titles, lines, ("HAS", "BUDGET"), context.paint))
    for volume in answer.data:
        swap = volume.get("swap") or {"word": "off"}
        if swap["word"] != "off":
            used = f"{swap['device'] or 'no device'}, {format_size(swap['used_bytes'])} used"
            why = f": {swap['why']}" if swap["why"] else ""
            context.say(f"{volume['volume']} on {volume['host']}: swap {swap['word']}, {used}{why}")
    for volume in answer.data:
        links = {state: count for state, count in (volume.get("links") or {}).items() if count}
        if set(links) - {"open"}:
            said = ", ".join(f"{count} {state}" for state, count in links.items())
            context.say(f"{volume['volume']} on {volume['host']}: places at lenders: {said}")
    context.as_of(answer, plural(len(answer.data), "volume"))
    return context.whole(answer)


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
