"""Show or set how many GPUs a tenant may hold: `agentctl quota` shows all tenants, `agentctl quota TENANT N` sets a
quota, `agentctl quota TENANT none` lifts it.

USED is what the tenant's guaranteed jobs hold, or are owed. BEYOND is what is held until guaranteed jobs need it: by
its opportunistic jobs, and by processes of its elastic jobs over their lower number.

Tenants without a quota take turns: the next job is that of the tenant with the fewest GPUs, held now (USED) and of late
(RECENT: the mean, in which service counts half after a day), over its weight. `agentctl quota TENANT --weight 2` lets a
tenant have twice as many as others."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.lists import Listing, list_arguments, show
from cli.table import plural

TITLES = ("TENANT", "GPUS", "USED", "BEYOND", "JOBS WAITING", "RECENT", "WEIGHT")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", nargs="?")
    parser.add_argument("gpus", nargs="?", metavar="N", help="a number of GPUs, or none")
    parser.add_argument("--weight", metavar="W", help="GPUs in this proportion to other tenants without a quota")
    list_arguments(parser)


def run(context: Context) -> int:
    tenant, gpus, weight = context.args.tenant, context.args.gpus, context.args.weight
    if weight is not None:
        return _weigh(context, tenant, gpus, weight)
    if gpus is not None:
        answer = context.agent.post("quotas", body={"tenant": tenant, "gpus": count(gpus)})
        if context.json:
            return context.say_json(answer.whole)
        context.say(f"{tenant} may hold {'any number of GPUs' if count(gpus) is None else plural(int(gpus), 'GPU')}")
        return 0
    answer = context.agent.get("quotas")
    rows = [row for row in answer.data if tenant in (None, row["tenant"])]
    if show(context, Listing(TITLES, cells, "tenant", TITLES[1:]), answer, rows):
        context.as_of(answer, plural(len(rows), "tenant"))
    return 0


def cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a tenant."""
    return (
        row["tenant"],
        "no limit" if row["gpus"] is None else row["gpus"],
        row["used"],
        row.get("opportunistic", 0),
        row["queued_jobs"],
        f"{row.get('recent_gpus', 0.0):.1f}",
        f"{row.get('weight', 1.0):g}",
    )


def _weigh(context: Context, tenant: str | None, gpus: str | None, weight: str) -> int:
    example = "agentctl quota alice --weight 2"
    if tenant is None or gpus is not None:
        why = "no tenant is given" if tenant is None else "a quota and a weight are given, and the weight needs none"
        raise AgentctlError(USAGE, "no weight was set", why, example)
    try:
        value = float(weight)
    except ValueError:
        raise AgentctlError(
            USAGE, f"{weight!r} is not a weight", "expected a number such as 2 or 0.5", example
        ) from None
    answer = context.agent.post("quotas", body={"tenant": tenant, "weight": value})
    if context.json:
        return context.say_json(answer.whole)
    rest = "" if answer.data.get("gpus") is None else "; it has one now, by which its jobs go"
    context.say(f"{tenant} has weight {value:g} among tenants without a quota{rest}")
    return 0


def count(text: str) -> int | None:
    if text == "none":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    raise AgentctlError(
        USAGE, f"{text!r} is not a number of GPUs", "expected 0 or more, or none", "agentctl quota TENANT 8"
    )
