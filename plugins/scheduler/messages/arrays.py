"""Arrays: which tasks `0-99:2,200%8` are, in which order they begin, and how many run at once. The same on every
host."""

import bisect
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec

TASKS_MAX = 100_000
"""The most tasks of an array (chosen): its record says nothing of single tasks, but each of them becomes a job."""
INDEX_MAX = 999_999_999
PARTS_MAX = 100
"""The most ranges of an array, also of those that are left out of it."""
AT_ONCE_MAX = 1000
"""The most tasks that an array has at once, whatever it asks for: each is a job of the log, which has 10,000."""
FORM = "indices and ranges of them, such as 0-99, 1,3,5-9:2 or 0-99%8 (at most 8 at once)"
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::([1-9]\d{0,8}))?)?")
Range = tuple[int, int, int]
"""First index, last index, and what lies between two."""


class TaskIndices(msgspec.Struct, frozen=True):
    """The tasks of an array."""

    parts: tuple[Range, ...]
    at_once: int
    """The most tasks that run, or wait to run, at once."""

    @property
    def count(self) -> int:
        return sum(_count(part) for part in self.parts)

    @property
    def first(self) -> int:
        return min(part[0] for part in self.parts)

    @property
    def last(self) -> int:
        return max(_last(part) for part in self.parts)

    @property
    def step(self) -> int:
        """What lies between any two indices that follow each other; 1 where that differs."""
        return self.parts[0][2] if len(self.parts) == 1 else 1

    def at(self, place: int) -> int | None:
        """The index of the task that begins as number `place`, from 0; None: there is none."""
        for part in self.parts:
            if place < _count(part):
                return part[0] + place * part[2]
            place -= _count(part)
        return None

    def place_of(self, index: int) -> int | None:
        """When a task begins: the opposite of `at`; None: there is no such task."""
        before = 0
        for part in self.parts:
            if part[0] <= index <= part[1] and (index - part[0]) % part[2] == 0:
                return before + (index - part[0]) // part[2]
            before += _count(part)
        return None

    def within(self, parts: Sequence[tuple[int, int]]) -> Iterator[int]:
        """The indices of the array that are in these ranges too, each once."""
        for first, last in joined(parts):
            for low, high, step in self.parts:
                begin = low if first <= low else low + -(-(first - low) // step) * step
                yield from range(begin, min(high, last) + 1, step)


def _count(part: Range) -> int:
    return (part[1] - part[0]) // part[2] + 1


def _last(part: Range) -> int:
    return part[0] + (_count(part) - 1) * part[2]


@lru_cache(256)
def tasks_of(text: str) -> TaskIndices:
    """The tasks of an array as it is written. ValueError says what is wrong."""
    ranges, percent, most = text.partition("%")
    parts = ranges_of(ranges)
    if percent and not (most.isascii() and most.isdigit() and 0 < int(most[:10]) <= TASKS_MAX):
        raise ValueError(f"after % stands the most tasks at once, from 1 to {TASKS_MAX}, and not {most[:20]!r}")
    found = TaskIndices(parts, min(int(most or AT_ONCE_MAX), AT_ONCE_MAX))
    if found.count > TASKS_MAX:
        raise ValueError(f"it has {found.count:,} tasks, and the limit is {TASKS_MAX:,}")
    ordered = sorted(parts)
    for one, other in pairwise(ordered):
        if other[0] <= one[1]:
            raise ValueError(f"{_written(one)} and {_written(other)} overlap")
    return found


def ranges_of(text: str) -> tuple[Range, ...]:
    """Ranges as they are written. ValueError says what is wrong."""
    words = text.split(",")
    if len(words) > PARTS_MAX:
        raise ValueError(f"it has {len(words)} ranges, and the limit is {PARTS_MAX}")
    found = []
    for word in words:
        part = _PART.fullmatch(word.strip())
        if part is None:
            raise ValueError(f"{word[:40]!r} is no index and no range of them")
        first, last = int(part[1]), int(part[2] or part[1])
        if last < first:
            raise ValueError(f"{word[:40]} ends before it begins")
        found.append((first, last, int(part[3] or 1)))
    return tuple(found)


def _written(part: Range) -> str:
    step = f":{part[2]}" if part[2] > 1 else ""
    return str(part[0]) if part[0] == part[1] else f"{part[0]}-{part[1]}{step}"


def written(parts: Sequence[tuple[int, int]]) -> str:
    """Ranges as people write them."""
    return ",".join(_written((first, last, 1)) for first, last in parts)


def is_in(number: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether a number is in one of these ranges, which are `joined`."""
    place = bisect.bisect_right(ranges, (number, INDEX_MAX + 1))
    return place > 0 and number <= ranges[place - 1][1]


def joined(parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges without gaps between numbers, ascending, those that touch as one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(parts):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)
