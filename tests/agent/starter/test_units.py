"""The unit that a program gets where systemd is the first process."""

import os
import subprocess
from pathlib import Path

import pytest

from agent.ports.starter.starter_wire import EndAs, StartAs
from agent.starter.accounts import Denied, UnixAccount
from agent.starter.units import Sessions, Units, launcher

ALICE = UnixAccount("alice", 1001, 1001, "/home/alice", "/bin/sh")
ASK = StartAs("j1", 3, "supervisor", "alice", 1001, memory_bytes=1 << 30)


class Systemd:
    """The commands that were run, and what they answer."""

    def __init__(self, status: int = 0, pid: str = "77\n") -> None:
        self.status, self.pid = status, pid
        self.commands: list[tuple[str, ...]] = []
        self.given = b""
        self.mode = 0

    def run(self, argv: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
        self.commands.append(argv)
        if argv[0] == "systemd-run":
            path = self.properties()["StandardInput"].removeprefix("file:")
            self.given, self.mode = Path(path).read_bytes(), os.stat(path).st_mode & 0o777
            return subprocess.CompletedProcess(argv, self.status, "", "no such user\n" if self.status else "")
        status = self.status if "kill" in argv else 0
        return subprocess.CompletedProcess(argv, status, self.pid, "no bus\n" if status else "")

    def properties(self) -> dict[str, str]:
        words = self.commands[0][: self.commands[0].index("--")]
        pairs = (word.removeprefix("--property=").split("=", 1) for word in words if word.startswith("--property="))
        return {pair[0]: pair[1] for pair in pairs}


def test_a_unit_has_its_user_its_group_of_processes_and_its_limits(tmp_path: Path) -> None:
    systemd = Systemd()
    assert Units(str(tmp_path), systemd.run).start(ASK, ALICE, "/var/lib/covey-jobs/jobs/j1", b"secret") == 77
    command, known = systemd.commands[0], systemd.properties()
    assert "--uid=alice" in command and "--slice=covey-jobs.slice" in command
    assert command[command.index("--") + 1 :][1:] == ("-P", "-m", "agent.program", "supervisor", "supervisor-j1-3")
    assert (known["MemoryMax"], int(known["TasksMax"]) > 0, known["UMask"]) == (str(1 << 30), True, "0027")
    assert known["KillMode"] == "process", "ranks outlive a supervisor that dies"
    assert known["StandardOutput"] == "journal", "root opens no file in the user's folder"
    assert "NoNewPrivileges" not in known, "rootless containers need setuid programs"


def test_what_a_unit_reads_is_roots_alone_and_gone_once_it_runs(tmp_path: Path) -> None:
    systemd = Systemd()
    Units(str(tmp_path), systemd.run).start(ASK, ALICE, "/f", b"secret")
    assert (systemd.given, systemd.mode, list(tmp_path.iterdir())) == (b"secret", 0o600, [])
    assert not any("secret" in word for command in systemd.commands for word in command)


@pytest.mark.parametrize(("status", "pid", "why"), [(1, "77", "no such user"), (0, "0\n", "ended at once")])
def test_a_unit_that_does_not_start_is_denied_in_words(tmp_path: Path, status: int, pid: str, why: str) -> None:
    with pytest.raises(Denied, match=why) as denied:
        Units(str(tmp_path), Systemd(status, pid).run).start(ASK, ALICE, "/f", b"secret")
    assert denied.value.next.startswith("journalctl -u covey-job:j1:3:")
    assert list(tmp_path.iterdir()) == []


def test_all_units_of_an_epoch_are_ended_and_of_no_other(tmp_path: Path) -> None:
    systemd = Systemd()
    Units(str(tmp_path), systemd.run).end(EndAs("j1", 3), 1001)
    assert systemd.commands == [("systemctl", "kill", "--signal=KILL", "covey-job:j1:3:*.service")]


def test_an_end_that_systemd_did_not_bring_about_is_none(tmp_path: Path) -> None:
    """Others may start in the place of these ranks once they have ended."""
    with pytest.raises(Denied, match="not ended: no bus"):
        Units(str(tmp_path), Systemd(1).run).end(EndAs("j1", 3), 1001)


def test_without_systemd_programs_have_sessions_of_their_own(tmp_path: Path) -> None:
    assert isinstance(launcher("/run/x", tmp_path / "none"), Sessions)
    assert isinstance(launcher("/run/x", tmp_path), Units)
