"""How long a test may take: processor seconds of its own process, which a busy machine does not use up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

CPU_S = 120.0
"""CPU seconds of a test without `@pytest.mark.cpu_seconds(N)`. A test that waits for ever, which costs none, is ended
by the wall clock (`timeout` in pyproject.toml), far off."""


@contextmanager
def within_cpu(seconds: float) -> Iterator[None]:
    """Fail the test once this process has worked for `seconds`, in whatever thread."""

    def over(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"it took more than {seconds:g} s of CPU")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
