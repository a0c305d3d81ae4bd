"""Show how the answering host reaches another one: the round trip between their agents, whether long messages come
through, how far the clocks differ, and over what pages of remote memory and tensors go.

PAGES and TENSORS go over RDMA where both hosts can; why a host cannot is told beside it."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.client import FAILED
from cli.context import Context
from cli.table import pairs, printable


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("host", metavar="HOST", help="name of the other host")


def run(context: Context) -> int:
    query = {} if context.args.timeout is None else {"timeout_s": context.args.timeout}
    answer = context.agent.get("hosts", context.args.host, "ping", **query)
    if context.json:
        context.say_json(answer.whole)
    else:
        context.say(pairs(lines(answer.data), context.paint))
        context.as_of(answer)
    return 0 if answer.data["link"]["rtt_s"] is not None else FAILED


def lines(ping: Mapping[str, Any]) -> list[tuple[str, object]]:
    """What there is to say of the way to a host."""
    link = ping["link"]
    if link["rtt_s"] is None:
        return [("control", f"no answer: {printable(link['why'])}"), *paths(ping)]
    long = {True: "64 KiB come through", False: "64 KiB do not come through: look at the MTU of the network"}
    whole = long.get(link["whole"], f"whether 64 KiB come through is not known: {link['why']}")
    return [
        ("control", f"{1000 * link['rtt_s']:.2f} ms there and back; {printable(whole)}"),
        ("clocks", f"{abs(1000 * link['offset_s']):.1f} ms apart, to {500 * link['rtt_s']:.1f} ms"),
        *paths(ping),
    ]


def paths(ping: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Over what pages and tensors go, as each of the two hosts says."""
    here, there = ping["here"], ping["there"]
    found: list[tuple[str, object]] = []
    for what in ("pages", "tensors"):
        own = f"{here['host']}: {here[what] or 'its plugin is off'}"
        other = f"{there['host']}: {there[what] or 'its plugin is off'}" if there else ""
        if there == here:
            other = ""
        elif there and here[what] == there[what]:
            own, other = f"{here['host']} and {there['host']}: {here[what] or 'their plugins are off'}", ""
        unknown = "" if there else f"the other host did not say: {printable(ping['there_why'])}"
        found += [(what, own), ("", other), ("", unknown)]
    return found
