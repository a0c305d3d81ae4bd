"""Starting and stopping a rack of stand-in agents, real processes on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.client import FAILED, NO_AGENT, USAGE, AgentctlError, find
from cli.rack import processes as rack_processes
from cli.rack import rack
from cli.rack.files import PROOF_LOCK, RackHost, hosts_of, locked, run_root
from cli.rack.processes import lock_holder, start_ticks
from cli.rack.rack import Timer

AGENTD = [sys.executable, str(Path(__file__).with_name("fake_agentd.py"))]


class Bench:
    """A folder for one rack, and what was printed."""

    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        self.directory = tmp_path / ".rack"
        self.environ = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path / "run")}
        self.said: list[str] = []

    def start(self, hosts: int | None = 2, **environ: str) -> list[RackHost]:
        # agents are told by the name agentd, which this one does not have: COVEY_RACK marks it as a program
        return rack.start(self.directory, hosts, 2, self.environ | environ, Timer(self.said.append), AGENTD)

    def stop(self) -> None:
        rack.stop(self.directory, self.environ, self.said.append)

    def pids(self) -> dict[str, int | None]:
        return {host.name: lock_holder(host.state_dir) for host in hosts_of(self.directory)}

    def alive(self) -> list[int]:
        return [ours.pid for ours in rack_processes.find(self.directory, [run_root(self.directory, self.environ)])]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.stop()


def test_a_rack_comes_up_tells_how_long_it_took_and_goes_away_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = bench.start()
    assert [line[10:] for line in bench.said] == [
        f"2 agents started; files in {bench.directory}",
        "2 agents up",
        "every agent sees 2 hosts alive",
        "gpu1 is the leader",
    ]
    assert len(bench.alive()) == 4
    monkeypatch.chdir(bench.directory.parent)
    assert find(None, {}).addresses == [host.address for host in hosts]
    bench.stop()
    assert bench.alive() == []
    assert not run_root(bench.directory, bench.environ).exists()
    left = {str(path.relative_to(bench.directory)) for path in bench.directory.rglob("*") if path.is_file()}
    assert left == {"gossip.key"} | {f"{host.name}/{name}" for host in hosts for name in ("agent.toml", "agentd.log")}
    bench.stop()
    assert bench.said[-1] == f"nothing was running in {bench.directory}"


def test_what_runs_is_left_alone_and_what_was_killed_is_started_again(bench: Bench) -> None:
    bench.start()
    before = bench.pids()
    assert before["gpu2"] is not None
    os.kill(before["gpu2"], signal.SIGKILL)
    os.waitpid(before["gpu2"], 0)
    bench.said.clear()
    bench.start(None)
    after = bench.pids()
    assert after["gpu1"] == before["gpu1"]
    assert after["gpu2"] not in (None, before["gpu2"])
    assert bench.said[0].endswith(f"1 agent started, 1 were running; files in {bench.directory}")


def test_stop_finds_what_a_killed_agent_left_behind(bench: Bench, tmp_path: Path) -> None:
    hosts = bench.start(1)
    pid = bench.pids()["gpu1"]
    assert pid is not None
    env = {**bench.environ, "COVEY_TOKEN": "t", "COVEY_SOCKET": f"{hosts[0].run_dir}/jobs.sock"}
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    bystander = subprocess.Popen(["tail", "-f", str(hosts[0].log)], stdout=subprocess.DEVNULL)
    rank = subprocess.Popen(sleep, env=env, start_new_session=True)
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert hosts[0].socket.exists()
        bench.stop()
        assert rank.wait(5) == -signal.SIGTERM
        assert bench.alive() == []
        assert not hosts[0].run_dir.exists()
        assert bystander.poll() is None
    finally:
        for process in (bystander, rank):
            process.kill()
            process.wait()


def test_an_agent_that_does_not_listen_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.start(1, FAKE_AGENTD="stubborn")
    pid = bench.pids()["gpu1"]
    assert pid is not None
    real_end = rack_processes.end
    monkeypatch.setattr(rack_processes, "end", lambda processes, grace_s: real_end(processes, min(grace_s, 0.2)))
    bench.stop()
    assert start_ticks(pid) is None


def test_an_agent_that_dies_is_shown_with_the_end_of_its_log(bench: Bench) -> None:
    with pytest.raises(AgentctlError) as caught:
        bench.start(2, FAKE_AGENTD="die")
    assert caught.value.code == FAILED
    assert "did not come up" in caught.value.what
    assert "status 3" in caught.value.why
    assert "| agentd: the sky is falling" in caught.value.why


def test_an_agent_that_never_answers_is_given_up_and_it_is_said_how_far_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("UP_S", 0.1), ("UP_S_OF_HOST", 0.1), ("PROGRESS_S", 0.0)):
        monkeypatch.setattr(rack, name, value)
    monkeypatch.setattr(rack, "answers", lambda host: host.name == "gpu1")
    with pytest.raises(AgentctlError, match="for 0 s nothing changed, and these do not answer: gpu2"):
        bench.start(2)
    assert any("1 of 2 agents do not answer yet" in line for line in bench.said)


def test_a_port_that_was_taken_meanwhile_is_named_with_its_setting(bench: Bench) -> None:
    host = bench.start(1)[0]
    bench.stop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as busy:
        busy.bind(("127.0.0.1", int(host.gossip.rpartition(":")[2])))
        with pytest.raises(AgentctlError) as caught:
            bench.start(1)
    assert host.gossip in caught.value.what
    assert "gossip.bind" in caught.value.next


def test_a_folder_that_was_deleted_under_a_running_rack_can_still_be_stopped(bench: Bench) -> None:
    bench.start(1)
    assert len(bench.alive()) == 2
    shutil.rmtree(bench.directory)
    bench.stop()
    assert bench.alive() == []
    assert not bench.directory.exists()
    assert not run_root(bench.directory, bench.environ).exists()


def test_status_says_what_runs(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert rack.status(bench.directory) == NO_AGENT
    hosts = bench.start(1)
    assert rack.status(bench.directory) == 0
    assert f"gpu1  running  {bench.pids()['gpu1']}  {hosts[0].address}" in capsys.readouterr().out
    bench.stop()
    assert rack.status(bench.directory) == NO_AGENT


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["run", "--hosts", "many"], ["start", "--gpus", "65"], ["run", "--host", "4"]]
)
def test_wrong_usage_is_said_in_three_lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert rack.main(argv) == USAGE
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("covey-rack: ")
    assert lines[-1].startswith("  next: ")


def test_a_second_proof_of_the_same_rack_is_refused_while_one_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proofs: list[str] = []

    def proof(*_: object) -> int:
        proofs.append("run")
        return 0

    monkeypatch.setattr(rack, "start", lambda *_, **__: [])
    monkeypatch.setattr("cli.rack.proof.run", proof)
    with locked(tmp_path, PROOF_LOCK):
        assert rack.main(["run", "--dir", str(tmp_path)]) == FAILED
    assert "busy" in capsys.readouterr().err
    assert rack.main(["run", "--dir", str(tmp_path)]) == 0
    assert proofs == ["run"]
    assert list(tmp_path.iterdir()) == []


def test_stop_takes_the_lock_of_a_proof_that_was_killed_and_leaves_a_held_one(bench: Bench) -> None:
    bench.directory.mkdir()
    lock = bench.directory / PROOF_LOCK
    lock.touch()
    bench.stop()
    assert not lock.exists()
    with locked(bench.directory, PROOF_LOCK):
        bench.stop()
        assert lock.exists()
