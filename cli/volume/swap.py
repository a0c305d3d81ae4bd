"""Use a volume as swap of its host: create it, or take the one of this name that exists, and switch swap on.

It takes `covey-swapd` on that host. With `--mirror 2` or `--parity K+1` a new volume has no disk, as with
`agentctl volume create`. Without SIZE the volume must exist. `agentctl volume unswap` ends it; `agentctl volume show`
shows how much is used."""

import argparse

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.volume.create import size_of
from cli.volume.named import agent_of, asked_kind, change, kind_arguments, named, row_of
from covey.core.units import format_size


def arguments(parser: argparse.ArgumentParser) -> None:
    named(parser)
    parser.add_argument("size", metavar="SIZE", nargs="?", help="such as 64GiB (default: that of an existing volume)")
    kind_arguments(parser)


def run(context: Context) -> int:
    name = context.args.volume
    step = f"agentctl volume swap {name} 64GiB"
    agent = agent_of(context)
    found = row_of(agent, name)
    if context.args.size is not None:
        size_bytes = size_of(context.args.size, step)
        agent.post("volumes", body={"volume": name, "size_bytes": size_bytes, **asked_kind(context.args)})
    elif found:
        size_bytes = found["size_bytes"]
    else:
        raise AgentctlError(USAGE, f"no size for volume {name}", "there is no volume of that name yet", step)
    try:
        answer = change(context, "swap", body={}, again=context.args.size or "")
    except AgentctlError:
        if not found and not row_of(agent, name)["swap"]["device"]:
            agent.delete("volumes", name)  # nobody else uses it
        raise
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{name}: {format_size(size_bytes)}, swap of {answer.host}; next: agentctl memory")
    return 0
