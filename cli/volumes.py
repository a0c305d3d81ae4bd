"""Remote memory volumes: where they are attached, how much of each is mapped, and what went through it."""

import argparse

from cli.context import Context
from cli.table import of, plural, table
from covey.units import format_size

TITLES = ("VOLUME", "HOST", "SIZE", "SLABS MAPPED", "WRITTEN", "READ", "OF IT REMOTE", "FROM DISK", "PROCESS")


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    answer = context.agent.get("volumes")
    if context.json:
        return context.say_json(answer.whole)
    rows = [
        (
            volume["volume"],
            volume["host"],
            format_size(volume["size_bytes"]),
            of(volume["slabs_mapped"], volume["slabs"]),
            format_size(volume["written_bytes"]),
            format_size(volume["read_bytes"]),
            format_size(volume["remote_read_bytes"]),
            format_size(volume["disk_read_bytes"]),
            "alive" if volume["process_alive"] else "gone",
        )
        for volume in answer.data
    ]
    context.say(table(TITLES, rows, TITLES[2:8], context.paint))
    context.as_of(answer, plural(len(rows), "volume"))
    return 0
