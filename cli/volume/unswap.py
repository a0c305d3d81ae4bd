"""Stop using a volume as swap: bring its pages back into memory, then remove the volume.

When there is no room for the pages, the command says so and the swap stays on."""

import argparse
import time

from cli.client import REFUSED, AgentctlError
from cli.context import Context
from cli.volume.named import agent_of, change, named, remove, row_of

LOOK_S = 0.5
"""Time between two looks at a swap area that is being emptied, seconds."""


def arguments(parser: argparse.ArgumentParser) -> None:
    named(parser)


def run(context: Context) -> int:
    name = context.args.volume
    word = change(context, "swap", body={"end": True}).data["swap"]
    agent = agent_of(context)
    while word == "ending":
        time.sleep(LOOK_S)
        now = row_of(agent, name).get("swap", {"word": "off"})
        word = now["word"]
        if word in ("on", "waits"):
            why, _, step = now["why"].partition("; next: ")
            again = f"agentctl volume unswap {name}"
            raise AgentctlError(REFUSED, f"volume {name} stays swap", why or "it was not given up", step or again)
    answer = remove(context)
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{name} is removed from {answer.host}")
    return 0
