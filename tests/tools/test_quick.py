"""`make quick`: which tests are near to a change."""

from pathlib import Path

import pytest

from tools import quick
from tools.quick import imported, near, related

FILES = {
    "plugins/memory/policy/parity.py": "import math\n",
    "plugins/memory/machine/slabs.py": "from plugins.memory.policy import (\n    parity,  # rows\n    other as o,\n)\n",
    "agent/host.py": "from plugins.memory.machine.slabs import Slabs\n",
    "tests/plugins/memory/test_parity.py": "from plugins.memory.policy.parity import rows\n",
    "tests/plugins/memory/test_slabs.py": "def test() -> None:\n    import plugins.memory.machine.slabs as slabs\n",
    "tests/agent/test_host.py": "from agent import host\n",
    "tests/rack/test_parity.py": "from plugins.memory.policy import parity\n",
    "tests/gossip/test_parity.py": "import gossip\n",
}
IMPORTS = {path: imported(text) for path, text in FILES.items()}


def test_tests_come_by_how_near_they_are_and_racks_are_left_out() -> None:
    near_first = ["tests/plugins/memory/test_parity.py", "tests/plugins/memory/test_slabs.py"]
    assert related(["plugins/memory/policy/parity.py"], IMPORTS) == near_first
    assert related(["plugins/memory/machine/slabs.py"], IMPORTS) == [
        "tests/plugins/memory/test_slabs.py",
        "tests/agent/test_host.py",
    ]
    assert related(["tests/rack/test_parity.py"], IMPORTS) == ["tests/rack/test_parity.py"], "who changed it wants it"
    assert related(["README.md"], IMPORTS) == []


def test_modules_and_folders_are_read_as_python_reads_them() -> None:
    assert imported("from a.b import c as d, e\nimport x.y, z as w\n") == {"a.b", "a.b.c", "a.b.e", "x.y", "z"}
    assert near("plugins/memory/policy/parity.py", "tests/plugins/memory/test_parity.py") == 2
    assert near("agent/host.py", "tests/gossip/test_service.py") == 0


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert quick.main(["plugins/nothing"]) == 2
    assert "there is no 'plugins/nothing' here; next: a path from the root" in capsys.readouterr().err


def test_the_tests_of_a_file_of_this_repository_are_found() -> None:
    imports = {name: imported((quick.ROOT / name).read_text()) for name in quick.listed("ls-files", "--", "*.py")}
    found = related(["plugins/sharing/policy/ladder.py"], imports)
    assert found[0] == "tests/plugins/sharing/test_ladder.py" and "tests/plugins/sharing/test_gpu.py" in found
    assert all(Path(quick.ROOT, test).is_file() for test in found)


def test_pytest_ends_when_the_time_is_over_and_says_how_far_it_came(tmp_path: Path) -> None:
    stops: list[int] = []
    clock = quick.Clock(0.0, tmp_path / "told.json", lambda: stops.append(1))
    for name, when, outcome in (("a", "call", "passed"), ("a", "teardown", "passed"), ("b", "call", "failed")):
        report = pytest.TestReport(name, ("", None, ""), {}, outcome, None, when)  # type: ignore[arg-type]
        clock.pytest_runtest_logreport(report)
    assert len(stops) == 3, "the time was over before the first"
    assert clock.told.read_text() == '{"run": 1, "failed": 1, "all": 0}'
