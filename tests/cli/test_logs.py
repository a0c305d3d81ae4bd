"""What ranks wrote, as agentctl shows it: whole lines with their rank, followed to the end of the job."""

import base64
import io
import json
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cli.client import Agent
from cli.jobs.log_lines import BEGUN_MAX, STILL_S, Appended, RankLines, Redrawn, cut, taken
from cli.jobs.logs import age_of, collect, tail_of
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
        self.since: dict[int, tuple[int, bool]] = {}
        """Age in seconds -> where output begins that is no older, and whether that is known."""

    def reply(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        if "/logs" not in target:
            return 200, {"schema": 1, "host": "gpu1", "as_of_wall_s": 0.0, "data": self.state()}
        query = dict(pair.split("=") for pair in target.partition("?")[2].split("&"))
        offset, timed = int(query["offset"]), None
        if "since_s" in query:
            offset, timed = self.since.get(int(query["since_s"]), (0, False))
        offset = self.dropped.stop if offset in self.dropped else offset
        data = self.texts[int(query["rank"])][offset : offset + self.part]
        size = len(self.texts[int(query["rank"])])
        found = {"data": base64.b64encode(data).decode(), "offset": offset, "end": False, "host": "gpu1", "size": size}
        found["timed"] = timed
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


BAR = b"".join(b"\r%d %%" % percent for percent in range(1, 101))


@pytest.mark.parametrize("part", [1, 7, 1000])
def test_of_a_line_that_was_overwritten_the_last_state_is_shown(
    agent: FakeAgent, job: Job, part: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(agent, part)
    output.state = job
    output.texts = [b"begin\r\n" + BAR + b"\n" + BAR + b"\r    \rend", b""]
    assert main(["logs", "j1", "--rank", "0"]) == 0
    assert capfdbinary.readouterr().out == b"begin\n100 %\nend\n"
    assert main(["logs", "j1", "--rank", "0", "--raw"]) == 0
    assert capfdbinary.readouterr().out == output.texts[0]
    assert main(["logs", "j1", "--raw"]) == 0
    assert capfdbinary.readouterr().out.split(b"\n")[1] == b"[0] " + BAR


def test_the_last_lines_and_those_since_a_time_are_shown(
    agent: FakeAgent, job: Job, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = Output(agent, 1 << 16)
    output.state = job
    long = b"x" * 70_000
    output.texts = [b"one\n" + long + b"\ntwo\nthree", b"alone\n"]
    for lines, expected in (
        (1, b"three\n"), (2, b"two\nthree\n"), (3, long + b"\ntwo\nthree\n"), (9, output.texts[0] + b"\n")
    ):  # fmt: skip
        assert main(["logs", "j1", "--rank", "0", "--tail", str(lines)]) == 0
        assert capfdbinary.readouterr().out == expected
    output.since = {600: (4 + 70_001, True)}
    assert main(["logs", "j1", "--rank", "0", "--since", "10m"]) == 0
    assert capfdbinary.readouterr() == (b"two\nthree\n", b"")
    assert main(["logs", "j1", "--rank", "1", "--since", "1h"]) == 0
    out = capfdbinary.readouterr()
    assert out.out == b"alone\n" and b"when rank 1 wrote it is not known on gpu1" in out.err
    for wrong in (["--tail", "0"], ["--tail", "-3"], ["--since", "soon"], ["--since", "2999-01-01"]):
        assert main(["logs", "j1", *wrong]) == 2
        assert capfdbinary.readouterr().out == b""


def test_a_time_of_day_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.mktime((2026, 3, 4, 14, 0, 0, 0, 0, -1))
    monkeypatch.setattr("cli.jobs.logs.time.time", lambda: now_s)
    assert age_of("90") == 90 and age_of("2h") == 7200
    assert age_of("2026-03-04 13:30") == age_of("2026-03-04T13:30:00") == 1800
    assert 0 <= age_of("13:30") <= 86_400 and 0 <= age_of("14:30:30") <= 86_400


def begun_at(now_s: float, text: bytes) -> RankLines:
    rank = RankLines(0)
    rank.take(text, now_s)
    return rank


@pytest.mark.parametrize(
    ("prefix", "begun", "rest", "shown", "then"),
    [
        (b"", b"loading ..", b" done\n", b"loading ..", b" done\n"),
        (b"[0] ", b"loading ..", b" done\n", b"[0] loading ..\n", b"[0] loading .. done\n"),
        (b"[0] ", b"loading ..", b"\n", b"[0] loading ..\n", b""),
        (b"", b"\r1 %\r2 %", b"\r3 %\n", b"2 %\n", b"3 %\n"),
        (b"[0] ", b"\r1 %\r2 %", b"\n", b"[0] 2 %\n", b""),
    ],
)
def test_where_lines_stay_a_begun_one_is_written_when_still_for_a_second(
    prefix: bytes, begun: bytes, rest: bytes, shown: bytes, then: bytes
) -> None:
    out = io.BytesIO()
    shows, rank = Appended(out, {0: prefix}), begun_at(10.0, begun)
    shows.show([rank], 10.0 + STILL_S / 2)
    assert out.getvalue() == b""
    for now_s in (10.0 + STILL_S, 15.0):
        shows.show([rank], now_s)
        assert out.getvalue() == shown
    rank.take(rest, 16.0)
    shows.show([rank], 16.0)
    assert out.getvalue() == shown + then


def test_on_a_terminal_begun_lines_are_redrawn_below_the_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 10)))
    out = io.BytesIO()
    shows = Redrawn(out, {0: b"[0] ", 1: b"[1] "})
    ranks = [begun_at(0.0, b"\r1 %"), RankLines(1)]
    ranks[1].take(b"\x1b[1mloading" + b"." * 40, 0.0)
    shows.show(ranks, 0.1)
    assert out.getvalue() == b"[0] 1 %"
    shows.show(ranks, STILL_S)
    assert out.getvalue().endswith(b"\r\x1b[J[0] 1 %\r\n[1] loading........")
    ranks[0].take(b"\r2 %\n", 2.0)
    shows.show(ranks, 2.0)
    assert out.getvalue().endswith(b"\r\x1b[1A\x1b[J[0] 2 %\n[1] loading........")
    before = out.getvalue()
    shows.show(ranks, 9.0)
    assert out.getvalue() == before
    shows.end()
    assert out.getvalue() == before + b"\r\n"
    assert cut("\x1b[31m日本\x07x", 4) == "日本"


def test_the_last_lines_are_found_across_gibibytes_that_were_dropped() -> None:
    """Kept are the first 100 kB and the last 10 kB of 8 GiB; each answer has 64 KiB at most."""
    first, gap_end, size = 100_000, (8 << 30) - 10_000, 8 << 30
    asked: list[int] = []

    def byte_at(offset: int) -> int:
        return ord("\n") if offset % 1000 == 999 else ord("x")

    class Parts:
        def get(self, *_: object, offset: int, **more: object) -> Any:
            asked.append(offset)
            begin = gap_end if first <= offset < gap_end else offset
            end = min(begin + (1 << 16), first if begin < first else size)
            data = base64.b64encode(bytes(map(byte_at, range(begin, end)))).decode()
            return SimpleNamespace(data={"offset": begin, "size": size, "data": data})

    before = sum(byte_at(offset) == ord("\n") for offset in range(gap_end, size))
    at = tail_of(Parts(), "j1", 0, before + 11)  # type: ignore[arg-type]
    assert first - 11_000 <= at <= first - 9_000 and byte_at(at - 1) == ord("\n")
    assert len(asked) < 60


@pytest.mark.parametrize("text", [b"\r%6d of 1000000", b"%6d no line at all "])
def test_a_begun_line_takes_no_more_memory_however_long_it_is(text: bytes) -> None:
    rank, shown = RankLines(0, raw=True), b""
    for number in range(40_000):
        rank.take(text % number, 0.0)
        assert len(rank.begun) <= BEGUN_MAX
        shown += b"".join(taken(rank))
    rank.flush()
    assert shown + b"".join(taken(rank)) == b"".join(text % number for number in range(40_000))
