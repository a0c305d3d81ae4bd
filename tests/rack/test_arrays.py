"""Arrays in remote memory on a rack of real agents: a job's, while what serves it is killed, and another user's."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.covey.live_volume import ROOT, STRANGER, script_of
from tests.covey.test_remote_array import OWN, TRIED
from tests.rack.living_rack import ENV, LivingRack, living_rack, wait

pytestmark = [pytest.mark.rack, pytest.mark.slow, pytest.mark.xdist_group("arrays on a rack")]
FEATURES = ROOT / "examples" / "features.py"


@pytest.fixture(scope="module")
def living() -> Iterator[LivingRack]:
    with living_rack() as living:
        yield living


@pytest.mark.long
def test_a_job_out_of_core_ends_with_the_same_weights_though_servers_are_killed(living: LivingRack) -> None:
    """Servers are ended by `kill -9` while they work: the volume's process, the pager's worker and a lender's slab
    process."""
    argv = [sys.executable, str(FEATURES)]
    local = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300, env=ENV).stdout
    body = {
        "name": "features",
        "workers": 1,
        "gpus_per_worker": 1,
        "argv": [*argv, "--volume", "features", "--budget", "15 MiB"],
        "cwd": str(living.directory),
        "env": ENV,
    }
    job = str(living.agent().post("jobs", body=body).data["id"])

    def volume() -> dict[str, object]:
        found = [each for each in living.agent().get("volumes").data if each["volume"] == "features"]
        return found[0] if found else {}

    wait("it writes", lambda: volume().get("written_bytes", 0))
    host = str(volume()["host"])
    slabs = living.agent().get("slabs").data
    lenders = sorted({slab["lender"] for slab in slabs if slab["volume"] == "features" and slab["lender"]})
    os.kill(living.program(host, "vold"), signal.SIGKILL)
    for lender in lenders[:1]:
        os.kill(living.program(lender, "slabd"), signal.SIGKILL)
    ended = wait("the job has ended", lambda: living.job(job)["times"]["ended_wall_s"] and living.job(job), 120)
    output = living.output(job)
    assert (ended["state"], ended["exit_code"]) == ("done", 0), output
    assert local in output, output
    assert "(faults" in output or "(explicit" in output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_volume_made_for_a_user_is_opened_by_him_alone(living: LivingRack) -> None:
    body = {"volume": "ours", "size_bytes": 4 << 20, "uid": STRANGER}
    path = living.agent().post("volumes", body=body).data["path"]
    mine = script_of(path, OWN, STRANGER)
    said, errors = mine.communicate(timeout=60)
    assert mine.returncode == 0, errors
    assert said.startswith((f"{STRANGER} faults", f"{STRANGER} explicit"))
    os.chmod(path, 0o666)
    theirs = script_of(path, TRIED, STRANGER + 1)
    said, errors = theirs.communicate(timeout=60)
    assert f"belongs to another user (uid {STRANGER})" in said, errors
