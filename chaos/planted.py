"""Planted bugs ("mutants") as data: one small wrong change each, and the check that must notice it.

A file `chaos/mutants/<area>/<slug>.toml` says which text of which file is replaced by what:

    file = "agent/raft/disk/store.py"
    find = '''text that occurs exactly once in that file'''
    replace = '''text with the bug'''
    why = "One sentence: what goes wrong for users."
    hosts = "one"              # or "several": it takes several hosts to see it
    tests = ["tests/agent/raft/test_disk.py::test_name"]
    story = "volume_killed"    # instead of tests, or besides them: a story of the simulator
    seeds = "1-20"
    harmless = "..."           # instead of a check: why it has no effect

`chaos.proving` plants each of them in a copy of the tree and counts which are noticed. `problems` is the quick half,
part of `make check`: code that changed under a mutant makes it stale, and a stale one proves nothing.
"""

import ast
import re
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

ROOT = Path(__file__).parent.parent
FOLDER = "chaos/mutants"


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One planted bug. `area` and `slug` are the folder and the name of its file."""

    file: str
    find: str
    replace: str
    why: str
    hosts: Literal["one", "several"]
    tests: tuple[str, ...] = ()
    story: str = ""
    seeds: str = "1-20"
    harmless: str = ""
    area: str = ""
    slug: str = ""

    @property
    def name(self) -> str:
        return f"{self.area}/{self.slug}"


def known_mutants(root: Path = ROOT) -> list[Mutant]:
    """All mutants, by area and name. Raises a ValueError that names the file when one cannot be read."""
    found: list[Mutant] = []
    for path in sorted((root / FOLDER).glob("*/*.toml")):
        try:
            mutant = msgspec.convert(tomllib.loads(path.read_text()), Mutant)
        except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.relative_to(root)}: {error}") from error
        found.append(msgspec.structs.replace(mutant, area=path.parent.name, slug=path.stem))
    return found


def with_bug(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the mutant's file with the bug in it. Raises ValueError when the mutant is stale."""
    path = root / mutant.file
    if not path.is_file():
        raise ValueError(f"{mutant.file} does not exist")
    text = path.read_text()
    times = text.count(mutant.find)
    if times != 1:
        raise ValueError(f"its text occurs {times} times in {mutant.file}, not once")
    if mutant.find == mutant.replace:
        raise ValueError("it changes nothing")
    return text.replace(mutant.find, mutant.replace)


def range_of(seeds: str) -> range:
    """The range of seeds that `1-20` or `7` means. Raises ValueError for other text."""
    first, _, last = seeds.partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise ValueError(f"{seeds!r} is not a range of seeds: write 1-100")
    return range(int(first), int(last or first) + 1)


def problems(mutant: Mutant, stories: frozenset[str], root: Path = ROOT) -> list[str]:
    """Reasons why this mutant proves nothing; empty when it is in order."""
    found: list[str] = []
    try:
        text = with_bug(mutant, root)
        if mutant.file.endswith(".py"):
            compile(text, mutant.file, "exec")
    except ValueError as error:
        found.append(str(error))
    except SyntaxError as error:
        found.append(f"{mutant.file} with the bug does not compile: {error.msg}, line {error.lineno}")
    if mutant.file.startswith(("tests/", "chaos/")):
        found.append(f"{mutant.file} is part of the checks: plant bugs in what they look at")
    if not (mutant.tests or mutant.story or mutant.harmless):
        found.append("it names neither tests nor a story that notices it, nor why it is harmless")
    if mutant.story and mutant.story not in stories:
        found.append(f"there is no story {mutant.story!r}")
    try:
        range_of(mutant.seeds)
    except ValueError as error:
        found.append(str(error))
    return found + [why for test in mutant.tests for why in _no_such_test(test, root)]


def _no_such_test(test: str, root: Path) -> list[str]:
    """Problems with the test's file, class and function, without looking into the brackets of its cases."""
    file, *names = test.partition("[")[0].split("::")
    if not (root / file).is_file():
        return [f"{file} does not exist"]
    text = (root / file).read_text()
    if len(names) == 1 and re.search(rf"^(async )?def {re.escape(names[0])}\(", text, re.MULTILINE):
        return []  # the plain case without a parse, which takes long
    body: Sequence[ast.stmt] = _parsed(text)
    for name in names:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inside = [node for node in body if isinstance(node, kinds) and node.name == name]
        # a machine of hypothesis is a test by assignment: TestStory = Story.TestCase
        assigned = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
        if not inside and not assigned:
            return [f"{file} has no {name}"]
        body = inside[0].body if inside else []
    return []


@lru_cache(maxsize=256)
def _parsed(text: str) -> Sequence[ast.stmt]:
    """The statements of a file of tests, which many mutants name."""
    return ast.parse(text).body
