"""Show which keys of gossip each host has, or give all hosts a new one while the rack runs. Keys are shown by a hash.

  list           each host, the key with which it seals, and others that it opens
  rotate         make a key, install it on every host, have all seal with it, and remove the others
  install [ID]   make a key and install it on every host; with ID: one that this host has, where it is missing
  use ID         have every host seal with this key; refused while a host lacks it
  remove ID      remove this key from every host; refused while a host needs it, or while a host is gone

`rotate` takes three steps, and each begins only when every host that is there has acknowledged the one before: a host
that does not answer stops it, and typing it again continues. A host that is gone meanwhile does not get the new key: it
joins again by `agentctl rack join --leave-own` with a token. `install`, `use` and `remove` are these steps one by one,
by the ID that the list shows. Nothing is restarted."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.client import TRY_AGAIN, USAGE, AgentctlError
from cli.context import Context
from cli.lists import Listing, list_arguments, show

TITLES = ("HOST", "SEALS WITH", "OPENS ALSO")
STEPS = ("install", "use", "remove")
STEPS_MAX = 6
"""More steps than a rotation has, also one that continues where another ended."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", default="list", choices=("list", "rotate", *STEPS))
    parser.add_argument("id", nargs="?", default="", metavar="ID", help="the key, as the list calls it")
    list_arguments(parser)


def run(context: Context) -> int:
    verb, id = context.args.verb, context.args.id
    if id and verb not in STEPS:
        raise AgentctlError(USAGE, f"{verb} takes no ID", f"{id!r} was given", f"agentctl keys {verb}")
    if verb in ("use", "remove") and not id:
        raise AgentctlError(USAGE, f"{verb} needs the ID of a key", "none was given", "agentctl keys")
    if verb in STEPS:
        return stepped(context, verb, id)
    return rotate(context) if verb == "rotate" else listed(context)


def stepped(context: Context, verb: str, id: str) -> int:
    turned = context.agent.post("keys", "turn", body={"step": verb, "id": id}).data
    if context.json:
        return context.say_json({"schema": 1, "data": [turned]})
    _say_step(context, turned)
    if turned["gone"] and verb == "install":
        context.say(f"{', '.join(turned['gone'])}: gone, without it; agentctl keys install {turned['id']} continues")
    return 0


def _say_step(context: Context, turned: Mapping[str, Any]) -> None:
    whose = f"acknowledged by {', '.join(turned['hosts'])}" if turned["hosts"] else "every host had done it before"
    context.say(f"{turned['step']:<8} {turned['id']}: {whose}")


def listed(context: Context) -> int:
    answer = context.agent.gather("keys")
    if not show(context, Listing(TITLES, _cells, "host"), answer, sorted(answer.data, key=_by_host)):
        return context.whole(answer)
    if len({tuple(row["ids"]) for row in answer.data}) > 1 or any(len(row["ids"]) > 1 for row in answer.data):
        context.say("a rotation has begun and is not complete; next: agentctl keys rotate")
    context.as_of(answer)
    return context.whole(answer)


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row["host"], row["ids"][0], ", ".join(row["ids"][1:])


def _by_host(row: dict[str, str]) -> str:
    return row["host"]


def rotate(context: Context) -> int:
    taken = []
    for _ in range(STEPS_MAX):
        turned = context.agent.post("keys", "turn").data
        taken.append(turned)
        if not context.json:
            _say_step(context, turned)
        if turned["done"]:
            break
    else:
        why = f"{STEPS_MAX} steps were taken, and others are left: somebody else rotates the keys, too"
        raise AgentctlError(TRY_AGAIN, "the rotation is not complete", why, "agentctl keys, then: agentctl keys rotate")
    last = taken[-1]
    if context.json:
        return context.say_json({"schema": 1, "data": taken})
    if last["gone"]:
        context.say(
            f"{', '.join(last['gone'])}: gone, without the new key; when it is back, there: "
            "agentctl rack join HOST:7946 --leave-own --token-file -    (with a token: agentctl rack token)"
        )
    context.say(f"done: every host seals with {last['id']}, and opens nothing else")
    return 0
