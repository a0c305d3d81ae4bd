"""Remove all users of a tenant: nobody may submit for it any more but operators. Its jobs continue, and its quota
stays until `agentctl quota TENANT none` lifts it."""

import argparse

from cli.context import Context
from cli.tenant.change import change


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT")


def run(context: Context) -> int:
    context.args.quota = None
    return change(context, {"users": []})
