"""Let held jobs start, whoever held them.

A job is held by its owner or an operator (`agentctl hold`, `submit --hold`), or since a job that was to be done first
(`submit --after ok:JOB`) failed."""

import argparse

from cli.context import Context
from cli.job_ids import each, jobs_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    jobs_argument(parser)


def run(context: Context) -> int:
    return each(
        context,
        lambda id: context.agent.post("jobs", id, "release"),
        lambda job: f"{job['id']} {context.paint.state(job['state'])}: {job['reason']}",
        "released",
    )
