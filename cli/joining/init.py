"""Begin a rack on this host, and print the line to type on each further host.

It makes the gossip key, writes agent.toml and starts the agent (`systemctl enable --now covey`). What is there is kept:
on a host that is set up already it starts the agent if it does not run, and prints the line."""

import argparse
import secrets

from cli.context import Context
from cli.joining import here as files
from cli.joining.here import Here, join_line, say_done


def arguments(parser: argparse.ArgumentParser) -> None:
    files.arguments(parser)


def run(context: Context) -> int:
    here = Here(context)
    name = here.config.name
    here.remember_if_it_runs()
    changed = False
    if here.config.gossip.seeds or here.config.leader.voters:
        here.did.append(f"{here.toml} is kept as it is: it names a rack")
    else:
        settings = {("leader", "voters"): [str(name)]}
        changed = here.write_toml(
            settings, False, f"{name} began this rack. docs/reference/agent-toml.md lists settings."
        )
    make_key(here)
    is_up = here.start(changed)
    if not is_up:
        say_done(context, [*here.did, f"next: {here.by_hand}", "then: agentctl rack token"])
        return context.say_json({"schema": 1, "data": {"did": here.did, "join": ""}}) if context.json else 0
    here.wait(lambda: here.agent.get("status").data["leader"] or "", f"{name} does not lead its rack")
    line, note = join_line(here.agent)
    if context.json:
        return context.say_json({"schema": 1, "data": {"did": here.did, "join": line, "note": note}})
    say_done(context, [*here.did, *([note] if note else []), "type this on one further host within an hour:"])
    context.say(line)
    return 0


def make_key(here: Here) -> None:
    """A new key, unless this host has one."""
    if here.keys_found():
        here.did.append("the gossip key is kept")
    else:
        here.write_key([secrets.token_bytes(32)])
