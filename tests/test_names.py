"""Names are the wire: what is sent or written is tagged with the name of its class; a class name means one thing."""

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("names")
"""Group of these tests: one process reads all files."""
ROOT = Path(__file__).parent.parent
PACKAGES = ("covey", "gossip", "plugins", "agent")
TWICE = {
    "Configuration": "Raft's configuration of voters (§6) and Cruise's configuration of workers and servers (§3.3)",
}
"""Class names that mean two things: one word in two papers."""


@cache
def classes() -> list[tuple[Path, ast.ClassDef]]:
    return [
        (path, node)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def tag_of(node: ast.ClassDef) -> object:
    """Value of the class's argument `tag`; None: it has none."""
    return next((ast.literal_eval(word.value) for word in node.keywords if word.arg == "tag"), None)


def test_a_tag_is_the_name_of_its_class() -> None:
    """A tag is `tag=True`, written once or inherited, which is msgspec's word for that. Gossip has a number for each
    of its messages, for the sake of small datagrams. What a name once meant it must mean for ever:
    `tests/compatibility`."""
    known = [(path.relative_to(ROOT), node) for path, node in classes()]
    numbers = [tag_of(node) for path, node in known if path.parts[0] == "gossip" and tag_of(node) is not None]
    assert numbers and all(type(number) is int for number in numbers) and len(set(numbers)) == len(numbers)
    others = [(path, node) for path, node in known if path.parts[0] != "gossip" and tag_of(node) is not None]
    assert [f"{path}: {node.name}" for path, node in others if tag_of(node) is not True] == []
    assert len(others) > 10


def test_a_class_name_is_defined_once() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path, node in classes():
        where[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in where.items() if len(paths) > 1 and not name.startswith("_")}
    assert twice.keys() == TWICE.keys(), {name: paths for name, paths in twice.items() if name not in TWICE}


def test_no_tests_name_is_longer_than_eighty_characters() -> None:
    """A name is a sentence that must hold, not a paragraph."""
    names = [
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > 80] == []


def test_a_policy_is_imported_without_the_agent_around_it() -> None:
    """A program that wants one function of a paper loads a handful of modules, and no event loop."""
    told = (
        "import sys, plugins.scheduler.policy.order; "
        "print(sum(name.partition('.')[0] in ('covey', 'gossip', 'plugins', 'agent') for name in sys.modules), "
        "'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT)
    modules, loop = done.stdout.split()
    assert int(modules) <= 8 and loop == "False"
