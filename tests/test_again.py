"""Which failed tests get a second run (`tests.again`)."""

import json
from pathlib import Path

import pytest

from tests.again import MOST, to_run_again


@pytest.mark.parametrize(("count", "again"), [(0, 0), (1, 1), (MOST, MOST), (MOST + 1, 0)])
def test_a_few_failures_are_run_again_and_many_are_not(tmp_path: Path, count: int, again: int) -> None:
    failed = tmp_path / "lastfailed"
    failed.write_text(json.dumps({f"tests/test_x.py::test_{number}": True for number in range(count)}))
    assert len(to_run_again(failed)) == again


def test_without_a_record_nothing_is_run_again(tmp_path: Path) -> None:
    assert to_run_again(tmp_path / "lastfailed") == []


def test_a_test_of_a_group_is_found_by_its_own_name(tmp_path: Path) -> None:
    failed = tmp_path / "lastfailed"
    told = ("tests/a.py::test_x[no route, a@b]@hosts", "tests/a.py::test_y@arrays on a rack", "tests/a.py::test_z")
    failed.write_text(json.dumps(dict.fromkeys(told, True)))
    assert to_run_again(failed) == ["tests/a.py::test_x[no route, a@b]", "tests/a.py::test_y", "tests/a.py::test_z"]
