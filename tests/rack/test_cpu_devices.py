"""A rack of four real agents with eight devices made of cores, on any machine: ranks are bound to what they got."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.client import Agent
from cli.jobs.logs import collect
from cli.rack import processes as rack_processes
from cli.rack import rack
from tests.rack.living_rack import wait

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]
CORES = sorted(os.sched_getaffinity(0))
SCRIPT = "import os, time; time.sleep(2); print(sorted(os.sched_getaffinity(0)), os.environ['COVEY_GPUS'])"


@pytest.fixture
def agent() -> Iterator[Agent]:
    if len(CORES) < 2:
        pytest.skip("two devices need two cores")
    directory = Path(tempfile.mkdtemp(prefix="covey-rack-"))
    try:
        hosts = rack.start(directory, 4, 2, os.environ, rack.Timer(lambda _line: None), devices="cpu")
        yield Agent([host.address for host in hosts], "the test's rack")
    finally:
        rack.stop(directory, os.environ, lambda _line: None)
        left = rack_processes.find(directory, [])
        shutil.rmtree(directory)
        assert left == [], "stop leaves no process"


@pytest.mark.long
def test_eight_ranks_on_eight_devices_are_bound_to_their_cores(agent: Agent) -> None:
    rows = wait("all devices are known", lambda: _eight(agent))
    assert {row["uuid"] for row in rows} == {f"CPU-gpu{n}-{device}" for n in range(1, 5) for device in (0, 1)}
    body = {"name": "bound", "workers": 8, "gpus_per_worker": 1, "argv": [sys.executable, "-c", SCRIPT], "cwd": "/"}
    job = agent.post("jobs", body=body).data["id"]
    wait("the job is done", lambda: agent.get("jobs", job).data["state"] == "done")
    halves = [CORES[: len(CORES) // 2], CORES[len(CORES) // 2 :]]
    said = {collect(agent, str(job), rank).strip() for rank in range(8)}
    assert said == {f"{halves[device]} CPU-gpu{n}-{device}" for n in range(1, 5) for device in (0, 1)}


def _eight(agent: Agent) -> list[dict[str, Any]] | None:
    rows: list[dict[str, Any]] = agent.get("gpus").data
    return rows if len(rows) == 8 else None
