"""Words of the scheduler are defined once, and what is not live says so where a reader begins."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = (ROOT / "docs/design/WORDS.md").read_text()
LEFT = [entry["module"] for entry in tomllib.loads((ROOT / "tools/reached.toml").read_text())["left"]]
PLUGINS = sorted(f"plugins.{path.parent.name}" for path in (ROOT / "plugins").glob("*/plugin.py"))


def first_paragraph(package: str) -> str:
    source = (ROOT / package.replace(".", "/") / "__init__.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]


@pytest.mark.parametrize("package", PLUGINS)
def test_a_plugin_names_only_parts_as_not_live(package: str) -> None:
    assert len(PLUGINS) == 6 and package not in LEFT and "it has no service" not in first_paragraph(package)
    parts = re.findall(r"Not live: `([\w/]+)\.py`", first_paragraph(package))
    assert [part for part in parts if f"{package}.{part.replace('/', '.')}" not in LEFT] == []


@pytest.mark.parametrize("page", ["README.md", "docs/guides/simulate.md"])
def test_no_plugin_is_said_to_be_simulated_only(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert not re.findall("simulation only|only simulated|no agent does it", text)


def test_the_part_of_the_aggregator_that_no_agent_runs_is_named() -> None:
    assert "Not live: `machine/pool.py`" in first_paragraph("plugins.aggregator")


@pytest.mark.parametrize(
    "word", ["reserve", "keep", "hold", "set aside", "take", "coming", "staying", "promised", "plugin", "coordinator"]
)
def test_a_word_that_is_said_of_gpus_is_defined_once(word: str) -> None:
    assert len(re.findall(rf"^\| \*\*{word}\*\* \|", WORDS, re.MULTILINE)) == 1


def test_names_that_words_gives_to_the_scheduler_exist() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "plugins").rglob("*.py"))
    table = WORDS[WORDS.index("## GPUs that a job has") :]
    names = re.findall(r"`(?:\w+\.)?(\w+)`", table)
    assert len(names) > 30
    assert sorted({name for name in names if not re.search(rf"\b{name}\b", code)}) == []
