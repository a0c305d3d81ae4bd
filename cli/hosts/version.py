"""Print the version of agentctl, and those of the rack's agents where one answers."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cli.client import AgentctlError
from cli.context import Context
from covey.core.version import VERSION


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    hosts = _hosts(context)
    if context.json:
        return context.say_json({"schema": 1, "data": {"version": VERSION, "hosts": hosts}})
    context.say(f"agentctl {VERSION}")
    for version, names in sorted(_by_version(hosts).items()):
        context.say(f"{(version and f'agentd {version}') or 'not known'}: {', '.join(names)}")
    return 0


def _hosts(context: Context) -> dict[str, str]:
    """The version that the agent of each host says it has; none where no agent answers, which is no error here."""
    try:
        rows: Sequence[Mapping[str, Any]] = context.agent.get("hosts").data
    except AgentctlError:
        return {}
    return {row["host"]: row.get("version", "") for row in rows if row["state"] not in ("gone", "left")}


def _by_version(hosts: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for host, version in hosts.items():
        found.setdefault(version, []).append(host)
    return found
