"""Limits of tests count work, not waiting."""

import subprocess
import sys
import time

import pytest

from tests.limits import within_cpu


def test_a_test_that_works_too_long_is_ended() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"more than 0\.2 s of CPU"), within_cpu(0.2):
        while True:
            sum(range(1000))


def test_waiting_for_others_does_not_count() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    began_s = time.monotonic()
    with within_cpu(0.3):
        subprocess.run([sys.executable, "-S", "-c", busy], check=True)
    assert time.monotonic() - began_s >= 0.5


def test_a_limit_ends_with_its_test() -> None:
    with within_cpu(0.2):
        pass
    until_s = time.process_time() + 0.4
    while time.process_time() < until_s:
        pass
    assert time.process_time() >= until_s
