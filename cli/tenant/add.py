"""Add a tenant: agentctl tenant add ml --users ann,bob --quota 16

Each user must exist on the host that is asked; create users on every host with the same number first. A tenant that has
users already is changed by `agentctl tenant set`."""

import argparse

from cli.context import Context
from cli.tenant.change import change, names, quota_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="a name of a-z, 0-9, '-' and '.'")
    parser.add_argument("--users", metavar="A,B", required=True, help="who may submit jobs for it")
    quota_argument(parser)


def run(context: Context) -> int:
    return change(context, {"users": names(context.args.users), "is_new": True})
