"""Let a job that waits come before all others of its tenant, or behind them: `agentctl priority j1 --up`.

Whoever owns the job moves it among the own ones; an operator among all of the tenant. Jobs of other tenants have the
places that they had. A job that has started before keeps its place."""

import argparse

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.job_ids import each, jobs_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    jobs_argument(parser)
    parser.add_argument("--up", action="store_true", help="before the others")
    parser.add_argument("--down", action="store_true", help="behind the others")


def run(context: Context) -> int:
    args = context.args
    if args.up == args.down:
        why = "expected one of --up and --down"
        raise AgentctlError(USAGE, "no place is named", why, f"agentctl priority {args.job[0]} --up")
    body = {"up": bool(args.up)}
    return each(
        context,
        lambda id: context.agent.post("jobs", id, "priority", body=body),
        lambda job: f"{job['id']} {context.paint.state(job['state'])}: {job['reason']}",
        "moved",
    )
