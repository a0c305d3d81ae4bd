"""What the fake agent of these tests answers: a little rack with a job, a volume and its slabs."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from cli.main import main
from tests.cli.conftest import FakeAgent

Job = Callable[..., dict[str, Any]]
Run = Callable[..., tuple[int, str, str]]

HOSTS = [
    {
        "host": "gpu1",
        "state": "alive",
        "age_s": 0.0,
        "address": "127.0.0.1:1",
        "leads": True,
        "since_s": 65.0,
        "gpus_total": 2,
        "gpus_free": 1,
        "slabs_free": 8,
        "slabs_lent": 0,
        "aggregator_jobs": 1,
        "version": "0.1.0",
        "suspected_by": None,
        "plugins_failed": ["memory"],
    },
    {
        "host": "gpu2",
        "state": "suspect",
        "age_s": 3.0,
        "address": "127.0.0.1:2",
        "leads": False,
        "since_s": 2.0,
        "gpus_total": None,
        "gpus_free": None,
        "slabs_free": None,
        "slabs_lent": None,
        "aggregator_jobs": None,
        "suspected_by": "gpu1",
        "plugins_failed": [],
    },
]
GPU = {
    "host": "gpu1",
    "index": 0,
    "uuid": "GPU-1",
    "model": "Pretend",
    "memory_total_bytes": 16 << 30,
    "memory_used_bytes": 3 << 29,
    "utilization": 0.42,
    "job": "j1",
    "simulated": True,
    "age_s": 0.0,
}
SLAB = {
    "volume": "demo",
    "index": 0,
    "borrower": "gpu1",
    "state": "mapped",
    "lender": "gpu2",
    "size_bytes": 16 << 20,
    "pages_written": 4096,
    "pages_remote": 4000,
    "requests_per_s": 812.25,
    "epoch": 3,
    "age_s": 0.0,
}
VOLUME = {
    "volume": "demo",
    "host": "gpu1",
    "size_bytes": 64 << 20,
    "page_bytes": 4096,
    "slab_bytes": 16 << 20,
    "taken_bytes": 64 << 20,
    "slabs_mapped": 1,
    "slabs": 4,
    "read_bytes": 1024,
    "written_bytes": 2048,
    "remote_read_bytes": 512,
    "disk_read_bytes": 0,
    "process_alive": True,
    "latencies": [{"op": "read", "answered": "lender", "requests": 812, "p50_s": 5.5e-5, "p99_s": 1.2e-3}],
    "tenant": "ann",
    "job": "j1",
    "budget_bytes": 96 << 20,
    "links": {"open": 3, "reopening": 1, "recovering": 0, "leaving": 0},
    "path": "",
}
ACCOUNTS = [
    {"kind": "tenant", "name": "ann", "tenant": "ann", "budget_bytes": None, "used_bytes": 0, "lenders": {}},
    {
        "kind": "job",
        "name": "j1",
        "tenant": "ann",
        "budget_bytes": 2 << 30,
        "used_bytes": 3 << 30,
        "lenders": {"gpu2": 1 << 30, "gpu3": 2 << 30},
    },
]
TENSORS = {
    "job": "j1",
    "host": "gpu3",
    "epoch": 2,
    "workers": 4,
    "joined": 3,
    "tensors": 2,
    "bytes": 2600,
    "rounds": 80,
    "received_bytes": 1 << 20,
    "sent_bytes": 1 << 21,
    "age_s": 0.0,
}
LEADER = {"leader": "gpu1", "term": 3, "since_s": 70.0, "applied_index": 9, "age_s": 0.2, "voters": ["gpu1"]}
STORY = {
    "wall_s": 900.0,
    "host": "gpu2",
    "subject": "j1",
    "event": "granted",
    "reason": "first in its queue",
    "key": "",
}


@pytest.fixture
def run(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs agentctl; returns exit code, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture(autouse=True)
def answers(agent: FakeAgent, job: Job) -> None:
    agent.replies |= {
        "GET /v1/hosts": HOSTS,
        "GET /v1/gpus": [GPU, GPU | {"index": 1, "job": None}],
        "GET /v1/jobs": [job()],
        "GET /v1/jobs/j1": job(),
        "GET /v1/slabs": [SLAB, SLAB | {"index": 1, "state": "cold", "lender": None}],
        "GET /v1/volumes": [VOLUME],
        "GET /v1/memory/accounts": ACCOUNTS,
        "GET /v1/tensors": [TENSORS],
        "GET /v1/leader": {
            "leader": "gpu1",
            "term": 3,
            "since_s": 70.0,
            "applied_index": 9,
            "age_s": 0.2,
            "voters": [],
        },
        "GET /v1/status": {"boot": 2, "up_s": 600.0, "plugins": {"memory": {"state": "on", "why": ""}}},
        "GET /v1/why/j1": [STORY],
        "GET /v1/quotas": [{"tenant": "ann", "gpus": None, "used": 2, "queued_jobs": 1}],
    }


def error_of(text: str) -> dict[str, Any]:
    found = json.loads(text)
    assert found["schema"] == 1
    error: dict[str, Any] = found["error"]
    return error
