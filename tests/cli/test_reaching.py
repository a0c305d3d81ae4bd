"""`agentctl ping` and `agentctl page`: what is known of a way, and what is not."""

import webbrowser
from typing import Any

import pytest

from cli.client import AgentctlError
from cli.reaching.page import found
from cli.reaching.ping import lines
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run

TCP = "over TCP; no RDMA: this host has no RDMA device"


def a_ping(there: Any = True, **link: Any) -> dict[str, Any]:
    here = {"host": "gpu1", "pages": TCP, "tensors": ""}
    measured = {"host": "gpu2", "rtt_s": 0.0002, "offset_s": -0.001, "whole": True, "why": ""}
    other = {**here, "host": "gpu2", "tensors": "over TCP"} if there else None
    return {"link": {**measured, **link}, "here": here, "there": other, "there_why": "" if there else "too old"}


def test_ping_names_each_path_and_what_is_not_known_of_it(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/hosts/gpu2/ping"] = a_ping()
    code, out, _ = run("ping", "gpu2")
    assert code == 0
    for expected in ("0.20 ms there and back; 64 KiB come through", "1.0 ms apart", f"gpu1 and gpu2: {TCP}"):
        assert expected in out
    assert "gpu1: its plugin is off" in out and "gpu2: over TCP" in out
    agent.replies["GET /v1/hosts/gpu2/ping"] = a_ping(False, rtt_s=None, offset_s=None, whole=None, why="it is away")
    code, out, _ = run("ping", "gpu2")
    assert code == 1 and "no answer: it is away" in out and "did not say: too old" in out
    assert "not known" in dict(lines(a_ping(whole=None, why="lost")))["control"]  # type: ignore[operator]
    assert "MTU" in dict(lines(a_ping(whole=False)))["control"]  # type: ignore[operator]


def test_the_page_is_named_with_who_may_read_it(run: Run, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def browser(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", browser)
    agent.replies["GET /v1/status"] = {"http": {"bind": "127.0.0.1:8470", "read_open": False}}
    code, out, _ = run("page", "--open")
    assert code == 0 and opened == ["http://127.0.0.1:8470/"] and "ssh -L 8470:127.0.0.1:8470 gpu1" in out
    assert found({"http": {"bind": "0.0.0.0:8470"}}, "gpu1")[0] == "https://gpu1:8470/"
    assert "sees all" in found({"http": {"bind": "[::1]:1", "read_open": True}}, "gpu1")[1]
    for status in ({}, {"http": {"bind": ""}}):
        with pytest.raises(AgentctlError, match="no page"):
            found(status, "gpu1")
    monkeypatch.setattr(webbrowser, "open", lambda _url: False)
    assert run("page", "--open")[0] == 3
