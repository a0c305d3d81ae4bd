"""What ranks wrote, as agentctl shows it: whole lines with their rank, followed to the end of the job."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from cli.client import Agent
from cli.jobs.logs import collect
from cli.main import main
from tests.cli.conftest import FakeAgent

Job = Callable[..., dict[str, Any]]


class Output:
    """What two ranks write, served in parts of `part` bytes from the offset asked for."""

    def __init__(self, agent: FakeAgent, part: int) -> None:
        self.texts = [b"", b""]
        self.part = part
        self.agent = agent
        agent.reply = self.reply  # type: ignore[method-assign]
        self.state: Callable[[], dict[str, Any]] = dict
        self.dropped = range(0)
        """Offsets that the host has not kept."""

    def reply(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        if "/logs" not in target:
            return 200, {"schema": 1, "host": "gpu1", "as_of_wall_s": 0.0, "data": self.state()}
        query = dict(pair.split("=") for pair in target.partition("?")[2].split("&"))
        offset = int(query["offset"])
        offset = self.dropped.stop if offset in self.dropped else offset
        data = self.texts[int(query["rank"])][offset : offset + self.part]
        found = {"data": base64.b64encode(data).decode(), "offset": offset, "end": False, "host": "gpu1", "size": 0}
        return 200, {"schema": 1, "host": "gpu1", "as_of_wall_s": 0.0, "data": found}


@pytest.mark.parametrize("part", [3, 1000])
def test_every_line_has_its_rank_whatever_the_parts_were(
    agent: FakeAgent, job: Job, part: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(agent, part)
    output.state = job
    output.texts = [b"one\ntwo\n", b"\xffeins\nlast without end"]
    assert main(["logs", "j1"]) == 0
    lines = capfdbinary.readouterr().out.splitlines()
    assert sorted(lines) == sorted([b"[0] one", b"[0] two", b"[1] \xffeins", b"[1] last without end"])
    assert [line for line in lines if line.startswith(b"[1]")] == [b"[1] \xffeins", b"[1] last without end"]


def test_for_programs_every_line_is_an_object_with_its_rank(
    agent: FakeAgent, job: Job, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(agent, 3)
    output.state = job
    output.texts = [b'say "one"\n', b"\xffeins\nlast without end"]
    assert main(["logs", "j1", "--json"]) == 0
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert sorted((line["rank"], line["line"]) for line in found) == [
        (0, 'say "one"'), (1, "last without end"), (1, "\ufffdeins"),
    ]  # fmt: skip


def test_one_rank_is_shown_as_it_is(agent: FakeAgent, job: Job, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    output = Output(agent, 1000)
    output.state = job
    output.texts = [b"", b"plain\n"]
    assert main(["logs", "j1", "--rank", "1"]) == 0
    assert capfdbinary.readouterr().out == b"plain\n"


def test_following_ends_with_the_job_and_misses_nothing(
    agent: FakeAgent, job: Job, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.jobs.logs.POLL_S", 0.0)
    output = Output(agent, 4)
    looks = 0

    def state() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        output.texts[0] += b"line %d\n" % looks
        return job(state="done" if looks == 5 else "running")

    output.state = state
    assert main(["logs", "j1", "-f", "--rank", "0"]) == 0
    assert capfdbinary.readouterr().out == b"".join(b"line %d\n" % n for n in range(1, 6))


def test_a_rank_whose_host_is_away_does_not_hide_the_others(
    agent: FakeAgent, job: Job, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(agent, 1000)
    output.state = job
    output.texts = [b"here\n", b""]
    whole = output.reply

    def reply(method: str, target: str, body: Any) -> tuple[int, Any]:
        if "rank=1" in target:
            return 503, {
                "code": 75,
                "what": "the output of rank 1 cannot be read",
                "why": "gpu2 is away",
                "next": "wait",
            }
        return whole(method, target, body)

    agent.reply = reply  # type: ignore[method-assign]
    assert main(["logs", "j1"]) == 1
    out = capfdbinary.readouterr()
    assert out.out == b"[0] here\n"
    assert b"gpu2 is away" in out.err


@pytest.mark.parametrize(
    ("rank", "what"),
    [
        ([], "the output of j1 is no longer kept"),
        (["--rank", "1"], "the output of rank 1 of j1 is no longer kept"),
    ],
)
def test_output_that_was_removed_is_said_to_be(
    agent: FakeAgent, job: Job, capsys: pytest.CaptureFixture[str], rank: list[str], what: str
) -> None:
    def reply(method: str, target: str, body: Any) -> tuple[int, Any]:
        if "/logs" not in target:
            return 200, {"schema": 1, "host": "gpu1", "as_of_wall_s": 0.0, "data": job(state="done")}
        number = target.partition("rank=")[2][:1]
        gone = f"the output of rank {number} of j1 is no longer kept"
        return 404, {"code": 3, "what": gone, "why": "gpu2 removed it", "next": "agentctl job j1"}

    agent.reply = reply  # type: ignore[method-assign]
    assert main(["logs", "j1", *rank]) == 3
    out = capsys.readouterr()
    assert out.out == ""
    for said in (what, "gpu2 removed it", "agentctl job j1"):
        assert said in out.err


def test_a_whole_output_is_collected_from_its_parts(agent: FakeAgent) -> None:
    output = Output(agent, 4)
    output.texts = [b"", "a long line of grün\n".encode()]
    assert collect(Agent([agent.address]), "j1", 1) == "a long line of grün\n"


def test_what_a_host_has_not_kept_is_said_in_its_place(
    agent: FakeAgent, job: Job, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(agent, 8)
    output.state = job
    output.texts = [b"", b"begin\nlo" + b"x" * 92 + b"ng\nend\n"]
    output.dropped = range(8, 100)
    assert main(["logs", "j1", "--rank", "1"]) == 0
    assert capfdbinary.readouterr().out == b"begin\nlo\n[covey: 92 bytes of output are no longer kept]\nng\nend\n"
    assert collect(Agent([agent.address]), "j1", 1) == "begin\nlong\nend\n"
