"""Stacks of a rank are written when its host asks, also where Python is stuck, and no process ends by being asked."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.ports.processes import procfs
from agent.ports.processes.shims import signal_catchers
from covey.hooks.stacks import SIGNAL
from covey.ports.processes import ProcessId

STUCK = """
import sys, subprocess, time
{before}
from covey.hooks import stacks
stacks.offer()
def waits_for_ever():
    print("up", flush=True)
    time.sleep(600)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
waits_for_ever()
"""


class Asked:
    """A script, and its child, which catches no signal."""

    def __init__(self, before: str, errors: Path) -> None:
        self.errors = errors
        with errors.open("wb") as opened:
            self.process = subprocess.Popen(
                [sys.executable, "-c", STUCK.format(before=before)],
                stdout=subprocess.PIPE,
                stderr=opened,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())
        assert self.process.stdout.readline() == b"up\n"

    def ask(self) -> str:
        """The text that the script wrote when asked."""
        started = procfs.start_ticks(self.process.pid)
        assert started is not None
        signal_catchers(ProcessId(self.process.pid, started), SIGNAL)
        end_s = time.monotonic() + 5.0
        while not self.errors.read_text() and time.monotonic() < end_s and self.process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.1)
        return self.errors.read_text()


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Callable[[str], Asked]]:
    started: list[Asked] = []

    def start(before: str) -> Asked:
        started.append(Asked(before, tmp_path / "errors"))
        return started[-1]

    yield start
    for one in started:
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()


def test_a_process_writes_where_it_is_and_goes_on(asked: Callable[[str], Asked]) -> None:
    one = asked("")
    assert "in waits_for_ever" in one.ask()
    assert one.process.poll() is None
    os.kill(one.child, 0)
    assert procfs.live_ticks(one.child) is not None, "a process that does not catch it was not asked"


def test_a_script_that_answers_the_signal_itself_goes_on_doing_so(asked: Callable[[str], Asked]) -> None:
    own = "import os, signal; signal.signal(signal.SIGRTMIN + 6, lambda *_: os.write(2, b'its own'))"
    assert asked(own).ask() == "its own"
