"""`agentctl voters`, against agents whose answers are written here."""

import json
from typing import Any

import pytest

from cli.main import main
from tests.cli.conftest import FakeAgent


def view(*hosts: str, learner: str = "", leaving: str = "", under_way: str = "") -> dict[str, Any]:
    row = {"part": "votes", "entry": 90, "names": ["gpu1"], "notes": [], "age_s": 0.0}
    rows = [{**row, "host": host, "leads": host == "gpu1"} for host in hosts]
    return {"voters": hosts, "learner": learner, "leaving": leaving, "under_way": under_way, "rows": rows}


def run(agent: FakeAgent, *words: str) -> int:
    return main([*words, "--agent", agent.address])


def test_who_votes_is_a_table_with_what_should_be_known(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    shown = view("gpu1", "gpu2", learner="gpu3", under_way="gpu3 will vote; it is receiving the log")
    shown["rows"][1] |= {"notes": ["agent.toml says another thing"], "part": "away", "age_s": 70.0}
    agent.replies["GET /v1/voters"] = shown
    assert run(agent, "voters") == 0
    out = capsys.readouterr().out
    assert "gpu1  votes  leads" in out and "gpu2  away" in out
    assert "gpu3 will vote; it is receiving the log" in out
    assert "gpu2: agent.toml says another thing" in out


def test_a_change_is_asked_for_and_waited_for(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.hosts.voters.LOOK_S", 0.0)
    answers = [
        view("gpu1", "gpu2", "gpu3"),  # this host's copy does not show it yet
        view("gpu1", "gpu2", "gpu3", learner="gpu4", leaving="gpu3", under_way="gpu4 will replace gpu3"),
        view("gpu1", "gpu2", "gpu4"),
    ]
    agent.replies["GET /v1/voters"] = lambda _: answers.pop(0) if answers[1:] else answers[0]
    agent.replies["POST /v1/voters"] = {"said": "gpu4 will replace gpu3; it is receiving the log"}
    agent.unanswered = [{"host": "gpu3", "why": "no answer within 3 s", "age_s": None}]
    assert run(agent, "voters", "replace", "gpu3", "gpu4") == 0, "that it is dead is why it is replaced"
    assert len(answers) == 1
    assert ("POST /v1/voters", {"add": "gpu4", "remove": "gpu3", "force": False}) in agent.asked
    assert "is receiving the log" in capsys.readouterr().out


def test_a_change_that_takes_long_goes_on_by_itself(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent.replies["POST /v1/voters"] = {"said": "gpu4 will vote; it is receiving the log"}
    agent.replies["GET /v1/voters"] = view("gpu1", learner="gpu4", under_way="gpu4 will vote; it is receiving the log")
    assert run(agent, "voters", "add", "gpu4", "--timeout", "0.1s") == 6
    err = capsys.readouterr().err
    assert "gpu4 will vote" in err and "it continues; watch it with agentctl voters" in err
    assert run(agent, "voters", "add", "gpu4", "--no-wait") == 0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("add", "takes 1 host"),
        ("replace gpu3", "takes 2 hosts"),
        ("list gpu1", "takes no hosts"),
        ("drop gpu1", "invalid"),
    ],
)
def test_a_change_names_its_hosts(agent: FakeAgent, capsys: pytest.CaptureFixture[str], words: str, what: str) -> None:
    assert run(agent, "voters", *words.split(), "--json") == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert what in error["what"] + error["why"]
