"""`covey-vectors`: the shipped cases pass, and what differs is said."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.vectors.main import load_handlers, main, schema_of
from sim.vectors.types import differs
from tests.families import examples

ROOT = Path(__file__).parents[3]
VECTORS = ROOT / "tests" / "vectors"


def test_every_shipped_case_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(VECTORS)]) == 0
    lines = capsys.readouterr().out.splitlines()
    contents = [json.loads(path.read_text()) for path in VECTORS.glob("*.json")]
    lists = [part for each in contents for part in (each.values() if isinstance(each, dict) else [each])]
    assert lines[-1] == f"{sum(map(len, lists))} passed, 0 failed"
    told = {line.partition(":")[0] for line in lines[:-1]}
    assert told == {path.name for path in VECTORS.glob("*.json")}


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


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(argv)
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("quota.json", "quota"),
        ("quota-2.json", "quota"),
        ("quota.hidden.json", "quota"),
        ("quota_2.json.gz", "quota"),
        ("2das_small_extra.json", "2das_small"),
        ("2das_traces2.json", "2das_traces"),
        ("quotas.json", None),
        ("my-quota.json", None),
        ("2das.json", None),
    ],
)
def test_the_beginning_of_a_name_says_the_schema(name: str, schema: str | None) -> None:
    assert schema_of(name, ["quota", "2das_small", "2das_traces", "placement"]) == schema


def test_packed_files_sub_folders_and_files_of_one_schema_are_counted_separately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(tmp_path, "placement", lambda cases: cases[0].update(gpus=1))
    (tmp_path / "more").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "surprise.json").write_text("[]")
    (tmp_path / "README.md").write_text("no vectors")
    packed = gzip.compress((VECTORS / "placement.json").read_bytes())
    (tmp_path / "more" / "placement-2.json.gz").write_bytes(packed)
    code, told = said([str(tmp_path)], capsys)
    assert code == 1
    assert "more/placement-2.json.gz: 25 of 25 passed" in told
    assert "placement.json: 24 of 25 passed" in told
    assert told.splitlines()[-1] == "49 passed, 1 failed"


def test_a_file_that_is_packed_badly_or_of_the_wrong_shape_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, why in (
        ("quota.json.gz", b"\x1f\x8bnonsense", "cannot be read"),
        ("quota.json", b'{"a": 1}', "quota.json is no list"),
        ("quota.json", b"\xff\xfe\xff", "cannot be read"),
        ("quota.json", b"[" * 100_000, "cannot be read"),
        ("parameters.json", b'{"memory": []}', "holds a list 'memory'"),
        ("parameters.json", b'{"cruise": {}}', "cruise is no list"),
        ("parameters.json", b"[]", "is no object"),
    ):
        (tmp_path / name).write_bytes(content)
        code, told = said([str(tmp_path)], capsys)
        assert (code, why in told) == (2, True), f"{name}: {told}"
        assert len(told.splitlines()) == 3, f"what, why, next: {told}"
        (tmp_path / name).unlink()


def test_a_case_without_its_trace_fails_alone_and_says_how_to_name_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(cases: Any) -> None:
        del cases[2:]
        cases[0]["trace"] = "nowhere.csv.gz"

    folder = changed(tmp_path, "2das_traces", lost)
    code, told = said([str(folder)], capsys)
    assert code == 1 and "there is no trace nowhere.csv.gz" in told and "--traces DIR" in told
    assert told.splitlines()[-1] == "1 passed, 1 failed"
    (tmp_path / "empty").mkdir()
    assert said([str(folder), "--traces", str(tmp_path / "empty")], capsys)[1].splitlines()[-1] == "0 passed, 2 failed"
    assert said([str(folder), "--traces", str(tmp_path / "none")], capsys)[0] == 2


def test_traces_beside_vectors_are_found_and_gangs_wider_than_the_cluster_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").mkdir()
    rows = "job_id,submit_time_s,num_gpus,duration_s\nj1,0,2,5\nj2,1,9,5\nj3,2,1,7\n"
    (tmp_path / "traces" / "mine.csv").write_text(rows)
    expect = {"jobs": 2, "sum_jct": 15, "makespan": 12, "preemptions": 0, "promotions": 0, "sum_wait": 3}
    case = {"name": "wide", "trace": "public/mine.csv", "policy": "fifo", "capacity": 2, "params": {}, "expect": expect}
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "2das_traces.json").write_text(json.dumps([case]))
    assert said([str(tmp_path / "vectors")], capsys) == (0, "2das_traces.json: 1 of 1 passed\n1 passed, 0 failed\n")


def test_a_case_may_expect_some_of_the_answers_but_not_none_and_none_that_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def partly(cases: Any) -> None:
        cases[0]["expect"] = {"avg_jct": [28, 3]}
        cases[1]["expect"] = {}
        cases[2]["expect"]["energy"] = 5
        cases[3]["extra"] = "is nobody's business"
        del cases[4:]

    code, told = said([str(changed(tmp_path, "2das_small", partly))], capsys)
    assert code == 1
    assert "fig7-las-quantum1 (case 2)\n  it expects nothing; known: end, preempt" in told
    assert "it expects 'energy', which is not known" in told
    assert told.splitlines()[-1] == "2 passed, 2 failed"


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a value."""
    inside: list[tuple[Any, ...]] = []
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        inside += [(*path, key), *paths(value[key], (*path, key))]
    return inside


NONSENSE: list[Any] = [None, [], {}, "text", -1, 0, 1.5, [1], float("nan"), float("inf"), True, 10**30]
KNOWN = sorted(set(load_handlers()[0]) - {"2das_traces"})


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_no_case_however_wrong_stops_the_others(name: str, data: st.DataObject) -> None:
    """A wrong case passes, or fails with a reason; the next one is replayed."""
    stem, _, key = name.partition("/")
    content = json.loads((VECTORS / f"{stem}.json").read_text())
    cases = (content[key] if key else content)[:6]
    at = data.draw(st.integers(0, len(cases) - 1))
    wrong = copy.deepcopy(cases[at])
    path = data.draw(st.sampled_from([(), *paths(wrong)]))
    nonsense = data.draw(st.sampled_from(NONSENSE))
    if not path:
        wrong = nonsense
    else:
        inside = wrong
        for part in path[:-1]:
            inside = inside[part]
        if data.draw(st.booleans()):
            inside[path[-1]] = nonsense
        else:
            del inside[path[-1]]
    replayed = list(load_handlers()[0][name]([wrong, cases[at]], ()))
    assert len(replayed) == 2
    assert replayed[1][1] == []


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_what_is_equal_does_not_differ_and_a_change_of_it_does(value: Any) -> None:
    assert differs("it", value, value) == []
    assert differs("it", [value, 1], [value, 2]) != []
