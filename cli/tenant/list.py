"""List the tenants, their users and their quotas."""

import argparse

from cli.context import Context
from cli.table import plural, table

TITLES = ("TENANT", "GPUS", "USED", "USERS")


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(context: Context) -> int:
    answer = context.agent.get("tenants")
    if context.json:
        return context.say_json(answer.whole)
    rows = [
        (row["tenant"], "no limit" if row["gpus"] is None else row["gpus"], row["used"], " ".join(row["users"]))
        for row in answer.data
    ]
    context.say(table(TITLES, rows, TITLES[1:3], context.paint))
    context.as_of(answer, plural(len(rows), "tenant"))
    return 0
