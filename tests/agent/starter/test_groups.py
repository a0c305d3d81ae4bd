"""The control group of an epoch where systemd is not the first process: a real one where this machine has any."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from agent.ports.starter import slices
from agent.ports.starter.starter_wire import EndAs, LimitAs, StartAs
from agent.starter import groups as groups_module
from agent.starter import sessions
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.groups import ControlGroups, usable
from agent.starter.main import launcher
from covey.ports.starter import EpochLimits, MemoryPeak
from tests.agent.starter.starter_here import ALICE

ACCOUNT = UnixAccount("alice", ALICE, ALICE, "/tmp", "/bin/sh")
ASK = StartAs("j1", 3, "supervisor", "alice", ALICE, limits=EpochLimits(memory_bytes=1 << 30, cpus=3, weight=200))
UNIFIED = next((path for path in (slices.GROUPS, slices.GROUPS / "unified") if (path / "cgroup.procs").exists()), None)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are a shell whose child lives in another session."""
    monkeypatch.setattr(sessions, "program", lambda ask, python: ("sh", "-c", "setsid sleep 77 & sleep 77"))
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, 64_777])


def of_files(root: Path) -> ControlGroups:
    """Groups that are folders of plain files."""
    found = ControlGroups(root=root)
    found.lacks = ("devices",)
    return found


def test_an_epoch_has_its_limits_before_it_runs_and_spares_change_none(tmp_path: Path, runs: None) -> None:
    made = of_files(tmp_path)
    os.kill(made.start(ASK, ACCOUNT, "/", b"x"), 9)
    group = tmp_path / "covey-jobs/j1:3"
    limits = {name: (group / name).read_text() for name in ("memory.max", "cpu.max", "cpu.weight", "pids.max")}
    assert limits == {
        "memory.max": "1073741824",
        "cpu.max": "300000 100000",
        "cpu.weight": "200",
        "pids.max": "32768",
    }
    spares = msgspec.structs.replace(ASK, program="spares", limits=EpochLimits())
    os.kill(made.start(spares, ACCOUNT, "/", b"x"), 9)
    assert (group / "cpu.weight").read_text() == "200"
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
    made.limit(LimitAs("j1", 3, EpochLimits()))
    assert ((group / "memory.max").read_text(), (group / "cpu.max").read_text()) == ("max", "max 100000")
    (group / "cgroup.procs").write_text("")
    made.limit(LimitAs("j1", 3, ASK.limits))
    assert (group / "memory.max").read_text() == "max", "nothing runs there"
    (group / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert slices.memory_peak("j1", 3, tmp_path) == MemoryPeak(0, 1, 0)


def test_a_limit_that_is_not_kept_is_said(tmp_path: Path, runs: None) -> None:
    made = ControlGroups(root=tmp_path)
    assert made.lacks == ("memory", "cpu", "pids", "devices"), "this folder gives control of nothing"
    made.lacks = ("devices",)
    (tmp_path / "covey-jobs/j1:3/memory.max").mkdir(parents=True)
    with pytest.raises(Denied, match=r"its limits cannot be set: memory\.max: Is a directory"):
        made.start(ASK, ACCOUNT, "/", b"x")


@pytest.mark.skipif(os.geteuid() != 0 or UNIFIED is None, reason="root and control groups of version 2 are needed")
def test_a_user_does_not_leave_the_group_and_all_in_it_ends(runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert UNIFIED is not None
    monkeypatch.setattr(slices, "OWN_GROUPS", f"covey-jobs-of-test-{os.getpid()}")
    made = ControlGroups(root=UNIFIED)
    group = UNIFIED / slices.OWN_GROUPS / "j1:3"
    try:
        pid = made.start(ASK, ACCOUNT, "/", b"secret")
        until_s = time.monotonic() + 10
        while len(pids := [int(each) for each in (group / "cgroup.procs").read_text().split()]) < 3:
            assert time.monotonic() < until_s, pids
            time.sleep(0.02)
        status = Path(f"/proc/{pid}/status").read_text()
        assert (
            pid in pids and f"Uid:\t{ALICE}\t{ALICE}\t{ALICE}" in status and f"Groups:\t64777 {ALICE}" in status
        ) or (f"Groups:\t{ALICE} 64777" in status)
        while len({os.getsid(each) for each in pids}) != 2:
            assert time.monotonic() < until_s, pids
            time.sleep(0.02)
        other = msgspec.structs.replace(ASK, epoch=4)
        beside = made.start(other, ACCOUNT, "/", b"x")
        made.end(EndAs("j1", 3), ALICE)
        assert not group.exists() and not any(Path(f"/proc/{each}/cwd").exists() for each in pids)
        assert Path(f"/proc/{beside}").exists(), "another epoch's"
        made.end(EndAs("j1", 4), None)
        group.mkdir()
        made.forget("j1")
        assert not group.exists()
        assert not usable(UNIFIED) or isinstance(launcher("/run/x", Path("/none"), UNIFIED), ControlGroups)
    finally:
        for each in (*(UNIFIED / slices.OWN_GROUPS).glob("*:*"), UNIFIED / slices.OWN_GROUPS):
            each.rmdir()


def test_a_process_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "END_S", 0.0)
    made = of_files(tmp_path)
    (tmp_path / "covey-jobs/j1:3").mkdir()
    (tmp_path / "covey-jobs/j1:3/cgroup.procs").write_text(f"{1 << 30}\n")
    with pytest.raises(Denied, match="do not end"):
        made.end(EndAs("j1", 3), ALICE)
