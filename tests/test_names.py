"""Names are the wire: what is sent or written is tagged, a tag never changes, and a class name means one thing."""

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("names")
"""One process reads them all."""
ROOT = Path(__file__).parent.parent
PACKAGES = ("covey", "gossip", "plugins", "agent")
TAGS = tomllib.loads((ROOT / "tests/tags.toml").read_text())
TWICE = {
    "Configuration": "Raft's configuration of voters (§6) and Cruise's configuration of workers and servers (§3.3)",
}
"""Class names that stand for two things: one word in two papers."""


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
    """None: it has no tag of its own; True: its name would be the tag, which is right only for a base."""
    return next((ast.literal_eval(word.value) for word in node.keywords if word.arg == "tag"), None)


def test_a_tag_that_was_given_never_changes_and_is_not_given_twice() -> None:
    """Other agents send it, and logs on disks hold it. A new message: a new line in tests/tags.toml."""
    found: dict[str, list[str | int]] = defaultdict(list)
    for path, node in classes():
        tag = tag_of(node)
        if tag is not None and tag is not True:
            assert isinstance(tag, str | int)
            found[".".join(path.relative_to(ROOT).with_suffix("").parts[:2])].append(tag)
    assert {place: sorted(tags, key=str) for place, tags in found.items()} == TAGS


def test_whatever_is_tagged_by_a_base_has_an_explicit_tag_of_its_own() -> None:
    """A class without one would be known on the wire by its name, which people may want to change."""
    tagged = {node.name for _, node in classes() if tag_of(node) is True}
    known = classes()
    for _ in range(4):
        tagged |= {node.name for _, node in known if {ast.unparse(base) for base in node.bases} & tagged}
    bases = {ast.unparse(base).rpartition(".")[2] for _, node in known for base in node.bases}
    wrong = [f"{path}: {node.name}" for path, node in known if node.name in tagged - bases and tag_of(node) is None]
    assert wrong == []


def test_a_class_name_is_defined_once() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path, node in classes():
        where[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in where.items() if len(paths) > 1 and not name.startswith("_")}
    assert twice.keys() == TWICE.keys(), {name: paths for name, paths in twice.items() if name not in TWICE}


def test_no_tests_name_is_longer_than_eighty_characters() -> None:
    """A sentence that must hold, not a paragraph."""
    names = [
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > 80] == []


def test_a_policy_is_imported_without_the_agent_around_it() -> None:
    """Whoever wants one function of a paper loads a handful of modules, and no event loop."""
    told = (
        "import sys, plugins.scheduler.policy.order; "
        "print(sum(name.partition('.')[0] in ('covey', 'gossip', 'plugins', 'agent') for name in sys.modules), "
        "'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT)
    modules, loop = done.stdout.split()
    assert int(modules) <= 8 and loop == "False"
