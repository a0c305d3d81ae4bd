"""A rank that has not pushed what all others wait for is named: by `aggd`, and to people."""

import io
import time
from pathlib import Path

import numpy as np
import pytest

from cli.jobs.tensors import silent
from covey.core.ids import HostId, JobId
from covey.job.tensors import TensorClient
from covey.wire.job import AggregatorAt
from covey.wire.sums import GetStatus, JobCounters, Now, Serve
from plugins.aggregator.service.view import worked
from plugins.facts import SumsWorked
from tests.plugins.aggregator.loopback import SECRET, AggdThread

JOB, EPOCH = JobId("j1"), (1 << 32) + 1


def test_what_was_done_for_a_table_is_told_from_one_look_to_the_next() -> None:
    def at(table: str, busy_us: int, iterations: int, epoch: int = EPOCH) -> JobCounters:
        return JobCounters(JobId(table), epoch, 4, 4, 1, 8, 1, 0, 0, busy_us, iterations)

    before = [at("j1", 500, 7), at("j1/1", 500, 7), at("j2", 500, 7), at("j3", 500, 7)]
    now = [at("j1", 2500, 11), at("j1/1", 600, 7), at("j2", 300, 9), at("j3", 900, 9, EPOCH + 1), at("j4", 9, 9)]
    assert worked(before, now) == [SumsWorked(JobId("j1"), 1, JobId("j1"), 4, 0.002)]


def counters(owner: AggdThread) -> JobCounters:
    now = owner.order(GetStatus())
    assert isinstance(now, Now)
    return now.jobs[0]


def test_the_rank_that_the_others_wait_for_is_named_until_it_pushes(tmp_path: Path) -> None:
    owner = AggdThread(tmp_path)
    owner.order(Serve(JOB, EPOCH, 3, SECRET))
    at = AggregatorAt(JOB, EPOCH, HostId("h1"), owner.aggd.address, SECRET)
    clients = [TensorClient(JOB, rank, 3, lambda *why: None, say=io.StringIO()) for rank in range(3)]
    try:
        for client in clients:
            client.moved(at)
        handles = [client.push("g", np.ones(10, np.float32)) for client in clients]
        for handle in handles:
            handle.wait()
        assert counters(owner).missing == [] and counters(owner).waits_s == 0.0
        handles = [client.push("g", np.ones(10, np.float32)) for client in clients[:2]]
        end_s = time.monotonic() + 10.0
        while counters(owner).missing != [2] or counters(owner).waits_s < 0.05:
            assert time.monotonic() < end_s, counters(owner)
            time.sleep(0.005)
        handles.append(clients[2].push("g", np.ones(10, np.float32)))
        for handle in handles:
            handle.wait()
        while counters(owner).missing:
            assert time.monotonic() < end_s, "nobody waits any more"
    finally:
        for client in clients:
            client.close()
        owner.kill()


ROW = {"missing": [3], "waits_s": 40.0, "age_s": 1.0, "period_us": 200_000}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], ""),
        ([{**ROW, "missing": []}], ""),
        ([{**ROW, "waits_s": 4.0}], ""),
        ([{**ROW, "period_us": 30_000_000}], ""),
        ([{**ROW, "period_us": None}], "waits for rank 3 on gpu2, 41 s"),
        ([{**ROW, "waits_s": 6.0, "missing": [0]}, ROW], "waits for rank 3 on gpu2, 41 s"),
        ([{**ROW, "missing": [0, 3]}], "waits for rank 0, 3 on gpu2, 41 s"),
    ],
)
def test_people_read_for_whom_and_how_long(rows: list[dict[str, object]], said: str) -> None:
    assert silent(rows, {3: "gpu2"}) == said
