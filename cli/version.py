"""The version of agentctl."""

import argparse

from cli.context import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    from importlib import metadata  # costs 30 ms: only here

    version = metadata.version("covey-agent")
    if context.json:
        return context.say_json({"schema": 1, "data": {"version": version}})
    context.say(f"agentctl {version}")
    return 0
