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


@pytest.mark.xdist_group("one_worker")
def test_tests_of_a_group_go_to_one_worker(request: pytest.FixtureRequest) -> None:
    """With pytest 9.2 pytest-xdist 3.8 forgets its groups without a word: what is made once for a group is made by
    each worker, and racks run beside one another."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("these tests are not dealt to workers by their groups")
    assert request.node.nodeid.endswith("@one_worker")
