"""What people read: columns, ages, colours."""

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.table import Paint, ago, clock, epoch_text, of, pairs, plural, shown, table

PLAIN = Paint("never")


def test_columns_are_aligned_numbers_to_the_right_and_empty_columns_left_out() -> None:
    text = table(
        ("HOST", "STATE", "SLABS", "NOTE"), [("gpu1", "alive", 4, None), ("gpu10", "gone", 16, "")], ("SLABS",), PLAIN
    )
    assert text.splitlines() == ["HOST   STATE  SLABS", "gpu1   alive      4", "gpu10  gone      16"]


def test_a_table_without_rows_still_says_what_it_would_hold() -> None:
    assert table(("JOB", "STATE"), [], (), PLAIN) == "JOB  STATE"


def test_colour_changes_nothing_but_colour() -> None:
    rows = [("gpu1", "alive"), ("gpu2", "suspect"), ("gpu3", "odd")]
    painted = table(("HOST", "STATE"), rows, (), Paint("always"))
    assert "\x1b[32malive\x1b[0m" in painted
    for code in ("\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[0m"):
        painted = painted.replace(code, "")
    assert painted == table(("HOST", "STATE"), rows, (), PLAIN)


@pytest.mark.parametrize(
    ("when", "environ", "expected"),
    [
        ("auto", {}, False),
        ("auto", {"FORCE_COLOR": "1"}, True),
        ("always", {"NO_COLOR": "1"}, True),
        ("never", {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_is_for_terminals(
    when: str, environ: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert Paint(when, io.StringIO()).on is expected


def test_no_color_wins_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Paint("auto", Terminal()).on
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Paint("auto", Terminal()).on


@given(st.text())
def test_nothing_from_the_other_side_can_steer_a_terminal(text: str) -> None:
    assert shown(text).isprintable()


@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), min_size=1, max_size=5))
def test_every_row_is_one_line(rows: list[tuple[str, str]]) -> None:
    shown = table(("A", "B"), rows, ("B",), PLAIN) + "|"  # a last row of blanks is a line too
    assert len(shown.splitlines()) == len(rows) + 1


def test_a_long_last_column_goes_on_under_itself_on_a_terminal() -> None:
    narrow = Paint("always")
    narrow.width = 40
    rows = [("j1", "queued", "it needs two GPUs and the tenant uses all of its quota"), ("j2", "done", "short")]
    text = table(("JOB", "STATE", "WHY"), rows, (), narrow)
    lines = [line.replace("\x1b[33m", "").replace("\x1b[32m", "").replace("\x1b[0m", "") for line in text.splitlines()]
    assert lines[1:] == [
        "j1   queued  it needs two GPUs and the",
        "             tenant uses all of its",
        "             quota",
        "j2   done    short",
    ]
    assert "\x1b[33mqueued\x1b[0m" in text
    narrow.width = 30
    assert len(table(("JOB", "STATE", "WHY"), rows, (), narrow).splitlines()) == 3


def test_pairs_leave_out_what_is_not_known() -> None:
    assert pairs([("leader", "gpu1"), ("for", ""), ("term", 3)], PLAIN) == "leader  gpu1\nterm    3"


def test_ages_are_relative() -> None:
    assert [ago(None), ago(0.0), ago(3.2), ago(90)] == ["-", "now", "3.2 s ago", "1 min 30 s ago"]


def test_a_time_of_another_day_has_its_date() -> None:
    now_s = time.time()
    assert len(clock(now_s)) == len("12:34:56.789")
    assert clock(86400.0 * 365).startswith(("1970-12-31 ", "1971-01-01 "))


def test_fractions_and_counts() -> None:
    assert [of(3, 8), of(0, 8), of(None, 8)] == ["3/8", "0/8", "-"]
    assert [plural(1, "host"), plural(2, "host"), plural(0, "process")] == ["1 host", "2 hosts", "0 processes"]


def test_an_epoch_of_two_halves_is_shown_as_such() -> None:
    assert [epoch_text(epoch) for epoch in (7, 1 << 32 | 5)] == ["7", "1.5"]
