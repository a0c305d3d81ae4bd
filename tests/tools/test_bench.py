"""Commands of bench/: the Makefile names files that exist, and a job that is not taken ends one with the reason."""

import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from bench.live_command import submitted
from bench.scripts import scripts, ways

ROOT = Path(__file__).parents[2]


def programs_of(makefile: str) -> list[str]:
    """The files in Python that the Makefile runs, with what it runs where no variable is given."""
    chosen = re.sub(r"\$\(or \$\(\w+\),(\w+)\)", r"\1", makefile)
    return re.findall(r"\$\(BIN\)/python ([^ \n]+\.py)", chosen)


def test_every_program_that_the_makefile_runs_exists() -> None:
    found = programs_of((ROOT / "Makefile").read_text())
    assert len([each for each in found if each.startswith("bench/")]) >= 20
    assert [each for each in found if not (ROOT / each).is_file()] == []
    assert programs_of("@$(BIN)/python bench/old_$(or $(ONLY),live).py $(ARGS)") == ["bench/old_live.py"]


class Answering:
    """A host of a laboratory whose agentctl answers so."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self._answer, self.typed = (code, out, err), ""

    def shell(self, words: str) -> CompletedProcess[str]:
        self.typed = words
        return CompletedProcess(words, *self._answer)


def test_a_job_that_is_not_taken_ends_the_command_with_what_agentctl_said() -> None:
    host: Any = Answering(0, "j7 queued\n", "")
    assert (submitted(host, "--workers 2 -- python a.py"), host.typed) == (
        "j7",
        "agentctl submit --workers 2 -- python a.py",
    )
    host = Answering(4, "", "not taken: the tenant has no quota")
    with pytest.raises(SystemExit, match="not taken: the tenant has no quota"):
        submitted(host, "-- true")


def test_the_table_of_scripts_has_each_kind_no_empty_cell_and_what_is_expected() -> None:
    lines = (ROOT / "bench/results/scripts.md").read_text().splitlines()
    assert lines[0] == f"| {' | '.join(scripts.TITLES)} |"
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line[1:-1].split(" | ")] for line in lines[2:])}
    kinds = scripts.kinds()
    assert len(kinds) >= 40 and list(cells) == [kind.name for kind in kinds]
    rows = [scripts.Row(kind, dict(zip(scripts.COLUMNS, cells[kind.name], strict=True)), 0.0) for kind in kinds]
    assert all(cell for row in rows for cell in row.cells.values())
    assert [each for row in rows for each in row.unlike] == []
    missing = [kind.file for kind in kinds if not ((ways.HERE / kind.file).exists() or (ROOT / kind.file).exists())]
    assert missing == []
