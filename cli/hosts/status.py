"""Show the answering agent: how long it has run, whether its plugins work, and which leader it knows."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.context import Context
from cli.table import pairs, table
from covey.core.units import format_seconds


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    """1 when a plugin has failed, or something is wrong with a host."""
    answer = context.agent.get("status")
    plugins = answer.data.get("plugins", {})
    wrong = answer.data.get("wrong") or ()
    failed = bool(wrong) or any(plugin["state"] == "failed" for plugin in plugins.values())
    if context.json:
        context.say_json(answer.whole)
        return int(failed)
    up_s = answer.data.get("up_s")
    rows = [
        ("agent", answer.host),
        ("answers at", context.agent.address),
        ("found through", context.agent.found_by),
        ("up", "" if up_s is None else format_seconds(up_s)),
        ("boot", answer.data.get("boot")),
        ("leader", answer.data.get("leader") or "none now"),
        ("hosts alive", answer.data.get("hosts_alive")),
        *(("wrong", f"{each['host']}: {each['what']}; next: {each['next']}") for each in wrong),
        *([("log", trouble)] if (trouble := answer.data.get("log")) else []),
        *answer.data.get("lines", {}).items(),
        *(("unknown seed", f"{seed}: {why}") for seed, why in answer.data.get("seeds_unknown", {}).items()),
    ]
    context.say(pairs([*rows, *(("note", note) for note in answer.data.get("notes", []))], context.paint))
    context.say()
    lines = [(name, plugin["state"], _why(plugin)) for name, plugin in sorted(plugins.items())]
    context.say(table(("PLUGIN", "STATE", "WHY"), lines, (), context.paint))
    return int(failed)


def _why(plugin: Mapping[str, Any]) -> str:
    """Why it failed, and what comes next."""
    if plugin["state"] != "failed":
        return str(plugin["why"])
    again_s = plugin.get("again_s")
    then = "correct that, then restart the agent" if again_s is None else f"it is restarted about every {again_s:g} s"
    return f"{plugin['why']}; {then}"
