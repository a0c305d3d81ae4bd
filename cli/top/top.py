"""Show the rack as it changes: jobs, the ranks of a job, hosts, GPUs and slabs of remote memory.

Enter goes down (job, rank, host, GPU, slabs), Esc back; l shows logs, w why, s opens a shell beside the rank; / shows
rows with some words alone, ? lists all keys, q ends it. Nothing is changed but by what is typed into that shell. A
narrow terminal shows fewer columns. It needs the package textual."""

import argparse
import sys

from cli.client import FAILED, USAGE, AgentctlError
from cli.context import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    if context.json:
        raise AgentctlError(USAGE, "top has no JSON", "it is for people at a terminal", "agentctl jobs --json")
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        why = "standard input, output and errors are not all a terminal"
        raise AgentctlError(USAGE, "top needs a terminal", why, "agentctl jobs")
    try:
        from cli.top.app import TopApp
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("textual", "rich"):
            raise
        why = f"the package {error.name} is not installed in {sys.prefix}"
        step = f"{sys.prefix}/bin/python -m pip install 'textual>=8', or: agentctl jobs"
        raise AgentctlError(FAILED, "top needs textual", why, step) from None
    context.agent.get("leader")  # an agent that does not answer is told of in three lines, before the screen changes
    TopApp(context.agent).run()
    return 0
