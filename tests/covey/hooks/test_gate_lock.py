"""A thread that the flag wakes does not hold up the thread that writes it (`covey/hooks/gate/gate.cpp`)."""

import os
import subprocess
import sys

import pytest

from tests.covey.hooks.torch_jobs import NEEDS_TORCH, gate_library

pytestmark = NEEDS_TORCH
WAKES = 40
SCRIPT = """
import mmap, os, sys, threading, time
from pathlib import Path
import torch
from covey.hooks.gate.native import NativeGate
from covey.kernel.futex import SharedWord
from covey.kernel.pages import BUSY_AT, PAGE_BYTES, LimitsWriter, RankLimits
limits, flag = mmap.mmap(-1, PAGE_BYTES), mmap.mmap(-1, PAGE_BYTES)
LimitsWriter(limits).write(RankLimits(1, guaranteed=True))
gate = NativeGate(Path(sys.argv[1]))
gate.start(limits, flag, False)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
word, blocked, ended = SharedWord(flag, BUSY_AT), [], threading.Event()
def switches():
    with open(f"/proc/self/task/{threading.get_native_id()}/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
def neighbour():
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    value = word.value
    while not ended.is_set():
        word.sleep(value, 100_000_000)
        if word.value != value:
            value, before = word.value, switches()
            gate.counters()  # under the lock of the flag
            blocked.append(switches() > before)
thread = threading.Thread(target=neighbour)
thread.start()
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
for at in range(int(sys.argv[2])):
    time.sleep(0.005)
    gate.wait(at % 2 == 0)
time.sleep(0.01)
ended.set()
thread.join()
gate.stop()
print(len(blocked), sum(blocked))
"""


def test_who_is_woken_by_the_flag_finds_its_lock_free() -> None:
    """On one core, the woken thread has a higher priority than the writer: it takes the core at once, within the call
    that woke it. If that call held the lock, the script's thread, which says that it works again, would wait until the
    woken one has had its time."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        pytest.skip("real-time priorities are not for this user")
    words = [sys.executable, "-c", SCRIPT, str(gate_library()), str(WAKES)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    woken, blocked = map(int, done.stdout.split())
    assert woken >= WAKES / 2 and blocked <= WAKES / 10, done.stdout
