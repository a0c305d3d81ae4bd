"""Keep jobs that wait from starting, until they are released.

A job that runs is not held: `agentctl requeue JOB --hold` stops it, and holds it then."""

import argparse

from cli.context import Context
from cli.job_ids import each, jobs_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    jobs_argument(parser)


def run(context: Context) -> int:
    return each(
        context,
        lambda id: context.agent.post("jobs", id, "hold"),
        lambda job: f"{job['id']} {context.paint.state(job['state'])}: {job['reason']}",
        "held",
    )
