"""docs/design/STATES.md shows the tables of the code, and each row of a table is taken."""

import json
import subprocess
import sys
from typing import Any

import pytest

from covey.core.transitions import StateTable
from tests.families import in_gate
from tools.states import MACHINES, PAGE, ROOT, Machine, declaring, diagram, page, rows


def test_the_page_shows_the_tables_of_now() -> None:
    assert PAGE.read_text() == page(), "next: make states"


def test_every_module_that_declares_a_table_is_on_the_page() -> None:
    assert sorted(machine.module for machine in MACHINES) == declaring(), "next: a line in MACHINES, tools/states.py"


def test_a_title_names_one_machine() -> None:
    titles = [machine.table.title for machine in MACHINES]
    assert sorted(set(titles)) == sorted(titles)


@pytest.mark.parametrize(
    "machine", in_gate(2, [(machine,) for machine in MACHINES]), ids=lambda machine: machine.module
)
def test_every_row_of_a_table_is_taken(machine: Machine) -> None:
    """A row that no test takes may be dead: correct the table, or write the test that takes it."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.states", "taken", *machine.tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    taken = {tuple(row) for row in json.loads(done.stdout.splitlines()[-1])}
    assert sorted(rows(machine.table) - taken) == []


def test_the_drawing_has_an_arrow_for_each_row_and_for_both_ends() -> None:
    lamp: StateTable[Any] = StateTable("lamp", {"off": {"on": "lit"}, "on": {"off": "out", "gone": "fell"}, "gone": {}})
    assert [line.strip() for line in diagram(lamp)] == [
        "[*] --> off",
        "off --> on",
        "on --> off",
        "on --> gone",
        "gone --> [*]",
    ]
