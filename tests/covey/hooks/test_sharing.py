"""A rank's side of a shared device, its agent played by the test (`covey.hooks.limits.sharing`)."""

import os
import threading
import time

import pytest

from covey.hooks.limits.sharing import MemoryUsed, ShareControl
from covey.hooks.reports.steps import Step
from covey.kernel.pages import (
    GATES,
    PAGE_BYTES,
    FlagReader,
    FlagWriter,
    LimitsWriter,
    RankLimits,
    RankReport,
    ReportReader,
)
from tests.agent.here import until
from tests.covey.agents import lease
from tests.covey.hooks.native_stand_in import Modules, Native


class Remembers:
    """A memory limit that can be told to fail."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.refuses = False

    def ended(self) -> MemoryUsed:
        return MemoryUsed(900, 300, 20, 4)

    counting = False

    def apply(self, limit_bytes: int) -> bool:
        self.applied.append(limit_bytes)
        return not self.refuses


class Rank:
    def __init__(self) -> None:
        self.pages = [bytearray(PAGE_BYTES) for _ in range(3)]
        self.memory, self.modules = Remembers(), Modules()
        self.share = ShareControl(memory=self.memory, stops=self.modules)
        self.limits, self.report = LimitsWriter(self.pages[0]), ReportReader(self.pages[1])
        self.share.pages_came(*self.pages)
        self.flag = FlagReader(self.pages[2])

    def ends(self, step_s: float = 0.005, input_s: float = 0.0) -> RankReport:
        self.share.boundary(Step(3, step_s, input_s, "optimizer"))
        self.share.tell()
        report = self.report.fresh()
        assert report is not None
        return report


def test_each_mini_batch_is_reported_with_memory_and_waits() -> None:
    rank = Rank()
    report = rank.ends(0.01, 0.004)
    assert (report.peak_bytes, report.stable_bytes, report.spill_bytes, report.retries) == (900, 300, 20, 4)
    (batch,) = report.batches
    assert (batch.number, batch.step_ns, batch.idle_ns, batch.gated_ns) == (3, 10_000_000, 4_000_000, 0)
    assert report.gate == 2 and not report.says_idle
    assert rank.ends(0.0).batches == (), "a step that nobody saw begin has no time"


async def test_an_epoch_is_acknowledged_once_its_memory_is_applied() -> None:
    """Memory limits change between mini-batches; an epoch without such a change need not wait. Reference: §3.1.1."""
    rank = Rank()
    rank.limits.write(RankLimits(1, memory_bytes=5000))
    assert rank.ends().acked == 1 and rank.memory.applied == [5000]
    rank.limits.write(RankLimits(2, memory_bytes=4000))
    await until(lambda: rank.share._limits.epoch == 2)
    with rank.share._lock:
        """The share control has finished its reaction to these limits."""
    assert rank.report.fresh() is None and rank.memory.applied == [5000], "in the middle of a mini-batch"
    report = rank.ends()
    assert (report.acked, report.memory_limit_bytes, rank.memory.applied) == (2, 4000, [5000, 4000])
    rank.limits.write(RankLimits(3, busy=0.5, lease_ns=lease(9), memory_bytes=4000))
    await until(lambda: (fresh := rank.report.fresh()) is not None and fresh.acked == 3)


def test_a_limit_that_does_not_hold_yet_is_applied_again_after_the_next_mini_batch() -> None:
    rank = Rank()
    rank.memory.refuses = True
    rank.limits.write(RankLimits(1, memory_bytes=5000))
    assert (rank.ends().acked, rank.ends().memory_limit_bytes) == (0, 0)
    rank.memory.refuses = False
    report = rank.ends()
    assert (report.acked, report.memory_limit_bytes, rank.memory.applied) == (1, 5000, [5000] * 3)


def test_a_script_that_recorded_graphs_says_that_operators_are_not_seen() -> None:
    rank = Rank()
    rank.share.graphs = lambda: True
    assert GATES[rank.ends().gate] == "graph"


def test_limits_of_memory_that_cannot_be_kept_are_not_acknowledged() -> None:
    pages = [bytearray(PAGE_BYTES) for _ in range(3)]
    share, report = ShareControl(), ReportReader(pages[1])
    share.pages_came(*pages)
    LimitsWriter(pages[0]).write(RankLimits(1, memory_bytes=4000))
    share.boundary(Step(0, 1.0, 0.0, "optimizer"))
    assert report.fresh() is not None and report.newest is not None and report.newest.acked == 0


def test_waits_of_the_scripts_thread_alone_lower_the_flag() -> None:
    rank = Rank()
    assert rank.flag.busy() is True
    rank.share.waits(True)
    assert rank.flag.busy() is False
    rank.share.waits(False)
    assert rank.flag.busy() is True and rank.ends().says_idle
    other = threading.Thread(target=rank.share.waits, args=(True,))
    other.start()
    other.join()
    assert rank.flag.busy() is True, "a thread that fetches ahead waits while the script computes"


def test_without_a_native_gate_a_script_is_stopped_until_its_lease_ends() -> None:
    rank = Rank()
    assert rank.modules.before is None
    rank.limits.write(RankLimits(1, idle=1, busy=0, failsafe=1, lease_ns=lease(0.3)))
    began_s = time.monotonic()
    rank.share.boundary(Step(0, 0.01, 0.0, "optimizer"))
    assert time.monotonic() - began_s > 0.2, "nobody says that the neighbour is idle"
    assert rank.modules.before is None, "the gate is out as soon as nothing is limited"
    assert rank.ends(1.0).batches[-1].gated_ns > 200_000_000


def test_an_idle_neighbour_lets_the_script_go_on() -> None:
    rank, neighbour = Rank(), bytearray(PAGE_BYTES)
    flag = FlagWriter(neighbour)
    rank.share.neighbour_is(neighbour)
    rank.limits.write(RankLimits(1, idle=1, busy=0, failsafe=0.01, lease_ns=lease(60)))
    rank.ends()
    assert rank.modules.before is not None
    rank.modules.before()
    flag.write(True, time.monotonic_ns())
    threading.Timer(0.2, lambda: flag.write(False, time.monotonic_ns())).start()
    began_s = time.monotonic()
    rank.modules.before()
    assert time.monotonic() - began_s > 0.15


def test_garbage_and_lost_agents_change_nothing() -> None:
    rank = Rank()
    rank.limits.write(RankLimits(1, memory_bytes=5000))
    rank.ends()
    rank.pages[0][:] = os.urandom(PAGE_BYTES)
    rank.share.pages_lost()
    report = rank.ends()
    assert (report.acked, report.memory_limit_bytes, rank.memory.applied) == (1, 5000, [5000])
    assert (rank.share.now().epoch, rank.share.now().memory_limit_bytes) == (1, 5000)


def test_pages_of_an_agent_that_began_anew_leave_memory_as_it_is() -> None:
    rank = Rank()
    rank.limits.write(RankLimits(4, memory_bytes=5000))
    rank.ends()
    pages = [bytearray(PAGE_BYTES) for _ in range(3)]
    rank.share.pages_came(*pages)
    rank.share.boundary(Step(9, 0.01, 0.0, "optimizer"))
    report = ReportReader(pages[1]).fresh()
    assert report is not None and (report.memory_limit_bytes, rank.memory.applied) == (5000, [5000])


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_writes_no_page_of_its_parent() -> None:
    rank = Rank()
    before = [bytes(page) for page in rank.pages]
    inside, outside = os.pipe()
    child = os.fork()
    if child == 0:
        rank.share.boundary(Step(5, 0.01, 0.0, "optimizer"))
        rank.share.waits(True)
        os.write(outside, b"same" if [bytes(page) for page in rank.pages] == before else b"written")
        os._exit(0)
    assert os.read(inside, 16) == b"same"
    os.waitpid(child, 0)
    os.close(inside)
    os.close(outside)
    assert rank.ends().batches[-1].number == 3, "the parent goes on"


def test_a_fetch_in_the_scripts_own_thread_is_told_at_once_and_of_no_other_thread() -> None:
    """The gate sees soon whether the thread sleeps; that it computes again is told before the next operator."""
    native = Native()
    share = ShareControl(native=native)  # type: ignore[arg-type]
    share.fetches(True)
    share.pages_came(*(bytearray(PAGE_BYTES) for _ in range(3)))
    share.fetches(True)
    share.fetches(False)
    other = threading.Thread(target=share.fetches, args=(True,))
    other.start()
    other.join()
    assert native.fetches == [True, False]


def test_mini_batches_of_a_moment_are_one_report_and_none_is_lost() -> None:
    """A report costs some 20 us of a mini-batch of 5 ms: agents read one every 50 ms."""
    rank = Rank()
    rank.ends()
    for _ in range(5):
        rank.share.boundary(Step(3, 0.0001, 0.0, "optimizer"))
    first = rank.report.fresh()
    rank.share.tell()
    last = rank.report.fresh()
    batches = len(first.batches if first else ()) + len(last.batches if last else ())
    assert batches == 5 and (first is None or len(first.batches) < 5)


class Computes(Native):
    """A native gate of a rank that only computes."""

    changes = (1,)


def test_a_rank_that_is_alone_reports_now_and_then_and_obeys_who_comes() -> None:
    rank = Rank()
    rank.share.gains(native=Computes())  # type: ignore[arg-type]
    rank.share._changes = 1
    rank.limits.write(RankLimits(1, memory_bytes=500, guaranteed=True, alone=True))
    assert rank.ends().memory_limit_bytes == 500 and rank.memory.applied == [], "all of the memory is its own"
    for number in range(20):
        assert rank.share.quiet.lasts(time.perf_counter(), number)
        rank.share.ended_before(Step(number, 0.005, 0.0, "optimizer"))
    rank.share.tell()
    report = rank.report.fresh()
    assert report is not None and [batch.number for batch in report.batches] == list(range(20))
    rank.limits.write(RankLimits(2, memory_bytes=400, guaranteed=True))
    rank.share._look(between_batches=False)  # by the thread that waits for limits
    assert rank.memory.applied == [] and not rank.share.quiet.lasts(time.perf_counter(), 0)
    assert rank.ends().acked == 2 and rank.memory.applied == [400]


def test_a_rank_that_is_alone_is_spared_the_counting_without_a_native_gate_too() -> None:
    rank = Rank()
    rank.limits.write(RankLimits(1, memory_bytes=500, guaranteed=True, alone=True))
    assert rank.ends().memory_limit_bytes == 500 and rank.memory.applied == []
    on_a_gpu = Rank()
    on_a_gpu.share.gains(meters=lambda: False)
    on_a_gpu.limits.write(RankLimits(1, memory_bytes=500, guaranteed=True, alone=True))
    assert on_a_gpu.ends().memory_limit_bytes == 500 and on_a_gpu.memory.applied == [500], "its allocator keeps it"
