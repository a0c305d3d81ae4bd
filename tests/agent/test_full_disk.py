"""One real agent whose disk is a small file system: full by what its ranks print, or to the last byte by others."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.ports.last_room import RESERVE, free_in, kept_free
from agent.ports.processes.processes import RACK_MARK
from cli.client import TRY_AGAIN, Agent, AgentctlError
from cli.rack import processes as rack_processes
from covey.arrays.remote_memory import RemoteMemory
from covey.arrays.volume_link import RemoteMemoryError

BIN = Path(sys.executable).parent
MIB = 1 << 20
DISK_BYTES = 48 * MIB
PAGES = random.Random(1).randbytes(MIB)
PRINTS = ("sh", "-c", "while :; do head -c 1000000 /dev/zero; sleep 0.005; done")


class OnSmallDisk:
    """An agent whose state directory is a file system of its own."""

    def __init__(self, place: Path) -> None:
        self.place, self.state = place, place / "state"
        self.agent = Agent([f"unix:{place}/run/agent.sock"])
        self.memory: RemoteMemory | None = None
        self.environ = {**os.environ, RACK_MARK: str(place)}
        place.joinpath("agent.toml").write_text(
            f'name = "gpu1"\nstate_dir = "{place}/state"\nrun_dir = "{place}/run"\nadvertise = "127.0.0.1"\n'
            '[gossip]\nbind = "127.0.0.1:0"\n[control]\nbind = "127.0.0.1:0"\n[gpus]\nsimulated = 4\n'
            '[jobs]\ndisk_free_min = "2 MiB"\n'
        )

    def start(self) -> None:
        self.log = (self.place / "log").open("ab")
        command: list[str | Path] = [BIN / "agentd", "--config", self.place / "agent.toml"]
        self.process = subprocess.Popen(command, env=self.environ, stderr=self.log, stdout=self.log)
        self.until(self.answers, "it answers")

    def answers(self) -> bool:
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(AgentctlError):
            return bool(self.agent.get("status").data)
        return False

    def said(self) -> str:
        return (self.place / "log").read_text()[-3000:]

    def until(self, true: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
        end_s = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < end_s, f"not: {what}\n{self.said()}"
            time.sleep(0.05)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [BIN / "agentctl", "--agent", f"unix:{self.place}/run/agent.sock", *words]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)

    def volume(self) -> RemoteMemory | None:
        with contextlib.suppress(RemoteMemoryError):
            self.memory = RemoteMemory.open("v1", 2 * DISK_BYTES, f"{self.place}/run/jobs.sock")
        return self.memory

    def quota(self, gpus: int) -> bool:
        try:
            self.agent.post("quotas", body={"tenant": "t", "gpus": gpus})
        except AgentctlError as error:
            assert error.code == TRY_AGAIN, error
            return False
        return True

    def fill(self) -> None:
        """Fill the disk by others' files, which take also what Covey's own leave free, and what the log frees."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.state / RESERVE)
        with open(self.state / "filler", "ab", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(MIB))
        with open(self.state / "filler", "ab", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(512))

    def end(self) -> None:
        if self.memory is not None:
            self.memory.close()
        while left := rack_processes.find(self.place, [self.place / "run"]):  # again: one may have started another
            for each in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()
        self.log.close()


@pytest.fixture
def host() -> Iterator[OnSmallDisk]:
    place = Path(tempfile.mkdtemp(prefix="covey-"))
    (place / "state").mkdir()
    mounted: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", place / "state"]
    if subprocess.run(mounted, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    found = OnSmallDisk(place)
    try:
        found.start()
        yield found
    finally:
        found.end()
        subprocess.run(["umount", "-l", place / "state"], check=True)
        shutil.rmtree(place)


@pytest.mark.long
def test_what_ranks_print_and_a_volume_has_leaves_room_for_the_log(host: OnSmallDisk) -> None:
    """The ranks and the volume have more than the disk takes."""
    jobs = [host.ctl("submit", "--json", "--name", f"prints{n}", "--", *PRINTS) for n in range(2)]
    ids = [json.loads(job.stdout)["data"]["id"] for job in jobs]
    least = kept_free(str(host.state))
    host.until(lambda: free_in(str(host.state)) < least + 3 * MIB, "the disk is as full as they may make it")
    for number in range(40):
        assert host.quota(number % 5), "every change is made"
        assert free_in(str(host.state)) >= least // 2 - MIB
        time.sleep(0.02)
    memory = host.until(host.volume, "a volume")
    with pytest.raises(RemoteMemoryError, match="may need"):
        for offset in range(0, memory.size, len(PAGES)):
            memory.write(offset, PAGES)
            memory.flush()
    assert free_in(str(host.state)) >= least // 2 - MIB
    assert host.quota(7) and host.process.poll() is None
    ended = host.ctl("submit", "--wait", "--", "sh", "-c", "echo heard")
    assert ended.returncode == 0 and "heard" in host.ctl("logs", "j3").stdout, "another job runs, and is heard"
    for job in ids:
        host.ctl("cancel", job)


def test_on_a_disk_that_takes_nothing_an_agent_lives_starts_and_says_so(host: OnSmallDisk) -> None:
    """Every writer of the host is at work: the log, records, event logs, logs of programs, a rank, a volume's log."""
    assert host.quota(1)
    memory = host.until(host.volume, "a volume")
    memory.write(0, PAGES)
    memory.flush()
    host.ctl("submit", "--name", "prints", "--", *PRINTS)
    host.until(lambda: list(host.state.glob("jobs/j1/rank0.log")), "it runs")

    def is_full() -> bool:
        host.fill()  # again: what a program frees meanwhile is room for the log
        return not host.quota(2)

    host.until(is_full, "the log cannot be written")
    said = host.until(lambda: host.agent.get("status").data["log"], "it says so")
    assert "waits for room" in said
    refused = host.ctl("submit", "--", "true")
    assert refused.returncode in (4, 75) and ("No space" in refused.stderr or "is free" in refused.stderr)
    doctor = host.ctl("doctor")
    assert doctor.returncode == 1 and "waits for room" in doctor.stdout
    assert "waits for room" in host.ctl("hosts").stdout
    host.kill()
    host.fill()
    host.start()
    host.until(lambda: "waits for room" in host.agent.get("status").data["log"], "a start says so too")
    host.until(lambda: "waits for room" in host.ctl("hosts").stdout, "and every host hears it")
    os.unlink(host.state / "filler")
    host.until(lambda: host.quota(3), "with room it takes changes again")
    host.until(lambda: plugins_down(host) == [], "no plugin is down")
    assert memory.read(0, len(PAGES)) == PAGES, "the volume has what it acknowledged"
    memory.write(len(PAGES), PAGES)
    memory.flush()
    host.until(lambda: host.ctl("submit", "--wait", "--", "true").returncode == 0, "jobs run")
    why = host.ctl("why", "host/gpu1").stdout
    assert "disk full" in why and "disk has room again" in why
    assert "waits for room" not in host.ctl("doctor").stdout


def plugins_down(host: OnSmallDisk) -> list[str]:
    return [name for name, each in host.agent.get("status").data["plugins"].items() if each["state"] == "failed"]
