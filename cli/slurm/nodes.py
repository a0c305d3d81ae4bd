"""sinfo, and `scontrol show node|partition`: hosts in Slurm's form."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cli.client import NOT_FOUND, USAGE, AgentctlError
from cli.context import Context
from cli.slurm import states
from cli.slurm.looking import no_words
from cli.slurm.options import read
from cli.slurm.states import PARTITION
from cli.table import printable

SINFO, SINFO_BY_NODE = "%10P %.5a %.10l %.6D %6t %N", "%20N %.6D %10P %6t"
DOWN, DRAINED = "down", "drain"


class Nodes(NamedTuple):
    """Hosts that one line shows."""

    hosts: list[Mapping[str, Any]]

    @property
    def names(self) -> str:
        return ",".join(sorted(str(host["host"]) for host in self.hosts))


LONG = {"alloc": "allocated", "mix": "mixed", DRAINED: "drained"}
"""Short words for states of hosts -> the long ones, where they differ."""
LETTERS: states.Letters = {
    "P": ("PARTITION", lambda nodes: f"{PARTITION}*"),
    "R": ("PARTITION", lambda nodes: PARTITION),
    "a": ("AVAIL", lambda nodes: "up"),
    "l": ("TIMELIMIT", lambda nodes: "infinite"),
    "D": ("NODES", lambda nodes: len(nodes.hosts)),
    "t": ("STATE", lambda nodes: state_of(nodes.hosts[0])),
    "T": ("STATE", lambda nodes: long_state(nodes.hosts[0])),
    "N": ("NODELIST", lambda nodes: nodes.names),
    "n": ("HOSTNAMES", lambda nodes: nodes.names),
    "G": ("GRES", lambda nodes: gres_of(nodes.hosts[0])),
    "E": ("REASON", lambda nodes: reason_of(nodes.hosts[0])),
}
"""Letters of sinfo's formats -> title, and what they show of hosts."""
APART = "tTGEn"
"""Letters that show the same of all hosts of a line: those that differ in them have lines of their own."""


def sinfo(context: Context, words: Sequence[str]) -> int:
    values = {"partition": "p", "format": "o", "states": "t", "nodes": "n", "clusters": "M"}
    flags = {"noheader": "h", "Node": "N", "long": "l", "summarize": "s", "all": "a", "exact": "e", "responding": "r"}
    said = read("sinfo", words, values, flags)
    no_words("sinfo", said.words)
    states.one_cluster("sinfo", said.values)
    form = said.values.get("format") or (SINFO_BY_NODE if "Node" in said.values else SINFO)
    if "noheader" not in said.values:
        context.say(states.line(form, None, LETTERS))
    named = said.values.get("partition")
    if named is not None and PARTITION not in named.split(","):
        return 0
    hosts = [host for host in context.agent.get("hosts").data if _is_wanted(host, said.values)]
    for nodes in grouped(hosts, form, "Node" in said.values):
        context.say(states.line(form, nodes, LETTERS))
    return 0


def grouped(hosts: Sequence[Mapping[str, Any]], form: str, each: bool) -> list[Nodes]:
    """Hosts by what this format shows of them, in order of it; `each`: a line for each."""
    apart = [letter for letter in LETTERS if letter in APART and letter in states.letters_of(form)]
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for host in hosts:
        shown = tuple(str(LETTERS[letter][1](Nodes([host]))) for letter in (*apart, *(["n"] if each else [])))
        found.setdefault(shown, []).append(host)
    return [Nodes(group) for _, group in sorted(found.items())]


def _is_wanted(host: Mapping[str, Any], said: Mapping[str, str]) -> bool:
    """Whether a host is in one of the states, and one of the hosts, that were named."""
    asked = [word.lower() for word in said.get("states", "").split(",") if word]
    known = {state_of(host), long_state(host)}
    if bad := [word for word in asked if word not in WORDS]:
        why = f"expected some of {', '.join(sorted(WORDS))}"
        raise AgentctlError(USAGE, f"invalid state {bad[0][:40]}", why, "sinfo -t idle,mix")
    if said.get("nodes") and host["host"] not in said["nodes"].split(","):
        return False
    return not asked or not known.isdisjoint(asked)


def long_state(host: Mapping[str, Any]) -> str:
    return LONG.get(state_of(host), state_of(host))


def state_of(host: Mapping[str, Any]) -> str:
    if host["state"] not in ("alive", "suspect"):
        return DOWN
    if host.get("drained_by") or host.get("cordoned_by"):
        return DRAINED
    free, total = host.get("gpus_free"), host.get("gpus_total")
    if total is None:
        return "unknown"
    if free == total:
        return "idle"
    return "alloc" if not free else "mix"


WORDS = {"idle", "mix", "mixed", "alloc", "allocated", DOWN, DRAINED, "drained", "unknown"}
"""States of hosts that may be asked for."""


def reason_of(host: Mapping[str, Any]) -> str:
    if host.get("drained_by"):
        return f"drained by {host['drained_by']}"
    return f"cordoned by {host['cordoned_by']}" if host.get("cordoned_by") else host.get("gpus_why") or "none"


def gres_of(host: Mapping[str, Any]) -> str:
    total = host.get("gpus_total")
    return f"gpu:{total}" if total else "(null)"


def show_nodes(context: Context, names: Sequence[str]) -> int:
    """All hosts, or those that are named. AgentctlError: there is none of that name."""
    wanted = [name for each in names for name in each.split(",") if name]
    hosts = {str(host["host"]): host for host in context.agent.get("hosts").data}
    for name in wanted:
        if name not in hosts:
            raise AgentctlError(NOT_FOUND, f"there is no host {name[:80]}", f"known: {', '.join(hosts)}", "sinfo -N")
    for name in wanted or sorted(hosts):
        host = hosts[name]
        free, total = host.get("gpus_free"), host.get("gpus_total")
        used = "unknown" if free is None or total is None else total - free
        lines = [
            f"NodeName={name} NodeAddr={host['address']} Version={host.get('version') or 'unknown'}",
            f"   State={long_state(host).upper()} Partitions={PARTITION}",
            f"   Gres={gres_of(host)} GresUsed=gpu:{used} Reason={reason_of(host)}",
        ]
        context.say("\n".join(map(printable, lines)) + "\n")
    return 0


def show_partition(context: Context) -> int:
    hosts = context.agent.get("hosts").data
    names = Nodes(hosts).names
    context.say(f"PartitionName={PARTITION}\n   Default=YES State=UP MaxTime=UNLIMITED TotalNodes={len(hosts)}")
    context.say(f"   Nodes={names}\n")
    return 0
