"""`agentd --install-unit`: what a pip install has, where systemd looks for it."""

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agent.etc import units
from agent.etc.units import NotInstalled, PlacedFile, check_open, install

SYSTEMD = Path(__file__).parents[3] / "systemd"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment into which a wheel was installed."""
    there = tmp_path / "srv/venv"
    shutil.copytree(SYSTEMD, there / units.SHARE)
    return there


def test_files_are_put_where_systemd_looks_and_name_this_environment(prefix: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert {placed.outcome for placed in install(root, prefix)} == {"written"}
    unit = (root / "etc/systemd/system/covey.service").read_text()
    assert f"PATH={prefix}/bin:" in unit and units.USUAL not in unit
    assert (root / "etc/covey/agent.toml").read_text() == (SYSTEMD / "agent.toml").read_text()
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert found == set(units.PLACES.values()), "and nothing else is left"
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()} == {0o644}


def test_an_environment_in_opt_gets_the_units_as_they_are_shipped() -> None:
    for name in units.UNITS:
        text = (SYSTEMD / name).read_text()
        assert units.rendered(text, units.USUAL) == text


def test_what_a_person_wrote_is_kept_and_what_is_ours_is_renewed(prefix: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    list(install(root, prefix))
    settings, unit = root / "etc/covey/agent.toml", root / "etc/systemd/system/covey.service"
    settings.write_text('name = "gpu1"\n')
    unit.write_text("of before")
    outcomes = {placed.path: placed.outcome for placed in install(root, prefix)}
    assert (outcomes[settings], outcomes[unit]) == ("kept", "written")
    assert settings.read_text() == 'name = "gpu1"\n' and "covey-agent" in unit.read_text()
    assert PlacedFile(root / units.PLACES["covey-swap.service"], "as it was") in list(install(root, prefix))


def test_an_environment_that_the_agents_user_may_not_pass_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "home"
    (closed / "bin").mkdir(parents=True)
    (closed / "bin/python").symlink_to("/bin/sh")
    closed.chmod(0o700)
    with pytest.raises(NotInstalled, match="which may not pass /"):
        check_open(closed)
    assert units.closed_to_others(Path("/bin/sh")) is None


def test_agentd_says_what_it_wrote(tmp_path: Path) -> None:
    agentd = Path(sys.executable).with_name("agentd")
    command = [str(agentd), "--install-unit", "--prefix", str(tmp_path / "host")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"agentd: {tmp_path}/host/etc/systemd/system/covey.service: written" in done.stdout
    assert f"PATH={sys.prefix}/bin:" in (tmp_path / "host/etc/systemd/system/covey.service").read_text()
