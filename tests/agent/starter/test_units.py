"""The slice and the unit that a program gets where systemd is the first process."""

import contextlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from agent.ports.starter import slices
from agent.ports.starter.starter_wire import EndAs, LimitAs, StartAs
from agent.starter import sessions
from agent.starter import units as units_module
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.main import launcher
from agent.starter.sessions import Sessions
from agent.starter.units import CLEAR, PROGRAMS, Units
from covey.ports.starter import EpochLimits, MemoryPeak

ALICE = UnixAccount("alice", 1001, 1001, "/home/alice", "/bin/sh")
LIMITS = EpochLimits(memory_bytes=1 << 30, cpus=3, weight=200, gpus=(0, 3), caps=(12,))
ASK = StartAs("j1", 3, "supervisor", "alice", 1001, limits=LIMITS)
Done = subprocess.CompletedProcess[str]


class Systemd:
    """The commands that were run, and what they answer. `status`: of the first word of a command; `left`: what is
    listed of units, look by look."""

    def __init__(self, pid: str = "77\n", left: tuple[str, ...] = ("",), **status: int) -> None:
        self.pid, self.left, self.status = pid, list(left), status
        self.commands: list[tuple[str, ...]] = []
        self.given = b""
        self.mode = 0

    def run(self, argv: tuple[str, ...]) -> Done:
        self.commands.append(argv)
        path = self.properties(argv).get("StandardInput", "").removeprefix("file:")
        if path:
            self.given, self.mode = Path(path).read_bytes(), os.stat(path).st_mode & 0o777
        verb = argv[1] if argv[0] == "systemctl" else argv[0]
        status = self.status.get(verb.replace("-", "_"), 0)
        listed = (self.left.pop(0) if len(self.left) > 1 else self.left[0]) if verb == "list-units" else self.pid
        return Done(argv, status, listed, "no such user\n" if status else "")

    def properties(self, argv: tuple[str, ...]) -> dict[str, str]:
        before = argv[: argv.index("--")] if "--" in argv else argv
        pairs = (word.removeprefix("--property=").partition("=") for word in before if word.startswith("--property="))
        return {name: value for name, _, value in pairs}

    def ran(self, verb: str) -> list[tuple[str, ...]]:
        return [argv for argv in self.commands if verb in argv[:2]]


def test_a_unit_has_its_user_and_its_slice_the_limits_of_all_units_of_the_job(tmp_path: Path) -> None:
    systemd = Systemd()
    assert Units(str(tmp_path), systemd.run).start(ASK, ALICE, "/var/lib/covey-jobs/jobs/j1", b"secret") == 77
    (made,), (limited,), (command,) = (systemd.ran(verb) for verb in ("call", "set-property", "systemd-run"))
    known, own = systemd.properties(command), "covey-jobs-j1:3.slice"
    assert systemd.commands.index(limited) < systemd.commands.index(command), "it never runs without"
    assert own in made and limited[:4] == ("systemctl", "set-property", "--runtime", own)
    assert {"MemoryMax=1073741824", "CPUQuota=300%", "CPUWeight=200", "TasksMax=32768"} <= set(limited)
    assert "--uid=alice" in command and f"--slice={own}" in command
    assert command[command.index("--") + 1 :][1:] == ("-P", "-m", "agent.program", "supervisor", "supervisor-j1-3")
    assert (known["UMask"], known["PrivateTmp"], "MemoryMax" in known) == ("0027", "no", False)
    assert known["KillMode"] == "process", "ranks outlive a supervisor that dies"
    assert known["StandardOutput"] == "journal", "root opens no file in the user's folder"
    assert "NoNewPrivileges" not in known, "rootless containers need setuid programs"


def test_a_job_opens_its_own_gpus_and_no_others() -> None:
    said = slices.set_limits(LimitAs("j1", 3, LIMITS))
    assert said.index("DeviceAllow=") < said.index("DeviceAllow=/dev/nvidia0 rw"), "it replaces what was allowed"
    gpus = {word for word in said if word.startswith("DeviceAllow=/dev/nvidia") and word.split()[0][-1].isdigit()}
    own = {"DeviceAllow=/dev/nvidia0 rw", "DeviceAllow=/dev/nvidia3 rw", "DeviceAllow=/dev/nvidia-caps/nvidia-cap12 rw"}
    assert gpus == own and "DevicePolicy=closed" in said
    none = slices.set_limits(LimitAs("j1", 3, EpochLimits(gpus=())))
    assert "DevicePolicy=closed" in none and not any("/dev/nvidia0" in word for word in none)
    assert "DevicePolicy=auto" in slices.set_limits(LimitAs("j1", 3, EpochLimits())), "a host without such GPUs"


def test_limits_change_while_an_epoch_runs_and_only_then(tmp_path: Path) -> None:
    systemd = Systemd(left=("covey-job:j1:3:supervisor-a.service loaded\n", ""))
    units = Units(str(tmp_path), systemd.run)
    for _ in range(2):
        units.limit(LimitAs("j1", 3, EpochLimits(gpus=(1,))))
    (changed,) = systemd.ran("set-property")
    assert "covey-jobs-j1:3.slice" in changed and "DeviceAllow=/dev/nvidia1 rw" in changed
    with pytest.raises(Denied, match="limits cannot be set"):
        Units(str(tmp_path), Systemd(set_property=1).run).start(ASK, ALICE, "/f", b"x")


SPARES = msgspec.structs.replace(ASK, program="spares", limits=EpochLimits(gpus=()))


def test_spares_change_no_limits_of_ranks_that_run_and_never_run_without(tmp_path: Path) -> None:
    systemd = Systemd(busctl=1)
    Units(str(tmp_path), systemd.run).start(SPARES, ALICE, "/f", b"x")
    assert systemd.ran("set-property") == [] and systemd.ran("systemd-run"), "the slice was there"
    Units(str(tmp_path), systemd.run).start(ASK, ALICE, "/f", b"x")
    assert len(systemd.ran("set-property")) == 1, "ranks come to where processes waited"
    systemd = Systemd()
    Units(str(tmp_path), systemd.run).start(SPARES, ALICE, "/f", b"x")
    assert len(systemd.ran("set-property")) == 1, "they are the first"
    for broken in (Systemd(busctl=1, is_active=3), Systemd(set_property=1)):
        with pytest.raises(Denied, match=r"slice .* cannot be made|limits cannot be set"):
            Units(str(tmp_path), broken.run).start(SPARES, ALICE, "/f", b"x")
        assert broken.ran("systemd-run") == []
    assert broken.commands[-1] == ("systemctl", "stop", "covey-jobs-j1:3.slice"), "none is left without limits"


def test_an_agent_of_0_1_0_has_its_memory_limited() -> None:
    assert slices.limits_of(StartAs("j1", 3, "supervisor", "alice", 1001, 1 << 20)).memory_bytes == 1 << 20
    assert slices.limits_of(msgspec.structs.replace(ASK, memory_bytes=1)) == LIMITS


def test_a_slice_is_of_one_job_whatever_its_name() -> None:
    """In names of slices `-` stands for a slice within a slice: job a-b would have the limits of job a."""
    assert slices.slice_of("a-b", 3) == "covey-jobs-a\\x2db:3.slice"


def test_what_a_unit_reads_is_roots_alone_and_gone_once_it_runs(tmp_path: Path) -> None:
    systemd = Systemd()
    Units(str(tmp_path), systemd.run).start(ASK, ALICE, "/f", b"secret")
    assert (systemd.given, systemd.mode, list(tmp_path.iterdir())) == (b"secret", 0o600, [])
    assert not any("secret" in word for command in systemd.commands for word in command)


@pytest.mark.parametrize(("status", "pid", "why"), [(1, "77", "no such user"), (0, "0\n", "ended at once")])
def test_a_unit_that_does_not_start_is_denied_in_words_and_does_not_run(
    tmp_path: Path, status: int, pid: str, why: str
) -> None:
    systemd = Systemd(pid, systemd_run=status)
    with pytest.raises(Denied, match=why) as denied:
        Units(str(tmp_path), systemd.run).start(ASK, ALICE, "/f", b"secret")
    assert denied.value.next.startswith("journalctl -u covey-job:j1:3:")
    ((*_, killed),) = systemd.ran("kill")
    assert killed.startswith("covey-job:j1:3:supervisor-") and list(tmp_path.iterdir()) == []


def test_all_units_of_an_epoch_are_ended_and_of_no_other_until_none_is_left(tmp_path: Path) -> None:
    """An inactive unit, whose supervisor has ended, may hold processes: without `--all` systemctl passes it over."""
    unit = "covey-job:j1:3:supervisor-a.service loaded inactive dead\n"
    systemd = Systemd(left=(unit, unit, ""))
    Units(str(tmp_path), systemd.run).end(EndAs("j1", 3), 1001)
    kill = ("systemctl", "kill", "--all", "--signal=KILL", "covey-job:j1:3:*.service")
    assert systemd.ran("kill") == [kill, kill]
    assert systemd.commands[-1] == ("systemctl", "stop", "covey-end:j1:3.timer", "covey-jobs-j1:3.slice")


@pytest.mark.parametrize("systemd", [Systemd(list_units=1), Systemd(left=("covey-job:j1:3:supervisor-a.service\n",))])
def test_an_end_that_systemd_did_not_bring_about_is_none(
    tmp_path: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may start in the place of these ranks once they have ended."""
    monkeypatch.setattr(units_module, "END_S", 0.0)
    with pytest.raises(Denied):
        Units(str(tmp_path), systemd.run).end(EndAs("j1", 3), 1001)
    assert systemd.ran("stop") == []


def test_a_job_with_a_time_limit_ends_whoever_is_there_to_end_it(tmp_path: Path) -> None:
    systemd = Systemd()
    Units(str(tmp_path), systemd.run).start(StartAs("j1", 3, "supervisor", "alice", 1001, seconds=90), ALICE, "/f", b"")
    timer, _ = systemd.ran("systemd-run")
    assert "--unit=covey-end:j1:3" in timer and "--on-active=90" in timer
    assert timer[-5:] == ("systemctl", "kill", "--all", "--signal=KILL", "covey-job:j1:3:*.service")
    for active, why in ((3, "nothing would end it"), (0, "its unit does not start")):  # 0: the timer is there already
        with pytest.raises(Denied, match=why):
            Units(str(tmp_path), Systemd(systemd_run=1, is_active=active).run).start(
                msgspec.structs.replace(ASK, seconds=90), ALICE, "/f", b""
            )


def test_slices_in_which_nothing_ran_but_spares_go_with_their_job(tmp_path: Path) -> None:
    listed = "covey-jobs-a\\x2db:4.slice loaded active\ncovey-jobs-axx2db:5.slice loaded active\n"
    systemd = Systemd(left=(listed, ""))
    Units(str(tmp_path), systemd.run).forget("a-b")
    assert systemd.ran("stop") == [("systemctl", "stop", "covey-end:a-b:4.timer", "covey-jobs-a\\x2db:4.slice")]
    busy = Systemd(left=(listed, "covey-job:a-b:4:supervisor-a.service loaded\n"))
    Units(str(tmp_path), busy.run).forget("a-b")
    assert busy.ran("stop") == [], "something runs there"


def test_a_folder_is_emptied_as_its_user_outside_of_the_starters_unit(tmp_path: Path) -> None:
    """A user can stop and change a process of his own: it is not to be in the starter's control group."""
    systemd = Systemd()
    Units(str(tmp_path), systemd.run).clear("/var/lib/covey-jobs/jobs/j1", 1001, 1002)
    (command,) = systemd.ran("systemd-run")
    assert {"--uid=1001", "--gid=1002", "--slice=covey-jobs.slice", "--wait"} <= set(command)
    assert {"TasksMax", "MemoryMax", "RuntimeMaxSec", "NoNewPrivileges"} <= systemd.properties(command).keys()
    with pytest.raises(Denied, match="cannot be removed"):
        Units(str(tmp_path), Systemd(systemd_run=1).run).clear("/f", 1001, 1002)


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
    assert isinstance(launcher("/run/x", tmp_path / "none"), Sessions)
    assert isinstance(launcher("/run/x", tmp_path), Units)
