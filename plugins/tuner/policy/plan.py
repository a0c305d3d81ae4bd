"""From the present configuration to the one wanted: operations that may run at the same time (Cruise §3.3.1).

A plan is a directed graph without cycles. What must wait for what:

    add h ------> move to h ------> start h        blocks need a place; a worker needs data before it computes
    stop h -----> move from h ----> delete h       data leaves once its host has stopped; then the host may go

Everything else is independent and runs together; `switch` waits for nothing, since its executor is there already. At
any instant, after any set of steps that the graph allows, every block has exactly one owner: a `move` hands over
ownership in one instant, and no other step changes it.

A host that dies ends the plan: steps under way between others are waited for, the rest is dropped, and blocks of the
dead host are given to the hosts left, which `recover` them (`after_loss`). Then a new plan is made from where things
are. The paper has no words for this; its successor restarts from data that can be read again and from the newest model.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from covey.core.ids import HostId
from plugins.tuner.policy.blocks import moves, whole
from plugins.tuner.policy.search import Split
from plugins.tuner.policy.steps import Add, Delete, Kind, Move, Role, Start, Step, Stop, Switch

Change = Add | Delete | Switch


class Configuration(msgspec.Struct, frozen=True):
    """Role of each host, and the blocks that it owns."""

    roles: Mapping[HostId, Role]
    data: Mapping[HostId, tuple[int, ...]]
    model: Mapping[HostId, tuple[int, ...]]


class Target(msgspec.Struct, frozen=True):
    """Role that each host should have, and its number of blocks."""

    roles: Mapping[HostId, Role]
    data: Mapping[HostId, int]
    model: Mapping[HostId, int]


class Plan(msgspec.Struct, frozen=True):
    """Steps, and which of them must be done before which: pairs of indices in `steps`."""

    steps: tuple[Step, ...]
    edges: tuple[tuple[int, int], ...]


def target(split: Split, data_blocks: int, model_blocks: int) -> Target:
    """The target of a split, in whole blocks."""
    roles: dict[HostId, Role] = dict.fromkeys(split.workers, "worker")
    roles |= dict.fromkeys(split.servers, "server")
    data = dict(zip(split.workers, whole(data_blocks, split.data), strict=True))
    model = dict(zip(split.servers, whole(model_blocks, split.model), strict=True))
    return Target(roles, data, model)


def operations(now: Configuration, wanted: Target) -> tuple[tuple[Change, ...], tuple[Move, ...]]:
    """Changes of hosts, in the order of their names, and moves, data first."""
    changes: list[Change] = []
    for host in sorted({**now.roles, **wanted.roles}):
        before, after = now.roles.get(host), wanted.roles.get(host)
        if before is None and after is not None:
            changes.append(Add(host, after))
        elif before is not None and after is None:
            changes.append(Delete(host, before))
        elif before is not None and after is not None and before != after:
            changes.append(Switch(host, before, after))
    return tuple(changes), (*moves("data", now.data, wanted.data), *moves("model", now.model, wanted.model))


def plan(now: Configuration, wanted: Target) -> Plan:
    """The paper's operations, and the order among them: add before a move to there, a move from there before delete."""
    changes, moving = operations(now, wanted)
    steps: tuple[Step, ...] = (*changes, *moving)
    return Plan(steps, _edges(steps))


def compiled(now: Configuration, wanted: Target, computing: Collection[HostId]) -> Plan:
    """The plan in full: a host that leaves the workers stops first, one that joins them starts last. `computing`: hosts
    that compute now, which are all workers, or others after a plan that broke off."""
    changes, moving = operations(now, wanted)
    stops = [Stop(host) for host in sorted(computing) if wanted.roles.get(host) != "worker"]
    starts = [Start(host) for host in sorted(wanted.roles) if wanted.roles[host] == "worker" and host not in computing]
    steps: tuple[Step, ...] = (*changes, *stops, *moving, *starts)
    return Plan(steps, _edges(steps))


def ready(plan: Plan, begun: Collection[int], done: Collection[int]) -> list[int]:
    """Indices of the steps that may begin now: not begun, and all steps before them are done."""
    waits = {after for before, after in plan.edges if before not in done}
    return [at for at in range(len(plan.steps)) if at not in begun and at not in waits]


def owners(now: Configuration, done: Sequence[Step]) -> dict[tuple[Kind, int], HostId]:
    """Owner of each block after these steps. ValueError when one moves a block that its source does not own."""
    held: dict[tuple[Kind, int], HostId] = {}
    kinds: tuple[tuple[Kind, Mapping[HostId, tuple[int, ...]]], ...] = (("data", now.data), ("model", now.model))
    for kind, owned in kinds:
        for host, blocks in owned.items():
            for block in blocks:
                if (kind, block) in held:
                    raise ValueError(f"{kind} block {block} has two owners: {held[kind, block]} and {host}")
                held[kind, block] = host
    for step in done:
        if isinstance(step, Move):
            for block in step.blocks:
                if held.get((step.kind, block)) != step.source:
                    raise ValueError(f"{step.kind} block {block} is not {step.source}'s to move")
                held[step.kind, block] = step.target
    return held


def after_loss(
    kind: Kind, lost: Sequence[int], under_way: Sequence[Move], heirs: Sequence[HostId]
) -> dict[HostId, tuple[int, ...]]:
    """Blocks of a lost host that each host takes: the host that was being sent a block takes it, the others are spread
    evenly over `heirs`. Without heirs they have no owner."""
    taken: dict[HostId, list[int]] = {}
    rest = sorted(lost)
    for move in under_way:
        if move.kind == kind:
            found = sorted(set(move.blocks) & set(rest))
            rest = [block for block in rest if block not in found]
            taken.setdefault(move.target, []).extend(found)
    for host, count in zip(heirs, whole(len(rest), [1.0] * len(heirs)) if heirs else (), strict=True):
        taken.setdefault(host, []).extend(rest[:count])
        rest = rest[count:]
    return {host: tuple(sorted(blocks)) for host, blocks in sorted(taken.items()) if blocks}


def _edges(steps: Sequence[Step]) -> tuple[tuple[int, int], ...]:
    adds = {step.host: at for at, step in enumerate(steps) if isinstance(step, Add)}
    stops = {step.host: at for at, step in enumerate(steps) if isinstance(step, Stop)}
    starts = {step.host: at for at, step in enumerate(steps) if isinstance(step, Start)}
    deletes = {step.host: at for at, step in enumerate(steps) if isinstance(step, Delete)}
    edges: set[tuple[int, int]] = set()
    for at, step in enumerate(steps):
        if isinstance(step, Move):
            before = [adds.get(step.target), stops.get(step.source) if step.kind == "data" else None]
            after = [starts.get(step.target) if step.kind == "data" else None, deletes.get(step.source)]
            edges |= {(each, at) for each in before if each is not None}
            edges |= {(at, each) for each in after if each is not None}
    for host, at in starts.items():
        if host in adds:
            edges.add((adds[host], at))
    for host, at in stops.items():
        if host in deletes:
            edges.add((at, deletes[host]))
    return tuple(sorted(edges))
