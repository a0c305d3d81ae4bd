"""Offer a remote memory volume as a block device of this host: NBD on a unix socket.

`agentctl memory export NAME --socket PATH` serves any NBD client (qemu, nbdfuse, nbdcopy, fio), also after a restart of
the volume's process; `agentctl memory unexport NAME --socket PATH` ends it. The socket belongs to the agent's user."""

import argparse
import os

from cli.client import NOT_FOUND, AgentctlError
from cli.context import Context, on_host
from cli.detach import say_where


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("export", "unexport"))
    parser.add_argument("volume", metavar="NAME")
    parser.add_argument("--socket", metavar="PATH", required=True, help="of the unix socket that clients connect to")
    parser.add_argument("--host", metavar="NAME", help="whose volume it is (default: of the agent that answers)")


def run(context: Context) -> int:
    name, end = context.args.volume, context.args.action == "unexport"
    path = os.path.abspath(context.args.socket)
    try:
        agent = on_host(context, context.args.host)
        answer = agent.post("volumes", name, "export", body={"socket": path, "end": end})
    except AgentctlError as error:
        if error.code == NOT_FOUND and context.args.host is None:
            say_where(context, error, f"agentctl memory {context.args.action} {name} --socket {path}")
        raise
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{name} is served at {path} no more" if end else f"{name}: nbd+unix:///?socket={path}")
    return 0
