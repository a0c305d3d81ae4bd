"""Run a job as if it ran here: wait for its start, show what it writes, and return its exit code.

    agentctl run --gpus 2 -- python train.py

Options are those of submit. While the job waits it is said why. Ctrl-C asks whether to cancel the job or to leave it
running; where nobody can be asked the job is cancelled. A second Ctrl-C cancels it, too. With --stdin what comes on
standard input is that of rank 0, which has none otherwise; a terminal for a job is `agentctl shell --gpus 1`.

    agentctl run --gpus 1 -- jupyter lab          prints the address to open in a browser here
    agentctl run --forward 8000 -- python serve.py

--forward PORT leads a port of this machine (127.0.0.1 alone; another one where it is taken) to that port of the host of
rank 0, through the agent. Of jupyter and tensorboard it is found in what they write."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cli.beside.attached import ANSWER_S, INTERRUPTED, say
from cli.beside.piped import PipedInput, name_of
from cli.beside.tunnel import SERVERS, announce, lead
from cli.client import NO_AGENT, TRY_AGAIN, USAGE, Agent, AgentctlError
from cli.context import Context
from cli.jobs import submit
from cli.jobs.logs import Wanted, follow, ranks_in
from cli.jobs.wait import exit_code, wait
from cli.table import printable

POLL_S = 0.3
PATIENCE_S = 30.0
"""Seconds for which an agent that does not answer is asked again."""
WAITS = ("queued", "placing", "held")


class LeftRunningError(Exception):
    """Whoever typed the command goes, and the job stays."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "agentctl run [options of submit] -- COMMAND..."
    submit.arguments(parser)
    what = "lead this port of this machine to the same port of the host of rank 0 (may be repeated)"
    given = "standard input here is that of rank 0, to its end; a job that is started again fails then"
    parser.add_argument("--stdin", action="store_true", help=given)
    parser.add_argument("--forward", type=port_of, action="append", default=[], metavar="PORT", help=what)


def port_of(text: str) -> int:
    """The number of a port."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a port from 1 to 65535")
    return int(text)


def run(context: Context) -> int:
    args, command = context.args, list(getattr(context.args, "command", []))
    if args.word:
        args, command = submit.from_file(args, command)
    if not command:
        what, why = "no command to run", "the job's command must come after a lone --"
        raise AgentctlError(USAGE, what, why, "agentctl run --gpus 2 -- python train.py")
    for flag in ("follow", "wait"):
        if getattr(args, flag):
            raise AgentctlError(USAGE, f"--{flag} is not needed", "run waits, and shows the output", "leave it out")
    if getattr(args, "array", None):
        why = "each task of an array has output of its own"
        raise AgentctlError(USAGE, "an array cannot be run attached", why, "agentctl submit --array ... -- COMMAND")
    given = PipedInput() if context.args.stdin else None
    if given is not None:
        if sys.stdin.isatty():
            why = "standard input is a terminal"
            raise AgentctlError(USAGE, "--stdin needs a pipe or a file", why, "agentctl shell --gpus 1")
        args.name = args.name or name_of(command)
        command = given.command(command)
    job = submitted(context, args, command)
    try:
        with asks(context, job):
            view = until_started(context, job)
            if not view["over"]:
                if given is not None:
                    given.start(context, job)
                tunnels(context, job, args.forward, command)
            if view["places"] or not view["over"]:
                count = ranks_in(view)
                follow(context, job, range(count), count > 1, Wanted(follows=True))
            context.args.timeout = None
            return wait(context, job)
    except LeftRunningError:
        say(f"{job} runs on\n  next: agentctl logs {job} -f, or: agentctl wait {job}")
        return INTERRUPTED


def tunnels(context: Context, job: str, ports: Sequence[int], command: Sequence[str]) -> None:
    """Open the tunnels that are wanted, each once somebody listens at its other end."""
    agent = Agent(context.agent.addresses, context.agent.found_by, ANSWER_S)
    for port in ports:
        threading.Thread(target=lead, args=(agent, job, port), daemon=True).start()
    if not ports and os.path.basename(command[0]) in SERVERS:
        threading.Thread(target=announce, args=(agent, job), daemon=True).start()


def submitted(context: Context, args: argparse.Namespace, command: Sequence[str]) -> str:
    """The id of the new job."""
    return str(submit.submitted(context, args, command)["id"])


def started(context: Context, args: argparse.Namespace, command: Sequence[str]) -> str | None:
    """Submit a job, and wait until it runs: its id; None: whoever typed the command did not want to wait.
    AgentctlError: it ended instead."""
    job = submitted(context, args, command)
    try:
        view = until_started(context, job)
    except KeyboardInterrupt:
        context.agent.post("jobs", job, "cancel")
        say(f"{job} is cancelled")
        return None
    if view["over"]:
        why = f"it is {view['state']}: {view['reason']}"
        raise AgentctlError(exit_code(view) or 1, f"{job} did not start", why, f"agentctl why {job}")
    return job


def until_started(context: Context, job: str) -> Any:
    """The job once it runs or has ended. Why it waits is said whenever that changes."""
    said, until_s = "", time.monotonic() + PATIENCE_S
    while True:
        try:
            view = context.agent.get("jobs", job).data
        except AgentctlError as error:
            if error.code not in (NO_AGENT, TRY_AGAIN) or time.monotonic() > until_s:
                raise
        else:
            until_s = time.monotonic() + PATIENCE_S
            if view["over"] or view["state"] not in WAITS:
                if said:
                    say(f"{job} {view['state']}")
                return view
            words = f"{job} {view['state']}{': ' if view['reason'] else ''}{printable(view['reason'])}"
            if words != said:
                said = words
                say(words)
        time.sleep(POLL_S)


@contextlib.contextmanager
def asks(context: Context, job: str) -> Iterator[None]:
    """Ask at Ctrl-C what is to become of the job. The answer comes while the output is held; it goes on from where it
    was."""
    asking = False

    def interrupted(_number: int, _frame: object) -> None:
        nonlocal asking
        answer = "c" if asking or not (sys.stdin.isatty() and sys.stderr.isatty()) else ""
        if not answer:
            asking = True
            try:
                sys.stderr.write(f"\n{job}: [c]ancel it, [l]eave it running, or Enter to stay? ")
                sys.stderr.flush()
                answer = sys.stdin.readline().strip().lower()[:1]
            finally:
                asking = False
        if answer == "l":
            raise LeftRunningError
        if answer == "c":
            context.agent.post("jobs", job, "cancel")
            say(f"{job} is cancelled")

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
