"""Show which jobs share hosts in turns (`agentctl submit --share-host`), group by group.

A group is the jobs of a pool that are on the same hosts, in the order of their turns. ROUND is the time in which each
of them runs one mini-batch, as predicted from what was measured of them; STEP is a mini-batch of the job as measured,
waits for turns included. CPU and NETWORK are shares of the time in which they are in use: predicted, then measured. No
figure is shown while a job is not profiled: some mini-batches on all its hosts have to be measured first.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cli.context import Context
from cli.jobs.jobs import step_time
from cli.table import plural, table

TITLES = ("GROUP", "HOSTS", "ROUND", "CPU", "NETWORK", "JOB", "PROCESSES", "STEP", "COMPUTES", "SENDS", "LEFT")
NUMBERS = ("ROUND", "CPU", "NETWORK", "PROCESSES", "STEP", "COMPUTES", "SENDS", "LEFT")
HOSTS_SHOWN = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", nargs="?", metavar="POOL", help="show only this pool: auto, or TENANT/NAME")


def run(context: Context) -> int:
    answer = context.agent.gather("groups")
    groups = [group for group in answer.data if context.args.pool in (None, group["pool"])]
    groups = list({group["group"]: group for group in groups}.values())
    if context.json:
        context.say_json({**answer.whole, "data": groups})
        return context.whole(answer)
    if groups:
        rows = [row for group in groups for row in shown(group)]
        context.say(table(TITLES, rows, NUMBERS, context.paint))
        for pool in sorted({group["pool"] for group in groups}):
            words = next(group["decided"] for group in groups if group["pool"] == pool)
            context.say(f"{pool}: {words}")
    else:
        context.say("no job shares hosts in turns; agentctl submit --share-host auto --gpus 0 -- COMMAND makes one")
    count = plural(sum(len(group["jobs"]) for group in groups), "job") + f" in {plural(len(groups), 'group')}"
    context.as_of(answer, count, age_s=max((group["age_s"] for group in groups), default=0.0))
    return context.whole(answer)


def shown(group: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """The lines of one group: the group beside its first job, then the others."""
    known = group["predicted_s"] is not None
    head: tuple[object, ...] = (
        group["group"],
        hosts(group["hosts"]),
        step_time(group["predicted_s"]) if known else "not profiled",
        both(group["cpu"], group["cpu_measured"]),
        both(group["net"], group["net_measured"]),
    )
    lines: list[tuple[object, ...]] = []
    for job in group["jobs"]:
        mine = (
            job["job"] if job["elastic"] else f"{job['job']} (stays)",
            job["processes"],
            step_time(job["step_s"]) if job["profiled"] else None,
            step_time(job["work_s"] / len(job["hosts"])) if job["profiled"] else None,
            step_time(job["net_s"]) if job["profiled"] else None,
            None if job["left_s"] is None else step_time(job["left_s"]),
        )
        lines.append((*(head if not lines else (head[0], None, None, None, None)), *mine))
    return lines


def hosts(names: Sequence[str]) -> str:
    more = len(names) - HOSTS_SHOWN
    return " ".join(names[:HOSTS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def both(predicted: float | None, measured: float | None) -> str | None:
    """`84 %, 79 %`: predicted, then measured."""
    if predicted is None or measured is None:
        return None
    return f"{predicted:.0%}, {measured:.0%}"
