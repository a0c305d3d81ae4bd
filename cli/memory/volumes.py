"""Remote memory volumes: where they are attached, how much of each is mapped, and what went through it.

`agentctl volumes give-up NAME` is for a volume whose process was restarted and waits for a lender that does not answer.
That lender may hold the newest content of pages which were written last; given up, they read as this host's disk has
them, which may be older, or, where the volume has no disk (`--mirror 2`), are lost. Waiting costs nothing but time; a
host that comes back answers by itself. Where the host has lost its disk, and with it the record of the volume, this
gives up what other hosts hold of it, so that it can be made anew."""

import argparse
from typing import Any

from cli.client import NOT_FOUND, USAGE, AgentctlError
from cli.context import Context, on_host
from cli.memory.detach import say_where
from cli.table import of, plural, table
from covey.core.units import format_size

TITLES = (
    "VOLUME", "HOST", "SIZE", "SLABS MAPPED", "WHOLE", "WRITTEN", "READ", "OF IT REMOTE", "FROM DISK", "PROCESS"
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("give-up",), help="wait no longer for lenders that do not answer")
    parser.add_argument("volume", nargs="?", metavar="NAME", help="of the volume whose lenders are given up")
    parser.add_argument("--host", metavar="HOST", help="whose volume it is (default: of the agent that answers)")


def run(context: Context) -> int:
    if context.args.action == "give-up":
        return give_up(context)
    answer = context.agent.gather("volumes")
    if context.json:
        context.say_json(answer.whole)
        return context.whole(answer)
    rows = [
        (
            volume["volume"],
            volume["host"],
            format_size(volume["size_bytes"]),
            of(volume["slabs_mapped"], volume["slabs"]),
            of(volume["slabs_whole"], volume["slabs"]) if is_mirrored(volume) else "",
            format_size(volume["written_bytes"]),
            format_size(volume["read_bytes"]),
            format_size(volume["remote_read_bytes"]),
            format_size(volume["disk_read_bytes"]),
            "alive" if volume["process_alive"] else "gone",
        )
        for volume in answer.data
    ]
    context.say(table(TITLES, rows, TITLES[2:9], context.paint))
    for volume in answer.data:
        say_trouble(context, volume)
    context.as_of(answer, plural(len(rows), "volume"))
    return context.whole(answer)


def is_mirrored(volume: dict[str, Any]) -> bool:
    """It has no disk."""
    return bool(volume.get("members", 1) > 1)


def say_trouble(context: Context, volume: dict[str, object]) -> None:
    """What keeps this volume from being read or written, and what to do about it."""
    name, host = volume["volume"], volume["host"]
    waits_for = volume.get("waits_for") or ()
    assert isinstance(waits_for, list | tuple)
    for wait in waits_for:
        slabs = plural(len(wait["slabs"]), "slab")
        context.say(
            f"{name} on {host}: {slabs} may be newer at {wait['lender']}, which has not answered: {wait['why']}"
        )
    if waits_for:
        instead = "lose what is there" if is_mirrored(volume) else "read older pages"
        context.say(f"next: bring those hosts back, or {instead}: agentctl volumes give-up {name} --host {host}")
    if volume.get("trouble"):
        context.say(f"{name} on {host}: {volume['trouble']}")


def give_up(context: Context) -> int:
    name = context.args.volume
    if name is None:
        raise AgentctlError(USAGE, "give-up of which volume?", "its name is missing", "agentctl volumes give-up NAME")
    try:
        answer = on_host(context, context.args.host).post("volumes", name, "give-up")
    except AgentctlError as error:
        if error.code == NOT_FOUND and context.args.host is None:
            say_where(context, error, f"agentctl volumes give-up {name}")
        raise
    if context.json:
        return context.say_json(answer.whole)
    slabs, lenders = answer.data["slabs"], answer.data["lenders"]
    if lenders and not answer.data.get("members", 1):
        context.say(f"{name}: what {' and '.join(lenders)} had of it is given up; it can be made anew, empty")
    elif slabs:
        which = ", ".join(str(index) for index in slabs[:20]) + (" ..." if len(slabs) > 20 else "")
        gone = " and ".join(lenders)
        cost = "that were written last may read older" if answer.data.get("members", 1) == 1 else "are lost"
        context.say(f"{name} waits no longer for {gone}: pages of slab {which} {cost}")
    else:
        context.say(f"{name} waits for no lender")
    return 0
