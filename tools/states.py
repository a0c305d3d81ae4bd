"""docs/design/STATES.md: every machine whose states are one value, drawn from its table; and which rows tests take.

    python -m tools.states                    writes the page; `make states` runs it
    python -m tools.states taken TEST...      runs these tests, and prints the rows that they took, as JSON

`covey/core/transitions.py` says how a machine gets a place on this page.
"""

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from covey.core.transitions import Kind, StateTable, kind_of, name_of
from plugins.scheduler.machine.log.jobs import STATES
from plugins.scheduler.machine.log.queue import FINDS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/design/STATES.md"
PACKAGES = ("covey", "gossip", "plugins", "agent", "cli", "sim", "chaos")
DECLARES = re.compile(r"^TRANSITIONS: StateTable\[", re.MULTILINE)
HEAD = """\
# States

*For those who change machines or read event logs: what may follow what, and why. `make states` draws this page from the
code, and a test fails when the page is older. Each row is taken by a test. A change that stands in no row raises an
error: `covey/core/transitions.py` says how, and how a machine is added.*
"""


class Machine(NamedTuple):
    module: str
    """Module that has the table, as `TRANSITIONS`."""
    tests: Sequence[str]
    """Tests that together take every row."""
    more: Callable[[], Iterator[str]] = lambda: iter(())
    """Lines below the table."""

    @property
    def table(self) -> StateTable[Any]:
        found = import_module(self.module).TRANSITIONS
        assert isinstance(found, StateTable)
        return found


def commands() -> Iterator[str]:
    yield "A command of the log finds its job in one of these states, or it changes nothing (`FINDS`,"
    yield "`plugins/scheduler/machine/log/queue.py`). `CancelAsked` finds it in any."
    yield ""
    yield f"| command | {' | '.join(STATES)} |"
    yield f"|---|{'---|' * len(STATES)}"
    for command, states in FINDS.items():
        yield f"| `{command.__name__}` | {' | '.join('x' if state in states else ' ' for state in STATES)} |"
    yield ""


BORROWER = [f"tests/plugins/memory/test_{part}.py" for part in ("slab", "search", "moving")]
SHARED_GPU_TESTS = ("gpu", "watching", "surges", "pressing", "admission")
SHARED_GPU = [f"tests/plugins/sharing/test_{part}.py" for part in SHARED_GPU_TESTS]
MACHINES = (
    Machine(
        "plugins.scheduler.machine.log.jobs",
        ["tests/plugins/scheduler/test_queue.py", "tests/plugins/scheduler/test_waiting.py"],
        commands,
    ),
    Machine(
        "plugins.aggregator.machine.tracked_job",
        [f"tests/plugins/aggregator/{name}.py" for name in ("test_tracked_job", "test_machines", "test_moving")],
    ),
    Machine("plugins.aggregator.machine.consolidator", ["tests/plugins/aggregator/test_emptying.py"]),
    Machine("plugins.memory.machine.borrowing.slab", BORROWER),
    Machine("plugins.memory.machine.borrowing.lender_search", BORROWER),
    Machine("plugins.memory.machine.mirror", ["tests/plugins/memory/test_mirror_machine.py"]),
    Machine("plugins.sharing.machine.control", SHARED_GPU),
    Machine("plugins.sharing.machine.device_use", SHARED_GPU),
)


def declaring() -> list[str]:
    """Modules that declare a table."""
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [dotted(path) for path in files if DECLARES.search(path.read_text())]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# ---- the page ----


def page() -> str:
    return "\n".join([HEAD, *(line for machine in MACHINES for line in section(machine))]).rstrip() + "\n"


def section(machine: Machine) -> Iterator[str]:
    table = machine.table
    file = machine.module.replace(".", "/") + ".py"
    yield from (f"## {table.title[0].upper()}{table.title[1:]}", "", f"Declared in `{file}`.", "")
    yield from ("```mermaid", "stateDiagram-v2", *diagram(table), "```", "")
    if any(isinstance(kind, type) for kind in table.rows):
        yield from ("| state | what it is | what is known in it |", "|---|---|---|")
        yield from (f"| `{name_of(kind)}` | {words(kind)} | {', '.join(fields(kind))} |" for kind in table.rows)
        yield ""
    yield from ("| from | to | when |", "|---|---|---|")
    for kind, following in table.rows.items():
        yield from (f"| `{name_of(kind)}` | `{name_of(to)}` | {why} |" for to, why in following.items())
    yield ""
    yield from machine.more()


def diagram(table: StateTable[Any]) -> Iterator[str]:
    yield from (f"    [*] --> {name_of(kind)}" for kind in table.begins)
    for kind, following in table.rows.items():
        yield from (f"    {name_of(kind)} --> {name_of(to)}" for to in following)
        if not following:
            yield f"    {name_of(kind)} --> [*]"


def words(kind: Kind) -> str:
    """The docstring of a class, in one line."""
    return "" if isinstance(kind, str) else " ".join((inspect.getdoc(kind) or "").split())


def fields(kind: Kind) -> list[str]:
    if isinstance(kind, str):
        return []
    found = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
    return [f"`{field.name}`" for field in found]


# ---- what tests take ----


def rows(table: StateTable[Any]) -> set[tuple[str, str, str]]:
    """Rows of the table: title, from, to."""
    return {(table.title, name_of(a), name_of(b)) for a, following in table.rows.items() for b in following}


class Taken:
    """Every change that a table allowed while this is in force; a plugin of pytest."""

    def __init__(self) -> None:
        self.rows: set[tuple[str, str, str]] = set()
        self._next = StateTable.next

    def pytest_sessionstart(self) -> None:
        before_all, rows = self._next, self.rows

        def recorded(table: StateTable[Any], before: Any, after: Any) -> Any:
            found = before_all(table, before, after)
            rows.add((table.title, name_of(kind_of(before)), name_of(kind_of(after))))
            return found

        setattr(StateTable, "next", recorded)  # noqa: B010

    def pytest_sessionfinish(self) -> None:
        setattr(StateTable, "next", self._next)  # noqa: B010


def main(words: Sequence[str]) -> int:
    if not words:
        PAGE.write_text(page())
        return 0
    taken = Taken()
    failed = pytest.main(["-q", "-p", "no:cacheprovider", *words[1:]], plugins=[taken])
    print("\n" + json.dumps(sorted(taken.rows)))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
