"""Begin a rack on this host, and print the line to type on each further host.

It makes the gossip key, writes agent.toml and starts the agent (`systemctl enable --now covey`). What is there is kept:
on a host that is set up already it starts the agent if it does not run, and prints the line."""

import argparse
import secrets

from cli.client import REFUSED, AgentctlError
from cli.context import Context
from cli.joining import here as files
from cli.joining.here import Here, join_line, say_done
from cli.joining.toml_lines import Settings


def arguments(parser: argparse.ArgumentParser) -> None:
    files.arguments(parser)


def run(context: Context) -> int:
    here = Here(context)
    name = here.config.name
    if here.config.gossip.seeds and not here.keys_found():
        why = f"{here.toml} names {', '.join(here.config.gossip.seeds)} as seeds, and their key is not here"
        next_step = "agentctl rack join, with a token of theirs; or remove the seeds"
        raise AgentctlError(REFUSED, "this host is set up to join a rack", why, next_step)
    here.check_writable()
    here.remember_if_it_runs()
    changed = False
    if here.config.gossip.seeds or here.config.leader.voters:
        here.did.append(f"{here.toml} is kept as it is: it names a rack")
    else:
        settings: Settings = {("leader", "voters"): [str(name)]}
        changed = here.write_toml(here.planned(settings, False, f"{name} began this rack."), settings)
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
