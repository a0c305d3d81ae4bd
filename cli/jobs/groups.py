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
from cli.lists import Listing, list_arguments, show
from cli.table import plural

TITLES = ("GROUP", "HOSTS", "ROUND", "CPU", "NETWORK", "JOB", "PROCESSES", "STEP", "COMPUTES", "SENDS", "LEFT")
NUMBERS = ("ROUND", "CPU", "NETWORK", "PROCESSES", "STEP", "COMPUTES", "SENDS", "LEFT")
HOSTS_SHOWN = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", nargs="?", metavar="POOL", help="show only this pool: auto, or TENANT/NAME")
    list_arguments(parser)


def run(context: Context) -> int:
    answer = context.agent.gather("groups")
    groups = [group for group in answer.data if context.args.pool in (None, group["pool"])]
    groups = list({group["group"]: group for group in groups}.values())
    lines = [line for group in groups for line in lines_of(group)]
    if not show(context, LISTING, answer, lines, data_of=lambda found: of_lines(groups, found)):
        return context.whole(answer)
    for pool in sorted({group["pool"] for group in groups}):
        words = next(group["decided"] for group in groups if group["pool"] == pool)
        context.say_folded(f"{pool}: {words}")
    if not groups:
        context.say_folded(
            "no job shares hosts in turns; agentctl submit --share-host auto --gpus 0 -- COMMAND makes one"
        )
    count = plural(sum(len(group["jobs"]) for group in groups), "job") + f" in {plural(len(groups), 'group')}"
    context.as_of(answer, count, age_s=max((group["age_s"] for group in groups), default=0.0))
    return context.whole(answer)


def lines_of(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The jobs of one group in the order of their turns, each with what is known of the group, which a table shows
    beside the first one."""
    of_group = {field: value for field, value in group.items() if field not in ("jobs", "hosts")}
    return [
        {**job, **of_group, "group_hosts": group["hosts"], "turn": turn}
        for turn, job in enumerate(group["jobs"], start=1)
    ]


def of_lines(groups: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of these lines, with the jobs of these lines alone."""
    kept = {(line["group"], line["turn"]) for line in lines}
    found = [
        {**group, "jobs": [job for turn, job in enumerate(group["jobs"], start=1) if (group["group"], turn) in kept]}
        for group in groups
    ]
    return [group for group in found if group["jobs"]]


def cells(line: Mapping[str, Any]) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a job in its group."""
    of_group: tuple[object, ...] = (None, None, None, None)
    if line["turn"] == 1:
        known = line["predicted_s"] is not None
        of_group = (
            hosts(line["group_hosts"]),
            step_time(line["predicted_s"]) if known else "not profiled",
            both(line["cpu"], line["cpu_measured"]),
            both(line["net"], line["net_measured"]),
        )
    return (
        line["group"],
        *of_group,
        line["job"] if line["elastic"] else f"{line['job']} (stays)",
        line["processes"],
        step_time(line["step_s"]) if line["profiled"] else None,
        step_time(line["work_s"] / len(line["hosts"])) if line["profiled"] else None,
        step_time(line["net_s"]) if line["profiled"] else None,
        None if line["left_s"] is None else step_time(line["left_s"]),
    )


LEAST = ("SENDS", "COMPUTES", "NETWORK", "CPU", "LEFT", "PROCESSES", "HOSTS", "ROUND", "STEP")
LISTING = Listing(TITLES, cells, "job", NUMBERS, LEAST)


def hosts(names: Sequence[str]) -> str:
    more = len(names) - HOSTS_SHOWN
    return " ".join(names[:HOSTS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def both(predicted: float | None, measured: float | None) -> str | None:
    """`84 %, 79 %`: predicted, then measured."""
    if predicted is None or measured is None:
        return None
    return f"{predicted:.0%}, {measured:.0%}"
