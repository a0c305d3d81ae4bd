"""What goes into the Debian package; `tests/rack/test_deb.py` builds one and lives with it."""

import re
import subprocess
from pathlib import Path

import pytest

from agent.etc import units
from tools import deb

PARTS = Path(__file__).parents[2] / "deploy" / "deb"
SYSTEMD = Path(__file__).parents[2] / "systemd"


@pytest.mark.parametrize("script", deb.SCRIPTS)
def test_a_script_of_the_package_is_one_that_any_shell_reads(script: str) -> None:
    done = subprocess.run(["sh", "-n", PARTS / script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = (PARTS / script).read_text()
    assert text.startswith("#!/bin/sh\n") and "\nset -e\n" in text


def test_all_that_systemd_needs_is_placed_and_nothing_is_forgotten() -> None:
    ours = {path.name for path in SYSTEMD.iterdir()}
    assert ours == set(deb.PLACES) == set(units.PLACES), "also by agentd --install-unit"
    assert deb.PLACES["covey.service"] == "usr/lib/systemd/system/covey.service"
    assert deb.PLACES["agent.toml"] == "etc/covey/agent.toml"


def test_a_host_that_swaps_to_remote_memory_keeps_its_package() -> None:
    """Its pages would be gone with the process that has them."""
    text = (PARTS / "prerm").read_text()
    assert re.search(r"grep -qs '\^/dev/nbd' /proc/swaps; then\n(?:.*\n){2}\s+exit 1", text)


def test_the_control_file_has_a_place_for_each_thing_that_is_found_out() -> None:
    text = (PARTS / "control").read_text()
    given = {"version", "architecture", "kib", "python", "libc", "byte_path"}
    assert set(re.findall(r"\{(\w+)\}", text)) == given
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith(" "))


def test_it_is_for_the_python_that_its_environment_was_made_by() -> None:
    if why := deb.lacking():
        pytest.skip(why)
    assert re.fullmatch(r"python3 \(>= 3\.(\d+)\), python3 \(<< 3\.(\d+)\)", deb.python_wanted())


def test_what_an_override_is_for_is_said() -> None:
    lines = (PARTS / "lintian-overrides").read_text().splitlines()
    assert lines[0].startswith("# ")
    tags = [line.split()[1] for line in lines if not line.startswith("#")]
    assert len(tags) == len(set(tags)) and all(line.startswith(("# ", "covey: ")) for line in lines)
