"""Tests of `agentctl groups`."""

import json
from typing import Any

import pytest

from cli.jobs.jobs import step_time
from cli.main import main
from tests.cli.conftest import FakeAgent


def job(name: str, **more: Any) -> dict[str, Any]:
    known = {"work_s": 0.4, "net_s": 0.03, "step_s": 0.25, "left_s": 300.0, "profiled": True}
    return {"job": name, "hosts": ["gpu1", "gpu2"], "processes": 2, "elastic": True, **known, **more}


KNOWN = {
    "group": "auto/j1",
    "pool": "auto",
    "hosts": ["gpu1", "gpu2"],
    "jobs": [job("j2"), job("j1", elastic=False)],
    "decided": "in force: j2 came: score 0.7 to 0.9",
    "predicted_s": 0.4,
    "cpu": 0.91,
    "net": 0.15,
    "cpu_measured": 0.88,
    "net_measured": 0.14,
    "age_s": 0.0,
}
UNKNOWN = {
    **KNOWN,
    "group": "lab/night/j3",
    "pool": "lab/night",
    "hosts": ["gpu3"],
    "decided": "j3 is not profiled yet",
    "jobs": [job("j3", profiled=False, left_s=None, step_s=0.0)],
    **dict.fromkeys(("predicted_s", "cpu", "net", "cpu_measured", "net_measured")),
}


def test_groups_stand_in_the_order_of_turns_and_say_what_is_not_known(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.replies["GET /v1/groups"] = [KNOWN, UNKNOWN, KNOWN]
    assert main(["--agent", agent.address, "groups"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = "auto/j1 gpu1 gpu2 400 ms 91%, 88% 15%, 14% j2 2 250 ms 200 ms 30 ms 5 min"
    assert lines[1].split() == first.split()
    assert lines[2].split()[:7] == ["auto/j1", "-", "-", "-", "-", "j1", "(stays)"]
    assert "not profiled" in lines[3] and lines[3].split()[-3:] == ["-", "-", "-"]
    assert lines[4:6] == ["auto: in force: j2 came: score 0.7 to 0.9", "lab/night: j3 is not profiled yet"]
    assert lines[6].startswith("3 jobs in 2 groups"), "two hosts that answer for one group count once"


def test_one_pool_is_shown_alone_also_as_json(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.replies["GET /v1/groups"] = [KNOWN, UNKNOWN]
    assert main(["--agent", agent.address, "groups", "lab/night", "--json"]) == 0
    assert [group["group"] for group in json.loads(capsys.readouterr().out)["data"]] == ["lab/night/j3"]


def test_where_no_job_shares_hosts_it_says_how_one_would(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.replies["GET /v1/groups"] = []
    assert main(["--agent", agent.address, "groups"]) == 0
    assert "agentctl submit --share-host auto" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "said"), [(3.59e-47, "0 ms"), (4.2e-7, "0 ms"), (0.0083, "8.3 ms"), (0.4321, "432 ms"), (1.2, "1.2 s")]
)
def test_a_step_is_shown_to_a_microsecond(seconds: float, said: str) -> None:
    assert step_time(seconds) == said
