"""What replays a file of vectors, and how it says what differs.

A *handler* gets the decoded content of one file (`2das_small.json`: a list of cases), or, for a file that holds several
lists, the list under one of its keys (`parameters/cruise`: the list `cruise` of `parameters.json`), and the folder of
traces if there is one. It yields (case, differences) for each case; no differences: the case passed. It calls the
policies that agents call and computes no answer of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

Handler = Callable[[Any, Path | None], Iterable[tuple[str, list[str]]]]

UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)
"""What a case of the wrong shape, or a policy that breaks on it, raises: the case failed, the next is replayed."""
SHOWN_MAX = 160


def each(cases: Sequence[Any], check: Callable[[Any], list[str]]) -> Iterator[tuple[str, list[str]]]:
    """`check` on every case, by the case's `name` or its number in the file from 1 on."""
    for number, case in enumerate(cases, 1):
        name = case.get("name") if isinstance(case, dict) else None
        try:
            differences = check(case)
        except UNUSABLE as error:
            differences = [f"the case cannot be replayed: {type(error).__name__}: {error}"]
        yield (str(name) if name else f"case {number}"), differences


def differs(what: str, ours: Any, expected: Any, within: float = 0.0) -> list[str]:
    """[] when equal, numbers up to `within` (absolute, and relative above 1); else where and how they differ.
    [n, d] equals the rational n/d; keys of objects are compared as text, as JSON does."""
    if isinstance(ours, Fraction):
        if isinstance(expected, (list, tuple)) and len(expected) == 2:
            expected = Fraction(expected[0], expected[1])
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
