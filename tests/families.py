"""Families of tests: cases of one rule, of which the gate tries some, and people and `make check LONG=1` all."""

import os
from collections.abc import Iterable
from typing import Any

import pytest


def in_gate(count: int, cases: Iterable[Any]) -> list[Any]:
    """These cases for `pytest.mark.parametrize`, a tuple of arguments each, or the only one, which is no tuple then;
    all but the first `count` are marked long."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*each, marks=[pytest.mark.long] * (number >= count)) for number, each in enumerate(values)]


def examples(count: int) -> int:
    """How many examples hypothesis tries: so many, and a third of them in the gate, which has the same ones each
    time."""
    return max(10, count // 3) if "CI" in os.environ and "COVEY_LONG" not in os.environ else count
