"""List the volumes of all hosts: size, how much of each is mapped to lenders, and its traffic."""

import argparse
from typing import Any

from cli.context import Context
from cli.lists import Listing, list_arguments, show
from cli.table import of, plural
from covey.core.units import format_size

TITLES = (
    "VOLUME", "HOST", "SIZE", "SLABS MAPPED", "WHOLE", "WRITTEN", "READ", "FROM LENDERS", "FROM DISK", "PROCESS"
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    list_arguments(parser)


def run(context: Context) -> int:
    answer = context.agent.gather("volumes")
    if not show(context, LISTING, answer):
        return context.whole(answer)
    for volume in answer.data:
        for line in troubles(volume):
            context.say(line)
    context.as_of(answer, plural(len(answer.data), "volume"))
    return context.whole(answer)


def cells(volume: dict[str, Any]) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a volume."""
    return (
        volume["volume"],
        volume["host"],
        format_size(volume["size_bytes"]),
        of(volume["slabs_mapped"], volume["slabs"]),
        of(volume["slabs_whole"], volume["slabs"]) if has_no_disk(volume) else "",
        format_size(volume["written_bytes"]),
        format_size(volume["read_bytes"]),
        format_size(volume["remote_read_bytes"]),
        format_size(volume["disk_read_bytes"]),
        process(volume),
    )


LISTING = Listing(
    TITLES, cells, "volume", TITLES[2:9], ("FROM DISK", "FROM LENDERS", "READ", "WRITTEN", "WHOLE", "SIZE")
)


def process(volume: dict[str, Any]) -> str:
    """The state of the volume's process."""
    return "alive" if volume["process_alive"] else "gone"


def has_no_disk(volume: dict[str, Any]) -> bool:
    """Whether each slab is on several hosts (a mirror, or parity) and on no disk."""
    return bool(volume.get("members", 1) > 1)


def troubles(volume: dict[str, Any]) -> list[str]:
    """What keeps this volume from being read or written, and what to do about it."""
    name, host = volume["volume"], volume["host"]
    lines = []
    waits_for = volume.get("waits_for") or ()
    for wait in waits_for:
        slabs, lender = plural(len(wait["slabs"]), "slab"), wait["lender"]
        lines.append(f"{name} on {host}: {slabs} may be newer at {lender}, which does not answer: {wait['why']}")
    if waits_for:
        instead = "lose what is there" if has_no_disk(volume) else "read older pages"
        lines.append(f"next: bring those hosts back, or {instead}: agentctl volume give-up {name} --host {host}")
    if volume.get("trouble"):
        lines.append(f"{name} on {host}: {volume['trouble']}")
    return lines
