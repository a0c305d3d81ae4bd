"""List the tenants, their users and their quotas."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.context import Context
from cli.lists import Listing, list_arguments, show, watch_argument
from cli.table import plural

TITLES = ("TENANT", "GPUS", "USED", "USERS")


def arguments(parser: argparse.ArgumentParser) -> None:
    list_arguments(parser)
    watch_argument(parser)


def run(context: Context) -> int:
    if context.args.watch:
        from cli.watched import watch  # only where it is needed: agentctl's imports are a budget

        return watch(context, "tenants", lambda _rows: LISTING)
    answer = context.agent.get("tenants")
    if show(context, LISTING, answer):
        context.as_of(answer, plural(len(answer.data), "tenant"))
    return 0


def cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a tenant."""
    return row["tenant"], "no limit" if row["gpus"] is None else row["gpus"], row["used"], " ".join(row["users"])


LISTING = Listing(TITLES, cells, "tenant", TITLES[1:3])
