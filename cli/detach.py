"""Forget a volume of the answering agent's host, and everything that is in it."""

import argparse

from cli.context import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", metavar="NAME")


def run(context: Context) -> int:
    answer = context.agent.delete("volumes", context.args.volume)
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{context.args.volume} is forgotten on {answer.host}")
    return 0
