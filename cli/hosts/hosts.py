"""List the hosts of the rack, the state of each, and what it can spare, as the answering agent knows it by gossip.

`agentctl hosts give-up NAME` declares that nothing runs any more on a host that is gone (because its power is off, for
example): jobs that wait for it, also those submitted with --on-lost keep, are taken back and placed again at once.
`agentctl hosts forget NAME`: the host will never come back. It votes no more, its jobs are taken back as above, volumes
wait no longer for what only it held, and no list has it any more. Refused while the host is alive.

`agentctl hosts drain NAME` empties a host before it is shut down or upgraded. No rank starts there; jobs that heal
(job.state) move to other hosts, and so do slabs and sums; other jobs stay until they end, or with --stop-jobs are
stopped and queued again. --wait returns once nothing is left. `agentctl hosts resume NAME` uses the host again.

`agentctl hosts cordon NAME`: no rank starts on the host any more, and what is there stays: jobs, slabs, sums. `agentctl
hosts uncordon NAME` ends that. A host on which starts of three jobs fail in a row cordons itself, and says so in NOTE;
only a person uncordons it."""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cli.client import REFUSED, TOO_LATE, USAGE, AgentctlError
from cli.context import Context
from cli.lists import Listing, list_arguments, show, watch_argument
from cli.table import ago, of, plural
from covey.core.units import format_seconds

TITLES = ("HOST", "STATE", "LEADS", "FOR", "GPUS FREE", "SLABS FREE", "SLABS LENT", "SUMS FOR", "SEEN", "NOTE")

ACTIONS = {
    "give-up": "give-up NAME: declare the host lost for good",
    "forget": "forget NAME: the host will never come back",
    "drain": "drain NAME: move everything away from the host",
    "resume": "resume NAME: use the host again",
    "cordon": "cordon NAME: start nothing new there, and leave the rest",
    "uncordon": "uncordon NAME: let jobs start there again",
}
ASK_AGAIN_S = 0.5
STOPS = "agentctl hosts drain --stop-jobs"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=tuple(ACTIONS), metavar="ACTION", help="; ".join(ACTIONS.values()))
    parser.add_argument("host", nargs="?", metavar="NAME", help="name of the host")
    parser.add_argument(
        "--stop-jobs", action="store_true", help="with drain: stop jobs that cannot move, and queue them again"
    )
    list_arguments(parser)
    watch_argument(parser)
    parser.add_argument("--wait", action="store_true", help="with drain: return once nothing is left on the host")


def run(context: Context) -> int:
    args = context.args
    if args.action is not None:
        return act(context, args.action, args.host)
    if args.watch:
        from cli.watched import watch  # only where it is needed: agentctl's imports are a budget

        return watch(context, "hosts", listing)
    answer = context.agent.get("hosts")
    if not show(context, listing(answer.data), answer):
        return 0
    for next_step in dict.fromkeys(step for host in answer.data for step in steps(host)):
        context.say(f"next: {next_step}")
    alive = sum(host["state"] == "alive" for host in answer.data)
    wrong = sum(bool(host.get("troubles")) for host in answer.data)
    leader = next((host["host"] for host in answer.data if host["leads"]), None)
    alive_text = f"{alive} of {plural(len(answer.data), 'host')} alive{f', {wrong} wrong' if wrong else ''}"
    context.as_of(answer, alive_text, f"{leader} leads" if leader else "no leader now")
    return 0


def listing(rows: Sequence[dict[str, Any]]) -> Listing:
    """How these hosts are listed."""
    has_other_users = any(host.get("other_users") in ("limited", "unlimited") for host in rows)
    right, least = ("FOR", "GPUS FREE", "SLABS FREE", "SLABS LENT"), ("SEEN", "SUMS FOR", "SLABS LENT", "SLABS FREE")
    return Listing(TITLES, lambda host: cells(host, has_other_users), "host", right, (*least, "FOR", "LEADS"))


def cells(host: dict[str, Any], has_other_users: bool) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a host."""
    return (
        host["host"],
        host["state"],
        "leader" if host["leads"] else "",
        format_seconds(host["since_s"]),
        of(host["gpus_free"], host["gpus_total"]),
        host["slabs_free"],
        host["slabs_lent"],
        plural(host["aggregator_jobs"], "job") if host["aggregator_jobs"] else "",
        ago(host["age_s"]),
        note(host, has_other_users),
    )


def act(context: Context, action: str, host: str | None) -> int:
    if not host:
        raise AgentctlError(
            USAGE, "no host is named", f"`{action}` needs the name of a host", f"agentctl hosts {action} gpu2"
        )
    answer = context.agent.post("hosts", host, action, body={"stop_jobs": context.args.stop_jobs})
    if context.json and not context.args.wait:
        return context.say_json(answer.whole)
    if action == "forget":
        return say_forgotten(context, host, answer.data)
    jobs = ", ".join(job["id"] for job in answer.data)
    if action == "give-up":
        context.say(f"{host} is given up; {f'jobs taken back: {jobs}' if jobs else 'no job waited for it'}")
    elif action == "cordon":
        stays = f"jobs that stay: {jobs}" if jobs else "no jobs there now"
        context.say(f"{host} is cordoned: no rank starts there; {stays}")
    elif action in ("resume", "uncordon"):
        context.say(f"{host} is used again")
    elif context.args.wait:
        return wait_until_empty(context, host)
    else:
        context.say(
            f"{host} is drained: nothing new starts there; {f'jobs there now: {jobs}' if jobs else 'no jobs there now'}"
        )
        context.say(f"next: agentctl hosts drain {host} --wait, or agentctl hosts")
    return 0


def say_forgotten(context: Context, host: str, forgotten: dict[str, Any]) -> int:
    jobs = ", ".join(forgotten["jobs"])
    context.say(f"{host} is forgotten; {f'jobs taken back: {jobs}' if jobs else 'no job waited for it'}")
    if forgotten["voted"]:
        voters = context.agent.get("voters").data["voters"]
        left = [name for name in voters if name != host]
        context.say(f"it voted; now {', '.join(left)} {'votes' if len(left) == 1 else 'vote'}")
        if len(left) % 2 == 0:
            context.say("next: agentctl voters add HOST, so that an odd number votes")
    return 0


def wait_until_empty(context: Context, host: str) -> int:
    """0 once the host says that nothing is left there."""
    began_s, said = time.monotonic(), ""
    while True:
        row = next((row for row in context.agent.get("hosts").data if row["host"] == host), None)
        state = "unknown" if row is None else row["state"]
        if row is None or state in ("gone", "left"):
            next_step = f"agentctl hosts give-up {host}, if nothing runs there any more"
            raise AgentctlError(REFUSED, f"cannot tell whether {host} is empty", f"it is {state}", next_step)
        heard, rest = row.get("drained_by") is not None, left(row)
        if heard and not rest:
            break
        if heard and rest != said:
            said = rest
            if not context.json:
                context.say(f"{host}: {rest} left")
        limit_s = context.args.timeout
        if limit_s is not None and time.monotonic() - began_s > limit_s:
            why = f"after {limit_s:g} s {f'{said} left' if said else 'it has not confirmed that it is drained'}"
            raise AgentctlError(TOO_LATE, f"{host} is not empty yet", why, f"agentctl jobs, or {STOPS} {host}")
        time.sleep(ASK_AGAIN_S)
    if context.json:
        return context.say_json({"schema": 1, "data": row})
    context.say(
        f"{host} is empty: no job, slab or sum is left; shut it down, or use it again: agentctl hosts resume {host}"
    )
    return 0


def left(row: dict[str, Any]) -> str:
    """What a host that is drained still has; empty: nothing."""
    parts = ((row.get("drained_jobs"), "job"), (row["slabs_lent"], "slab"), (row["aggregator_jobs"], "summed job"))
    return ", ".join(plural(count, what) for count, what in parts if count)


def steps(host: dict[str, Any]) -> Iterator[str]:
    """What to type next about a host."""
    name = host["host"]
    yield from (each["next"] for each in host.get("troubles") or ())
    if host["state"] == "gone":
        yield f"agentctl why host/{name}; agentctl hosts give-up {name}, if its power is off and stays off"
    if host.get("no_room"):
        yield f"make room where NOTE says, on {name}; it then goes on by itself"
    if host.get("closed_why"):
        yield f"agentctl why host/{name}; agentctl hosts uncordon {name}, once jobs can start there"
    if host.get("gpus_why") or host.get("gpus_held"):
        yield "agentctl gpus"


def since(host: dict[str, Any]) -> str:
    """Since when a host that closed itself is closed, by the wall clock there; empty where a person knows it."""
    wall_s = host.get("closed_wall_s") if host.get("closed_why") else None
    return time.strftime(" since %Y-%m-%d %H:%M", time.localtime(wall_s)) if wall_s else ""


def note(host: dict[str, Any], has_other_users: bool = False) -> str:
    """What there is to say of a host. `has_other_users`: some host runs jobs as users other than the agent's."""
    failed, suspected_by = host["plugins_failed"], host["suspected_by"]
    parts = [f"wrong: {each['what']}" for each in host.get("troubles") or ()]
    parts += [f"suspected by {suspected_by}"] if suspected_by else []
    parts += [f"late: {late['job']} waits for it {late['percent']} % of the time" for late in host.get("late") or ()]
    if host.get("drained_by") is not None:
        rest = left(host)
        parts.append(f"drained by {host['drained_by']}, {f'{rest} left' if rest else 'empty'}")
    if host.get("cordoned_by") is not None:
        stay = plural(host.get("drained_jobs") or 0, "job")
        parts.append(f"cordoned by {host['cordoned_by']}{since(host)}, {stay} there")
    if why := host.get("closed_why"):
        parts.append(str(why))
    if why := host.get("gpus_why"):
        out = host.get("gpus_out", 0)
        parts.append(f"{plural(out, 'GPU')} out: {why}" if out else why)
    for job, word in sorted((host.get("gpus_held") or {}).items()):
        parts.append(f"{job} does not use a GPU that it holds" if word == "idle" else f"{job} holds a GPU: {word}")
    if no_room := host.get("no_room"):
        parts.append(no_room)
    if has_other_users and host.get("other_users") == "no":
        parts.append("jobs of other users: not possible, no starter")
    if host.get("other_users") == "unlimited":
        parts.append("limits of other users' jobs: not enforced")
    if host["state"] == "away":
        parts.append(f"back within {format_seconds(float(str(host.get('away_s', 0))))}")
    if isinstance(failed, list) and failed:
        parts.append(f"failed: {', '.join(map(str, failed))}")
    return "; ".join(parts)
