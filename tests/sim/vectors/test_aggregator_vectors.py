"""The aggregator's vectors: all pass, and a wrong expectation is told where and how."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sim.vectors.aggregator import HANDLERS

VECTORS = Path(__file__).parents[2] / "vectors"


def cases(name: str) -> list[Any]:
    stem, _, key = name.partition("/")
    content = json.loads((VECTORS / f"{stem}.json").read_text())
    found: list[Any] = content[key] if key else content
    return found


@pytest.mark.parametrize("name", sorted(HANDLERS))
def test_every_shipped_case_passes(name: str) -> None:
    found = dict(HANDLERS[name](cases(name), ()))
    assert len(found) == len(cases(name)) >= 8
    assert not {case: differences for case, differences in found.items() if differences}


def numbers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every number and flag inside a value."""
    if isinstance(value, dict):
        return [found for key in value for found in numbers(value[key], (*path, key))]
    if isinstance(value, list):
        return [found for at, one in enumerate(value) for found in numbers(one, (*path, at))]
    return [path] if isinstance(value, int | float | bool) else []


@pytest.mark.parametrize("name", sorted(HANDLERS))
def test_any_expected_number_that_is_changed_is_told(name: str) -> None:
    for at, case in enumerate(cases(name)):
        expected = ("expect", "final", "out", "run_now")
        paths = [path for path in numbers(case) if any(part in expected for part in path)]
        for path in paths[:: max(1, len(paths) // 6)]:
            wrong = copy.deepcopy(case)
            inside = wrong
            for part in path[:-1]:
                inside = inside[part]
            inside[path[-1]] = not inside[path[-1]] if isinstance(inside[path[-1]], bool) else inside[path[-1]] + 0.25
            ((_, differences),) = HANDLERS[name]([wrong], ())
            assert differences, f"case {at + 1}: {path} was changed and nobody noticed"


@pytest.mark.parametrize(
    ("name", "case", "why"),
    [
        ("autops_assign", {}, "steps"),
        ("autops_assign", {"steps": [{"job": "j", "D": 0, "tasks": [1], "expect": [0]}], "final": []}, "above 0"),
        ("autops_assign", {"steps": [{"job": "j", "D": 2, "tasks": [3], "expect": [0]}], "final": []}, "split it"),
        ("parameters/autops", {"kind": "other"}, "unknown kind"),
        ("parameters/autops", {"kind": "schedule", "jobs": {"j": {"D": 1, "t": {}}}, "events": [["go", "j"]],
                               "out": [{}]}, "unknown event"),
    ],
)  # fmt: skip
def test_a_case_of_the_wrong_shape_fails_with_a_reason(name: str, case: Any, why: str) -> None:
    ((_, differences),) = HANDLERS[name]([case], ())
    assert why in differences[0]
