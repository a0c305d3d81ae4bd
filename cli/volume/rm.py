"""Remove a volume from its host and from its lenders. Everything in it is lost."""

import argparse

from cli.context import Context
from cli.volume.named import named, remove


def arguments(parser: argparse.ArgumentParser) -> None:
    named(parser)


def run(context: Context) -> int:
    answer = remove(context)
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{context.args.volume} is removed from {answer.host}")
    return 0
