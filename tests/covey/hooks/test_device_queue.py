"""The queue of a GPU, for gate and flag (`covey/hooks/gate/device_queue.cpp`), over a played stream."""

import ctypes
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.hooks.limits.cuda_calls import DeviceQueue
from covey.hooks.limits.sharing import ShareControl
from covey.kernel.pages import PAGE_BYTES, FlagReader, LimitsWriter, RankLimits, ReportReader
from tests.covey.hooks import cuda_stand_in
from tests.covey.hooks.played_stream import PlayedStream

FIRST = 8
"""Number of operators in the first part."""


class Rig:
    """The library by itself, with a stream."""

    def __init__(self) -> None:
        path = cuda_stand_in.native()
        if path is None:
            pytest.skip("there is no C++ compiler")
        self.stream, self.library = PlayedStream(), ctypes.CDLL(str(path))
        self.library.queue_worked.restype = ctypes.c_int64
        self.library.queue_worked.argtypes = self.library.queue_full.argtypes = [ctypes.c_int64]
        self.library.queue_empty.argtypes = [ctypes.c_int64]
        self.library.queue_forget()
        self.queue = DeviceQueue(path, self.stream)
        self.queue.stream_is(self.stream.address)

    def full(self) -> bool:
        return bool(self.library.queue_full(time.monotonic_ns()))

    def empty(self) -> bool:
        return bool(self.library.queue_empty(time.monotonic_ns()))

    def worked(self, at_ns: int) -> int:
        return int(self.library.queue_worked(at_ns))

    def told(self) -> tuple[int, int]:
        """How often the flag was told to say idle, and busy again."""
        return self.library.told_of(1), self.library.told_of(0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.library.queue_forget()
    made.library.covey_device(None)


@given(operators=st.integers(1, 1024), took=st.integers(-5, 10**10), quantum=st.integers(1, 10**9))
def test_a_part_has_so_many_operators_as_take_a_quantum(operators: int, took: int, quantum: int) -> None:
    path = cuda_stand_in.native()
    if path is None:
        pytest.skip("there is no C++ compiler")
    of = ctypes.CDLL(str(path)).covey_operators_of
    of.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    found = of(operators, took, quantum)
    assert 1 <= found <= 1024 and operators / 4 - 1 <= found <= operators * 2
    if took > 0 and operators / 4 <= (exact := operators * quantum / took) <= min(operators * 2, 1024):
        assert abs(found - exact) <= 1


def test_no_more_than_two_parts_are_queued(rig: Rig) -> None:
    """Before more is launched, the part before the newest one is done; each part has one event. Reference: §3.1.2."""
    part, most = 0, 0
    for _ in range(200):
        if rig.full():
            over = threading.Thread(target=rig.library.queue_drain, args=(1,))
            over.start()
            while over.is_alive():
                rig.stream.work(4)
                time.sleep(0.0001)
            assert rig.stream.records == 1 or rig.stream.records - 1 in rig.stream.done
            assert rig.stream.queue.count("operator") <= part, "the part before the newest is done"
            part = 0
        rig.stream.launch()
        part += 1
        most = max(most, rig.stream.queue.count("operator"))
    counters = rig.queue.counters()
    assert most < 200 and counters.parts == rig.stream.records > 2 and rig.stream.events == 2
    assert counters.failures == 0 and rig.stream.error == 0, "PyTorch would raise an error that is left"


def test_whoever_is_let_go_on_waits_no_longer(rig: Rig) -> None:
    for _ in range(3 * FIRST):
        rig.full()
        rig.stream.launch()
    began_s = time.monotonic()
    rig.library.queue_drain(0)
    assert time.monotonic() - began_s < 5 and rig.stream.queue


def test_what_was_worked_is_the_time_in_which_something_was_queued(rig: Rig) -> None:
    rig.full()
    rig.stream.launch()
    t = time.monotonic_ns()
    began = rig.worked(t)
    assert rig.worked(t + 5_000_000) - began == 5_000_000
    assert not rig.empty(), "an event is put behind the operator, and is not done"
    rig.stream.work()
    now = time.monotonic_ns()
    assert rig.empty()
    after = rig.worked(now)
    assert rig.worked(now + 7_000_000) == after, "an empty queue costs nothing"
    rig.full()
    again = time.monotonic_ns()
    assert rig.worked(again + 3_000_000) > after


def test_a_graph_that_is_recorded_has_no_events_of_ours(rig: Rig) -> None:
    rig.stream.recording = True
    assert not any(rig.full() for _ in range(10 * FIRST)) and not rig.empty()
    assert not rig.queue.waits()
    assert rig.stream.records == rig.stream.host_functions == rig.stream.spoiled == 0


def test_while_a_graph_is_recorded_elsewhere_nothing_is_asked(rig: Rig) -> None:
    for _ in range(3 * FIRST):
        rig.full()
        rig.stream.launch()
    records = rig.stream.records
    rig.queue.recording(True)
    rig.stream.recording = True
    rig.library.queue_drain(1)
    assert not any(rig.full() for _ in range(10 * FIRST)) and not rig.empty() and not rig.queue.waits()
    assert rig.stream.spoiled == 0
    rig.stream.recording = False
    rig.queue.recording(False)
    assert not rig.empty(), "now an event is put behind them"
    rig.stream.work()
    assert rig.empty() and rig.stream.records == records + 1


def test_the_flag_says_idle_when_the_stream_is_done_and_not_before(rig: Rig) -> None:
    idle, busy = rig.told()
    rig.stream.launch(3)
    assert rig.queue.waits() and rig.told() == (idle, busy)
    rig.stream.work(2)
    assert rig.told() == (idle, busy), "one operator is left"
    rig.stream.work()
    assert rig.told() == (idle + 1, busy)
    rig.queue.works()
    rig.queue.works()
    assert rig.told() == (idle + 1, busy + 1), "each beginning has one end"


def test_input_that_came_before_the_stream_was_done_leaves_the_flag_up(rig: Rig) -> None:
    told = rig.told()
    rig.stream.launch()
    rig.queue.waits()
    rig.queue.works()
    rig.stream.launch()
    rig.queue.waits()
    rig.stream.work(1)
    assert rig.told() == told, "the first wait is over; the second one has an operator before it"
    rig.stream.work()
    assert rig.told() == (told[0] + 1, told[1])
    rig.queue.works()


def test_waits_of_the_scripts_thread_are_marked_on_its_stream(rig: Rig) -> None:
    torch_cuda = pytest.importorskip("covey.hooks.frameworks.torch_cuda", reason="PyTorch is not installed")
    share, pages = ShareControl(), [bytearray(PAGE_BYTES) for _ in range(3)]
    asked: list[bool] = []
    gpu: Any = SimpleNamespace(queue=rig.queue, follow_stream=lambda: None)
    waits = torch_cuda.StreamWaits(share, gpu, cast(Any, SimpleNamespace(waits=asked.append)))
    waits.waits(True)
    assert rig.stream.host_functions == 0, "nobody shares the device"
    share.pages_came(*pages)
    waits.waits(True)
    assert rig.stream.host_functions == 0, "nobody reads the flag of an opportunistic rank"
    LimitsWriter(pages[0]).write(RankLimits(1, guaranteed=True))
    share._look(between_batches=True)
    other = threading.Thread(target=waits.waits, args=(True,))
    other.start()
    other.join()
    assert rig.stream.host_functions == 0, "who fetches ahead is not the script"
    waits.waits(True)
    waits.waits(False)
    assert rig.stream.host_functions == 1 and asked == [False] and FlagReader(pages[2]).busy() is True
    reader = ReportReader(pages[1])
    share._write()
    assert (report := reader.fresh()) is not None and report.says_idle
    gpu.queue, asked[:] = None, []
    waits.waits(True)
    assert asked == [True], "without the native half the stream is asked"
