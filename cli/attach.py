"""Make a remote memory volume of this size on one host, or find it again."""

import argparse

from cli.client import USAGE, AgentctlError
from cli.context import Context, on_host
from covey.units import format_size, parse_size


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", metavar="NAME")
    parser.add_argument("size", metavar="SIZE", help="such as 64MiB")
    parser.add_argument("--host", metavar="NAME", help="make it there (default: the host of the agent that answers)")


def run(context: Context) -> int:
    try:
        size_bytes = parse_size(context.args.size)
    except ValueError as error:
        raise AgentctlError(USAGE, "that volume cannot be made", str(error), "agentctl attach NAME 64MiB") from None
    agent = on_host(context, context.args.host)
    answer = agent.post("volumes", body={"volume": context.args.volume, "size_bytes": size_bytes})
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{context.args.volume}: {format_size(size_bytes)} on {answer.host}; next: agentctl volumes")
    return 0
