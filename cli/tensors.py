"""Whose gradients are summed where, what their aggregator promised them, and how much has gone through.

A job on several hosts has a line for each owner: `train`, `train/1`, ... (`covey.blocks`). D is an iteration of the job
alone, WORK what its aggregator does in one, LOAD the part of the aggregator promised to it, LOSS the part of its speed
that sharing takes by plan and, in brackets, as measured. Without them it is on trial.
"""

import argparse

from cli.context import Context
from cli.table import epoch_text, of, plural, table
from covey.blocks import job_of
from covey.units import format_size

TITLES = (
    "JOB", "AGGREGATOR", "EPOCH", "JOINED", "TENSORS", "SIZE", "ROUNDS", "RECEIVED", "SENT", "D", "WORK", "LOAD", "LOSS"
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    answer = context.agent.get("tensors")
    if context.json:
        return context.say_json(answer.whole)
    rows = [
        (
            job["job"],
            job["host"],
            epoch_text(job["epoch"]),
            of(job["joined"], job["workers"]),
            job["tensors"],
            format_size(job["bytes"]),
            job["rounds"],
            format_size(job["received_bytes"]),
            format_size(job["sent_bytes"]),
            milliseconds(job.get("period_us")),
            milliseconds(job.get("work_us")),
            percent(job.get("load")),
            loss(job.get("loss"), job.get("loss_measured")),
        )
        for job in answer.data
    ]
    context.say(table(TITLES, rows, TITLES[2:], context.paint))
    for job in answer.data:
        if job.get("refused"):
            context.say(f"{job['job']} was refused: {job['refused']}")
    jobs = {job_of(job["job"]) for job in answer.data}
    context.as_of(answer, plural(len(jobs), "job"), age_s=max((job["age_s"] for job in answer.data), default=0.0))
    return 0


def milliseconds(us: int | None) -> str:
    return "" if us is None else f"{us / 1000:.4g} ms"


def percent(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"


def loss(planned: float | None, measured: float | None) -> str:
    if planned is None:
        return "" if measured is None else f"({measured:.1%})"
    return f"{planned:.1%}" if measured is None else f"{planned:.1%} ({measured:.1%})"
