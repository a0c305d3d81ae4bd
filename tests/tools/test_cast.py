"""`tools/cast.py` records what a terminal was given, and README shows what the recording of `make run` has."""

import json
import re
import sys
from pathlib import Path

import pytest

from tools import cast

ROOT = Path(__file__).parents[2]
RUN = ROOT / "docs/start/run.cast"


def test_a_command_is_recorded_with_the_times_of_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.cast"
    program = "import sys, time; print('é', sys.stdout.isatty(), flush=True); time.sleep(0.2); print('end')"
    assert cast.main([str(path), sys.executable, "-c", program]) == 0
    head, *events = map(json.loads, path.read_text().splitlines())
    assert (head["version"], head["width"], head["height"]) == (2, cast.WIDTH, cast.HEIGHT)
    times = [at for at, kind, _ in events if kind == "o"]
    assert len(times) == len(events) >= 2 and times == sorted(times) and times[0] == 0 and times[-1] >= 0.2
    assert cast.text_of(path) == f"$ {sys.executable} -c {program}\r\né True\r\nend\r\n"
    assert capsys.readouterr().out == "é True\r\nend\r\n"


def test_a_command_that_fails_leaves_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cast.main([str(tmp_path / "x.cast"), "sh", "-c", "exit 3"]) == 3
    assert list(tmp_path.iterdir()) == [] and "ended with 3" in capsys.readouterr().err


def test_readme_shows_what_the_recording_of_make_run_has() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", cast.text_of(RUN)).replace("\r", "\n")
    seen = {" ".join(line.split()) for line in text.splitlines()}
    blocks = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    shown = next(block for block in blocks if "All checks passed" in block)
    missing = [line for line in shown.splitlines() if line.strip() and " ".join(line.split()) not in seen]
    assert missing == [], "make a new recording (python -m tools.cast), and show its lines"
    assert "All checks passed" in shown and "make run" in json.loads(RUN.read_text().splitlines()[0])["title"]
