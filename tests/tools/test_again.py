"""Failed tests get a second run alone, are named with both outcomes, and are not forgiven twice (`tools.again`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.again import (
    MOST,
    RUNS,
    Run,
    failures,
    judge,
    place,
    read,
    red,
    remembered,
    to_run_again,
    words,
)

A, B = "tests/a.py::test_a", "tests/b.py::test_b"


def runs(*forgiven: str) -> list[Run]:
    """One run for each letter of a word: `a` and `b` mean the tests that were forgiven, `.` a green run."""
    return [
        {"wall_s": n, "forgiven": {"a": {A: "slow"}, "b": {B: "slow"}, ".": {}}[each]}
        for n, each in enumerate(forgiven)
    ]


@pytest.mark.parametrize(("count", "again"), [(0, 0), (1, 1), (MOST, MOST), (MOST + 1, 0)])
def test_a_few_failures_are_run_again_and_many_are_not(count: int, again: int) -> None:
    assert len(to_run_again({f"tests/test_x.py::test_{number}": "" for number in range(count)})) == again


def test_without_a_record_nothing_is_run_again(tmp_path: Path) -> None:
    assert failures(tmp_path / "failed") == {}


def test_a_test_of_a_group_is_found_by_its_own_name(tmp_path: Path) -> None:
    failed = tmp_path / "failed"
    told = ("tests/a.py::test_x[no route, a@b]@hosts", "tests/a.py::test_y@arrays on a rack", "tests/a.py::test_z")
    failed.write_text(json.dumps(dict.fromkeys(told, "why")))
    assert list(failures(failed)) == ["tests/a.py::test_x[no route, a@b]", "tests/a.py::test_y", "tests/a.py::test_z"]


@pytest.mark.parametrize(
    ("earlier", "is_red"),
    [
        ("", False),
        ("a", True),
        ("b", False),
        ("a........", True),
        ("a.........", False),
        ("b...b....", False),
        ("aaaa.........", False),
    ],
)
def test_one_name_twice_in_ten_runs_is_red(earlier: str, is_red: bool) -> None:
    assert red(runs(*earlier), {A: "slow"}) == [A] * is_red
    assert red(runs(*earlier), {}) == []


def test_the_file_holds_ten_runs_green_ones_among_them() -> None:
    known: list[Run] = []
    for number in range(RUNS + 5):
        known = remembered(known, {A: "slow"} if number == 6 else {}, float(number))
    assert [run["wall_s"] for run in known] == list(range(5, RUNS + 5))
    assert [run["forgiven"] for run in known if run["forgiven"]] == [{A: "slow"}]


def test_both_outcomes_are_named_with_their_reasons() -> None:
    text = words({A: "assert 1 == 2", B: "TimeoutError"}, {B: "TimeoutError: 5 s"}, runs("a", "."))
    for line in (A, "beside others: FAILED: assert 1 == 2", "passed; RED: so it was in 1 of the 9 runs before",
                 "beside others: FAILED: TimeoutError", "alone:         FAILED: TimeoutError: 5 s"):  # fmt: skip
        assert line in text
    assert "forgiven once" in words({A: "slow"}, {}, runs("b"))


def test_a_run_is_judged_by_those_before_it_whatever_clone_they_were_of(tmp_path: Path) -> None:
    path = tmp_path / "not/there/again.json"
    assert [judge(first, {}, path, 0.0) for first in ({A: "slow"}, {}, {B: "slow"}, {A: "slow"})] == [0, 0, 0, 1]
    assert judge({}, {}, path, 0.0) == 0 and len(read(path)) == 5
    assert judge({B: "x"}, {B: "x"}, tmp_path / "new", 0.0) == 1, "what fails twice fails"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"forgiven": 1}]', "\0"])
def test_a_damaged_file_is_said_and_begun_anew(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "again.json"
    path.write_text(text)
    assert judge({}, {}, path, 0.0) == 0
    assert "nothing is known about earlier runs" in capsys.readouterr().err and len(read(path)) == 1


def test_what_cannot_be_remembered_is_not_forgiven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "again.json"
    assert (judge({}, {}, path, 0.0), judge({A: "slow"}, {}, path, 0.0)) == (0, 1)
    assert "cannot be kept" in capsys.readouterr().err


def test_where_the_file_is() -> None:
    assert place({"AGAIN_FILE": "/a", "XDG_STATE_HOME": "/b"}) == Path("/a")
    assert place({"XDG_STATE_HOME": "/b"}) == Path("/b/covey-check/again.json")


def test_pytest_says_what_failed_and_why(tmp_path: Path) -> None:
    """Runs pytest in a session of its own, with the hooks of this one."""
    (tmp_path / "test_it.py").write_text("def test_no():\n    assert 1 == 2, 'they differ'\n\ndef test_yes(): ...\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_terminal_summary\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-n", "0", str(tmp_path)]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = tmp_path.glob(".pytest_cache/v/covey/failed")
    assert failures(found) == {"test_it.py::test_no": "AssertionError: they differ"}
