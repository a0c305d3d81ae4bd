"""Tests of `agentctl gpus --shared` and `agentctl interference`."""

import time

import pytest

from cli.jobs.interference import slower
from cli.main import main
from tests.cli.conftest import FakeAgent

JOBS = [
    {"job": "j1", "kind": "guaranteed", "stage": "running", "may": "without limit", "gate": True, "flag": True,
     "memory_limit_bytes": 40 << 30, "applied": True, "spill_bytes": 0, "step_s": 0.02},
    {"job": "j2", "kind": "opportunistic", "stage": "running", "may": "idle phases", "gate": False, "flag": False,
     "memory_limit_bytes": 30 << 30, "applied": False, "spill_bytes": 1 << 30, "step_s": 0.0},
]  # fmt: skip
GPU = {
    "host": "a",
    "gpu": "GPU-1",
    "model": "H100",
    "backend": "nvml",
    "state": "run",
    "condition": "ok",
    "why": "",
    "utilization": 0.75,
    "memory_bytes": 80 << 30,
    "memory_free_bytes": 10 << 30,
    "age_s": 0.0,
    "jobs": JOBS,
}
ROW = {
    "host": "a",
    "gpu": "GPU-1",
    "job": "j1",
    "beside": ["j2"],
    "state": "run",
    "slowdown": 0.021,
    "error": 0.006,
    "baseline_s": 0.02,
    "baseline_age_s": 75.0,
    "audits": 3,
    "others": "idle phases",
    "age_s": 0.0,
}


def test_watch_shows_who_shares_a_gpu_and_what_each_may_do(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.replies["GET /v1/shared_gpus"] = [
        GPU,
        {**GPU, "gpu": "GPU-2", "jobs": [], "state": "empty", "utilization": None},
    ]
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["--agent", agent.address, "gpus", "--shared", "0.5"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert any("30 GiB (not yet)" in line for line in lines)
    assert looks == [0.5, 0.5] and sum(line.startswith("HOST") for line in lines) == 2
    first = "a GPU-1 run 75% 10 GiB j1 guaranteed without limit 40 GiB - 20 ms itself"
    assert lines[1].split() == first.split()
    assert "j2" in lines[2] and "30 GiB (not yet)" in lines[2] and lines[2].endswith("nothing")
    assert "GPU-2" in lines[3] and "%" not in lines[3], "its driver does not say how busy it is"
    assert "2 GPUs, 1 shared" in lines[4]


def test_interference_says_how_sure_it_is_and_how_old_the_baseline(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.replies["GET /v1/interference"] = [ROW, {**ROW, "job": "j9", "state": "verify", "slowdown": None}]
    assert main(["--agent", agent.address, "interference"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "+2.1 % ± 0.8" in out[1] and "20 ms" in out[1] and "1 min" in out[1] and "j2" in out[1]
    assert "checking" in out[2]
    assert main(["--agent", agent.address, "interference", "j9"]) == 0
    assert "j1" not in capsys.readouterr().out


def test_nothing_is_said_of_what_is_not_measured() -> None:
    assert slower(None, None) is None and slower(-0.004, 0.001) == "-0.4 % ± 0.1"


def test_who_keeps_the_memory_it_took_at_its_start_is_shown_as_such(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [{**job, "fixed": True} for job in JOBS]
    agent.replies["GET /v1/shared_gpus"] = [{**GPU, "jobs": jobs}]
    monkeypatch.setattr(time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["--agent", agent.address, "gpus", "--shared", "0.5"]) == 130
    shown = capsys.readouterr().out
    assert "40 GiB (at its start)" in shown and "30 GiB (ignored)" in shown
