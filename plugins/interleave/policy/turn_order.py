"""The order in which jobs take turns on a host (Harmony §4.3.1)."""

from collections.abc import Iterable

from covey.core.ids import JobId


def turn_order(jobs: Iterable[JobId]) -> list[JobId]:
    """Jobs in the order in which they take turns, the same on every host: by number, so that those that came first
    end first."""
    return sorted(jobs, key=lambda job: (len(job), job))
