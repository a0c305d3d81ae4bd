"""`agentctl tensors`: what a job was promised, what it lost, and which hosts refused it."""

from typing import Any

import pytest

from cli.jobs import tensors
from cli.main import main
from tests.cli.conftest import FakeAgent

ROW: dict[str, Any] = {
    "job": "j1",
    "host": "gpu3",
    "epoch": (1 << 32) + 2,
    "workers": 4,
    "joined": 4,
    "tensors": 2,
    "bytes": 2600,
    "rounds": 80,
    "received_bytes": 1 << 20,
    "sent_bytes": 1 << 21,
    "age_s": 0.5,
    "period_us": 204_300,
    "work_us": 8_120,
    "load": 0.0397,
    "loss": 0.0213,
    "loss_measured": 0.031,
    "refused": "",
}


@pytest.fixture
def shown(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*rows: dict[str, Any]) -> str:
        agent.replies["GET /v1/tensors"] = list(rows)
        assert main(["tensors"]) == 0
        return capsys.readouterr().out

    return call


def test_the_promise_of_a_job_is_shown_with_what_it_measures(shown: Any) -> None:
    words = shown(ROW).split()
    assert words[:4] == ["JOB", "AGGREGATOR", "BY", "EPOCH"]
    line = shown(ROW).splitlines()[1]
    assert all(text in line for text in ("204.3 ms", "8.12 ms", "4.0%", "2.1% (3.1%)", "1.2"))


def test_a_job_on_trial_was_promised_nothing_yet(shown: Any) -> None:
    trial = ROW | {"period_us": None, "work_us": None, "load": None, "loss": None, "loss_measured": None}
    line = shown(trial).splitlines()[1]
    assert "%" not in line and "ms" not in line
    assert "(3.1%)" in shown(trial | {"loss_measured": 0.031})


def test_an_agent_of_another_version_says_less_and_is_shown_all_the_same(shown: Any) -> None:
    old = {
        name: value for name, value in ROW.items() if name not in ("period_us", "work_us", "load", "loss", "refused")
    }
    old.pop("loss_measured")
    assert "gpu3" in shown(old)


def test_sums_that_are_not_finite_are_a_line_of_its_own(shown: Any) -> None:
    out = shown(ROW, ROW | {"job": "j3", "not_finite": 12})
    assert (
        "j3: 12 numbers of its sums were NaN or infinite; the log of aggd on gpu3 names the first" in out.splitlines()
    )
    assert out.count("NaN") == 1


def test_why_a_job_was_refused_is_a_line_of_its_own(shown: Any) -> None:
    why = "gpu2: in a cycle of 343000 us j1 would lose 40.1% of its speed"
    out = shown(ROW, ROW | {"job": "j3", "refused": why})
    assert f"j3 was refused: {why}" in out.splitlines()
    assert out.count("was refused") == 1


def test_who_sums_a_table_is_said_and_why_no_rank_does(shown: Any) -> None:
    direct = ROW | {"job": "j3", "by": "rank 2", "not_finite": 1}
    why = "none of its ranks is on gpu3"
    out = shown(ROW | {"by": "aggd", "not_direct": why}, direct)
    assert f"j1 is summed by aggd on gpu3, not by its own ranks: {why}" in out.splitlines()
    assert out.count("not by its own ranks") == 1 and "rank 2" in out.splitlines()[2]
    assert "the output of rank 2 names the first" in out


def test_a_jobs_line_says_who_sums_each_of_its_tables_now() -> None:
    direct = [ROW | {"job": f"j1/{at}" if at else "j1", "by": f"rank {at}", "host": f"gpu{at}"} for at in (0, 1)]
    moved = ROW | {"job": "j1/1", "epoch": ROW["epoch"] + 4, "by": "aggd", "host": "gpu4", "not_direct": "it was lost"}
    assert tensors.ways([*direct, moved]) == "rank 0 on gpu0, aggd on gpu4 (it was lost)"
    assert tensors.ways([ROW]) == "aggd on gpu3" and tensors.ways([]) == ""


def test_a_table_is_moved_and_waited_for(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    table = ROW | {"job": "j1/1"}
    moved = table | {"host": "gpu4", "epoch": ROW["epoch"] + 4}
    agent.replies["GET /v1/tensors"] = [ROW, table]

    def move(body: dict[str, Any]) -> dict[str, Any]:
        agent.replies["GET /v1/tensors"] = [ROW, table, moved]
        return {"job": "j1/1", "from": "gpu3", "to": "gpu4"}

    agent.replies["POST /v1/tensors/move"] = move
    assert main(["tensors", "--move", "j1/1", "gpu4"]) == 0
    assert capsys.readouterr().out == "j1/1 is summed on gpu4 now, epoch 1.6\n"
    wish = {"job": "j1/1", "epoch": ROW["epoch"], "from": "gpu3", "to": "gpu4"}
    assert ("POST /v1/tensors/move", wish) in agent.asked
    assert main(["tensors", "--move", "j7", "gpu4"]) == 3
    assert "no host sums tensors of a job of that name" in capsys.readouterr().err


def test_a_move_that_is_declined_says_where_to_look(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "MOVE_S", 0.2)
    monkeypatch.setattr(tensors, "LOOK_S", 0.05)
    agent.replies |= {"GET /v1/tensors": [ROW], "POST /v1/tensors/move": {}}
    assert main(["tensors", "--move", "j1", "gpu4"]) == 1
    said = capsys.readouterr().err
    assert "gpu4 did not take it over" in said and "agentctl why j1" in said
