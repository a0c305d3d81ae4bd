"""What the commands of `agentctl volume` share: the volume that is named, its host, and its rows."""

import argparse
from typing import Any

from cli.client import NOT_FOUND, TRY_AGAIN, Agent, AgentctlError, Answer
from cli.context import Context, on_host


def named(parser: argparse.ArgumentParser) -> None:
    """The arguments NAME and --host."""
    parser.add_argument("volume", metavar="NAME", help="name of the volume")
    parser.add_argument(
        "--host", metavar="HOST", help="the host it is on (default: the host of the agent that answers)"
    )


def change(context: Context, *path: str, body: dict[str, Any] | None = None, again: str = "") -> Answer:
    """The answer to a POST about the named volume. When only other hosts have a volume of that name, the error says so
    and how to do this to theirs. `again`: arguments of the command besides the name."""
    try:
        return agent_of(context).post("volumes", context.args.volume, *path, body=body)
    except AgentctlError as error:
        say_where(context, error, again)
        raise


def remove(context: Context) -> Answer:
    """The answer to a DELETE of the named volume; errors as of `change`."""
    try:
        return agent_of(context).delete("volumes", context.args.volume)
    except AgentctlError as error:
        say_where(context, error)
        raise


def agent_of(context: Context) -> Agent:
    """The agent of the volume's host."""
    return on_host(context, context.args.host)


def say_where(context: Context, error: AgentctlError, again: str = "") -> None:
    """Adds to "not found" which other hosts have a volume of that name."""
    if error.code != NOT_FOUND or context.args.host is not None:
        return
    try:
        answer = context.agent.get("volumes")
    except AgentctlError:
        return
    name = context.args.volume
    owners = [volume["host"] for volume in answer.data if volume["volume"] == name]
    if owners:
        have = "has" if len(owners) == 1 else "have"
        error.why = f"{answer.host} has no volume of that name; {' and '.join(owners)} {have}"
        error.next = " ".join(filter(None, (context.command, name, again, f"--host {owners[0]}")))


def row_of(agent: Agent, name: str) -> dict[str, Any]:
    """The volume of that name on that agent's host; empty when the host has none."""
    answer = agent.gather("volumes")
    for each in answer.unanswered:
        if each["host"] == answer.host:
            raise AgentctlError(TRY_AGAIN, f"the state of volume {name} is not known", each["why"], "agentctl status")
    return next((row for row in answer.data if (row["volume"], row["host"]) == (name, answer.host)), {})


def kind_arguments(parser: argparse.ArgumentParser) -> None:
    """Where a new volume's pages are kept, and against whose budget they count."""
    parser.add_argument("--mirror", metavar="2", type=int, help="no disk: each slab is on two other hosts")
    parser.add_argument("--parity", metavar="K+1", help="no disk: pages on K other hosts, their parity on one more")
    parser.add_argument("--tenant", metavar="TENANT", help="the tenant whose budget it counts against (default: none)")


def asked_kind(arguments: argparse.Namespace) -> dict[str, int | str]:
    """The arguments of `kind_arguments` that were given, as the agent takes them."""
    given = {name: getattr(arguments, name) for name in ("tenant", "mirror", "parity")}
    return {name: value for name, value in given.items() if value is not None}
