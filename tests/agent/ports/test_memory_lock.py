"""Memory that stays: what a process of Covey locks, and what it says when it may not."""

import asyncio
import os
import resource
import subprocess
import sys
import time

import pytest

from agent.ports.loop_stalls import RealLoopStalls, RunDelay
from agent.ports.memory import lock as memory_lock
from agent.ports.memory.pages import MemfdPages
from tests.agent.here import until

ASK = """
import os, resource, sys
from agent.ports.memory.lock import stay_in_memory
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
open("/proc/self/status", encoding="ascii").close()  # what another user may not read
if sys.argv[1] == "nobody":
    os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
print(stay_in_memory(sys.argv[2] == "flushes"))
more = bytearray(32 << 20)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck")))
"""


def asked(*arguments: str) -> tuple[str, int]:
    """What a process that stays in memory lacks, and KiB locked."""
    said = subprocess.run((sys.executable, "-c", ASK, *arguments), capture_output=True, text=True, check=True).stdout
    lacks, locked = said.split("\n")[:2]
    return lacks, int(locked)


@pytest.mark.skipif(not memory_lock._capabilities() >> memory_lock.CAP_IPC_LOCK & 1, reason="it takes the privilege")
def test_with_the_privilege_all_of_a_process_stays_in_memory() -> None:
    lacks, locked_kib = asked("us", "no")
    assert lacks == "" and locked_kib > 32 << 10


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_without_it_the_process_says_so_and_goes_on() -> None:
    assert asked("nobody", "no") == (memory_lock.NOT_ALLOWED, 0)
    assert asked("nobody", "flushes") == (f"{memory_lock.NOT_ALLOWED}; {memory_lock.NO_FLUSHER}", 0)


HEAP = """
import sys
from agent.ports.memory.lock import keep_heap
def pages():
    words = open("/proc/self/status").read().split()
    return int(words[words.index("VmRSS:") + 1])
before = pages()
print(keep_heap(32 << 20))
kept = pages()
most = 0
for _ in range(4):
    requests = [bytearray(128 << 10) for _ in range(128)]
    most = max(most, pages())
    del requests
print(kept - before, most - kept, kept - pages())
"""


def test_requests_find_memory_that_was_kept_for_them_and_leave_it() -> None:
    """The requests have 16 MiB in all: none of it is asked of the kernel, none goes back to it."""
    said = subprocess.run((sys.executable, "-c", HEAP), capture_output=True, text=True, check=True).stdout
    why, figures = said.splitlines()
    kept, grown, returned = map(int, figures.split())
    assert why == "" and kept > 30 << 10
    assert grown < 512 and returned < 512


FAULTS = """
import collections, resource
from agent.ports.memory.lock import keep_heap
print(keep_heap(0))
under_way = collections.deque((bytearray(1 << 20) for _ in range(8)), 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    under_way.append(bytearray(1 << 20))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_long_requests_one_after_another_ask_the_kernel_for_nothing() -> None:
    """The requests are 100 of 1 MiB, eight at a time: 256 faults each where what is freed goes back to the kernel."""
    said = subprocess.run((sys.executable, "-c", FAULTS), capture_output=True, text=True, check=True).stdout
    why, faults = said.splitlines()
    assert why == "" and int(faults) < 1000


def test_memory_beyond_the_limit_is_not_called_locked() -> None:
    small = MemfdPages().make_ring(1 << 12, sparse=True)
    assert small.locked
    if not memory_lock._capabilities() >> memory_lock.CAP_IPC_LOCK & 1:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        assert not MemfdPages().make_ring(limit + (1 << 20), sparse=True).locked


async def test_a_loop_that_is_held_up_says_so() -> None:
    stalls = RealLoopStalls()
    await asyncio.sleep(0.02)
    count = stalls.count
    time.sleep(0.15)  # noqa: ASYNC251 - longer than the pause of a process that rests
    await until(lambda: stalls.count > count)
    assert stalls.longest_s >= 0.04


async def test_a_machine_without_a_processor_is_not_the_loops_own_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel said so while the timer was late; here it is made to say so."""
    waited_s = iter([0.0, 0.0])  # when it looks whether the kernel counts, and when it begins
    monkeypatch.setattr(RunDelay, "now_s", lambda self: next(waited_s, 0.2))
    stalls = RealLoopStalls()
    time.sleep(0.15)  # noqa: ASYNC251
    await until(lambda: stalls.count or stalls.waits_count)
    assert (stalls.count, stalls.waits_count) == (0, 1)
    assert stalls.longest_s < 0.04 <= stalls.waits_longest_s


def test_the_kernel_tells_how_long_a_thread_waited_for_a_processor() -> None:
    """Two programs that never rest share one processor."""
    allowed = os.sched_getaffinity(0)
    first = {min(allowed)}
    rests_never = [sys.executable, "-c", "while True: pass"]
    other = subprocess.Popen(rests_never, preexec_fn=lambda: os.sched_setaffinity(0, first))
    try:
        os.sched_setaffinity(0, first)
        delay = RunDelay()
        before_s, end_s = delay.now_s(), time.monotonic() + 20
        while delay.now_s() == before_s and time.monotonic() < end_s:
            pass
        assert delay.now_s() > before_s
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
