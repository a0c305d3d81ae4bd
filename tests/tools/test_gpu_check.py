"""The check for machines that have a GPU for minutes only: what is written when it is cut off anywhere, what counts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.gpu import check
from tools.gpu.check import Part, Record, Run, cases_of, cases_told, judged, sources_digest, verdict
from tools.gpu.pack import ROOT, wanted

PASSES, FAILS, SKIPS = (
    Part(name, ("{python}", "-c", code))
    for name, code in (("passes", "print(1)"), ("fails", "import sys; sys.exit(2)"), ("skips", "print('not measured')"))
)


def run(out: Path, *parts: Part, total_s: float = 600.0, part_s: float = 60.0, sources: str = "s") -> dict[str, Any]:
    record = Record(out, sources)
    Run(record, sys.executable, os.environ, part_s, total_s, say=lambda line: None).all(parts)
    return dict(record.found["parts"])


def states(found: dict[str, Any]) -> dict[str, str]:
    return {name: part["state"] for name, part in found.items()}


def test_each_part_is_on_record_before_the_next_begins(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    reads = Part("reads", ("{python}", "-c", f"print(open({str(out)!r}).read())"))
    found = run(out, PASSES, FAILS, reads)
    seen = json.loads(found["reads"]["printed"])["parts"]
    assert states(seen) == {"passes": "passed", "fails": "failed", "reads": "running"}


LEAVES = """
import os, sys, time
path, seconds = sys.argv[1:]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(path + ".new", "w") as out:
            out.write(str(os.getpid()))
        os.rename(path + ".new", path)
        time.sleep(600)
    os._exit(0)
while not os.path.exists(path):
    time.sleep(0.01)
time.sleep(float(seconds))
"""
"""Script of a part whose grandchild is in a session of its own when it ends, as the processes of agents are."""
ENDS = """
import os, sys
from pathlib import Path
from tools.gpu import check
out, leaves, folder = sys.argv[1:]
check.GRACE_S = 0.2
check.adopt_orphans()
for name, seconds, limit_s in (("ends", "0", 60), ("hangs", "600", 3)):
    pid = Path(folder, name)
    part = check.Part(name, ("{python}", leaves, str(pid), seconds))
    check.Run(check.Record(Path(out), "s"), sys.executable, os.environ, 600, 600).one(part, limit_s)
    print("left" if Path("/proc", pid.read_text()).exists() else "gone")
"""


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    out, leaves = tmp_path / "found.json", tmp_path / "leaves.py"
    leaves.write_text(LEAVES)
    command = [sys.executable, "-c", ENDS, str(out), str(leaves), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line in ("left", "gone")] == ["gone", "gone"]
    assert states(json.loads(out.read_text())["parts"]) == {"ends": "passed", "hangs": "timed out"}


def test_a_second_run_goes_on_after_what_has_passed_and_tries_the_rest_again(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    counted = tmp_path / "counted"
    counts = Part("counts", ("{python}", "-c", f"open({str(counted)!r}, 'a').write('x')"))
    run(out, counts, FAILS)
    found = run(out, counts, Part("fails", PASSES.command))
    assert states(found) == {"counts": "passed", "fails": "passed"} and counted.read_text() == "x"
    run(out, counts, sources="others")
    assert counted.read_text() == "xx", "it was found with other sources"


CUT = """
import os, sys
from pathlib import Path
from tools.gpu.check import Part, Record, Run
parts = [Part("passes", ("{python}", "-c", "")), Part("long", ("{python}", "-c", "import time; time.sleep(600)"))]
Run(Record(Path(sys.argv[1]), "s"), sys.executable, os.environ, 600, 600).all(parts)
"""


def test_a_run_that_is_killed_leaves_what_it_found_and_says_what_was_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    process = subprocess.Popen([sys.executable, "-c", CUT, str(out)], cwd=ROOT, stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + 60
    while "long" not in check._read(out).get("parts", {}) or not (children := check._children(process.pid)):
        assert time.monotonic() < until_s, "it did not come to its second part"
        time.sleep(0.01)
    process.kill()
    process.wait()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    left = Record(out, "s").found["parts"]
    assert states(left) == {"passes": "passed", "long": "cut off"}
    assert verdict([PASSES, Part("long", ())], left, rehearsed=False) == (1, ["long: cut off"])


def test_no_part_begins_that_could_not_end_in_time(tmp_path: Path) -> None:
    found = run(tmp_path / "found.json", PASSES, FAILS, total_s=10.0)
    assert found == {}
    assert verdict([PASSES, FAILS], found, rehearsed=False) == (3, ["passes: not begun", "fails: not begun"])


def case(outcome: str, why: str = "") -> dict[str, str]:
    return {"test": "t", "outcome": outcome, "seconds": "1", "why": why}


TESTED = Part("tested", ("{python}", "-m", "pytest"))


@pytest.mark.parametrize(
    ("part", "code", "printed", "cases", "state"),
    [
        (TESTED, 0, "", [case("passed"), case("skipped")], "passed"),
        (TESTED, 0, "", [case("skipped")], "skipped"),
        (TESTED, 5, "", [case("skipped")], "skipped"),
        (TESTED, 5, "", [], "failed"),  # nothing was collected: the part names no test
        (TESTED, 0, "", [], "failed"),
        (TESTED, 1, "", [case("passed"), case("failed")], "failed"),
        (TESTED, 4, "", [], "failed"),
        (TESTED, None, "", [case("passed")], "timed out"),
        (PASSES, 0, "1", [], "passed"),
        (PASSES, -9, "1", [], "failed"),
        (PASSES, 0, "| x | not measured |", [], "skipped"),
    ],
)
def test_a_part_has_passed_when_something_of_it_was_tried_and_nothing_failed(
    part: Part, code: int | None, printed: str, cases: list[dict[str, str]], state: str
) -> None:
    assert judged(part, code, printed, cases) == state


def test_a_rehearsal_holds_when_parts_skip_for_want_of_a_gpu_and_for_nothing_else() -> None:
    cores = Part("cores", ("{python}", "-m", "pytest"), needs_gpu=False)
    parts = [TESTED, cores]
    why = "PyTorch finds no CUDA device here"
    good = {
        "tested": {"state": "skipped", "tests": [case("skipped", why), case("skipped", "no NVIDIA driver here: ...")]}
    }
    good["cores"] = {"state": "passed", "tests": [case("passed")]}
    assert verdict(parts, good, rehearsed=True) == (0, [])
    assert verdict(parts, good, rehearsed=False)[0] == 3
    other = good | {"tested": {"state": "skipped", "tests": [case("skipped", "no torch here")]}}
    assert verdict(parts, other, rehearsed=True)[0] == 1
    assert verdict(parts, good | {"cores": {"state": "skipped", "tests": []}}, rehearsed=True)[0] == 1
    assert verdict(parts, {"cores": good["cores"]}, rehearsed=True) == (1, ["tested: not begun, expected skipped"])


def test_outcomes_come_from_the_report_and_without_one_from_what_was_printed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='a' name='t1' time='0.1'/><testcase classname='a' name='t2'>"
        "<failure message='m'>text</failure></testcase><testcase classname='a' name='t3'><skipped message='why'/>"
        "</testcase></testsuite></testsuites>"
    )
    assert [one["outcome"] for one in cases_of(report)] == ["passed", "failed", "skipped"]
    report.write_text("<testsuites><tests")
    assert cases_of(report) == [] == cases_of(tmp_path / "none.xml")
    printed = "tests/a.py::t1 PASSED [ 50%]\ntests/a.py::t2[x y] FAILED [ 75%]\n[gw1] [ 80%] SKIPPED tests/b.py::t3 \n"
    assert [one["outcome"] for one in cases_told(printed)] == ["passed", "failed", "skipped"]


def test_every_part_names_something_that_is_there() -> None:
    words = [word for part in check.PARTS for word in part.command if word.endswith(".py")]
    assert words and all((ROOT / word).is_file() for word in words)
    assert len({part.name for part in check.PARTS}) == len(check.PARTS)


def test_every_test_that_needs_a_gpu_is_in_a_part() -> None:
    """`pytest -m gpu` over the files of the parts finds what it finds over all."""
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert marked <= {word for part in check.PARTS for word in part.command}


def test_the_digest_changes_with_any_source(tmp_path: Path) -> None:
    (tmp_path / "covey").mkdir()
    (tmp_path / "covey" / "a.py").write_text("1")
    before = sources_digest(tmp_path)
    (tmp_path / "covey" / "a.py").write_text("2")
    assert sources_digest(tmp_path) != before


def test_the_pack_has_what_the_agent_needs_and_not_what_the_machine_has() -> None:
    names = [line.split(">")[0].split("[")[0] for line in wanted(ROOT)]
    assert {"msgspec", "pyzmq", "structlog", "cryptography", "uvloop", "aiohttp", "isal", "pip"} <= set(names)
    assert not {"numpy", "torch", "jax", "covey-job", "mypy"} & set(names)
