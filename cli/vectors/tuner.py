"""`parameters/cruise`: epochs, splits and plans, replayed through the tuner's policies."""

from typing import Any

from cli.vectors.types import Handler, differs, each
from covey.core import HostId
from plugins.tuner.messages import Add, Delete, Move, Role, Start, Step, Stop, Switch
from plugins.tuner.policy import cost, plan, search
from plugins.tuner.policy.cost import Host, Load

WITHIN = 1e-6
ROLES: dict[str, Role] = {"w": "worker", "s": "server"}
LETTER = {"worker": "w", "server": "s"}
BEFORE = {"h0": ["w", 10, 0], "h1": ["w", 6, 0], "h2": ["s", 0, 6], "h3": ["s", 0, 6]}
AFTER = {"h0": ["w", 5, 0], "h1": ["w", 6, 0], "h2": ["w", 5, 0], "h3": ["s", 0, 6], "h4": ["s", 0, 6]}
"""Host: role, data blocks, model blocks. The schema fixes these two; a case may give its own `before` and `after`."""


def load_of(case: dict[str, Any]) -> Load:
    return Load(samples=case["D"], model_bytes=case["M"], batch=case["B"])


def homo(case: dict[str, Any]) -> list[str]:
    load, n = load_of(case), case["N"]
    w, epoch_s = search.equal_split(load, case["c"], case["b"], n)
    hosts = [Host(HostId(f"h{at:04}"), case["c"], case["b"]) for at in range(n)]
    general = search.best(load, hosts)
    continuous = search.equal_split_continuous(load, case["c"], case["b"], n)
    return [
        *differs("w", w, case["w"]),
        *differs("s", n - w, case["s"]),
        *differs("cost", epoch_s, case["cost"], WITHIN),
        *differs("w_cont", round(continuous, 4), case["w_cont"], 1e-4),
        *differs("cost by the general search", general.epoch_s, case["cost"], WITHIN),
    ]


def hetero(case: dict[str, Any]) -> list[str]:
    load = load_of(case)
    hosts = [Host(HostId(f"h{at:04}"), c, b) for at, (c, b) in enumerate(zip(case["c"], case["b"], strict=True))]
    found = search.best(load, hosts)
    by_descent = search.best(load, hosts, counts_max=0)
    data = [share * load.samples for share in found.data]
    model = [share * load.model_bytes for share in found.model]
    named = {host.host: host for host in hosts}
    workers, servers = [named[host] for host in found.workers], [named[host] for host in found.servers]
    counted = cost.epoch_of_shares(load, workers, servers, data, model)
    return [
        *differs("cost", found.epoch_s, case["cost"], WITHIN),
        *differs("cost by descent", by_descent.epoch_s, case["cost"], WITHIN),
        *differs("cost of the shares given out", counted, case["cost"], WITHIN),
    ]


def printed(case: dict[str, Any]) -> list[str]:
    epoch_s, per = cost.epoch_as_printed(case["w"], case["m"], case["d"], case["c"], case["b"], case["B"])
    return [*differs("cost", epoch_s, case["cost"], WITHIN), *differs("per", per, case["per"], WITHIN)]


def planned(case: dict[str, Any]) -> list[str]:
    before, after = case.get("before", BEFORE), case.get("after", AFTER)
    now = plan.Configuration(
        {HostId(host): ROLES[of[0]] for host, of in before.items()}, _numbered(before, 1), _numbered(before, 2)
    )
    wanted = plan.Target(
        {HostId(host): ROLES[of[0]] for host, of in after.items()},
        {HostId(host): of[1] for host, of in after.items()},
        {HostId(host): of[2] for host, of in after.items()},
    )
    found = plan.plan(now, wanted)
    said = [_said(step) for step in found.steps]
    edges = sorted(([said[first], said[then]] for first, then in found.edges), key=str)
    return [
        *differs("ops", sorted((each for each in said if each[0] != "move"), key=str), sorted(case["ops"], key=str)),
        *differs(
            "moves", sorted((each for each in said if each[0] == "move"), key=str), sorted(case["moves"], key=str)
        ),
        *differs("edges", edges, sorted(case["edges"], key=str)),
    ]


def _numbered(hosts: dict[str, list[Any]], column: int) -> dict[HostId, tuple[int, ...]]:
    first, found = 0, {}
    for host, of in hosts.items():
        found[HostId(host)] = tuple(range(first, first + of[column]))
        first += of[column]
    return found


def _said(step: Step) -> list[Any]:
    match step:
        case Add(host, role):
            return ["add", host, LETTER[role]]
        case Delete(host, role):
            return ["delete", host, LETTER[role]]
        case Switch(host, before, after):
            return ["switch", host, LETTER[before], LETTER[after]]
        case Move(kind, source, target, blocks):
            return ["move", kind, source, target, len(blocks)]
        case Stop(host) | Start(host):
            return [type(step).__name__.lower(), host]


KINDS = {"homo": homo, "hetero": hetero, "cost": printed, "plan": planned}


def case_of(case: dict[str, Any]) -> list[str]:
    if case["kind"] not in KINDS:
        return [f"no such kind of case: {case['kind']!r}; known: {', '.join(KINDS)}"]
    return KINDS[case["kind"]](case)


HANDLERS: dict[str, Handler] = {"parameters/cruise": lambda cases, traces: each(cases, case_of)}
