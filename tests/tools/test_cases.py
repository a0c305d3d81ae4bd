"""What `make cases` says of cases that are right, wrong, skipped, endless, or not there."""

import os
import select
from pathlib import Path

import pytest

from tools.cases import ROOT, main, run


def case(folder: Path, name: str, script: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "run.sh").write_text(script)
    return folder / name / "run.sh"


def test_the_table_says_of_each_case_what_became_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case(tmp_path, "02-wrong", "echo ok one; echo WRONG two; echo three; exit 1")
    case(tmp_path, "01-right", f'[ "$COVEY" = {ROOT} ] && [ "$PWD" = {tmp_path}/01-right ] && echo ok')
    case(tmp_path, "03-skipped", "echo looks; echo needs faketime; exit 77")
    assert main([str(tmp_path)]) == 1
    table = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert [line.split()[:2] for line in table[:3]] == [
        ["01-right", "ok"],
        ["02-wrong", "WRONG"],
        ["03-skipped", "skipped"],
    ]
    assert table[1].endswith("WRONG two") and table[2].endswith("needs faketime")
    assert table[3] == "1 ok, 1 WRONG, 1 skipped"


@pytest.mark.parametrize(("code", "status"), [(0, 0), (77, 0), (1, 1), (2, 1), (139, 1)])
def test_only_right_and_skipped_cases_are_good_news(tmp_path: Path, code: int, status: int) -> None:
    case(tmp_path, "one", f"exit {code}")
    assert main([str(tmp_path)]) == status


def test_no_case_at_all_is_no_good_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == main([""]) == main([]) == 2
    assert "make cases CASES=" in capsys.readouterr().err


def test_a_case_hears_nothing_of_the_make_that_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make` exports what it was called with: a case with a variable of the same name would take it for its own."""
    for name in ("CASES", "MAKEFLAGS", "COVEY_AGENT"):
        monkeypatch.setenv(name, "x")
    heard = case(tmp_path, "one", 'echo "[$CASES$MAKEFLAGS$COVEY_AGENT]"')
    assert run(heard).printed == "[]\n"


def ended(pid: int) -> bool:
    """Whether a process that was killed is gone within ten seconds."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 10.0)[0])
    finally:
        os.close(process)


def test_a_case_that_does_not_end_is_wrong_and_leaves_nothing(tmp_path: Path) -> None:
    endless = case(tmp_path, "endless", "sleep 600 & echo $! > pid; wait")
    outcome = run(endless, limit_s=0.5)
    assert outcome.verdict == "WRONG" and "not over" in outcome.why
    left = (tmp_path / "endless/pid").read_text().strip()
    assert ended(int(left)), f"process {left} of the case runs on"
