"""List the slabs of all volumes, or of one: their state, and the host that lends the memory for each."""

import argparse

from cli.context import Context
from cli.table import epoch_text, of, plural, table
from covey.core.units import format_size

TITLES = ("VOLUME", "SLAB", "MEMBER", "BORROWER", "STATE", "LENDER", "SIZE", "PAGES", "REMOTE", "REQUESTS/S", "EPOCH")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", nargs="?", help="only this volume")


def run(context: Context) -> int:
    answer = context.agent.gather("slabs")
    if context.json:
        context.say_json(answer.whole)
        return context.whole(answer)
    slabs = [slab for slab in answer.data if context.args.volume in (None, slab["volume"])]
    rows = [
        (
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
        for slab in slabs
    ]
    context.say(table(TITLES, rows, ("SLAB", "SIZE", "PAGES", "REMOTE", "REQUESTS/S", "EPOCH"), context.paint))
    mapped = [slab for slab in slabs if slab["state"] == "mapped"]
    lenders = len({slab["lender"] for slab in mapped})
    text = f"{len(mapped)} of {plural(len(slabs), 'slab')} mapped on {plural(lenders, 'lender')}"
    context.as_of(answer, text, age_s=max((slab["age_s"] for slab in slabs), default=0.0))
    return context.whole(answer)
