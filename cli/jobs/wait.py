"""Wait until a job has ended, and return its exit code, or 128+N when signal N ended it.

With --timeout: exit code 6 when the job has not ended by then."""

import argparse
import time
from typing import Any

from cli.books.ending import ended, last_lines
from cli.client import FAILED, AgentctlError, wait_until_over
from cli.context import Context, not_found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")


def run(context: Context) -> int:
    try:
        return wait(context, context.args.job)
    except AgentctlError as error:
        not_found(context, error, context.args.job)


def wait(context: Context, job: str) -> int:
    deadline_s = None if context.args.timeout is None else time.monotonic() + context.args.timeout
    return report(context, wait_until_over(context.agent, job, deadline_s))


def report(context: Context, view: dict[str, Any]) -> int:
    """Say how the job ended; its exit code."""
    if context.json:
        context.say_json({"schema": 1, "data": view})
    else:
        context.say(f"{view['id']} {ended(view, context.paint)}")
        for line in last_lines(context.agent, view):
            context.say(line)
        if view["state"] == "failed":
            context.say(f"next: agentctl logs {view['id']}")
    return exit_code(view)


def exit_code(view: dict[str, Any]) -> int:
    """The job's own; 1 for one that ended badly without ever having run."""
    code: int | None = view["exit_code"]
    if code is None:
        return 0 if view["state"] == "done" else FAILED
    return code
