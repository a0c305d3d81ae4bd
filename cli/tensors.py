"""Whose gradients are summed where, and how much has gone through."""

import argparse

from cli.context import Context
from cli.table import epoch_text, of, plural, table
from covey.units import format_size

TITLES = ("JOB", "AGGREGATOR", "EPOCH", "JOINED", "TENSORS", "SIZE", "ROUNDS", "RECEIVED", "SENT")


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
        )
        for job in answer.data
    ]
    context.say(table(TITLES, rows, TITLES[2:], context.paint))
    context.as_of(answer, plural(len(rows), "job"), age_s=max((job["age_s"] for job in answer.data), default=0.0))
    return 0
