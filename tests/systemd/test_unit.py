"""The unit file, as systemd reads it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.raft.disk import Contradicted, DiskRefused
from covey.wire.bulk import BULK_BYTES
from covey.wire.checked import StateRefused

UNIT = Path(__file__).parents[2] / "systemd" / "covey.service"
EXPOSURE_MAX = 3.0
"""Largest exposure by systemd's own measure, 0 (none) to 10. Jobs are started from this unit, so it cannot be as tight
as it might be."""

with_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")


STARTER = UNIT.with_name("covey-starter.service")
STARTER_EXPOSURE_MAX = 2.5
"""Nothing is started from the starter's unit itself: systemd starts the jobs' units."""


def analyze(*arguments: str, unit: Path = UNIT) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments, str(unit)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@with_systemd
def test_systemd_accepts_the_unit() -> None:
    verified = analyze("verify")
    assert (verified.returncode, verified.stderr) == (0, "")


@with_systemd
def test_its_exposure_is_bounded() -> None:
    found = re.search(r"exposure level for covey.service: ([\d.]+)", analyze("security", "--offline=true").stdout)
    assert found
    assert float(found[1]) <= EXPOSURE_MAX


@with_systemd
def test_systemd_accepts_the_starters_unit_which_is_exposed_less() -> None:
    verified = analyze("verify", unit=STARTER)
    assert (verified.returncode, verified.stderr) == (0, "")
    said = analyze("security", "--offline=true", unit=STARTER).stdout
    found = re.search(r"exposure level for covey-starter.service: ([\d.]+)", said)
    assert found and float(found[1]) <= STARTER_EXPOSURE_MAX


def test_the_starter_has_no_network_and_few_capabilities() -> None:
    settings = dict(line.split("=", 1) for line in STARTER.read_text().splitlines() if "=" in line and line[0] != "#")
    assert (settings["PrivateNetwork"], settings["RestrictAddressFamilies"]) == ("yes", "AF_UNIX")
    made = settings["ExecStartPre"]
    assert made == "-+/usr/bin/nvidia-modprobe -c0 -u", "as root outside of the sandbox, and no harm without a driver"
    assert set(settings["CapabilityBoundingSet"].split()) == {
        *("CAP_CHOWN", "CAP_FOWNER", "CAP_DAC_OVERRIDE", "CAP_SETUID", "CAP_SETGID")
    }
    assert settings["RuntimeDirectoryMode"] == "0700", "environments of jobs pass through it"


def test_jobs_and_bytes_outlive_the_agent_and_the_watchdog_watches() -> None:
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    assert settings["KillMode"] == "process"
    assert settings["Type"] == "notify"
    assert settings["Restart"] == "always"
    assert int(settings["WatchdogSec"]) >= 5


def test_what_no_restart_mends_is_not_restarted() -> None:
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    statuses = {StateRefused.status, DiskRefused.status, Contradicted.status}
    assert set(map(int, settings["RestartPreventExitStatus"].split())) == statuses
    assert not statuses & {0, 1, 2}, "those come again: an address taken, a rack that is being written"


def test_sockets_get_as_much_as_they_ask_for_by_the_settings_of_the_kernel() -> None:
    lines = (UNIT.parent / "covey.sysctl.conf").read_text().splitlines()
    ((name, value),) = [line.split(" = ") for line in lines if not line.startswith("#")]
    assert (name, int(value) >= BULK_BYTES) == ("net.core.wmem_max", True)
