"""Open a shell beside a rank of a job, or with --gpus in a job of its own that ends with the shell.

    agentctl shell j3           beside rank 0 of j3, wherever it runs
    agentctl shell j3.2         beside rank 2
    agentctl shell --gpus 1     in a new job with one GPU, once it starts; other options are those of submit

A shell whose terminal was lost keeps running for a while ([jobs] shell_kept, 10 min): the same command finds it again.
One with neither input nor output for [jobs] shell_idle (8 h) is ended, and is told so a minute ahead."""

import argparse
import os

from cli.beside.attached import INTERRUPTED, AttachedSession, job_and_rank, opened, say
from cli.beside.run import started
from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.jobs import submit
from covey.core.units import format_seconds

IN_JOB = (
    "sh",
    "-c",
    "trap 'came=1' USR1; trap 'exit 0' TERM INT HUP; left=120; "
    'while [ "$came" ] || [ $left -gt 0 ]; do sleep 1 & wait $!; left=$((left - 1)); done; echo no shell came',
)
"""What the job of a shell runs: it ends when its session says so (SIGTERM), or when none came for two minutes."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "agentctl shell JOB[.RANK] | agentctl shell --gpus N [options of submit]"
    submit.arguments(parser)


def run(context: Context) -> int:
    args = context.args
    if getattr(args, "command", None) is not None:
        why = "a shell runs what is typed into it"
        raise AgentctlError(USAGE, "a command after -- is not expected", why, "agentctl exec JOB -- COMMAND")
    if not os.isatty(0):
        why = "standard input is not a terminal"
        raise AgentctlError(USAGE, "a shell needs a terminal", why, "agentctl exec JOB -- sh -s < FILE")
    if len(args.word) == 1:
        job, rank = job_and_rank(args.word[0])
        return shell(context, job, rank)
    if args.word or args.gpus_per_worker is None:
        why = "expected the id of one job, or --gpus N for a job of its own"
        raise AgentctlError(USAGE, "which shell is not said", why, "agentctl shell j1, or agentctl shell --gpus 1")
    args.name = args.name or "shell"
    args.hooks = False
    own = started(context, args, IN_JOB)
    if own is None:
        return INTERRUPTED
    try:
        code = shell(context, own, 0, holds_job=True)
    except AgentctlError:
        context.agent.post("jobs", own, "cancel")
        raise
    say(f"{own} ends with its shell")
    return code


def shell(context: Context, job: str, rank: int, holds_job: bool = False) -> int:
    """`holds_job`: the job is there for this shell, and ends with it."""
    found = opened(context.agent, job, rank, "shell", [], True, holds_job)
    kept = format_seconds(found["kept_s"])
    where = f"beside rank {rank} of {job} on {found['host']}"
    if found["again"]:
        say(f"this is your shell of before {where}")
    else:
        say(f"a shell {where}; if this terminal is lost, agentctl shell {job}.{rank} finds it again for {kept}")
    return AttachedSession(context.agent, "shell", found, True).run()
