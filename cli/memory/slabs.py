"""List the slabs of all volumes, or of one: their state, and the host that lends the memory for each."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.context import Context
from cli.lists import Listing, list_arguments, show, watch_argument
from cli.table import epoch_text, of, plural
from covey.core.units import format_size

TITLES = ("VOLUME", "SLAB", "MEMBER", "BORROWER", "STATE", "LENDER", "SIZE", "PAGES", "REMOTE", "REQUESTS/S", "EPOCH")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", nargs="?", help="only this volume")
    list_arguments(parser)
    watch_argument(parser)


def run(context: Context) -> int:
    volume = context.args.volume
    if context.args.watch:
        from cli.watched import watch  # only where it is needed: agentctl's imports are a budget

        return watch(context, "slabs", lambda _rows: LISTING, lambda slab: volume in (None, slab["volume"]))
    answer = context.agent.gather("slabs")
    slabs = [slab for slab in answer.data if volume in (None, slab["volume"])]
    if not show(context, LISTING, answer, slabs):
        return context.whole(answer)
    mapped = [slab for slab in slabs if slab["state"] == "mapped"]
    lenders = len({slab["lender"] for slab in mapped})
    text = f"{len(mapped)} of {plural(len(slabs), 'slab')} mapped on {plural(lenders, 'lender')}"
    context.as_of(answer, text, age_s=max((slab["age_s"] for slab in slabs), default=0.0))
    return context.whole(answer)


def cells(slab: Mapping[str, Any]) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a slab."""
    return (
        slab["volume"],
        slab["index"],
        of(slab["member"] + 1, slab["members"]) if slab.get("members", 1) > 1 else "",
        slab["borrower"],
        slab["state"],
        slab["lender"],
        format_size(slab["size_bytes"]),
        slab["pages_written"],
        slab["pages_remote"],
        f"{slab['requests_per_s']:.1f}",
        epoch_text(slab["epoch"]),
    )


LISTING = Listing(
    TITLES,
    cells,
    "volume",
    ("SLAB", "SIZE", "PAGES", "REMOTE", "REQUESTS/S", "EPOCH"),
    ("EPOCH", "PAGES", "REMOTE", "SIZE", "REQUESTS/S", "BORROWER"),
)
