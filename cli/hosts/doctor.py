"""Report what is wrong with the rack and with this host, which features this host lacks, and the next step for each.

Exit code 1 when something is wrong. A *lacking* feature stops nothing: without it a part of Covey does less, or is
slower. The host itself is examined only through its own agent, and as far as this user may read it.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent.etc.units import SHARE, UNITS, rendered
from cli.client import Answer
from cli.context import Context
from cli.hosts import examined
from cli.hosts.examined import Finding, State
from cli.table import GREEN, RED, YELLOW
from covey.core.units import format_size
from covey.kernel import userfault
from covey.wire.bulk import BULK_BYTES

COLOURS: Mapping[State, str] = {"good": GREEN, "lacking": YELLOW, "wrong": RED}
NEXT = "; next: "
"""Where an agent's own words go on with what to do."""


class Looked(NamedTuple):
    """At this host. None: it could not be seen, or does not concern it."""

    send_bytes_max: int | None
    """Most that a socket may keep on its way (`net.core.wmem_max`)."""
    units: Mapping[str, bool]
    """Unit that is installed -> whether it is this version's."""
    prefix: str
    """The environment that this version is installed in."""
    no_faults: str
    """Why this user's memory cannot be filled by another process; empty: it can."""
    ptrace_scope: int | None
    huge_pages: str | None
    """What stands in brackets in the kernel's `transparent_hugepage/enabled`."""


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def findings(context: Context, status: Answer) -> list[Finding]:
    """All there are, of the rack and of this host. AgentctlError when the agent of that status answers no more."""
    hosts, voters, gpus = context.agent.get("hosts").data, context.agent.gather("voters"), context.agent.gather("gpus")
    silent = {each["host"]: each for each in (*gpus.unanswered, *voters.unanswered)}
    found = [*of_rack(status.data, hosts), *unheard(hosts, list(silent.values())), *of_gpus(gpus.data)]
    me, root = str(status.host), Path("/")
    links = context.agent.get("links").data
    seen = [*examined.of_links(me, links), *examined.of_limits(hosts)]
    address = context.agent.address or ""
    if address.startswith("unix:"):
        found += of_host(look(root, installed()))
        names = [host["host"] for host in hosts if host["state"] == "alive"]
        seen += examined.of_process_limits(root, examined.pid_behind(address.removeprefix("unix:")), len(names))
        seen += examined.of_names(root, names, me)
        if me not in {each["host"] for each in gpus.unanswered}:
            seen += examined.of_driver(root, me, gpus.data)
    return [*found, *seen]


def run(context: Context) -> int:
    status = context.agent.get("status")
    found = findings(context, status)
    wrong = any(each.state == "wrong" for each in found)
    if context.json:
        context.say_json({"schema": 1, "host": status.host, "data": [each._asdict() for each in found]})
        return int(wrong)
    for each in sorted(found, key=lambda each: list(COLOURS).index(each.state)):
        context.say(
            f"{context.paint(each.state, COLOURS[each.state])}{' ' * (9 - len(each.state))}{each.what}: {each.why}"
        )
        if each.next:
            context.say(f"{' ' * 9}  next: {each.next}")
    context.as_of(status, f"{sum(each.state == 'wrong' for each in found)} wrong")
    return int(wrong)


def installed() -> Path:
    """The environment whose `agentctl` this is."""
    try:
        called = Path(sys.argv[0]).absolute().parent.parent
    except OSError:  # a relative name, and this directory was deleted
        return Path(sys.prefix)
    return called if (called / SHARE).is_dir() else Path(sys.prefix)


# ---- what an agent says ----------------------------------------------------------------------------------------------


def of_rack(status: Mapping[str, Any], hosts: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """`status` and `hosts`: as `GET /v1/status` and `/v1/hosts` have them."""
    alive = sum(host["state"] == "alive" for host in hosts)
    if leader := status.get("leader"):
        yield Finding("rack", "good", f"hosts alive: {alive} of {len(hosts)}; {leader} leads")
    else:
        yield Finding("leader", "wrong", "none now: running jobs continue, changes wait", "agentctl voters")
    for host in hosts:
        yield from _of_host(host, host["host"] == status.get("host"))
    for name, plugin in sorted(status.get("plugins", {}).items()):
        if plugin["state"] == "failed":
            yield Finding(f"plugin {name}", "wrong", plugin["why"], "agentctl status")
    if trouble := status.get("log"):
        yield _said("log", "wrong", trouble)
    for seed, why in sorted(status.get("seeds_unknown", {}).items()):
        yield Finding(f"seed {seed}", "wrong", why, f"getent hosts {seed.rpartition(':')[0]}")
    for name, line in status.get("lines", {}).items():
        yield _said(name, "lacking" if NEXT in line else "good", line)
    for note in status.get("notes", []):
        yield _said("note", "lacking", note)


def _of_host(host: Mapping[str, Any], answers: bool) -> Iterator[Finding]:
    """`answers`: it is the one that was asked, and has said itself what is wrong with its plugins."""
    name, state = host["host"], host["state"]
    if state in ("suspect", "gone"):
        yield Finding(f"host {name}", "wrong", state, f"agentctl why host/{name}")
    elif state == "away":
        yield Finding(f"host {name}", "lacking", "it restarts", "agentctl hosts")
    if not host.get("gpus_known", True):
        yield Finding(
            f"host {name}",
            "wrong",
            f"its GPUs are not known: {host['gpus_why']}",
            f"nvidia-smi on {name}",
        )
    elif why := host.get("gpus_why"):
        out = host.get("gpus_out", 0)
        what = f"GPUs that cannot take jobs: {out}" if out else "a GPU that a process holds cannot take another job"
        yield Finding(f"host {name}", "wrong", f"{what} ({why})", f"agentctl why host/{name}")
    if why := host.get("closed_why"):
        by = host.get("cordoned_by") or host.get("drained_by")
        yield Finding(f"host {name}", "wrong", f"cordoned by {by}: {why}", f"agentctl why host/{name}")
    for trouble in host.get("troubles") or ():
        yield Finding(f"host {name}", "wrong", trouble["what"], trouble["next"])
    if no_room := host.get("no_room"):
        yield Finding(f"host {name}", "wrong", no_room, f"agentctl why host/{name}")
    for plugin in () if answers else host.get("plugins_failed", ()):
        yield Finding(f"host {name}", "wrong", f"its plugin {plugin} has failed", f"agentctl why host/{name}")


def of_gpus(gpus: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """`gpus`: as `GET /v1/gpus` has them."""
    for gpu in gpus:
        condition, what = gpu.get("condition", "ok"), f"GPU {gpu['index']} of {gpu['host']}"
        if use := gpu.get("use"):
            yield Finding(what, "lacking" if gpu["job"] else "wrong", f"{gpu['uuid']} is {use}", "agentctl gpus")
        if condition != "ok":
            state: State = "lacking" if condition == "degraded" else "wrong"
            yield Finding(what, state, f"{gpu['uuid']} is {condition}: {gpu['why']}", f"agentctl why {gpu['uuid']}")


def unheard(hosts: Sequence[Mapping[str, Any]], silent: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Hosts that gossip has as alive and whose agent did not answer a question."""
    alive = {host["host"] for host in hosts if host["state"] == "alive"}
    for each in silent:
        if each["host"] in alive:
            why = f"its gossip works, but its agent did not answer: {each['why']}"
            yield Finding(f"host {each['host']}", "wrong", why, f"agentctl why host/{each['host']}")


def _said(what: str, state: State, text: str) -> Finding:
    why, _, next = text.partition(NEXT)
    return Finding(what, state, why, next)


# ---- what this host has ----------------------------------------------------------------------------------------------


def look(root: Path, prefix: Path) -> Looked:
    """`root`: of the file system; `prefix`: of the environment whose `agentctl` this is."""
    share = prefix / SHARE
    units = {}
    for name in UNITS:
        here, ours = _text(root / "etc/systemd/system" / name), _text(share / name)
        if here is not None and ours is not None:
            units[name] = here == rendered(ours, str(prefix))
    try:
        os.close(userfault.opened().descriptor)
        no_faults = ""
    except OSError as error:
        no_faults = error.strerror or str(error)
    enabled = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return Looked(
        send_bytes_max=_number(root / "proc/sys/net/core/wmem_max"),
        units=units,
        prefix=str(prefix),
        no_faults=no_faults,
        ptrace_scope=_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        huge_pages=None if enabled is None else enabled.partition("[")[2].partition("]")[0],
    )


def of_host(looked: Looked) -> Iterator[Finding]:
    for name, is_ours in looked.units.items():
        if is_ours:
            yield Finding(name, "good", "as installed with this version")
        else:
            next = f"{looked.prefix}/bin/agentd --install-unit && systemctl daemon-reload && systemctl restart {name}"
            yield Finding(name, "wrong", "the file in /etc/systemd/system is not that of this version", next)
    if looked.send_bytes_max is not None and looked.send_bytes_max < BULK_BYTES:
        why = f"net.core.wmem_max is {format_size(looked.send_bytes_max)}: long reads of remote memory take longer"
        next = f"cp {looked.prefix}/{SHARE}/covey.sysctl.conf /etc/sysctl.d/ && systemctl restart systemd-sysctl"
        yield Finding("sockets", "lacking", why, next)
    if looked.no_faults:
        why = f"{looked.no_faults}: a RemoteArray of this user can only be read and written by calls"
        yield Finding("arrays", "lacking", why, "use Linux 5.19 or newer, without a sandbox that forbids userfaultfd")
    if looked.ptrace_scope is not None and looked.ptrace_scope > 1:
        why = (
            f"kernel.yama.ptrace_scope is {looked.ptrace_scope}: ranks on one host "
            "copy large tensors instead of sharing them"
        )
        yield Finding("tensors", "lacking", why, "sysctl kernel.yama.ptrace_scope=1")
    if looked.huge_pages == "never":
        why = "transparent huge pages are off: ranks on one host copy large tensors instead of sharing them"
        yield Finding("huge pages", "lacking", why, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None
