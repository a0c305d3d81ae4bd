"""Two real jobs on two agents take turns, one of their processes is killed with its turn, and both end with the sums
that they have alone; so do scripts of PyTorch that know nothing of Covey."""

import importlib.util
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.covey.hooks.torch_jobs import gate_folder
from tests.rack.living_rack import ENV, LivingRack, living_rack, wait

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]

WORK = """
import os, sys, time
import numpy as np
import covey
steps = int(sys.argv[1])
with covey.join() as job:
    sums = job.tensors.push_pull("first", np.zeros(1, np.float32))
    print("PID", os.getpid(), flush=True)
    total = np.zeros(60_000, np.float32)
    for step in range(steps):
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            np.square(total).sum()
        total += job.tensors.push_pull("g", np.full(len(total), (job.rank + 1) * (step + 1), np.float32))
        job.step()
    print("TOTAL", int(total[0]), flush=True)
"""
STEPS = 60
STOCK = """
import time, torch
model = torch.nn.Linear(64, 64)
o = torch.optim.SGD(model.parameters(), 0.01)
x = torch.randn(64, 64)
while True:
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s: model(x).square().mean().backward()
    o.step(); o.zero_grad()
"""


@pytest.fixture(scope="module")
def living() -> Iterator[LivingRack]:
    with living_rack(hosts=2) as found:
        (found.directory / "work.py").write_text(WORK)
        (found.directory / "stock.py").write_text(STOCK)
        yield found


def submit(living: LivingRack, steps: int, group: str) -> str:
    more = {"workers": 2, "gpus_per_worker": 0, "share_host": group}
    return living.submit(living.directory / "work.py", str(steps), **more)


def stock_jobs(living: LivingRack) -> list[str]:
    """Two jobs of one process on one host, whose steps Covey only sees; none where PyTorch is missing."""
    if importlib.util.find_spec("torch") is None:
        return []
    env = {**ENV, "COVEY_GATE": str(gate_folder()), "OMP_NUM_THREADS": "1"}
    more = {"workers": 1, "gpus_per_worker": 0, "share_host": "stock", "env": env}
    return [living.submit(living.directory / "stock.py", **more) for _ in range(2)]


def turns_s(living: LivingRack, job: str) -> float:
    """Seconds of its newest step in which the job waited for turns."""
    timing = (living.job(job)["seen"] or {}).get("timing") or {}
    return float(timing.get("turns_s", 0.0))


def said(living: LivingRack, job: str, word: str) -> list[int]:
    logs = Path(living.directory).glob(f"gpu*/jobs/{job}/rank*.log")
    return [int(number) for log in logs for number in re.findall(rf"{word} (\d+)", log.read_text())]


@pytest.mark.long
def test_jobs_of_a_group_take_turns_and_end_with_their_sums(living: LivingRack) -> None:
    jobs = [submit(living, STEPS, "night") for _ in range(2)]
    wait("turns", lambda: "turns of default/night" in living.agentctl("status")[1])
    stock = stock_jobs(living)
    wait("the jobs' ends", lambda: all(living.job(job)["state"] == "done" for job in jobs), 120.0)
    for job in jobs:
        assert said(living, job, "TOTAL") == [3 * STEPS * (STEPS + 1) // 2] * 2
        shown = living.agentctl("job", job)[1]
        assert "in turns with group night of tenant default" in shown
    assert any(turns_s(living, job) for job in jobs), "nobody waited for a turn"
    for job in stock:
        wait(f"a step of {job} that waited for a turn", partial(turns_s, living, job))
    for job in stock:
        living.agentctl("cancel", job)


def test_a_process_that_is_killed_with_its_turn_blocks_nobody(living: LivingRack) -> None:
    doomed, other = submit(living, 100_000, "auto"), submit(living, 100_000, "auto")
    wait("both to compute", lambda: all(len(said(living, job, "PID")) == 2 for job in (doomed, other)))
    wait("steps", lambda: (living.job(other)["step"] or 0) > 3)
    killed = said(living, doomed, "PID")
    os.kill(killed[0], signal.SIGKILL)
    before = int(living.job(other)["step"] or 0)
    began_s = time.monotonic()
    wait("the other job's steps", lambda: int(living.job(other)["step"] or 0) > before + 3, 30.0)
    assert time.monotonic() - began_s < 20.0
    for job in (doomed, other):
        living.agentctl("cancel", job)
    wait("the ends", lambda: all(living.job(job)["over"] for job in (doomed, other)))
