"""agentd as systemd sees it: one real process."""

import asyncio
import contextlib
import errno
import grp
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent import keys, main
from agent.api import http
from agent.config import Config, ConfigError, load
from agent.keyring.service import of_file
from agent.main import check, check_own, make_key
from agent.ports.disk import DirectoryDisk
from agent.raft.disk import Store
from agent.raft.machine.types import Persist
from agent.raft.messages import configuration_entry
from agent.raft.policy import founders
from agent.raft.service import consensus
from agent.runtime import plugin_runtime
from cli.client import Agent
from covey.core.ids import HostId
from covey.core.version import VERSION
from covey.wire import checked
from gossip import service as gossip
from tests.families import in_gate

AGENTD = Path(sys.executable).with_name("agentd")


@pytest.fixture
def place() -> Iterator[Path]:
    """A short directory: unix sockets live in it."""
    directory = Path(tempfile.mkdtemp(prefix="covey-"))
    yield directory
    shutil.rmtree(directory)


def write_config(place: Path, more: str = "") -> Path:
    path = place / "agent.toml"
    path.write_text(
        f'name = "gpu1"\nstate_dir = "{place}/state"\nrun_dir = "{place}/run"\nadvertise = "127.0.0.1"\n'
        f'plugins = ["scheduler"]\n[gossip]\nbind = "127.0.0.1:0"\n[control]\nbind = "127.0.0.1:0"\n{more}'
    )
    return path


class Systemd:
    """The other end of $NOTIFY_SOCKET."""

    def __init__(self, place: Path) -> None:
        self.path = str(place / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(20)
        self.told: list[str] = []

    def until(self, word: str) -> None:
        end_s = time.monotonic() + 30
        while not any(line.startswith(word) for line in self.told):
            assert time.monotonic() < end_s, f"told {self.told}, and no {word}"
            self.told += self._socket.recv(4096).decode().splitlines()

    def drain(self) -> None:
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.told += self._socket.recv(4096).decode().splitlines()
        self._socket.settimeout(20)

    def close(self) -> None:
        self._socket.close()


def run(config: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([AGENTD, "--config", config, *more], capture_output=True, text=True, timeout=30, check=False)


def test_systemd_is_told_ready_status_watchdog_stopping_and_sigterm_ends_it_in_time(place: Path) -> None:
    systemd = Systemd(place)
    environ = os.environ | {"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": "1000000"}
    process = subprocess.Popen(
        [AGENTD, "--config", write_config(place)], env=environ, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        systemd.until("READY=1")
        systemd.until("STATUS=1 host alive")
        systemd.until("WATCHDOG=1")
        taken = run(place / "agent.toml")
        assert taken.returncode == 2
        assert f"pid {process.pid}" in taken.stderr, "a second agent on this state directory is refused"
        systemd.drain()  # more than ten messages are not kept, and that is how many come in three seconds
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        systemd.until("STOPPING=1")
        assert process.wait(timeout=10) == 0
        assert time.monotonic() - began_s < 5
    finally:
        process.kill()
        process.communicate()
        systemd.close()
    assert list((place / "run").iterdir()) == [], "no socket is left"


def takes_sighup(pid: int) -> bool:
    """Whether the process has a handler for SIGHUP, which would end it otherwise."""
    (caught,) = re.findall(r"(?m)^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) & 1 << signal.SIGHUP - 1)


def test_a_reload_applies_what_is_live_and_says_what_waits_for_a_restart(place: Path) -> None:
    systemd, config = Systemd(place), write_config(place)
    text, environ = config.read_text(), os.environ | {"NOTIFY_SOCKET": systemd.path}
    process = subprocess.Popen([AGENTD, "--config", config], env=environ, stderr=subprocess.PIPE)
    try:
        while not takes_sighup(process.pid):
            time.sleep(0.001)
        process.send_signal(signal.SIGHUP)  # while it starts, having read its file
        systemd.until("READY=1")
        systemd.until("STATUS=agent.toml was read again; nothing has changed")
        systemd.told.clear()
        config.write_text(f'{text}[log]\nlevel = "debug"\n[leader]\nheartbeat_s = 0.2\n')
        process.send_signal(signal.SIGHUP)
        systemd.until("RELOADING=1")
        waits = "needs a restart: leader.heartbeat_s"
        systemd.until(f"STATUS=agent.toml was read again; applied live: log.level; {waits}")
        config.write_text(f"{text}[log]\nlevle = 1\n")
        process.send_signal(signal.SIGHUP)
        systemd.until("STATUS=agent.toml is not valid, what was in force stays")
        config.write_text(f'{text}[log]\nlevel = "debug"\n')
        process.send_signal(signal.SIGHUP)
        systemd.until("STATUS=agent.toml was read again; nothing has changed")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        said = process.stderr.read().decode() if process.stderr else ""
        assert "did you mean `log.level`?" in said and f"applied live: log.level; {waits}" in said
    finally:
        process.kill()
        process.communicate()
        systemd.close()


def test_all_goodbyes_together_take_less_than_an_agent_has_to_leave() -> None:
    sockets_and_plugins = http.STOP_S + plugin_runtime.STOP_S
    log_and_gossip = consensus.HAND_OVER_S + consensus.STOP_S + gossip.GOODBYES * gossip.GOODBYE_INTERVAL_S
    assert sockets_and_plugins + log_and_gossip <= main.LEAVE_S < main.FORCED_EXIT_S
    unit = (Path(__file__).parent.parent.parent / "systemd/covey.service").read_text()
    assert "TimeoutStopSec=10\n" in unit and main.FORCED_EXIT_S < 10, "systemd kills later than we cut off"


def test_a_request_that_hangs_keeps_nobody_from_leaving_in_time(place: Path) -> None:
    """The request's body never comes whole."""
    process = subprocess.Popen([AGENTD, "--config", write_config(place)], stderr=subprocess.PIPE)
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            end_s = time.monotonic() + 20
            while asking.connect_ex(str(place / "run/agent.sock")):
                assert time.monotonic() < end_s
                time.sleep(0.02)
            asking.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=10) == 0
            assert process.stderr is not None and b"did not leave in time" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_wrong_setting_is_refused_at_start_in_three_lines(place: Path) -> None:
    refused = run(write_config(place, "[gpus]\nsimulatd = 2\n"))
    assert refused.returncode == 2
    what, why, next_step = refused.stderr.splitlines()
    assert "agent.toml: `gpus.simulatd` is not a setting" in what
    assert "why: [gpus] knows backend, cpu, simulated" in why
    assert next_step.strip() == "next: did you mean `gpus.simulated`?"
    refused = run(write_config(place, '[gpus]\ncpu = [{cores = "7000", memory = "1 GiB"}]\n'))
    assert refused.returncode == 2
    what, why, next_step = refused.stderr.splitlines()
    assert "`gpus.cpu[0].cores`" in what and "core 7000 is not available" in why and "choose among" in next_step


def test_wheels_of_two_versions_are_refused_at_start_in_three_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agent.main.metadata.version", {"covey-agent": "9.8.7"}.__getitem__)
    monkeypatch.setattr(sys, "argv", ["agentd", "--check"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    what, why, following = capsys.readouterr().err.splitlines()
    assert what == "agentd: the installed wheels have different versions"
    assert why == f"  why: covey-agent is 9.8.7, covey-job is {VERSION}"
    assert following == "  next: install both anew, of one version"


def test_check_says_that_a_file_is_good_and_starts_nothing(place: Path) -> None:
    checked = run(write_config(place), "--check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "host gpu1 at 127.0.0.1, plugins scheduler" in checked.stdout
    assert not (place / "state").exists()


TENANTS = "[scheduler]\nquotas = {ml = 4, bio = 4}\n"


def test_check_refuses_several_tenants_without_a_starter_unless_they_trust(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = f'[jobs]\nusers_dir = "{place}/u"\n'
    refused = run(write_config(place, users + TENANTS), "--check")
    assert refused.returncode == 1 and "is valid" in refused.stdout
    what, why, following = refused.stderr.splitlines()
    assert "2 tenants (bio, ml), and no limits: without a starter" in what and f"no starter listens at {place}/u" in why
    assert "covey-starter" in following and 'separate = "no"' in following
    for more, status in (('separate = "no"\n' + TENANTS, 0), ("[scheduler]\nquotas = {ml = 4}\n", 0)):
        assert check(load(str(write_config(place, users + more)), {}), {}) == status
    (place / "u").symlink_to("u")
    assert check(load(str(write_config(place, users + TENANTS)), {}), {}) == 1
    assert "it cannot be seen whether a starter listens" in capsys.readouterr().err
    (place / "u").unlink()
    (place / "u").mkdir()
    (place / "u/starter.sock").touch()
    assert check(load(str(write_config(place, users + TENANTS)), {}), {}) == 0


def test_an_agent_whose_tenants_share_a_user_starts_by_systemd_and_says_so(place: Path) -> None:
    """It ran yesterday, and an upgrade is to stop no rack. In a unit's ExecStartPre `--check` lets it start."""
    config = write_config(place, f'[jobs]\nusers_dir = "{place}/u"\n{TENANTS}')
    environ = {name: value for name, value in os.environ.items() if name != "SYSTEMD_EXEC_PID"} | {"INVOCATION_ID": "1"}
    checks = subprocess.run([AGENTD, "--config", config, "--check"], env=environ, capture_output=True, check=False)
    assert (checks.returncode, checks.stderr) == (0, b"")
    systemd = Systemd(place)
    process = subprocess.Popen(
        [AGENTD, "--config", config], env=environ | {"NOTIFY_SOCKET": systemd.path}, stderr=subprocess.PIPE
    )
    try:
        systemd.until("READY=1")
        asked = Agent([f"unix:{place}/run/agent.sock"])
        (wrong,) = asked.get("status").data["wrong"]
        assert wrong["host"] == "gpu1" and "2 tenants (bio, ml), and no limits" in wrong["what"]
        (row,) = asked.get("hosts").data
        assert row["troubles"] == [{"what": wrong["what"], "next": wrong["next"]}], "doctor reads this"
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None and wrong["what"] in process.stderr.read().decode()
    finally:
        process.kill()
        process.communicate()
        systemd.close()


def test_who_asks_for_a_check_is_systemd_where_its_variables_name_this_process() -> None:
    assert main.is_of_systemd({"INVOCATION_ID": "1", "SYSTEMD_EXEC_PID": str(os.getpid())})
    assert main.is_of_systemd({"INVOCATION_ID": "1"}), "before systemd 248"
    assert not main.is_of_systemd({})
    inherited = {"INVOCATION_ID": "1", "SYSTEMD_EXEC_PID": str(os.getppid())}
    assert not main.is_of_systemd(inherited), "a person's, under a unit such as that of a terminal"


def test_a_log_whose_voters_are_others_than_agent_tomls_is_told_by_check_and_counts(place: Path) -> None:
    """Found so: a rack of one that is given three voters in its file said `is good`, then ended in a traceback for
    ever."""
    asyncio.run(a_log_of_one(place))
    again = write_config(place, '[leader]\nvoters = ["gpu1", "gpu2", "gpu3"]\n')
    checked = run(again, "--check")
    assert checked.returncode == 0
    assert "leader.voters = gpu1, gpu2, gpu3; the log says gpu1, and the log counts" in checked.stdout


async def a_log_of_one(place: Path) -> None:
    disk = DirectoryDisk(str(place / "state"))
    files = Store(disk, os.urandom)
    saved = await files.load(alone=True)
    entry = configuration_entry(1, founders([HostId("gpu1")], b"rack one"))
    await files.append([Persist(1, msgspec.structs.replace(saved.hard, term=1), 1, (entry,))])
    disk.close()


def test_an_address_in_use_ends_it_with_the_address(place: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        config = write_config(place)
        config.write_text(
            config.read_text().replace('[gossip]\nbind = "127.0.0.1:0"', f'[gossip]\nbind = "127.0.0.1:{port}"')
        )
        refused = run(config)
    assert refused.returncode == 1
    assert f"127.0.0.1:{port}" in refused.stderr or f"{port}" in refused.stderr


def test_a_key_file_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    path = keys.find(config_of(tmp_path), {})
    assert path == tmp_path / "state" / "gossip.key"
    made = keys.load(path, make=True)
    assert [len(key) for key in made] == [32]
    assert keys.load(path, make=True) == made
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by everybody"):
        keys.load(path, make=False)


def test_the_users_of_a_rack_cannot_read_its_key(tmp_path: Path) -> None:
    """The group whose users ask the agent is the agent's own group, too."""
    path, group = tmp_path / "gossip.key", grp.getgrgid(os.getegid()).gr_name
    made = keys.load(path, make=True)
    os.chown(path, -1, os.getegid())
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"can be read by group {group}") as error:
        keys.load(path, make=False, group=group)
    assert error.value.next == f"chmod g-rwx {path}"
    for other in ("", "no-such-group-here"):
        assert keys.load(path, make=False, group=other) == made, "as systemd hands over credentials"
    path.chmod(0o600)
    assert keys.load(path, make=False, group=group) == made


def test_a_key_file_that_is_absent_or_none_is_refused_with_the_next_step(tmp_path: Path) -> None:
    absent = tmp_path / "absent.key"
    with pytest.raises(ConfigError) as error:
        keys.load(absent, make=False)
    assert "another host" in error.value.next
    for text in ("", "not hex\n", "ab" * 31 + "\n", ("ab" * 32 + "\n") * 4):
        path = tmp_path / "bad.key"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="does not hold gossip keys"):
            keys.load(path, make=False)


def config_of(tmp_path: Path, text: str = "") -> Config:
    (tmp_path / "agent.toml").write_text(f'state_dir = "{tmp_path}/state"\n{text}')
    return load(str(tmp_path / "agent.toml"), {})


def test_a_key_is_found_as_named_then_as_systemds_credential_then_beside_agent_toml(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    environ = {"CREDENTIALS_DIRECTORY": str(credentials)}
    for folder in (tmp_path, credentials):
        folder.mkdir(exist_ok=True)
        (folder / "gossip.key").write_text("ab" * 32)
    assert keys.find(config_of(tmp_path, '[gossip]\nkey_file = "/etc/key"'), environ) == Path("/etc/key")
    assert keys.find(config_of(tmp_path), environ) == credentials / "gossip.key"
    assert keys.find(config_of(tmp_path), {}) == tmp_path / "gossip.key"
    (credentials / "gossip.key").write_text("#")
    assert keys.find(config_of(tmp_path), environ) == tmp_path / "gossip.key", "the unit found none"


def test_a_key_that_this_user_may_not_see_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    config = config_of(tmp_path)
    for name in ("is_file", "read_text"):
        monkeypatch.setattr(Path, name, refuse)
    found = keys.find(config, {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    with pytest.raises(ConfigError, match=f"cannot read the gossip key in {tmp_path}") as error:
        keys.load(found, make=True)
    assert "Permission denied" in error.value.why


def test_a_host_with_seeds_makes_no_key_that_nobody_else_has(tmp_path: Path) -> None:
    config = config_of(tmp_path, '[gossip]\nseeds = ["127.0.0.1:7946"]')
    with pytest.raises(ConfigError, match="no gossip key") as error:
        keys.find(config, {})
    beside = tmp_path / "gossip.key"
    assert f"agentd --make-key {beside}" in error.value.next
    assert (make_key(beside), make_key(beside)) == (0, 2), "one that may be in use is never written over"
    assert keys.find(config, {}) == beside
    assert len(keys.load(beside, make=False)) == 1


def test_a_run_dir_that_others_can_write_to_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_own(str(place))
    place.chmod(0o770)
    with pytest.raises(ConfigError, match="mode 770"):
        check_own(str(place))
    place.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(place, 12345, -1)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ConfigError, match="belongs to uid"):
        check_own(str(place))


def rotten(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


@pytest.fixture
def once_run(place: Path) -> Path:
    """The state directory of an agent that ran for a moment and was killed."""
    process = subprocess.Popen([AGENTD, "--config", write_config(place)], stderr=subprocess.DEVNULL)
    end_s = time.monotonic() + 20
    while not (place / "run/agent.sock").exists():
        assert time.monotonic() < end_s
        time.sleep(0.02)
    process.kill()
    process.wait()
    return place / "state"


@pytest.mark.parametrize("damaged", in_gate(1, ["consensus", "identity", "consensus/log-00000001"]))
def test_state_that_cannot_be_trusted_ends_in_three_lines_and_a_final_status(
    place: Path, once_run: Path, damaged: str
) -> None:
    """The status is one at which systemd does not start the agent again. It is a rack of one: no other host has what is
    gone."""
    path = once_run / damaged
    shutil.rmtree(path) if path.is_dir() else rotten(path)
    kept = [*once_run.glob("consensus/*"), once_run / "acknowledged", *([path] if path.is_file() else [])]
    before = {file: file.read_bytes() for file in kept}
    ended = run(place / "agent.toml")
    assert ended.returncode == 3
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.splitlines()[-3:]
    assert [line.split(":")[0].strip() for line in lines] == ["agentd", "why", "next"]
    assert str(once_run) in lines[1] + lines[2]
    assert {file: file.read_bytes() for file in before} == before, "what was found is left as it was"


def test_keys_that_a_host_was_given_since_count_instead_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = b"o" * 32, b"n" * 32
    assert main.found_ring(str(tmp_path), [old]) == of_file([old])
    ring = msgspec.structs.replace(of_file([old]), keys=(new,), numbers=(1,))
    (tmp_path / "gossip.ring").write_bytes(checked.seal(ring))
    assert main.found_ring(str(tmp_path), [old]) == ring
    assert main.found_ring(str(tmp_path), [new]) == of_file([new]), "an operator put another file there"
    (tmp_path / "gossip.ring").write_bytes(b"rot")
    assert main.found_ring(str(tmp_path), [old]) == of_file([old])
    assert "gossip.ring do not count" in capsys.readouterr().err
