"""Real agents on devices made of cores that jobs share, for tests and benchmarks."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cli.client import Agent
from cli.rack import files as rack_files
from cli.rack import ports as rack_ports
from cli.rack import processes as rack_processes
from cli.rack import rack
from cli.rack.files import RackHost
from tests.rack.living_rack import wait

RANK = Path(__file__).with_name("sharing_rank.py")
ROOT = Path(__file__).parents[2]


class SharingRack:
    """A started rack, `gpus` devices a host; `scheduler`: lines of that section of every agent.toml."""

    def __init__(self, directory: Path, hosts: int, gpus: int, scheduler: str, devices: str = "cpu") -> None:
        self.directory, self.count, self.gpus, self.devices = directory, hosts, gpus, devices
        self.words = directory / "words"
        self.words.mkdir()
        with rack_ports.Claims() as claims:
            for host in rack_files.generate(directory, hosts, gpus, os.environ, claims, devices):
                text = host.config.read_text().replace("[scheduler]\n", f"[scheduler]\n{scheduler}\n")
                host.config.write_text(text)
        self.hosts: list[RackHost] = []

    def start(self) -> None:
        """Start whatever is missing, as systemd's Restart=always would."""
        quiet = rack.Timer(lambda _line: None)
        self.hosts = rack.start(self.directory, self.count, self.gpus, os.environ, quiet)

    def host(self, name: str) -> RackHost:
        return next(host for host in self.hosts if host.name == name)

    def agent(self, name: str | None = None) -> Agent:
        """The agent of this host, or whichever answers."""
        hosts = self.hosts if name is None else [self.host(name)]
        return Agent([host.address for host in hosts], name or "the rack", timeout_s=5.0)

    def agentd(self, name: str) -> int:
        pid = rack_processes.lock_holder(self.host(name).state_dir)
        assert pid, f"no agent runs on {name}"
        return pid

    def kill(self, name: str) -> None:
        """Kill a host's agent, which has ended when this returns: one that still holds its lock would be left alone by
        `start`."""
        state_dir = self.host(name).state_dir
        os.kill(self.agentd(name), signal.SIGKILL)
        wait(f"the agent of {name} has ended", lambda: not rack_processes.lock_holder(state_dir))

    def submit(self, name: str, argv: list[str], **more: Any) -> str:
        """Submit a job, and return its id. Ranks find `words` in their environment, and covey where this checkout has
        it."""
        env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/tmp"),
            "WORDS": str(self.words),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
        }
        body = {"name": name, "argv": argv, "cwd": "/", "env": env, "gpus_per_worker": 1, **more}
        return str(self.agent().post("jobs", body=body).data["id"])

    def job(self, job: str, at: str | None = None) -> dict[str, Any]:
        """The job as this host's agent sees it."""
        found: dict[str, Any] = self.agent(at).get("jobs", job).data
        return found

    def listed(self, job: str, at: str) -> dict[str, Any]:
        """The job's row by this host's own copy of the log; no other host is asked."""
        rows: list[dict[str, Any]] = self.agent(at).get("jobs", all=1).data
        return next(row for row in rows if row["id"] == job)

    def word(self, job: str, rank: int) -> dict[str, Any]:
        """What this rank says of itself; empty while it has not begun."""
        path = self.words / f"{job}-{rank}"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def shared(self, at: str) -> dict[str, dict[str, str]]:
        """Device -> job -> class, as that host's own sharing has it; without jobs whose ranks have ended."""
        rows = self.agent(at).get("shared_gpus").data
        return {
            row["gpu"]: {one["job"]: one["kind"] for one in row["jobs"] if one["stage"] != "ended"}
            for row in rows
            if row["host"] == at
        }

    def runs(self, job: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the job runs, and return its view."""
        found: dict[str, Any] = wait(
            f"{job} runs", lambda: (now := self.job(job))["state"] == "running" and now, timeout_s
        )
        return found


def rank(work_s: float, wait_s: float, steps: int = 0) -> list[str]:
    """The command of a rank without a framework."""
    return [sys.executable, str(RANK), str(work_s), str(wait_s), str(steps)]


@contextlib.contextmanager
def sharing_rack(hosts: int, gpus: int, scheduler: str, devices: str = "cpu") -> Iterator[SharingRack]:
    """A started rack, which is stopped at the end; nothing of it is left."""
    directory = Path(tempfile.mkdtemp(prefix="covey-rack-"))
    try:
        found = SharingRack(directory, hosts, gpus, scheduler, devices)
        found.start()
        yield found
    finally:
        rack.stop(directory, os.environ, lambda _line: None)
        left = rack_processes.find(directory, [])
        shutil.rmtree(directory)
        assert left == [], "stop leaves no process"
