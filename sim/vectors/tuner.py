"""`parameters/cruise`: epochs, splits and plans, replayed through the tuner's policies."""

from collections.abc import Sequence
from typing import Any

from covey.core.ids import HostId
from plugins.tuner.policy import cost, plan, search
from plugins.tuner.policy.cost import HostCosts, Load
from plugins.tuner.policy.steps import Add, Delete, Move, Recover, Role, Start, Step, Stop, Switch
from sim.vectors.types import Handler, answers, beside, differs, each, measured, whole_number

WITHIN = 1e-6
ROUNDED_WITHIN = 1e-4
"""Tolerance (relative above 1) for numbers that the files give with four digits."""
HOSTS_MAX = 10_000
ROLES: dict[str, Role] = {"w": "worker", "s": "server"}
LETTER = {"worker": "w", "server": "s"}
BEFORE = {"h0": ["w", 10, 0], "h1": ["w", 6, 0], "h2": ["s", 0, 6], "h3": ["s", 0, 6]}
AFTER = {"h0": ["w", 5, 0], "h1": ["w", 6, 0], "h2": ["w", 5, 0], "h3": ["s", 0, 6], "h4": ["s", 0, 6]}
"""Host: role, data blocks, model blocks. The schema fixes these two; a case may give its own `before` and `after`."""


def load_of(case: dict[str, Any]) -> Load:
    return Load(samples=positive(case["D"]), model_bytes=positive(case["M"]), batch=positive(case["B"]))


def positive(number: Any) -> float:
    return measured(number, above_zero=True)


def hosts_of(sample_s: Sequence[Any], rates: Sequence[Any]) -> list[HostCosts]:
    rows = enumerate(zip(sample_s, rates, strict=True))
    return [HostCosts(HostId(f"h{at:04}"), positive(sample), positive(rate)) for at, (sample, rate) in rows]


def homo(case: dict[str, Any]) -> list[str]:
    load, n = load_of(case), whole_number("N", case["N"], 2, HOSTS_MAX)
    hosts = hosts_of([case["c"]] * n, [case["b"]] * n)
    w, epoch_s = search.equal_split(load, case["c"], case["b"], n)
    ours = {"w": w, "s": n - w, "cost": epoch_s}
    expected = beside(case, ours)
    general = search.best(load, hosts).epoch_s
    continuous = search.equal_split_continuous(load, case["c"], case["b"], n)
    return [
        *answers(ours, expected, WITHIN),
        *differs("cost by the general search", general, expected.get("cost", epoch_s), WITHIN),
        *differs("w_cont", continuous, case.get("w_cont", continuous), ROUNDED_WITHIN),
    ]


def hetero(case: dict[str, Any]) -> list[str]:
    load, hosts = load_of(case), hosts_of(case["c"], case["b"])
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
    model, data, sample_s = ([measured(number) for number in case[name]] for name in ("m", "d", "c"))
    rates = [[positive(rate) for rate in row] for row in case["b"]]
    epoch_s, per = cost.epoch_as_printed(case["w"], model, data, sample_s, rates, positive(case["B"]))
    ours = {"cost": epoch_s, "per": per}
    return answers(ours, beside(case, ours), WITHIN)


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
    ours = {
        "ops": [each for each in said if each[0] != "move"],
        "moves": [each for each in said if each[0] == "move"],
        "edges": [[said[first], said[then]] for first, then in found.edges],
    }
    expected = beside(case, ours)
    return answers(_unordered(ours), _unordered(expected))


def _unordered(lists: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: sorted(each, key=str) for name, each in lists.items()}


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
        case Recover(kind, host, blocks):
            return ["recover", kind, host, len(blocks)]


KINDS = {"homo": homo, "hetero": hetero, "cost": printed, "plan": planned}


def case_of(case: dict[str, Any]) -> list[str]:
    if case["kind"] not in KINDS:
        return [f"no such kind of case: {case['kind']!r}; known: {', '.join(KINDS)}"]
    return KINDS[case["kind"]](case)


HANDLERS: dict[str, Handler] = {"parameters/cruise": lambda cases, traces: each(cases, case_of)}
