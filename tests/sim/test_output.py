"""One report as text, JSON, Markdown, CSV and SVG."""

import csv
import io
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cli.table import Paint
from sim import main as command
from sim import output
from sim.plot import Axis, mark
from sim.report import Figure, Report, Series, Table
from sim.tuner import tuner

TABLE = Table("sizes", ("name", "bytes", "share"), [("a|b", 12345, 0.5), ("c", None, math.inf)], ("a note",))
LINES = (Series("one & two", (1, 10, 100), (0.1, 0.5, 1.0)), Series("three", (1, 100), (0.0, 2.0)))
FIGURE = Figure("f", "a <title>", "x (s)", "y", LINES, log_x=True, steps=True)
REPORT = Report("r", {"n": 1, "gone": math.nan, "nested": {"x": [math.inf, 2]}}, (TABLE,), (FIGURE,))


def test_numbers_are_shown_with_the_digits_that_mean_something() -> None:
    shown = [
        output.shown(value) for value in (None, 7, 12345, 0.12345, 1.2345, 123.456, 1234.5, 98765.4, 1e-6, True, "x")
    ]
    assert shown == ["-", "7", "12,345", "0.123", "1.23", "123.5", "1234", "98,765", "1.00e-06", "True", "x"]


def test_text_holds_every_cell_and_note() -> None:
    said = output.text(REPORT, Paint("never"))
    assert all(part in said for part in ("sizes", "12,345", "a|b", "a note", "inf"))


def test_json_is_one_object_that_any_reader_takes() -> None:
    found = json.loads(output.as_json(REPORT), parse_constant=lambda name: pytest.fail(name))
    assert found == {"schema": 1, "report": "r", "n": 1, "gone": None, "nested": {"x": [None, 2]}}


def test_markdown_escapes_what_would_break_a_row() -> None:
    lines = output.as_markdown(REPORT, "r").splitlines()
    assert "| a\\|b | 12,345 | 0.500 |" in lines and "|---|---:|---:|" in lines and "- a note" in lines


def test_csv_keeps_numbers_in_full() -> None:
    rows = list(csv.reader(io.StringIO(output.as_csv(REPORT))))
    assert rows[0] == ["table", "name", "bytes", "share"] and rows[1] == ["sizes", "a|b", "12345", "0.5"]


def test_svg_is_well_formed_and_the_same_every_time() -> None:
    drawn = output.svg([FIGURE, FIGURE])
    assert ET.fromstring(drawn).tag.endswith("svg") and drawn == output.svg([FIGURE, FIGURE])
    assert "one &amp; two" in drawn and "a &lt;title&gt;" in drawn


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20), st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], log: bool) -> None:
    figure = Figure("f", "t", "x", "y", [Series("s", range(len(values)), values)], log_y=log)
    ET.fromstring(output.svg([figure]))
    assert "nan" not in output.svg([figure]) and "inf" not in output.svg([figure])


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=10))
@example([5e-324])
@example([1e12, 1e12 + 1e-3])
def test_an_axis_holds_all_its_values(values: list[float]) -> None:
    axis = Axis(values, 0, 100, log=False, zero=True)
    assert all(-0.5 <= axis(value) <= 100.5 for value in values)
    assert 2 <= len(axis.marks) <= 12


def test_marks_are_short() -> None:
    assert [mark(value) for value in (0, 0.25, 1500, 20000, 2.5e6, 3e9)] == ["0", "0.25", "1500", "20k", "2.5M", "3G"]


def test_an_unknown_word_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["job"]) == 2
    assert "did you mean: covey-sim jobs" in capsys.readouterr().err


def test_a_part_that_is_not_there_is_said_and_nothing_is_made_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(command.COMMANDS, "magic", ("magic", "of a part that nobody wrote"))
    assert command.main(["magic"]) == 2
    said = capsys.readouterr()
    assert "not built yet" in said.err and said.out == ""


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in command.COMMANDS)


# ---- the command itself ----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_never_fills_a_line_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SHOW_EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    shown = command.Shown(out)
    for text in ("x" * 200, "short", "y" * 70):
        shown(0.5, text)
    shown.done()
    assert out.getvalue().count("x") > 30
    assert all(len(part) <= 59 for part in out.getvalue().split("\r"))


def test_a_figure_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "run", lambda options, progress: pytest.fail("it ran"))
    for plot, said in ((tmp_path / "no" / "x.svg", "no folder"), (tmp_path, "cannot be written")):
        assert command.main(["tuner", "--plot", str(plot)]) == 2
        assert said in capsys.readouterr().err


def test_a_report_is_shown_although_its_figure_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "run", lambda options, progress: Report("r", {}, (TABLE,)))
    assert command.main(["tuner", "--plot", str(tmp_path / "x.svg")]) == 2
    said = capsys.readouterr()
    assert "12,345" in said.out and "no figure" in said.err


def test_a_full_disk_behind_standard_output_is_an_error_of_three_lines() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from sim.main import main; sys.exit(main(['--help']))"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1 and "standard output cannot be written" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_help_names_what_every_command_takes_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("--json", "--plot", "--quiet", "--seed", "exit codes"))
