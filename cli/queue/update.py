"""Change the time limit of jobs that wait or run: `agentctl update j1 --time 4h`, or `--time none`.

It is the time that a job runs in all its starts together. A job of a user gets no more time while it runs: its hosts
have set a timer. Requeue it first."""

import argparse

from cli.context import Context
from cli.job_ids import each, jobs_argument
from cli.times import duration


def arguments(parser: argparse.ArgumentParser) -> None:
    jobs_argument(parser)
    parser.add_argument("--time", metavar="TIME", required=True, help="the time limit, such as 4h; none: no limit")


def run(context: Context) -> int:
    said = context.args.time
    body = {"time_limit_s": None if said == "none" else duration("--time", said)}
    return each(
        context,
        lambda id: context.agent.post("jobs", id, "update", body=body),
        lambda job: f"{job['id']} {context.paint.state(job['state'])}: time limit {said}",
        "changed",
    )
