"""Which modules of `plugins/` do agents run? By the graph of imports: what no agent loads says why in `reached.toml`.

    python -m tools.reached      what is wrong, or how many modules agents and tools reach; `make house` runs it

A module that only tests reach is dead; one that only tools reach decides differently from what agents do. An import
for types alone reaches nothing. What a tool imports by name, it lists in a table, and those are roots too.
"""

import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import grimp

from agent import main as agentd
from agent import program as covey_program
from agent.starter import main as covey_starter
from agent.swap import main as covey_swapd
from sim import main as covey_sim
from sim.vectors import main as covey_vectors

ROOT = Path(__file__).parent.parent
LISTED = "tools/reached.toml"
PACKAGE = "plugins"
AGENT = (agentd.__name__, covey_program.__name__, covey_starter.__name__, covey_swapd.__name__)
"""Modules of `agentd`, of the programs that it starts beside itself, and of the helpers of its host."""
TOOLS = (
    covey_sim.__name__,
    *(f"{covey_sim.__package__}.{module}" for module, _ in covey_sim.COMMANDS.values()),
    covey_vectors.__name__,
    *(f"{covey_vectors.__package__}.{module}" for module in covey_vectors.MODULES),
)


def packages(root: Path = ROOT) -> list[str]:
    """The project's packages, as import-linter knows them."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    return list(project["tool"]["importlinter"]["root_packages"])


def graph_of(names: Sequence[str]) -> grimp.ImportGraph:
    return grimp.build_graph(*names, exclude_type_checking_imports=True, cache_dir=None)


def reached(graph: grimp.ImportGraph, roots: Collection[str]) -> set[str]:
    """Every module that is loaded when these are, or when their functions import. Raises KeyError for an unknown
    root."""
    if unknown := sorted(set(roots) - graph.modules):
        raise KeyError(f"no module {', '.join(unknown)}")
    found: set[str] = set()
    left = list(roots)
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += [*graph.find_modules_directly_imported_by(module), *_parents(module)]
    return found


def _parents(module: str) -> Iterator[str]:
    """Packages that a module is in: each is loaded before it."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def listed(root: Path = ROOT) -> dict[str, str]:
    """Module, or package for all that tools reach in it -> why no agent loads it. Raises ValueError when one is listed
    twice."""
    entries = tomllib.loads((root / LISTED).read_text())["left"]
    found = {entry["module"]: entry["why"].strip() for entry in entries}
    if len(found) != len(entries):
        raise ValueError(f"{LISTED} names a module twice")
    return found


def wrong(
    modules: Collection[str], by_agents: Collection[str], by_tools: Collection[str], reasons: Mapping[str, str]
) -> list[str]:
    """What is wrong with `modules` (all of them) and with the list, one sentence each."""
    found = []
    for entry, why in sorted(reasons.items()):
        meant = [module for module in sorted(modules) if entry in (module, *_parents(module))]
        awake = [module for module in meant if module in by_agents]
        if not why:
            found.append(f"{entry} is listed without a reason")
        if not meant:
            found.append(f"{entry} is listed and does not exist")
        elif awake:
            found.append(f"{entry} is listed, but an agent reaches {awake[0]}: take it off the list")
    for module in sorted(set(modules) - set(by_agents) - set(reasons)):
        if module not in by_tools:
            found.append(f"{module} is reached by tests only: remove it, or list it with its reason")
        elif not any(parent in reasons for parent in _parents(module)):
            found.append(f"{module} is reached by tools, but by no agent: list it with its reason")
    return found


def ours(root: Path = ROOT) -> tuple[list[str], str]:
    """What is wrong in this tree, and a line that says how much is reached."""
    graph = graph_of(packages(root))
    modules = {module for module in graph.modules if PACKAGE in (module, *_parents(module))}
    by_agents, by_tools = modules & reached(graph, AGENT), modules & reached(graph, TOOLS)
    said = (
        f"{len(by_agents)} of {len(modules)} modules of {PACKAGE} are reached by agents, "
        f"{len(by_tools - by_agents)} more by tools only"
    )
    return wrong(modules, by_agents, by_tools, listed(root)), said


def main() -> int:
    found, said = ours()
    print("\n".join([*(f"reached: {each}" for each in found), said]))
    if found:
        print(f"next: a service that runs it, or an entry in {LISTED}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
