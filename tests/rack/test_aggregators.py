"""Three real jobs on a real rack: two that fit share one aggregator, a third is refused there, in words; and all end
with the parameters that one process ends with, although they were moved while they ran."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.client import Agent, AgentctlError
from cli.rack import files as rack_files
from cli.rack import ports as rack_ports
from cli.rack import processes as rack_processes
from cli.rack import rack
from cli.rack.files import RackHost

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
PACED = Path(__file__).with_name("paced_digits.py")
STEPS, SHORT_S = 400, 0.2
LONG_STEPS, LONG_S = 250, 0.34
"""The steps of the long jobs, and their seconds: 0.34 s divides into none of 0.2 s: in one cycle with it, those would
lose 40 % of their speed. Jobs run for more than a minute, or until they are told to hurry."""
ENV = {"PATH": os.environ["PATH"], "COVEY_SHARED_TENSORS": "0"}
"""The environment of the ranks and of the reference run: another BLAS kernel (OPENBLAS_CORETYPE) would differ in the
last bits. Ranks that happen to be on one host have an aggregator nevertheless."""
SETTINGS = """\
cycles_max = 1          # the thesis: no cycle is longer than the longest iteration
scale_s = 5
trial_iterations = 8    # still two seconds, which is the least
"""


@pytest.fixture
def hosts() -> Iterator[list[RackHost]]:
    directory = Path(tempfile.mkdtemp(prefix="covey-rack-"))
    try:
        with rack_ports.Claims() as claims:
            for host in rack_files.generate(directory, 4, 2, os.environ, claims):
                host.config.write_text(host.config.read_text() + SETTINGS)  # its last section is [aggregator]
            hosts = rack.start(directory, 4, 2, os.environ, rack.Timer(lambda _line: None))
        yield hosts
    finally:
        rack.stop(directory, os.environ, lambda _line: None)
        left = rack_processes.find(directory, [])
        shutil.rmtree(directory)
        assert left == [], "stop leaves no process"


class Rack:
    def __init__(self, hosts: list[RackHost], cwd: Path) -> None:
        self.agent, self.cwd = Agent([host.address for host in hosts], "the test's rack"), cwd
        self.hurry = cwd / "hurry"
        """The file that, once it is there, makes jobs no longer wait between two steps."""

    def submit(self, name: str, steps: int, step_s: float) -> str:
        words = [f"--steps={steps}", f"--step-seconds={step_s}"]
        body = {
            "name": name,
            "workers": 2,
            "gpus_per_worker": 1,
            "argv": [sys.executable, str(PACED), str(self.hurry), *words],
            "cwd": str(self.cwd),
            "env": ENV,
        }
        return str(self.agent.post("jobs", body=body).data["id"])

    def tensors(self) -> dict[str, dict[str, Any]]:
        return {row["job"]: row for row in self.agent.get("tensors").data}

    def story(self, job: str) -> list[str]:
        return [f"{line['event']}: {line['reason']}" for line in self.agent.get("why", job).data]

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.agent.get("jobs", job).data
        return found

    def ended(self, job: str) -> dict[str, Any] | None:
        found = self.job(job)
        return found if found["times"]["ended_wall_s"] else None

    def wait(self, what: str, holds: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            try:
                if found := holds():
                    return found
            except AgentctlError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"waited {timeout_s:.0f} s in vain until {what}: {self.tensors()}")


def sha256(output: str) -> str:
    found = re.search(r"parameters sha256=([0-9a-f]{64})", output)
    assert found, output[-500:]
    return found[1]


def test_two_jobs_share_one_aggregator_and_a_third_is_refused_there(hosts: list[RackHost], tmp_path: Path) -> None:
    living = Rack(hosts, tmp_path)
    # each is on a host of its own, and has its trial there: none of them is busy yet
    first, second = living.submit("one", STEPS, SHORT_S), living.submit("two", STEPS, SHORT_S)

    def share() -> bool:
        rows = living.tensors()
        both = [rows[job] for job in (first, second) if job in rows and rows[job]["period_us"]]
        return len(both) == 2 and both[0]["host"] == both[1]["host"]

    living.wait("the two share an aggregator", share, 90)
    host = living.tensors()[first]["host"]
    third = living.submit("three", LONG_STEPS, LONG_S)
    row = living.wait("the third is refused there", lambda: refused_by(living.tensors().get(third), host), 90)
    assert row["host"] != host and row["period_us"] > 1e6 * LONG_S
    assert f"{host}: in a cycle of " in row["refused"] and "of its speed" in row["refused"]
    living.wait(
        "its story says so", lambda: f"its tensors have no room elsewhere: {row['refused']}" in living.story(third), 20
    )
    shown = living.tensors()
    for job in (first, second):
        assert shown[job]["host"] == host
        assert 1e6 * SHORT_S < shown[job]["period_us"] < 1e6 * LONG_S
        assert 0 < shown[job]["work_us"] < shown[job]["period_us"] and shown[job]["loss"] < 0.1
    moved = [job for job in (first, second) if any("handed over all its jobs" in line for line in living.story(job))]
    assert len(moved) >= 1, "one of them was moved to the other's aggregator while it ran"
    assert not any(living.ended(job) for job in (first, second, third)), "all of it while they ran"
    living.hurry.touch()
    for job, steps in ((first, STEPS), (second, STEPS), (third, LONG_STEPS)):
        ended = living.wait(f"{job} has ended", partial(living.ended, job), 150)
        assert (ended["state"], ended["exit_code"], ended["tally"]["attempt"]) == ("done", 0, 1), ended["reason"]
        logs = [path.read_text() for one in hosts for path in one.state_dir.glob(f"jobs/{job}/rank0.log")]
        assert sha256("".join(logs)) == expected(steps)


def expected(steps: int) -> str:
    """The digest of what one process prints that does the work of both ranks."""
    sequential = [sys.executable, str(DIGITS), f"--steps={steps}", "--sequential=2"]
    return sha256(subprocess.run(sequential, capture_output=True, text=True, check=True, env=ENV).stdout)


def refused_by(row: dict[str, Any] | None, host: str) -> dict[str, Any] | None:
    return row if row is not None and host in row["refused"] else None
