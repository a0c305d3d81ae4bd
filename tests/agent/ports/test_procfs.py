"""What /proc tells, of processes that may end at any moment."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agent.ports.processes import procfs
from covey.ports.processes import ProcessId

NOBODY = 2**22 + 1
"""A pid above the largest that Linux gives."""


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    heeds = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # not so in what a shell started with &
    code = f"import signal, time; {heeds}; print('up', flush=True); time.sleep(60)"
    environ = {"PLAIN": "1", "ODD": "a=b=c", "EMPTY": "", "BYTES": "\udcff"}
    with subprocess.Popen([sys.executable, "-c", code, ""], env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def test_a_process_is_listed_with_its_words_its_environment_and_its_parent(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    assert sleeper.pid in procfs.pids() and procfs.pids() == sorted(set(procfs.pids()))
    found = procfs.environment(sleeper.pid)
    assert {name: found[name] for name in ("PLAIN", "ODD", "EMPTY")} == {"PLAIN": "1", "ODD": "a=b=c", "EMPTY": ""}
    assert found["BYTES"] == "\udcff", "bytes that are no UTF-8 come back as they were"
    assert procfs.words(sleeper.pid, "cmdline")[:2] == [sys.executable, "-c"]
    assert procfs.parent(sleeper.pid) == os.getpid()
    assert procfs.is_ours(sleeper.pid)


def test_a_zombie_began_but_is_not_alive(sleeper: "subprocess.Popen[bytes]") -> None:
    ticks = procfs.start_ticks(sleeper.pid)
    assert ticks is not None and procfs.live_ticks(sleeper.pid) == ticks
    assert procfs.is_alive(ProcessId(sleeper.pid, ticks)) and not procfs.is_alive(ProcessId(sleeper.pid, ticks + 1))
    sleeper.kill()
    end_s = time.monotonic() + 5
    while procfs.live_ticks(sleeper.pid) is not None:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    assert procfs.start_ticks(sleeper.pid) == ticks and not procfs.is_alive(ProcessId(sleeper.pid, ticks))
    sleeper.wait()
    assert procfs.start_ticks(sleeper.pid) is None and sleeper.pid not in procfs.pids()


def test_of_a_process_that_is_gone_nothing_is_told() -> None:
    assert procfs.stat(NOBODY) is None and procfs.parent(NOBODY) is None
    assert procfs.start_ticks(NOBODY) is None and procfs.live_ticks(NOBODY) is None
    assert not procfs.is_alive(ProcessId(NOBODY, 1))
    for asked in (procfs.environment, procfs.is_ours):
        with pytest.raises(FileNotFoundError):
            asked(NOBODY)


def test_the_first_process_has_no_parent() -> None:
    assert procfs.parent(1) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_somebody_elses_is_not_ours() -> None:
    with subprocess.Popen(["/bin/sleep", "60"], user=12345) as process:
        assert not procfs.is_ours(process.pid)
        process.kill()


def test_who_catches_a_signal_and_of_which_group_it_is(sleeper: "subprocess.Popen[bytes]") -> None:
    assert procfs.catches(sleeper.pid, signal.SIGINT)
    assert not procfs.catches(sleeper.pid, signal.SIGRTMIN + 6)
    assert procfs.group(sleeper.pid) == os.getpgid(sleeper.pid)
    assert not procfs.catches(NOBODY, signal.SIGINT) and procfs.group(NOBODY) is None
