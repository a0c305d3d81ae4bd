"""Forget a volume of one host, and everything that is in it."""

import argparse

from cli.client import NOT_FOUND, AgentctlError
from cli.context import Context, on_host


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", metavar="NAME")
    parser.add_argument("--host", metavar="NAME", help="whose it is (default: the host of the agent that answers)")


def run(context: Context) -> int:
    agent = on_host(context, context.args.host)
    try:
        answer = agent.delete("volumes", context.args.volume)
    except AgentctlError as error:
        if error.code == NOT_FOUND and context.args.host is None:
            say_where(context, error, f"agentctl detach {context.args.volume}")
        raise
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{context.args.volume} is forgotten on {answer.host}")
    return 0


def say_where(context: Context, error: AgentctlError, command: str) -> None:
    """When other hosts have a volume of that name, the error says so, and how to do this to theirs."""
    try:
        answer = context.agent.get("volumes")
    except AgentctlError:
        return
    owners = [volume["host"] for volume in answer.data if volume["volume"] == context.args.volume]
    if owners:
        error.why = (
            f"{answer.host} has none of that name; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'}"
        )
        error.next = f"{command} --host {owners[0]}"
