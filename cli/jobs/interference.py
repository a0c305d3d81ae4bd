"""Show how much the jobs that share a GPU slow the guaranteed one: its mini-batches beside them against its own alone.

SLOWER is measured in the current window, with its 90 % interval; ALONE is a mini-batch with the other jobs stopped,
and AGE how long ago that was measured or confirmed. STATE `checking`: the other jobs are stopped at this moment, to
find out whether they cause the slowdown.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.context import Context
from cli.jobs.jobs import step_time
from cli.lists import Listing, list_arguments, show
from cli.table import ago, plural

TITLES = ("JOB", "HOST", "GPU", "STATE", "SLOWER", "ALONE", "AGE", "CHECKS", "BESIDE", "THE OTHERS MAY")
ONE_SIDED_90 = 1.3
"""Standard errors of the interval that is shown, as the controller counts (`plugins.sharing.policy.interference`)."""
CHECKING = ("baseline", "verify")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB", help="show only this job")
    list_arguments(parser)


def run(context: Context) -> int:
    answer = context.agent.gather("interference")
    rows = [row for row in answer.data if context.args.job in (None, row["job"])]
    listing = Listing(TITLES, shown, "job", ("SLOWER", "ALONE", "AGE", "CHECKS"), ("CHECKS", "AGE", "ALONE"))
    if not show(context, listing, answer, rows, json_too=True):
        return context.whole(answer)
    count = f"guaranteed jobs run on {plural(len(rows), 'GPU')}"
    context.as_of(answer, count, age_s=max((row["age_s"] for row in rows), default=0.0))
    return context.whole(answer)


def shown(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        row["job"],
        row["host"],
        row["gpu"],
        "checking" if row["state"] in CHECKING else row["state"],
        slower(row["slowdown"], row["error"]),
        step_time(row["baseline_s"]) if row["baseline_s"] else None,
        None if row["baseline_age_s"] is None else ago(row["baseline_age_s"]),
        row["audits"],
        ", ".join(row["beside"]) or "nobody",
        row["others"] if row["beside"] else None,
    )


def slower(slowdown: float | None, error: float | None) -> str | None:
    """`+2.1 % ± 0.8`; None while nothing is known."""
    if slowdown is None or error is None:
        return None
    return f"{100 * slowdown:+.1f} % ± {100 * ONE_SIDED_90 * error:.1f}"
