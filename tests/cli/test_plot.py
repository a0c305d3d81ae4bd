"""Curves in a terminal: within the width that there is, whatever the values are."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cli.main import main
from cli.plot import HEIGHT, WIDTH_MAX, WIDTH_MIN, chart
from tests.cli.conftest import FakeAgent

values = st.floats(allow_nan=False, allow_infinity=False)
curves = st.dictionaries(st.integers(0, 1 << 53), values, min_size=1, max_size=600).map(
    lambda each: sorted(each.items())
)


@given(curves, st.integers(1, 400))
@example([(10**15, 10.0)], 1)
def test_a_chart_has_room_for_any_values_in_any_width(points: list[tuple[int, float]], width: int) -> None:
    title, *lines = chart("loss", points, width).split("\n")
    assert title == "loss" and len(lines) == HEIGHT + 2
    assert max(map(len, lines)) <= max(WIDTH_MIN, min(WIDTH_MAX, width))
    marks = "".join(lines[:HEIGHT])
    assert marks.isascii() and "*" in marks


def test_a_falling_curve_begins_above_and_ends_below() -> None:
    rows = chart("loss", [(step, 10.0 - step) for step in range(10)], 40).split("\n")[1:11]
    assert rows[0].startswith(" 10 |*") and rows[-1].startswith("  1 |") and rows[-1].endswith("*")


def test_the_curves_of_a_job_are_drawn_with_loss_first(
    agent: FakeAgent, job: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    points = [
        {
            "step": step,
            "step_s": 0.2 if step else None,
            "rank": 0,
            "epoch": 1,
            "metrics": {"acc": 0.5, "loss": 1.0 / step},
        }
        for step in (1, 2, 3)
    ]
    curve: dict[str, Any] = {"id": "j1", "points": points, "unanswered": ["gpu2"]}

    def reply(method: str, target: str, body: Any) -> tuple[int, Any]:
        assert target.startswith("/v1/jobs/j1/curve")
        return 200, {"schema": 1, "host": "gpu1", "as_of_wall_s": 0.0, "data": curve}

    agent.reply = reply  # type: ignore[method-assign]
    assert main(["job", "j1", "--plot"]) == 8
    out = capsys.readouterr().out
    assert out.index("loss  0.333333") < out.index("acc  0.5") < out.index("step time, s  0.2")
    assert "gpu2 did not answer, so steps may be missing" in out
    curve |= {"points": [], "unanswered": []}
    assert main(["job", "j1", "--plot"]) == 0
    assert "no step of j1 is known" in capsys.readouterr().out
    assert main(["job", "j1", "--plot", "--json"]) == 0
    assert '"points": []' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (-11, b"Fatal Python error: x\n", "rank 0 ended by SIGSEGV: its Python stack is in agentctl logs j1 --rank 0"),
        (134, b"abort\n", "rank 0 ended by SIGABRT: it wrote no Python stack; see agentctl logs j1 --rank 0"),
        (-9, b"", ""),
        (3, b"", ""),
    ],
)  # fmt: skip
def test_a_rank_that_a_fault_ended_has_its_stack_named(
    agent: FakeAgent,
    job: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    code: int,
    text: bytes,
    said: str,
) -> None:
    view = job(state="failed")
    view["ranks"] = [{**view["ranks"][0], "rank": 0, "code": code}]

    def reply(method: str, target: str, body: Any) -> tuple[int, Any]:
        data: Any = view
        if "/logs" in target:
            part = base64.b64encode(text).decode()
            data = {"data": part, "offset": 0, "end": True, "host": "gpu1", "size": len(text)}
        return 200, {"schema": 1, "host": "gpu1", "as_of_wall_s": 0.0, "data": data}

    agent.reply = reply  # type: ignore[method-assign]
    assert main(["job", "j1"]) == 0
    out = capsys.readouterr().out
    assert said in out and (bool(said) or "ended by" not in out)
