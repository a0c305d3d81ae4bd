"""A rack of four real agents, started, and the questions that tests which kill parts of it ask."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli.client import Agent, AgentctlError
from cli.rack import processes as rack_processes
from cli.rack import rack
from cli.rack.files import RackHost

EXAMPLES = Path(__file__).parents[2] / "examples"
ENV = {"PATH": os.environ["PATH"], "COVEY_SHARED_TENSORS": "0"}
"""The environment of the ranks and of the reference run: another BLAS kernel (OPENBLAS_CORETYPE) would differ in the
last bits. Ranks that happen to be on one host have an aggregator nevertheless."""


class LivingRack:
    """A started rack and the questions these tests ask of it."""

    def __init__(self, directory: Path, hosts: int = 4, gpus: int = 2) -> None:
        self.directory, self.shape = directory, (hosts, gpus)
        self.hosts: list[RackHost] = []
        self.start()

    def start(self) -> None:
        """Start whatever is missing, as systemd's Restart=always would."""
        quiet = rack.Timer(lambda _line: None)
        self.hosts = rack.start(self.directory, *self.shape, os.environ, quiet)

    def host(self, name: str) -> RackHost:
        return next(host for host in self.hosts if host.name == name)

    def agent(self) -> Agent:
        return Agent([host.address for host in self.hosts], "the test's rack")

    def agentctl(self, *words: str) -> tuple[int, str]:
        """Run agentctl: its exit code, and what it printed."""
        program = [str(Path(sys.executable).with_name("agentctl")), "--agent", self.hosts[0].address, *words]
        done = subprocess.run(program, capture_output=True, text=True, timeout=90, check=False)
        return done.returncode, done.stdout + done.stderr

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.agent().get("jobs", job).data
        return found

    def submit(self, script: Path, *options: str, **more: Any) -> str:
        """Submit a script with four workers, on two hosts, and return its id. `more`: further options of the job."""
        body = {
            "name": script.stem,
            "workers": 4,
            "gpus_per_worker": 1,
            "argv": [sys.executable, str(script), *options],
            "cwd": str(self.directory),
            "env": {"HOME": str(self.directory), **ENV},  # a shell reads nothing of whoever tests
            **more,
        }
        return str(self.agent().post("jobs", body=body).data["id"])

    def output(self, job: str, rank: int = 0) -> str:
        return "".join(p.read_text() for p in self.directory.glob(f"gpu*/jobs/{job}/rank{rank}.log"))

    def agentd(self, name: str) -> int:
        pid = rack_processes.lock_holder(self.host(name).state_dir)
        assert pid, f"no agent runs on {name}"
        return pid

    def lose(self, name: str) -> None:
        """End all that runs on that host at once: its agent, programs, supervisors and ranks."""
        agent, host = self.agentd(name), self.host(name)
        for _ in range(3):  # what was just being started is there the next time
            for pid in (agent, *(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())):
                if pid == agent or _is_of(pid, host):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def program(self, name: str, program: str) -> int:
        """The pid of a byte process of that host."""
        state_dir = str(self.host(name).state_dir)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                here = os.readlink(entry / "cwd")
            except OSError:
                continue
            if b"agent.program" in words and program.encode() in words and here == state_dir:
                return int(entry.name)
        raise AssertionError(f"no {program} runs on {name}")


def _is_of(pid: int, host: RackHost) -> bool:
    """Whether this is a process of that host, of this rack."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        is_rank = any(word.startswith(f"COVEY_SOCKET={host.run_dir}".encode()) for word in environ)
        return is_rank or os.readlink(f"/proc/{pid}/cwd") == str(host.state_dir)
    except OSError:
        return False


def wait(what: str, holds: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Wait until `holds` answers something true, and return that; agents that are being killed may not answer."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        try:
            if found := holds():
                return found
        except AgentctlError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"waited {timeout_s:.0f} s in vain until {what}")


@contextmanager
def living_rack(hosts: int = 4, gpus: int = 2) -> Iterator[LivingRack]:
    directory = Path(tempfile.mkdtemp(prefix="covey-rack-"))
    try:
        yield LivingRack(directory, hosts, gpus)
    finally:
        rack.stop(directory, os.environ, lambda _line: None)
        left = rack_processes.find(directory, [])
        shutil.rmtree(directory)
        assert left == [], "stop leaves no process"
