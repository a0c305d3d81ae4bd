"""Run a command beside a rank of a job: as the job's user, in the rank's environment and folder, within its limits.

    agentctl exec j3 -- nvidia-smi          beside rank 0
    agentctl exec j3.2 -- ls -l             beside rank 2, on whichever host that is

Its output is written here, what comes on standard input is its input, and its exit code is returned (128+N for signal
N). Ctrl-C interrupts it, a second one ends it. It is no rank: it has none of the variables by which one joins its
agent. It ends with the job. -t gives it a terminal."""

import argparse
import os

from cli.beside.attached import AttachedSession, job_and_rank, opened
from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.jobs.submit import text_of


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "agentctl exec JOB[.RANK] [-t] -- COMMAND..."
    parser.add_argument("job", metavar="JOB[.RANK]", help="such as j1, or j1.2 for rank 2")
    parser.add_argument("-t", "--terminal", action="store_true", help="give the command a terminal")


def run(context: Context) -> int:
    args, command = context.args, getattr(context.args, "command", [])
    job, rank = job_and_rank(args.job)
    if not command:
        raise AgentctlError(USAGE, "no command is named", "it must come after a lone --", f"agentctl exec {job} -- ls")
    terminal = bool(args.terminal) and os.isatty(0)
    found = opened(context.agent, job, rank, "exec", [text_of(word) for word in command], terminal)
    return AttachedSession(context.agent, "exec", found, terminal).run()
