"""Stop waiting for lenders that do not answer. What only they have of the volume is lost or older.

This is for a volume whose process was restarted and waits for a lender that does not answer. That lender may hold the
newest content of the pages written last. Given up, those pages read as this host's disk has them, which may be older;
where the volume has no disk (`--mirror 2`, `--parity K+1`), they are lost. Waiting is safe: a host that comes back
answers by itself. Where the host has lost its disk, and with it the record of the volume, this drops what other hosts
hold of the volume, so that it can be created again."""

import argparse

from cli.context import Context
from cli.volume.named import change, named


def arguments(parser: argparse.ArgumentParser) -> None:
    named(parser)


def run(context: Context) -> int:
    answer = change(context, "give-up")
    if context.json:
        return context.say_json(answer.whole)
    name, slabs, lenders = context.args.volume, answer.data["slabs"], answer.data["lenders"]
    if lenders and not answer.data.get("members", 1):
        context.say(f"{name}: what {' and '.join(lenders)} held of it is dropped; it can be created again, empty")
    elif slabs:
        which = ", ".join(str(index) for index in slabs[:20]) + (" ..." if len(slabs) > 20 else "")
        gone = " and ".join(lenders)
        cost = "that were written last may read older" if answer.data.get("members", 1) == 1 else "are lost"
        context.say(f"{name} no longer waits for {gone}: pages of slab {which} {cost}")
    else:
        context.say(f"{name} waits for no lender")
    return 0
