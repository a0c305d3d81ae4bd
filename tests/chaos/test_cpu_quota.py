"""The processor quota of a laboratory leaves nothing behind, on a tree of files in place of the kernel's."""

from pathlib import Path

import pytest

from chaos.rack import cpu_quota
from chaos.rack.cpu_quota import CpuQuota

QUOTA, CONTROLLERS = "cpu.max", "cgroup.subtree_control"


@pytest.fixture
def cgroups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was written to the root's list of controllers; a new cgroup has no file for its quota."""
    monkeypatch.setattr(cpu_quota, "OLD", tmp_path / "none")
    monkeypatch.setattr(cpu_quota, "NEW", tmp_path)
    (tmp_path / CONTROLLERS).write_text("memory")
    write, said = Path.write_text, list[str]()

    def kernel(path: Path, text: str) -> int:
        if path.name == CONTROLLERS:
            said.append(text)
        elif path.name == QUOTA:
            raise OSError(22, "Invalid argument")
        return write(path, text) if path.name != CONTROLLERS else len(text)

    monkeypatch.setattr(Path, "write_text", kernel)
    return said


def test_a_quota_that_cannot_be_set_leaves_no_cgroup_and_no_controller(cgroups: list[str], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Invalid argument"), CpuQuota("covey-a-test", 0.5):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [CONTROLLERS] and cgroups == ["+cpu", "-cpu"]


def test_a_controller_that_was_on_stays_on(cgroups: list[str], tmp_path: Path) -> None:
    with (tmp_path / CONTROLLERS).open("w") as file:
        file.write("cpu memory")
    with pytest.raises(OSError, match="Invalid argument"), CpuQuota("covey-a-test", 0.5):
        pass
    assert cgroups == ["+cpu"]


def test_a_cgroup_that_stays_is_an_error(cgroups: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_quota, "ENDS_S", 0.0)
    with pytest.raises(TimeoutError, match="was not removed"):
        CpuQuota("covey-a-test", 0.5).__exit__(None, None, None)
