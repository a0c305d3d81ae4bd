"""The slice and the unit that a program gets where systemd is the first process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agent.ports.starter import slices
from agent.ports.starter.slices import Properties
from agent.ports.starter.starter_wire import EndAs, LimitAs, StartAs
from agent.starter import sessions
from agent.starter import units as units_module
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.main import launcher
from agent.starter.manager import EXISTS, ManagerError
from agent.starter.sessions import Sessions
from agent.starter.units import CLEAR, PROGRAMS, Units
from covey.ports.starter import EpochLimits, MemoryPeak

ALICE = UnixAccount("alice", 1001, 1001, "/home/alice", "/bin/sh")
LIMITS = EpochLimits(memory_bytes=1 << 30, cpus=3, weight=200, gpus=(0, 3), caps=(12,))
ASK = StartAs("j1", 3, "supervisor", "alice", 1001, limits=LIMITS)


class Systemd:
    """A manager: what it was asked, and what it answers. `refuses`: a verb, or a verb and the beginning of a unit's
    name -> the error's name; `left`: what is listed of units, look by look."""

    def __init__(self, pid: int = 77, left: tuple[list[str], ...] = ([],), began: str = "done", **refuses: str) -> None:
        self.pid, self.left, self.began, self.refuses = pid, list(left), began, refuses
        self.asked: list[tuple[Any, ...]] = []
        self.given = b""
        self.mode = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator["Systemd"]:
        yield self

    def _ask(self, verb: str, *words: Any) -> None:
        self.asked.append((verb, *words))
        if verb in self.refuses:
            raise ManagerError(self.refuses[verb], "no such user")

    def make(self, unit: str, properties: Properties, aux: Sequence[tuple[str, Properties]] = ()) -> None:
        self._ask("make_timer" if unit.endswith(".timer") else "make", unit, properties, aux)

    def start(self, unit: str, properties: Properties) -> str:
        path = Path(str(dict(properties)["StandardInputFile"][1]))
        self.given, self.mode = path.read_bytes(), os.stat(path).st_mode & 0o777
        self._ask("start", unit, properties)
        return self.began

    def main_pid(self, unit: str) -> int:
        return self.pid

    def set(self, unit: str, properties: Properties) -> None:
        self._ask("set", unit, properties)

    def units(self, pattern: str) -> list[str]:
        self._ask("units", pattern)
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def kill(self, unit: str) -> None:
        self._ask("kill", unit)

    def stop(self, unit: str) -> None:
        self._ask("stop", unit)

    def did(self, verb: str) -> list[tuple[Any, ...]]:
        return [asked for asked in self.asked if asked[0] == verb]


def units(folder: Path, systemd: Systemd) -> Units:
    return Units(str(folder), systemd.opened)


def test_a_unit_has_its_user_and_its_slice_the_limits_of_all_units_of_the_job(tmp_path: Path) -> None:
    systemd = Systemd()
    assert units(tmp_path, systemd).start(ASK, ALICE, "/var/lib/covey-jobs/jobs/j1", b"secret") == 77
    (_, made, limits, _), (_, _, properties) = systemd.asked[:2]
    own, known = "covey-jobs-j1:3.slice", {name: value for name, (_, value) in properties}
    assert [verb for verb, *_ in systemd.asked[:2]] == ["make", "start"], "it never runs without"
    assert made == own and known["Slice"] == own and known["User"] == "alice"
    assert dict(limits)["MemoryMax"] == ("t", 1 << 30) and dict(limits)["CPUQuotaPerSecUSec"] == ("t", 3_000_000)
    assert dict(limits)["CPUWeight"] == ("t", 200) and dict(limits)["TasksMax"] == ("t", 32_768)
    ((program, argv, ignored),) = known["ExecStart"]
    assert (program, argv[1:], ignored) == (
        sys.executable,
        ["-P", "-m", "agent.program", "supervisor", "supervisor-j1-3"],
        False,
    )
    assert (known["UMask"], known["PrivateTmp"], "MemoryMax" in known) == (0o027, False, False)
    assert known["KillMode"] == "process", "ranks outlive a supervisor that dies"
    assert known["OOMScoreAdjust"] < 0, "a rank is killed at the limit, not who says so"
    assert known["StandardOutput"] == "journal", "root opens no file in the user's folder"
    assert "NoNewPrivileges" not in known, "rootless containers need setuid programs"


def test_a_job_opens_its_own_gpus_and_no_others() -> None:
    def allowed(limits: EpochLimits) -> tuple[object, list[list[str]]]:
        said = slices.limit_properties(limits)
        lists = [value for name, (_, value) in said if name == "DeviceAllow"]
        return dict(said)["DevicePolicy"][1], [[name for name, _ in each] for each in lists]  # type: ignore[attr-defined]

    policy, (first, devices) = allowed(LIMITS)
    assert policy == "closed" and first == [], "it replaces what was allowed"
    gpus = {name for name in devices if name.startswith("/dev/nvidia") and name[-1].isdigit()}
    assert gpus == {"/dev/nvidia0", "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap12"}
    policy, (_, devices) = allowed(EpochLimits(gpus=()))
    assert policy == "closed" and "/dev/nvidia0" not in devices
    assert allowed(EpochLimits()) == ("auto", [[]]), "a host without such GPUs"


def test_limits_change_while_an_epoch_runs_and_only_then(tmp_path: Path) -> None:
    systemd = Systemd(left=(["covey-job:j1:3:supervisor-a.service"], []))
    here = units(tmp_path, systemd)
    for _ in range(2):
        here.limit(LimitAs("j1", 3, EpochLimits(gpus=(1,))))
    ((_, changed, properties),) = systemd.did("set")
    assert changed == "covey-jobs-j1:3.slice" and ("/dev/nvidia1", "rw") in dict(properties)["DeviceAllow"][1]
    with pytest.raises(Denied, match="limits cannot be set"):
        units(tmp_path, Systemd(make=EXISTS, set="x")).start(ASK, ALICE, "/f", b"x")


SPARES = msgspec.structs.replace(ASK, program="spares", limits=EpochLimits(gpus=()))


def test_spares_change_no_limits_of_ranks_that_run_and_never_run_without(tmp_path: Path) -> None:
    systemd = Systemd(make=EXISTS)
    units(tmp_path, systemd).start(SPARES, ALICE, "/f", b"x")
    assert systemd.did("set") == [] and systemd.did("start"), "the slice was there"
    units(tmp_path, systemd).start(ASK, ALICE, "/f", b"x")
    assert len(systemd.did("set")) == 1, "ranks come to where processes waited"
    for ask in (ASK, SPARES):
        broken = Systemd(make="org.freedesktop.DBus.Error.InvalidArgs")
        with pytest.raises(Denied, match=r"slice .* cannot be made"):
            units(tmp_path, broken).start(ask, ALICE, "/f", b"x")
        assert broken.did("start") == []


def test_an_agent_of_0_1_0_has_its_memory_limited() -> None:
    assert slices.limits_of(StartAs("j1", 3, "supervisor", "alice", 1001, 1 << 20)).memory_bytes == 1 << 20
    assert slices.limits_of(msgspec.structs.replace(ASK, memory_bytes=1)) == LIMITS


def test_a_slice_is_of_one_job_whatever_its_name() -> None:
    """In names of slices `-` stands for a slice within a slice: job a-b would have the limits of job a."""
    assert slices.slice_of("a-b", 3) == "covey-jobs-a\\x2db:3.slice"


def test_what_a_unit_reads_is_roots_alone_and_gone_once_it_runs(tmp_path: Path) -> None:
    systemd = Systemd()
    units(tmp_path, systemd).start(ASK, ALICE, "/f", b"secret")
    assert (systemd.given, systemd.mode, list(tmp_path.iterdir())) == (b"secret", 0o600, [])
    assert "secret" not in repr(systemd.asked)


@pytest.mark.parametrize(
    ("systemd", "why"),
    [
        (Systemd(start="x"), "no such user"),
        (Systemd(began="failed"), "does not start: failed"),
        (Systemd(pid=0), "ended at once"),
    ],
)
def test_a_unit_that_does_not_start_is_denied_in_words_and_does_not_run(
    tmp_path: Path, systemd: Systemd, why: str
) -> None:
    with pytest.raises(Denied, match=why) as denied:
        units(tmp_path, systemd).start(ASK, ALICE, "/f", b"secret")
    assert denied.value.next.startswith("journalctl -u covey-job:j1:3:")
    ((_, killed),) = systemd.did("kill")
    assert killed.startswith("covey-job:j1:3:supervisor-") and list(tmp_path.iterdir()) == []


def test_all_units_of_an_epoch_are_ended_and_of_no_other_until_none_is_left(tmp_path: Path) -> None:
    """An inactive unit, whose supervisor has ended, may hold processes: it is listed and killed as others are."""
    unit = "covey-job:j1:3:supervisor-a.service"
    systemd = Systemd(left=([unit], [unit], []))
    units(tmp_path, systemd).end(EndAs("j1", 3), 1001)
    assert systemd.did("units")[0] == ("units", "covey-job:j1:3:*.service")
    assert systemd.did("kill") == [("kill", unit), ("kill", unit)]
    assert systemd.did("stop") == [("stop", "covey-end:j1:3.timer"), ("stop", "covey-jobs-j1:3.slice")]


@pytest.mark.parametrize("systemd", [Systemd(units="x"), Systemd(left=(["covey-job:j1:3:supervisor-a.service"],))])
def test_an_end_that_systemd_did_not_bring_about_is_none(
    tmp_path: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may start in the place of these ranks once they have ended."""
    monkeypatch.setattr(units_module, "END_S", 0.0)
    with pytest.raises(Denied):
        units(tmp_path, systemd).end(EndAs("j1", 3), 1001)
    assert systemd.did("stop") == []


def test_a_job_with_a_time_limit_ends_whoever_is_there_to_end_it(tmp_path: Path) -> None:
    systemd, timed = Systemd(), msgspec.structs.replace(ASK, seconds=90)
    units(tmp_path, systemd).start(timed, ALICE, "/f", b"")
    ((_, timer, properties, ((service, of_service),)),) = systemd.did("make_timer")
    assert (timer, service) == ("covey-end:j1:3.timer", "covey-end:j1:3.service")
    assert dict(properties)["TimersMonotonic"] == ("a(st)", [("OnActiveSec", 90_000_000)])
    ((_, argv, _),) = dict(of_service)["ExecStart"][1]
    assert argv[1:] == ["kill", "--all", "--signal=KILL", "covey-job:j1:3:*.service"]
    assert units(tmp_path, Systemd(make_timer=EXISTS)).start(timed, ALICE, "/f", b"") == 77, "of the first program"
    broken = Systemd(make_timer="x")
    with pytest.raises(Denied, match="nothing would end it"):
        units(tmp_path, broken).start(timed, ALICE, "/f", b"")
    assert broken.did("start") == []


def test_slices_in_which_nothing_ran_but_spares_go_with_their_job(tmp_path: Path) -> None:
    listed = ["covey-jobs-a\\x2db:4.slice", "covey-jobs-axx2db:5.slice"]
    systemd = Systemd(left=(listed, []))
    units(tmp_path, systemd).forget("a-b")
    assert systemd.did("stop") == [("stop", "covey-end:a-b:4.timer"), ("stop", "covey-jobs-a\\x2db:4.slice")]
    busy = Systemd(left=(listed, ["covey-job:a-b:4:supervisor-a.service"]))
    units(tmp_path, busy).forget("a-b")
    assert busy.did("stop") == [], "something runs there"


def test_where_no_bus_answers_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/none")
    with pytest.raises(Denied, match="the system bus does not answer") as denied:
        Units(str(tmp_path)).start(ASK, ALICE, "/f", b"secret")
    assert denied.value.next == "systemctl status dbus" and list(tmp_path.iterdir()) == []


def test_a_folder_is_emptied_as_its_user_outside_of_the_starters_unit(tmp_path: Path) -> None:
    """A user can stop and change a process of his own: it is not to be in the starter's control group."""
    commands: list[tuple[str, ...]] = []

    def run(argv: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
        commands.append(argv)
        return subprocess.CompletedProcess(argv, len(commands) - 1, "", "busy")

    here = Units(str(tmp_path), run=run)
    here.clear("/var/lib/covey-jobs/jobs/j1", 1001, 1002)
    (command,) = commands
    assert command[0] == "systemd-run"
    assert {"--uid=1001", "--gid=1002", "--slice=covey-jobs.slice", "--wait"} <= set(command)
    limits = {word.split("=")[1] for word in command if word.startswith("--property=")}
    assert {"TasksMax", "MemoryMax", "RuntimeMaxSec", "NoNewPrivileges"} <= limits
    with pytest.raises(Denied, match="cannot be removed"):
        here.clear("/f", 1001, 1002)


def test_what_the_kernel_does_not_limit_is_said(tmp_path: Path) -> None:
    assert slices.lacking(tmp_path) == ("memory", "cpu", "pids")
    (tmp_path / "cgroup.controllers").write_text("cpu io hugetlb pids\n")
    assert Units("/run/x", groups=tmp_path).lacks == ("memory",)
    (tmp_path / "cgroup.controllers").unlink()
    for name in ("memory", "pids"):  # version 1
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    assert slices.lacking(tmp_path) == ("cpu",)


def test_the_kernels_count_of_an_epochs_memory(tmp_path: Path) -> None:
    assert slices.memory_peak("j1", 3, tmp_path) is None
    folder = tmp_path / "covey.slice/covey-jobs.slice/covey-jobs-j1:3.slice"
    folder.mkdir(parents=True)
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n")
    (folder / "memory.max").write_text("1073741824\n")
    assert slices.memory_peak("j1", 3, tmp_path) == MemoryPeak(0, 2, 1 << 30), "Linux before 5.19"
    (folder / "memory.peak").write_text("1073741000\n")
    (folder / "memory.max").write_text("max\n")
    assert slices.memory_peak("j1", 3, tmp_path) == MemoryPeak(1_073_741_000, 2, 0)
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 0\noom_kill 2\noom_group_kill 0\n")
    found = slices.memory_peak("j1", 3, tmp_path)
    assert found is not None and found.killed == 0, "the whole host had no memory"


@pytest.mark.parametrize("ends", [True, False])
def test_an_end_that_took_all_its_time_is_one(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    found = iter([[(1 << 30, 0)], *([[]] if ends else [[(1 << 30, 0)]]) * 99])
    now_s = iter([0.0, 1.0, *[9.0] * 99])
    monkeypatch.setattr(sessions, "_of_epoch", lambda ask, uid: next(found))
    monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: next(now_s), sleep=lambda s: None))
    with contextlib.nullcontext() if ends else pytest.raises(Denied, match="do not end: 1073741824"):
        Sessions().end(EndAs("j1", 3), 1001)


def test_a_folder_is_emptied_and_the_first_of_what_stays_is_said(tmp_path: Path) -> None:
    def clear(path: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(("sh", "-c", CLEAR), cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True)

    (tmp_path / "a/b").mkdir(parents=True, mode=0o500)
    (tmp_path / "a/b/c").touch()
    (tmp_path / "a").chmod(0)
    assert clear(PROGRAMS).returncode == 0 and list(tmp_path.iterdir()) == []
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "find").write_text("#!/bin/sh\nyes cannot remove it | /usr/bin/head -c 2000000 && echo 1 > done\n")
    (bin / "find").chmod(0o755)
    said = clear(f"{bin}:{PROGRAMS}")
    assert said.returncode != 0 and len(said.stderr) == 400 and (tmp_path / "done").exists(), "find is not cut short"


def test_without_systemd_programs_have_sessions_of_their_own(tmp_path: Path) -> None:
    assert isinstance(launcher("/run/x", tmp_path / "none", tmp_path), Sessions)
    assert isinstance(launcher("/run/x", tmp_path), Units)
