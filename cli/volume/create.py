"""Create a volume of this size on one host. A volume of this name and size that exists is used as it is.

With `--user` it belongs to that user of the host, and only that user's processes can open it, at the socket that is
printed: `covey.remote.RemoteMemory.at(PATH)`, `RemoteArray(PATH, ...)`. With `--mirror 2` the volume has no disk: each
slab is on two other hosts, in different racks where hosts have a rack label, and the command fails when they have no
room. With `--parity K+1` it has no disk either: each slab is on K hosts, and its parity on one more.

A host that has lost its disk does not know its volumes, while other hosts may still hold their pages. Creating such a
volume fails, unless `--force` drops those pages."""

import argparse
import pwd

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.volume.named import agent_of, asked_kind, kind_arguments, named
from covey.core.units import format_size, parse_size


def arguments(parser: argparse.ArgumentParser) -> None:
    named(parser)
    parser.add_argument("size", metavar="SIZE", help="such as 64MiB")
    kind_arguments(parser)
    parser.add_argument("--force", action="store_true", help="drop what other hosts hold of an earlier volume so named")
    parser.add_argument("--user", metavar="USER", help="its owner on that host, a name or a uid (default: nobody)")


def run(context: Context) -> int:
    size_bytes = size_of(context.args.size, "agentctl volume create NAME 64MiB")
    body: dict[str, object] = {"volume": context.args.volume, "size_bytes": size_bytes, **asked_kind(context.args)}
    if context.args.force:
        body["create"] = True
    if context.args.user is not None:
        body["uid"] = uid_of(context.args.user)
    answer = agent_of(context).post("volumes", body=body)
    if context.json:
        return context.say_json(answer.whole)
    what = f"{context.args.volume}: {format_size(size_bytes)} on {answer.host}"
    if context.args.user is not None:
        what += f", owned by {context.args.user}, opened at {answer.data['path']}"
    context.say(f"{what}; next: agentctl volume show {context.args.volume}")
    return 0


def size_of(text: str, example: str) -> int:
    """The size in bytes. AgentctlError when `text` is none."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise AgentctlError(USAGE, f"invalid size {text!r}", str(error), example) from None


def uid_of(user: str) -> int:
    """The uid of a user that this host knows, or the number itself."""
    if user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        why, step = "this host has no user of that name", "if only the volume's host knows the user, give its uid"
        raise AgentctlError(USAGE, f"unknown user {user!r}", why, step) from None
