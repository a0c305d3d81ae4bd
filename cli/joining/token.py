"""Make a token on a member of the rack, and print the line to type on the host that joins.

A token is good for one host and one hour. The agent that made it has it in memory alone: when it restarts, its tokens
are no longer good. Whoever has a token can join, so send the line to nobody else."""

import argparse

from cli.context import Context
from cli.joining.here import join_line, say_done


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(context: Context) -> int:
    line, note = join_line(context.agent)
    if context.json:
        return context.say_json({"schema": 1, "data": {"join": line, "note": note}})
    say_done(context, [note] if note else [])
    context.say(line)
    return 0
