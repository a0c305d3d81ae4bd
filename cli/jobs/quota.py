"""Show or set how many GPUs a tenant may hold: `agentctl quota` shows all tenants, `agentctl quota TENANT N` sets a
quota, `agentctl quota TENANT none` lifts it.

USED is what the tenant's guaranteed jobs hold, or are owed. BEYOND is what is held until guaranteed jobs need it: by
its opportunistic jobs, and by processes of its elastic jobs over their lower number."""

import argparse

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.table import plural, table

TITLES = ("TENANT", "GPUS", "USED", "BEYOND", "JOBS WAITING")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", nargs="?")
    parser.add_argument("gpus", nargs="?", metavar="N", help="a number of GPUs, or none")


def run(context: Context) -> int:
    tenant, gpus = context.args.tenant, context.args.gpus
    if gpus is not None:
        answer = context.agent.post("quotas", body={"tenant": tenant, "gpus": count(gpus)})
        if context.json:
            return context.say_json(answer.whole)
        context.say(f"{tenant} may hold {'any number of GPUs' if count(gpus) is None else plural(int(gpus), 'GPU')}")
        return 0
    answer = context.agent.get("quotas")
    if context.json:
        return context.say_json(answer.whole)
    rows = [
        (
            row["tenant"],
            "no limit" if row["gpus"] is None else row["gpus"],
            row["used"],
            row.get("opportunistic", 0),
            row["queued_jobs"],
        )
        for row in answer.data
        if tenant in (None, row["tenant"])
    ]
    context.say(table(TITLES, rows, TITLES[1:], context.paint))
    context.as_of(answer, plural(len(rows), "tenant"))
    return 0


def count(text: str) -> int | None:
    if text == "none":
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    raise AgentctlError(
        USAGE, f"{text!r} is not a number of GPUs", "expected 0 or more, or none", "agentctl quota TENANT 8"
    )
