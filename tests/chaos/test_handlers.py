"""Which `except` handlers were entered is counted exactly, and those that are let off exist and have a reason."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import PRODUCT
from chaos.checks import handlers

SOURCE = """
def find(name):
    try:
        return 1 / name
    except ZeroDivisionError:
        return 0
    except (TypeError, ValueError):
        return 1

class Box:
    def open(self):
        try:
            raise KeyError
        except KeyError:
            pass
        try:
            raise KeyError
        except KeyError:
            pass
"""


def test_a_handler_is_named_by_its_place_and_what_it_catches() -> None:
    assert [name for name, _ in handlers.named(ast.parse(SOURCE), "x.py")] == [
        "x.py find: ZeroDivisionError",
        "x.py find: (TypeError, ValueError)",
        "x.py Box.open: KeyError",
        "x.py Box.open: KeyError #2",
    ]


def test_the_handlers_that_nobody_is_expected_to_enter_exist_and_each_has_a_reason() -> None:
    there = {
        name
        for package in PRODUCT
        for path in sorted((handlers.ROOT / package).rglob("*.py"))
        for name in handlers.handlers_of(path)
    }
    assert [name for name in handlers.listed() if name not in there] == []
    assert all(len(why) > 20 for why in handlers.listed().values())


@pytest.mark.long
def test_a_soak_says_which_handlers_were_entered_and_which_never_were() -> None:
    asked = ("soak", "--handlers", "--story", "agent_killed", "--seeds", "1-2", "--cpu-seconds", "60")
    told = subprocess.run(
        [sys.executable, "-P", "-m", "chaos.main", *asked],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 stories held, 0 broke" in told.stdout
    assert "never entered: agent/rpc/rpc.py Messenger._handle: Refused" in told.stdout
    assert "agent/config.py load: OSError" not in told.stdout, "it is listed with a reason"
    entered, known = (int(told.stdout.splitlines()[-1].split()[at]) for at in (0, 2))
    assert 2 < entered < known
    assert told.returncode == 1, "two stories enter few of them"


def test_modules_that_were_loaded_before_cannot_be_watched() -> None:
    importlib.import_module("covey.core.events")
    with pytest.raises(RuntimeError, match="loaded before"):
        handlers.install()
