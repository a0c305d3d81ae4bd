"""`covey-vectors`: the shipped cases pass, and what differs is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.vectors.main import main
from cli.vectors.types import differs

ROOT = Path(__file__).parents[3]
VECTORS = ROOT / "tests" / "vectors"
SCHEDULER = ("2das_small", "2das_traces", "gittins_index", "placement", "quota")


@pytest.mark.parametrize("name", SCHEDULER)
def test_the_shipped_cases_of_the_scheduler_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(VECTORS / f"{name}.json"), "--traces", str(ROOT / "bench" / "traces")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("passed, 0 failed")


def changed(tmp_path: Path, name: str, change: Any) -> Path:
    cases = json.loads((VECTORS / f"{name}.json").read_text())
    change(cases)
    (tmp_path / f"{name}.json").write_text(json.dumps(cases))
    return tmp_path


def test_a_case_that_differs_is_named_with_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def later(cases: Any) -> None:
        cases[0]["expect"]["end"]["3"] += 1

    assert main([str(changed(tmp_path, "2das_small", later))]) == 1
    said = capsys.readouterr().out
    assert "2das_small.json: fig7-srsf" in said
    assert "end[3]: ours 16, expected 17" in said
    assert said.splitlines()[-1] == "43 passed, 1 failed"


def test_an_unknown_name_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "surprise.json").write_text("[]")
    assert main([str(tmp_path)]) == 2
    assert "surprise.json is no known kind of vectors" in capsys.readouterr().err


def test_a_file_that_is_no_json_is_an_error_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quota.json").write_text('[{"name": ]')
    assert main([str(tmp_path)]) == 2
    assert "line 1, column 11" in capsys.readouterr().err


def test_a_file_without_cases_and_an_empty_folder_are_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    (tmp_path / "quota.json").write_text("[]")
    assert main([str(tmp_path)]) == 1
    assert "it holds no case" in capsys.readouterr().out


def test_a_broken_case_fails_alone_and_the_others_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(cases: Any) -> None:
        del cases[1]["capacity"]
        cases[2]["policy"] = "magic"
        cases[3]["params"]["speed"] = 9

    assert main([str(changed(tmp_path, "2das_small", broken)), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["failed"]) == (41, 3)
    assert all("cannot be replayed" in each["differences"][0] for each in found["differing"])


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_what_is_equal_does_not_differ_and_a_change_of_it_does(value: Any) -> None:
    assert differs("it", value, value) == []
    assert differs("it", [value, 1], [value, 2]) != []
