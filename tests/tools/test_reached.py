"""Which modules agents reach: the check of `tools/reached.py`, here and on packages made for it."""

from pathlib import Path

import grimp
import pytest

from tools import reached

FILES = {
    "agent/__init__.py": "",
    "agent/main.py": "def main():\n    from hall.service import run\n    run()",
    "tool/__init__.py": "from hall import baseline",
    "hall/__init__.py": "",
    "hall/service.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hall import words\ndef run(): 1",
    "hall/words.py": "",
    "hall/baseline.py": "",
    "hall/dead.py": "from hall import words",
}


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> grimp.ImportGraph:
    """An agent that imports within a function, a tool, and a module that is imported for its types only."""
    for name, text in FILES.items():
        path = tmp_path / f"my{name}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("hall", "myhall"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return reached.graph_of(["myagent", "mytool", "myhall"])


def test_agents_are_followed_to_what_their_plugins_do() -> None:
    graph = reached.graph_of(reached.packages())
    by_agents = reached.reached(graph, reached.AGENT)
    assert {"plugins.memory.machine.borrowing.borrower", "plugins.memory.datapath.lending.slabd"} <= by_agents
    assert "plugins.interleave.machine.turns" in reached.reached(graph, reached.TOOLS) - by_agents


def test_an_import_within_a_function_reaches_and_one_for_types_does_not(graph: grimp.ImportGraph) -> None:
    assert reached.reached(graph, ["myagent.main"]) == {"myagent", "myagent.main", "myhall", "myhall.service"}


def test_a_root_that_does_not_exist_is_no_empty_answer(graph: grimp.ImportGraph) -> None:
    with pytest.raises(KeyError, match="no module"):
        reached.reached(graph, ["myagent.gone"])


def judged(graph: grimp.ImportGraph, **reasons: str) -> list[str]:
    modules = [module for module in graph.modules if module.startswith("myhall")]
    by_agents, by_tools = (reached.reached(graph, [root]) for root in ("myagent.main", "mytool"))
    return reached.wrong(modules, by_agents, by_tools, {f"myhall.{name}": why for name, why in reasons.items()})


def test_what_only_tests_or_only_tools_reach_must_be_listed(graph: grimp.ImportGraph) -> None:
    assert judged(graph) == [
        "myhall.baseline is reached by tools, but by no agent: list it with its reason",
        "myhall.dead is reached by tests only: remove it, or list it with its reason",
        "myhall.words is reached by tests only: remove it, or list it with its reason",
    ]
    assert judged(graph, baseline="to compare with", dead="soon", words="soon") == []


def test_an_entry_without_a_reason_for_nothing_or_for_what_runs_is_wrong(graph: grimp.ImportGraph) -> None:
    rest = {"baseline": "to compare with", "dead": "soon", "words": "soon"}
    assert judged(graph, **rest | {"dead": ""}) == ["myhall.dead is listed without a reason"]
    assert judged(graph, **rest, gone="soon") == ["myhall.gone is listed and does not exist"]
    assert judged(graph, **rest, service="soon") == [
        "myhall.service is listed, but an agent reaches myhall.service: take it off the list"
    ]


def test_a_package_stands_for_what_tools_reach_in_it_not_for_what_only_tests_do() -> None:
    modules, by_tools = ["p.a", "p.a.used", "p.a.dead"], {"p.a", "p.a.used"}
    assert reached.wrong(modules, set(), by_tools, {"p.a": "no service yet"}) == [
        "p.a.dead is reached by tests only: remove it, or list it with its reason"
    ]
    assert reached.wrong(modules[:2], {"p.a.used"}, by_tools, {"p.a": "no service yet"}) == [
        "p.a is listed, but an agent reaches p.a.used: take it off the list"
    ]


def test_a_module_that_is_listed_twice_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / reached.LISTED
    path.parent.mkdir()
    path.write_text('[[left]]\nmodule = "a"\nwhy = "x"\n' * 2)
    with pytest.raises(ValueError, match="twice"):
        reached.listed(tmp_path)
