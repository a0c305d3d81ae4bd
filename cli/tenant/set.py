"""Change who may submit for a tenant, or its quota: agentctl tenant set ml --add carol --quota 24

Jobs of users who are removed continue; operators can cancel them."""

import argparse

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.tenant.change import change, names, quota_argument


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT")
    parser.add_argument("--users", metavar="A,B", help="all users of the tenant from now on")
    parser.add_argument("--add", metavar="A,B", help="users who may submit for it, too")
    parser.add_argument("--remove", metavar="A,B", help="users who may not submit for it any more")
    quota_argument(parser)


def run(context: Context) -> int:
    args = context.args
    given = {field: names(text) for field in ("users", "add", "remove") if (text := getattr(args, field)) is not None}
    if not given and args.quota is None:
        example = f"agentctl tenant set {args.tenant} --add ann"
        raise AgentctlError(USAGE, "nothing to change", "neither users nor a quota are given", example)
    return change(context, given)
