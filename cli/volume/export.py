"""Serve a volume as an NBD device on a unix socket, for any NBD client (qemu, nbdfuse, nbdcopy, fio).

The export comes back after a restart of the volume's process or of the agent. The socket belongs to the agent's user
and must be in a folder of that user or of root. `agentctl volume unexport` ends it."""

import argparse
import os

from cli.context import Context
from cli.volume.named import change, named


def arguments(parser: argparse.ArgumentParser) -> None:
    named(parser)
    parser.add_argument("--socket", metavar="PATH", required=True, help="the unix socket that clients connect to")


def run(context: Context) -> int:
    return serve(context, end=False)


def serve(context: Context, end: bool) -> int:
    """Starts to serve the volume, or with `end` stops."""
    name, path = context.args.volume, os.path.abspath(context.args.socket)
    answer = change(context, "export", body={"socket": path, "end": end}, again=f"--socket {path}")
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{name} is no longer served at {path}" if end else f"{name}: nbd+unix:///?socket={path}")
    return 0
