"""Make a remote memory volume of this size on one host, or find it again.

With `--user` it belongs to that user of the host, whose processes open it at the socket that is told, and nobody
else's: `covey.remote.RemoteMemory.at(PATH)`, `RemoteArray(PATH, ...)`. With `--mirror 2` it has no disk: each slab lies
on two other hosts, in different racks where they are labelled, and is refused when they have no room for it. With
`--parity K+1` it has no disk either: each slab lies on K hosts, and their parity on one more.

A host that has lost its disk knows nothing of its volumes, and other hosts may hold their pages: such a volume is
refused, and `--create` makes it anew, empty."""

import argparse
import pwd

from cli.client import USAGE, AgentctlError
from cli.context import Context, on_host
from covey.core.units import format_size, parse_size


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", metavar="NAME")
    parser.add_argument("size", metavar="SIZE", help="such as 64MiB")
    kind_arguments(parser)
    parser.add_argument("--create", action="store_true", help="anew and empty, also if other hosts hold its pages")
    parser.add_argument("--user", metavar="NAME", help="whose it is on that host: a name or a uid (default: nobody's)")
    parser.add_argument("--host", metavar="NAME", help="make it there (default: the host of the agent that answers)")


def kind_arguments(parser: argparse.ArgumentParser) -> None:
    """Where a volume's pages lie, and against whose budget they count: of every command that makes one."""
    parser.add_argument("--mirror", metavar="2", type=int, help="no disk: each slab lies on two other hosts")
    parser.add_argument("--parity", metavar="K+1", help="no disk: pages on K other hosts, their parity on one more")
    parser.add_argument("--tenant", metavar="NAME", help="against whose budget it counts (default: nobody's)")


def asked_kind(arguments: argparse.Namespace) -> dict[str, int | str]:
    """What of it was said, as the agent is asked for it."""
    said = {name: getattr(arguments, name) for name in ("tenant", "mirror", "parity")}
    return {name: value for name, value in said.items() if value is not None}


def run(context: Context) -> int:
    try:
        size_bytes = parse_size(context.args.size)
    except ValueError as error:
        raise AgentctlError(USAGE, "that volume cannot be made", str(error), "agentctl attach NAME 64MiB") from None
    agent = on_host(context, context.args.host)
    body: dict[str, object] = {"volume": context.args.volume, "size_bytes": size_bytes, **asked_kind(context.args)}
    if context.args.create:
        body["create"] = True
    if context.args.user is not None:
        body["uid"] = uid_of(context.args.user)
    answer = agent.post("volumes", body=body)
    if context.json:
        return context.say_json(answer.whole)
    what = f"{context.args.volume}: {format_size(size_bytes)} on {answer.host}"
    if context.args.user is None:
        context.say(f"{what}; next: agentctl volumes")
    else:
        context.say(f"{what}, of {context.args.user}, at {answer.data['path']}; next: agentctl volumes")
    return 0


def uid_of(user: str) -> int:
    """The uid of a user name that this host knows, or of a number as text."""
    if user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        why, step = "this host knows no user of that name", "give the uid, if only the other host knows it"
        raise AgentctlError(USAGE, f"no user {user}", why, step) from None
