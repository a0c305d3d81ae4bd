"""Let this host join a rack. `agentctl rack init` or `agentctl rack token` on a member printed the line to type.

It asks the member for the gossip key (which crosses the network sealed), writes it and agent.toml, starts the agent,
and returns once this host is a member. Nothing is written when the token is refused. An interrupted join is repeated by
typing the same line: once the key is here, the token is not needed any more.

A host whose agent has run before has a log of its own. With `--leave-own` it gives up that log, with the jobs and
quotas in it, and joins; the log is kept beside, as `consensus.given-up`. A host that has the key of the rack already
needs no token then."""

import argparse
import sys
from pathlib import Path

from cli.client import REFUSED, USAGE, AgentctlError
from cli.context import Context
from cli.joining import here as files
from cli.joining.asking import ask, checked_address
from cli.joining.here import Here, say_done
from cli.joining.toml_lines import Settings
from gossip.joining.messages import BY_KEY, JoinToken, RackGiven, fingerprint, parsed
from gossip.joining.policy import by_key

SEEDS_MAX = 3
"""The most seeds that are written: any host that is up leads to all others."""

LEAVE = "type the same line with --leave-own    (its own jobs and quotas are forgotten)"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("at", metavar="HOST:PORT", help="a member of the rack: where its gossip listens")
    parser.add_argument("--token", metavar="T", help="the token; other users of this host can see it while it is typed")
    parser.add_argument("--token-file", metavar="FILE", help="a file with the token; -: standard input")
    parser.add_argument("--leave-own", action="store_true", help="give up this host's own log, and join")
    files.arguments(parser)


def run(context: Context) -> int:
    args = context.args
    checked_address(args.at)
    here = Here(context)
    check_free(here, args.leave_own)
    here.check_writable()
    token = token_of(here)
    if not args.leave_own and token.id != BY_KEY and here.keys_found():
        why = f"{here.key_path} or {here.config.state_dir} has one of another rack, which may be in use"
        raise AgentctlError(REFUSED, "this host has a gossip key already", why, LEAVE)
    given = ask(args.at, token)
    if given.host == here.config.name:
        why = f"{args.at} has that name, and each host of a rack has its own"
        next_step = f"set name = ... at the top of {here.toml}, and get another token"
        raise AgentctlError(REFUSED, f"this host is named {given.host}", why, next_step)
    settings = settings_of(args.at, given, here)
    text = here.planned(settings, args.leave_own, f"This host joined the rack of {given.host}.")
    try:
        is_up = settle(here, given, text, settings)
    finally:
        say_done(context, here.did)
    if not is_up:
        if context.json:
            return context.say_json({"schema": 1, "data": {"did": here.did, "member": False}})
        context.say(f"{here.config.name} will join when its agent starts; next: {here.by_hand}")
        return 0
    said = here.wait(lambda: membership(here), f"{here.config.name} is not a member yet")
    if context.json:
        return context.say_json({"schema": 1, "data": {"did": here.did, "member": True}})
    context.say(said)
    return 0


def settle(here: Here, given: RackGiven, text: str, settings: Settings) -> bool:
    """Write what was given, and start the agent; whether it runs."""
    here.remember_if_it_runs()
    if here.args.leave_own:
        leave_own(here, given)
    if here.keys_found() != list(given.keys):
        here.write_key(given.keys)  # before agent.toml: without its key a host with seeds does not start
    return here.start(here.write_toml(text, settings))


def token_of(here: Here) -> JoinToken:
    """The token that was given, or, for a host that leaves its own log, that of its key. AgentctlError."""
    args = here.args
    if args.token is not None and args.token_file is not None:
        raise AgentctlError(USAGE, "two tokens are given", "--token and --token-file", "leave one of them out")
    text = args.token if args.token is not None else None if args.token_file is None else _read(args.token_file)
    if text is None:
        found = here.keys_found()
        if args.leave_own and found:
            return by_key(found[0])
        why = "a host joins by a token that a member made"
        raise AgentctlError(USAGE, "no token is given", why, "on a member: agentctl rack token")
    token = parsed(text)
    if token is None:
        why = "a token begins with covey- and has 54 characters: it was cut off, or a letter is wrong"
        raise AgentctlError(
            USAGE, "this is not a token", why, "copy the whole line, or on a member: agentctl rack token"
        )
    if (key := key_of(token, here)) is not None:
        return by_key(key)  # a join that was interrupted has used the token up
    return token


def key_of(token: JoinToken, here: Here) -> bytes | None:
    """The key that this host has of the token's rack; None: it has none of it."""
    return next((key for key in here.keys_found() if fingerprint(key) == token.rack), None)


def _read(path: str) -> str:
    try:
        return sys.stdin.read(4096) if path == "-" else Path(path).read_text()[:4096]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise AgentctlError(
            USAGE, f"cannot read the token in {path}", why, "name another file, or --token-file -"
        ) from None


def check_free(here: Here, leave_own: bool) -> None:
    """AgentctlError when this host is of a rack already, before anybody is asked."""
    if leave_own:
        if here.runs() and not here.by_systemd:
            why = f"it runs with {here.toml}, and this command could not start it again"
            raise AgentctlError(
                REFUSED, "the agent of this host runs", why, "end agentd with SIGTERM, then type this again"
            )
        return
    named = [*here.config.gossip.seeds, *here.config.leader.voters]
    if here.has_log():
        why = f"its log is in {here.log_folder}"
        raise AgentctlError(REFUSED, "this host has a rack of its own, or belongs to one", why, LEAVE)
    if named:
        why = f"{here.toml} names {', '.join(named)}"
        raise AgentctlError(REFUSED, "this host is set up for a rack already", why, f"{here.by_hand}; or: {LEAVE}")


def settings_of(at: str, given: RackGiven, here: Here) -> Settings:
    seeds = list(dict.fromkeys((at, *given.seeds)))[:SEEDS_MAX]
    settings: dict[tuple[str, str], str | list[str]] = {
        ("gossip", "seeds"): seeds,
        ("leader", "voters"): [str(host) for host in given.voters],
    }
    if given.cluster != here.config.gossip.cluster:
        settings["gossip", "cluster"] = given.cluster
    return settings


def leave_own(here: Here, given: RackGiven) -> None:
    """Stop the agent, and move away its log, and its key if that is another one."""
    if here.by_systemd:
        here.stop()
    if here.has_log():
        here.move_aside(here.log_folder)
    if here.key_path.is_file() and here.keys_found() != list(given.keys):
        here.move_aside(here.key_path)


def membership(here: Here) -> str:
    """That this host is a member, in words; empty as long as it is none."""
    answer = here.agent.get("status")
    leader, alive = answer.data.get("leader"), answer.data.get("hosts_alive") or 0
    if not leader or leader == answer.host or alive < 2:
        return ""
    return f"{answer.host} is a member: {leader} leads, {alive} hosts are alive"
