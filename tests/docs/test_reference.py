"""docs/reference/ says what the code says now."""

import re
from pathlib import Path

import pytest

from cli import client
from tools.pages import EXITS, PAGES, ROUTES, metrics, routes, text_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/reference"
OUR_CODE = ("covey", "plugins", "gossip", "agent", "cli")


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says_now(name: str) -> None:
    assert (FOLDER / f"{name}.md").read_text() == text_of(name), "next: make reference"


def test_every_route_is_described_and_no_other_one() -> None:
    assert sorted(routes()) == sorted(ROUTES)


def test_every_exit_code_of_agentctl_is_described() -> None:
    assert {getattr(client, name) for name in EXITS} == {*range(9), 75}
    text = (ROOT / "cli/client.py").read_text()
    assert text[: text.index(" = (")].rpartition("\n")[2].split(", ") == list(EXITS)


def test_every_metric_that_has_help_stands_in_the_table() -> None:
    rows = list(metrics())
    assert len(rows) > 120 and not any("\n" in row for row in rows)
    assert any(row.startswith("| `covey_gossip_dropped_total` | counter | `reason` |") for row in rows)


def test_every_environment_variable_is_described_and_no_other_one() -> None:
    used = {
        name
        for path in (ROOT / "setup.py", *(path for package in OUR_CODE for path in (ROOT / package).rglob("*")))
        if path.suffix in (".py", ".c", ".cpp")
        for name in re.findall(r"\bCOVEY_[A-Z_]+\b", path.read_text())
    }
    page = (FOLDER / "environment.md").read_text()
    described = set(re.findall(r"\bCOVEY_[A-Z_]+\b", page.partition("## In tests")[0]))
    assert described == used


def test_what_a_rank_finds_is_described() -> None:
    source = (ROOT / "agent/jobs/rank_env.py").read_text()
    given = set(re.findall(r'^ +"([A-Z][A-Z_]{3,})":', source, re.MULTILINE)) - {"PYTHONPATH"}
    page = (FOLDER / "environment.md").read_text()
    assert len(given) > 30
    assert sorted(name for name in given if f"`{name}`" not in page) == []
