"""Types that replay a file of vectors, and functions that say what differs.

A *handler* gets the decoded content of one file (`2das_small.json`: a list of cases), or, for a file that holds
several lists, the list under one of its keys (`parameters/cruise`: the list `cruise` of `parameters.json`), and the
folders in which traces may lie. It yields (case, differences) for each case; no differences: the case passed. It calls
the policies that agents call and computes no answer of its own.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from sim.report import Wrong

Handler = Callable[[Any, Sequence[Path]], Iterable[tuple[str, list[str]]]]

UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RecursionError, Wrong)
"""What a case of the wrong shape, a missing trace, or a policy that breaks on it, raises: the case failed, the next is
replayed."""
FLOAT_WITHIN = 1e-6
"""Tolerance (relative above 1) for a rational that a file gives as a decimal fraction."""
MEASURED_MAX = 1e18
SHOWN_MAX = 160


def each(cases: Sequence[Any], check: Callable[[Any], list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Run `check` on every case; a case is named by its number in the file from 1 on and its `name`, or else its
    `kind`."""
    for number, case in enumerate(cases, 1):
        name = case.get("name") or case.get("kind") if isinstance(case, dict) else None
        try:
            if not isinstance(case, dict):
                raise TypeError(f"an object is expected, not {_short(case)}")
            differences = check(case)
        except KeyError as error:
            differences = [f"the case cannot be replayed: it has no {error.args[0]!r}"]
        except UNUSABLE as error:
            differences = [f"the case cannot be replayed: {type(error).__name__}: {error}"]
        yield (f"{name} (case {number})" if name else f"case {number}"), differences


def answers(ours: Mapping[str, Any], expected: Mapping[str, Any], within: float = 0.0) -> list[str]:
    """Differences in the answers that a case expects: it need not expect all that there are, but at least one."""
    if not expected:
        return [f"it expects nothing; known: {', '.join(ours)}"]
    found = [
        f"it expects {name!r}, which is not known; known: {', '.join(ours)}" for name in expected if name not in ours
    ]
    return found + [
        line for name in expected if name in ours for line in differs(name, ours[name], expected[name], within)
    ]


def beside(case: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The answers that a case expects when they are given beside its questions."""
    return {name: case[name] for name in names if name in case}


def rational(number: Any) -> Fraction:
    """The exact value of `7`, `3.5` or `[7, 2]`. Raises ValueError for what is no number."""
    if isinstance(number, (list, tuple)):
        return Fraction(*number)
    if isinstance(number, bool):
        raise ValueError(f"a number is expected, not {number}")
    return Fraction(str(number))


def per_unit(numbers: Iterable[Any]) -> int:
    """The factor by which these rationals must be multiplied to be whole numbers."""
    return math.lcm(*(rational(number).denominator for number in numbers))


def whole_number(what: str, number: Any, least: int, most: int) -> int:
    """The number. Raises ValueError for what is none, or not from `least` to `most`: a case must end, in little
    memory."""
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"{what} is {_short(number)}; a whole number from {least} to {most} is expected")
    return number


def measured(number: Any, above_zero: bool = False) -> float:
    """The number as a float. Raises ValueError for what is no number, has no end, or is below 0 (or is 0)."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= MEASURED_MAX:
        raise ValueError(f"{_short(number)}: a number from 0 on is expected")
    if above_zero and number == 0:
        raise ValueError("0: a number above 0 is expected")
    return float(number)


def finite(number: Any) -> Any:
    """The number, or None for what switches a limit off: nothing, `"inf"`, and the Infinity that some programs
    write."""
    return None if number in (None, "inf", math.inf) else number


def differs(what: str, ours: Any, expected: Any, within: float = 0.0) -> list[str]:
    """[] when both are equal, numbers up to `within` (absolute, and relative above 1); else where and how they differ.
    [n, d] equals the rational n/d; keys of objects are compared as text, as JSON does."""
    if isinstance(ours, Fraction):
        if isinstance(expected, (list, tuple)) and len(expected) == 2:
            expected = Fraction(expected[0], expected[1])
        elif isinstance(expected, float):
            within = max(within, FLOAT_WITHIN)
        if not isinstance(expected, (int, float, Fraction)) or not math.isfinite(expected):
            return [f"{what}: ours {ours}, expected {_short(expected)}"]
        allowed = Fraction(within) * (abs(ours) if abs(ours) > 1 else 1)
        same = abs(ours - Fraction(expected)) <= allowed
        return [] if same else [f"{what}: ours {ours}, expected {expected}"]
    if isinstance(ours, dict) and isinstance(expected, dict):
        mine, theirs = {str(key): value for key, value in ours.items()}, {str(k): v for k, v in expected.items()}
        found = [f"{what}: ours lacks {key}" for key in theirs if key not in mine]
        found += [f"{what}: ours has {key}, which is not expected" for key in mine if key not in theirs]
        for key in theirs:
            if key in mine:
                found += differs(f"{what}[{key}]", mine[key], theirs[key], within)
        return found
    if isinstance(ours, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(ours) != len(expected):
            return [f"{what}: ours {_short(list(ours))}, expected {_short(list(expected))}"]
        found = []
        for at, (mine_one, their_one) in enumerate(zip(ours, expected, strict=True)):
            found += differs(f"{what}[{at}]", mine_one, their_one, within)
        return found
    if _number(ours) and _number(expected) and within:
        return (
            []
            if abs(ours - expected) <= within * max(1.0, abs(expected))
            else [f"{what}: ours {ours}, expected {expected}"]
        )
    return [] if ours == expected else [f"{what}: ours {_short(ours)}, expected {_short(expected)}"]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."
