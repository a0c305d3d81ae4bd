"""Print the version of agentctl, and those of the rack's agents, or why they are not known."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cli.client import AgentctlError
from cli.context import Context
from cli.table import printable
from covey.core.version import VERSION

ANSWER_S = 5.0
"""How long an agent is waited for unless --timeout says another time, seconds (chosen): what is known here is printed,
and a script waits for that, although the agent hangs."""


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    hosts, why = _hosts(context)
    if context.json:
        return context.say_json({"schema": 1, "data": {"version": VERSION, "hosts": hosts}})
    context.say(f"agentctl {VERSION}")
    if hosts is None:
        context.say(f"agents: not known: {printable(why)}")
        return 0
    for version, names in sorted(_by_version(hosts).items()):
        context.say(f"{(version and f'agentd {version}') or 'not known'}: {', '.join(names)}")
    return 0


def _hosts(context: Context) -> tuple[dict[str, str] | None, str]:
    """The version that the agent of each host says it has. None, and why, where no agent says it: that is no error
    here."""
    if context.args.timeout is None:
        context.agent.timeout_s = ANSWER_S
    try:
        rows: Sequence[Mapping[str, Any]] = context.agent.get("hosts").data
    except AgentctlError as error:
        return None, f"{error.what}: {error.why}"
    return {row["host"]: row.get("version", "") for row in rows if row["state"] not in ("gone", "left")}, ""


def _by_version(hosts: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for host, version in hosts.items():
        found.setdefault(version, []).append(host)
    return found
