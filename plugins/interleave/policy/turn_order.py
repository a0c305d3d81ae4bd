"""The order in which jobs take turns on a host (Harmony §4.3.1)."""

import math
from collections.abc import Iterable, Mapping

from covey.core.ids import JobId


def numbered(job: JobId) -> tuple[int, str]:
    """Sort key of a job: by its number, `j9` before `j10`."""
    return len(job), job


def turn_order(jobs: Iterable[JobId], left: Mapping[JobId, float] | None = None) -> list[JobId]:
    """Jobs in the order in which they take turns: the one with the least left first, those of which that is not known
    last, and by number, so that those that came first end first.

    `left` is what each job has left, in seconds alone, as far as it is known. It is measured, by hosts that hear of it
    at different moments, so it counts by powers of two: nearly always all hosts of a group have the same order."""

    def place(job: JobId) -> tuple[float, tuple[int, str]]:
        known = (left or {}).get(job)
        return math.inf if known is None else math.floor(math.log2(max(known, 1e-3))), numbered(job)

    return sorted(jobs, key=place)
