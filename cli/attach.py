"""Make a remote memory volume of this size on the answering agent's host, or find it again."""

import argparse

from cli.client import USAGE, AgentctlError
from cli.context import Context
from covey.units import format_size, parse_size


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", metavar="NAME")
    parser.add_argument("size", metavar="SIZE", help="such as 64MiB")


def run(context: Context) -> int:
    try:
        size_bytes = parse_size(context.args.size)
    except ValueError as error:
        raise AgentctlError(USAGE, "that volume cannot be made", str(error), "agentctl attach NAME 64MiB") from None
    answer = context.agent.post("volumes", body={"volume": context.args.volume, "size_bytes": size_bytes})
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{context.args.volume}: {format_size(size_bytes)} on {answer.host}; next: agentctl volumes")
    return 0
