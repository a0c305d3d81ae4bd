"""examples/features.py: out of core, with a quarter of its features local, it ends with the same weights to the bit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from covey.core.units import MIB
from tests.covey.live_volume import ROOT, LiveVolume, faults_are_possible
from tests.families import in_gate

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables for one thread; they count before numpy is imported, which the script does not do here."""
SCRIPT = ROOT / "examples" / "features.py"
RUN = """
import runpy
from covey.kernel import userfault
if {forbid}:
    def refused():
        raise PermissionError(1, "userfaultfd: Operation not permitted")
    userfault.opened = refused
sys.argv = ["features.py", "--volume", PATH, "--budget", "15 MiB"]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def local() -> str:
    """Output of the script in this host's own memory."""
    argv = [sys.executable, str(SCRIPT)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300, cwd=Path("/")).stdout


@pytest.mark.rack
@pytest.mark.slow
@pytest.mark.parametrize("forbid", in_gate(1, [False, True]), ids=["faults", "explicit"])
def test_features_in_remote_memory_are_those_in_local_memory(local: str, forbid: bool) -> None:
    if not forbid and not faults_are_possible():
        pytest.skip("this kernel gives no userfaultfd")
    with LiveVolume(64 * MIB) as volume:
        script = volume.script(RUN.format(forbid=forbid, script=str(SCRIPT)), **ONE_THREAD)
        said, errors = script.communicate(timeout=300)
    assert script.returncode == 0, errors
    assert said == local
    right = re.search(r"weights [0-9a-f]{16}, ([0-9.]+) %", said)
    assert right is not None and float(right[1]) > 90
    assert ("explicit: userfaultfd" if forbid else "(faults") in errors
    if not forbid:
        counts = dict(re.findall(r"'(\w+)': (\d+)", errors))
        assert int(counts["local"]) * 65536 <= 15 * MIB
        assert int(counts["saved"]) * 65536 > 40 * MIB, "most of it was elsewhere at some time"
