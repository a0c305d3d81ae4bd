"""`agentctl top`: keys pressed by textual's pilot, against an agent whose stream of events a test writes.

`top.txt` holds the screens, as text. `python -m tests.cli.test_top` writes it anew (`make samples`).
"""

import asyncio
import contextlib
import json
import queue
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App
from textual.pilot import Pilot

from cli.client import Agent
from cli.top.app import TopApp
from cli.top.columns import GAP, LAST_MIN, cut, fitting, keys_that_fit
from cli.top.views import VIEWS, Place, lines, rows
from tests.cli.conftest import FakeAgent, job_view
from tests.cli.rack_answers import GPU, HOSTS, SLAB, STORY, Run
from tests.cli.rack_answers import run as run

FILE = Path(__file__).parent / "top.txt"
WAITS = "2nd of the waiting jobs, in queue 0; it needs 8 GPUs and 1 is free; it starts when enough of j1 have ended"
NOT_YET: dict[str, Any] = {"state": "queued", "places": [], "ranks": [], "reason": WAITS}
ROWS: dict[str, dict[str, Any]] = {
    "jobs": {
        "j1": job_view(user="ann"),
        "j2": job_view(id="j2", name="a-long-name-of-a-sweep-over-learning-rates", user="bob", gpus=8, **NOT_YET),
        "j3": job_view(id="j3", name="eval", state="failed", reason="rank 0 on gpu1 exited with 3"),
    },
    "hosts": {str(host["host"]): host for host in HOSTS},
    "gpus": {"gpu1/0": GPU, "gpu1/1": GPU | {"index": 1, "job": None, "use": "process 77 of bob uses 3 GiB"}},
    "slabs": {"demo/0": SLAB, "demo/1": SLAB | {"index": 1, "state": "cold", "lender": None, "borrower": "gpu3"}},
}


def told(event: str, **data: Any) -> bytes:
    return f"event: {event}\nid: 7.1\ndata: {json.dumps({'as_of_wall_s': 1.0, 'unanswered': [], **data})}\n\n".encode()


class Stream:
    """What an agent says, as long as the test wants."""

    def __init__(self, agent: FakeAgent) -> None:
        self._said: queue.Queue[bytes | None] = queue.Queue()
        self._parts: list[bytes] = []
        for table, found in ROWS.items():
            self.says("snapshot", table=table, host="gpu1", rows=found)
        agent.replies |= {
            "GET /v1/events": lambda _: self._told(),
            "GET /v1/jobs/j1": job_view(),
            "GET /v1/leader": {"leader": "gpu1"},
            "GET /v1/why/j1": [STORY],
        }

    def says(self, event: str, **data: Any) -> None:
        self._said.put(told(event, **data))

    def ends(self) -> None:
        self._said.put(None)

    def _told(self) -> Iterator[bytes]:
        yield b": Covey\n\n"
        while (part := self._said.get()) is not None:
            yield part


def text(app: App[None]) -> str:
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


async def until(pilot: Pilot[None], pattern: str) -> str:
    """What is on the screen once the pattern is."""
    for _ in range(1200):
        if re.search(pattern, seen := text(pilot.app)):
            return seen
        await pilot.pause(0.05)
    raise AssertionError(f"{pattern} never was on the screen:\n{text(pilot.app)}")


WALK = (
    ("", "j2 .*queued"),
    ("down", "2nd of"),
    ("up enter", r"(?s)2 ranks.*running.*ended"),
    ("enter", "1 host\n"),
    ("enter", "2 GPUs"),
    ("down", "process 77"),
    ("enter", r"1\s+slab\n"),
    ("escape escape escape escape", "2 jobs waiting"),
    ("a", r"j3\s.*failed"),
    ("2", "2 hosts\n"),
    ("3", r"(?s)GPUs: 2 GPUs.*gpu1.*out"),
    ("4", "2 slabs"),
    ("1 slash b o b", "1 of 2 jobs"),
    ("escape", "2 jobs waiting or"),
    ("question_mark", "go down"),
    ("escape", "2 jobs waiting"),
)
"""Keys, and what is on the screen after them."""


async def walked(agent: FakeAgent, width: int, height: int) -> str:
    """The screens of a walk through all views."""
    stream = Stream(agent)
    app = TopApp(Agent([agent.address]), wall=lambda: 1.0)
    screens = []
    async with app.run_test(size=(width, height)) as pilot:
        for keys, pattern in WALK:
            await pilot.press(*keys.split())
            await until(pilot, pattern)
            await pilot.pause()
            seen = re.sub(r"\n{2,}", "\n", text(app))
            screens.append(f"---- {width}x{height}: {keys or 'start'}\n{seen}")
        stream.ends()
    return "\n".join(screens) + "\n"


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (200, 20)])
async def test_the_screens_are_what_was_looked_at(agent: FakeAgent, size: tuple[int, int]) -> None:
    screens = re.split(r"(?m)^(?=---- )", FILE.read_text())
    seen = await walked(agent, *size)
    wanted = "".join(each for each in screens if each.startswith(f"---- {size[0]}x{size[1]}:"))
    assert seen == wanted, "next: make samples, and look at tests/cli/top.txt"
    assert all(len(line) <= size[0] for line in seen.splitlines() if not line.startswith("----"))


async def test_what_the_stream_says_is_seen_and_the_cursor_stays_on_its_row(agent: FakeAgent) -> None:
    stream, app = Stream(agent), TopApp(Agent([agent.address]))
    async with app.run_test(size=(100, 24)) as pilot:
        await until(pilot, "2 jobs")
        await pilot.press("down")
        await until(pilot, "j2: 2nd of")
        stream.says("change", table="jobs", set={"j2": {"reason": "1st of the waiting jobs"}}, gone=["j1"])
        await until(pilot, r"(?s)1 job waiting.*j2: 1st of the waiting jobs")
        stream.says("change", table="jobs", set={"j9": job_view(id="j9")}, gone=[], unanswered=[{"host": "gpu4"}])
        await until(pilot, r"(?s)no answer: gpu4.*j9 .*j2: 1st")
        stream.says("change", table="jobs", set={}, gone=["nobody"], unanswered=[])
        await until(pilot, r"jobs: 2 jobs waiting or running\n")
        stream.ends()
        await until(pilot, "as it was: the agent ended the stream")
        stream.says("snapshot", table="jobs", host="gpu1", rows={})
        await until(pilot, r"jobs: 0 jobs waiting or running\n")
        asked = [target for target, _ in agent.asked if "/events" in target]
        assert asked[0].endswith("tables=jobs%2Chosts%2Cgpus%2Cslabs") and asked[1].endswith("since=7.1")
        stream.ends()


async def test_of_many_rows_the_first_are_shown_and_a_filter_finds_the_others(agent: FakeAgent) -> None:
    stream, app = Stream(agent), TopApp(Agent([agent.address]))
    stream.says("snapshot", table="gpus", rows={f"h/{i}": GPU | {"index": i, "job": f"j{i}"} for i in range(1200)})
    async with app.run_test(size=(100, 24)) as pilot:
        await pilot.press("3")
        await until(pilot, r"1200 GPUs, the first 500 here")
        await pilot.press(*"/j1199")
        await until(pilot, r"(?s)1 of 1200 GPUs\n.* 1199 ")
        stream.ends()


async def test_an_agent_that_refuses_the_stream_is_told_of_in_its_words(agent: FakeAgent) -> None:
    Stream(agent)
    agent.replies["GET /v1/events"] = (75, 503)
    app = TopApp(Agent([agent.address]))
    async with app.run_test(size=(100, 24)) as pilot:
        await until(pilot, "as it was: no: because")


async def test_logs_why_and_shell_are_agentctls_own(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    typed: list[list[str]] = []
    stream, app = Stream(agent), TopApp(Agent([agent.address]))
    log = {"data": "c3RlcCA0MQo=", "offset": 0, "end": True, "host": "gpu1", "size": 8, "timed": None}
    agent.replies |= {
        "GET /v1/jobs/j1/logs": log | {"data": ""},
        "GET /v1/jobs/j1/logs?rank=0&offset=0": log,
        "GET /v1/jobs/j1": job_view(state="done"),
    }

    def run(argv: list[str], **_: Any) -> Any:
        typed.append(argv)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr("cli.top.app.subprocess.run", run)
    monkeypatch.setattr(TopApp, "suspend", lambda _: contextlib.nullcontext())
    async with app.run_test(size=(90, 24)) as pilot:
        await until(pilot, "j1 ")
        await pilot.press("w")
        await until(pilot, r"(?s)agentctl why j1.*granted .*first in its queue")
        await pilot.press("escape")
        await until(pilot, "2 jobs")
        await pilot.press("l")
        await until(pilot, r"agentctl logs j1 -f --tail 200")
        await pilot.press("q")
        await until(pilot, "2 jobs")
        await pilot.press("s", "enter")
        await until(pilot, "2 ranks(.|\n)*77")
        await pilot.press("down", "s")
        await pilot.pause()
        assert [words[-2:] for words in typed] == [["shell", "j1"], ["shell", "j1.1"]]
        assert typed[0][typed[0].index("--agent") + 1] == agent.address
        stream.ends()


def test_top_without_textual_or_a_terminal_is_refused_in_three_lines(
    run: Run, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("top", "--json")[0] == 2
    code, _, err = run("top")
    assert (code, "top needs a terminal" in err) == (2, True)
    monkeypatch.setattr("cli.top.top.sys.stdin", sys.stdout)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.delitem(sys.modules, "cli.top.app")
    monkeypatch.setitem(sys.modules, "textual", None)
    code, _, err = run("top")
    lines = err.splitlines()
    assert code == 1 and len(lines) == 3 and "textual is not installed" in lines[1] and "pip install" in lines[2]


# ---- columns ---------------------------------------------------------------------------------------------------------

words = st.text("abc def", max_size=40)


@given(st.lists(st.tuples(*[words] * 5), max_size=6), st.integers(10, 200))
def test_columns_fit_and_the_first_is_always_there(cells: list[tuple[str, ...]], width: int) -> None:
    titles = ("JOB", "NAME", "STATE", "TIME", "WHY")
    found = fitting(titles, cells, ("NAME", "TIME", "STATE"), width)
    assert found[0].place == 0 and [each.place for each in found] == sorted({each.place for each in found})
    if len(found) > 1:
        assert sum(each.width + GAP for each in found) <= width
    why = next((each for each in found if each.place == 4), None)
    assert why is None or why.width >= min(LAST_MIN, max(len(row[4]) for row in cells))


@given(words, st.integers(1, 60))
def test_a_cell_is_cut_between_words(said: str, width: int) -> None:
    short = cut(said, width)
    assert len(short) <= width
    if short != said and " " in short.strip():
        assert said.startswith(short[:-1]) and said[len(short) - 1] == " "


def test_every_view_says_which_columns_a_narrow_terminal_does_without() -> None:
    for name, view in VIEWS.items():
        assert set(view.drops) < set(view.titles) and set(view.right) <= {*view.titles, "SEEN"}
        place = Place(name, job="j1", host="gpu1")
        found = lines(place, ROWS, rows(place, ROWS, ROWS["jobs"]["j1"]["ranks"]))
        assert found and all(len(line.cells) == len(view.titles) for line in found), name
    assert keys_that_fit((("q", "quit"), ("x", "a very long thing"), ("?", "keys")), 16) == "q quit  ? keys"


if __name__ == "__main__":
    found = []
    for width, height in ((40, 12), (80, 24), (200, 20)):
        with tempfile.TemporaryDirectory() as folder:
            fake = FakeAgent(Path(folder) / "a.sock")
            found.append(asyncio.run(walked(fake, width, height)))
            fake.close()
    FILE.write_text("".join(found))
