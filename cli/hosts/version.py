"""Print the version of agentctl."""

import argparse

from cli.context import Context
from covey.core.version import VERSION


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    if context.json:
        return context.say_json({"schema": 1, "data": {"version": VERSION}})
    context.say(f"agentctl {VERSION}")
    return 0
