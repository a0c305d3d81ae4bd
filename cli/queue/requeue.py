"""Stop jobs that run, as if they had to yield, and queue them again: `agentctl requeue j1`.

Their ranks get SIGTERM, and the time of --grace to save. That counts against no limit of starts. With --hold they wait
for `agentctl release` then."""

import argparse

from cli.context import Context
from cli.job_ids import each, jobs_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    jobs_argument(parser)
    parser.add_argument("--hold", action="store_true", help="keep them from starting again until they are released")


def run(context: Context) -> int:
    body = {"hold": bool(context.args.hold)}
    return each(
        context,
        lambda id: context.agent.post("jobs", id, "requeue", body=body),
        lambda job: f"{job['id']} {context.paint.state(job['state'])}: {job['reason']}",
        "requeued",
    )
