"""A rack in a few lines: what `covey-rack run` ends with, and `covey-rack summary` shows at any time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cli.client import Agent
from cli.jobs.jobs import how_long
from cli.rack.files import RackHost
from cli.table import DIM, Paint, plural
from covey.core.units import format_seconds, format_size


def summary(
    rack: Sequence[RackHost],
    say: Callable[[str], None],
    job: str | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> None:
    """The rack in a few lines: hosts and leader, the newest jobs (or `job`, with what its aggregator said last), slabs
    and their lenders, traffic."""
    agent = Agent([host.address for host in rack], "the rack")
    paint = Paint()
    hosts, leader = agent.get("hosts").data, agent.get("leader").data
    alive = [host["host"] for host in hosts if host["state"] == "alive"]
    rows: list[tuple[str, str]] = [("hosts", f"{len(alive)} of {len(hosts)} alive: {', '.join(alive)}")]
    since_s = leader["since_s"]
    held = "" if since_s is None else f" for {format_seconds(since_s)}"
    rows.append(("leader", f"{leader['leader']} (term {leader['term']}){held}" if leader["leader"] else "none now"))
    answer = agent.get("jobs", all=1)
    for view in [view for view in answer.data if job in (None, view["id"])][-3:]:
        rows += job_rows(view)
    rows += [tensor_row(row) for row in ([tensors] if tensors else agent.get("tensors").data)]
    rows += memory_rows(agent)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{paint(name.ljust(width), DIM)}  {value}")


def job_rows(view: Mapping[str, Any]) -> list[tuple[str, str]]:
    places = ", ".join(f"{place['host']} (ranks {' '.join(map(str, place['ranks']))})" for place in view["places"])
    facts = [f"{view['id']} {view['name']}: {view['state']}", how_long(dict(view))]
    if view["step"] is not None:
        facts.append(f"step {view['step']}")
    facts += [f"{name} {value:.4g}" for name, value in sorted(view["metrics"].items())]
    rows = [("job", ", ".join(facts))]
    if places:
        rows.append(("", f"on {places}"))
    return rows


def tensor_row(tensors: Mapping[str, Any]) -> tuple[str, str]:
    moved = f"{format_size(tensors['received_bytes'])} in, {format_size(tensors['sent_bytes'])} out"
    rounds = plural(tensors["rounds"], "round")
    return "", f"gradients summed at {tensors['host']}: {rounds}, {moved} (as last seen)"


def memory_rows(agent: Agent) -> list[tuple[str, str]]:
    slabs, volumes = agent.get("slabs").data, agent.get("volumes").data
    rows = []
    for volume in volumes:
        own = [slab for slab in slabs if (slab["volume"], slab["borrower"]) == (volume["volume"], volume["host"])]
        places = [f"{slab['index']} on {slab['lender']}" if slab["lender"] else f"{slab['index']} cold" for slab in own]
        what = f"{volume['volume']} of {volume['host']}, {format_size(volume['size_bytes'])}"
        rows.append(("memory", f"{what}; slabs {', '.join(places)}"))
        moved = f"{format_size(volume['written_bytes'])} written, {format_size(volume['read_bytes'])} read"
        rows.append(("", f"{moved}, {format_size(volume['remote_read_bytes'])} of that from lenders"))
    return rows
