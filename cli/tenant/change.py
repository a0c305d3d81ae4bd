"""What the commands of `agentctl tenant` that change something share."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.context import Context
from cli.jobs.quota import count
from cli.table import plural


def quota_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quota", metavar="N", help="GPUs that its guaranteed jobs may hold, or none for no limit")


def names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def change(context: Context, given: Mapping[str, Any]) -> int:
    """Ask for the change of the tenant that is named, and say how it is now."""
    args = context.args
    quota = {} if args.quota is None else {"gpus": count(args.quota)}
    answer = context.agent.post("tenants", body={"tenant": args.tenant, **given, **quota})
    if context.json:
        return context.say_json(answer.whole)
    users, gpus = answer.data["users"], answer.data["gpus"]
    may = f"{', '.join(users)} may submit for it" if users else "nobody but operators may submit for it"
    limit = "no limit of GPUs" if gpus is None else f"a quota of {plural(gpus, 'GPU')}"
    context.say(f"{args.tenant}: {may}, with {limit}")
    return 0
