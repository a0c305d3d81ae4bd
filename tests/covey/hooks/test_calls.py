"""A rank of jitted calls on a shared device; agent and framework are played by the test
(`covey.hooks.limits.sharing`)."""

import threading
import time
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.hooks.limits.sharing import MemoryUsed, Neighbour, ShareControl
from covey.hooks.reporter import CALLS_MAX, CallRounds
from covey.hooks.reports.steps import JITTED_CALL, OPTIMIZER, Step
from covey.hooks.words import DeviceWords
from covey.kernel.futex import SharedWord
from covey.kernel.pages import (
    BUSY_AT,
    GATES,
    PAGE_BYTES,
    FlagReader,
    FlagWriter,
    LimitsWriter,
    RankLimits,
    ReportReader,
)
from tests.covey.agents import lease
from tests.covey.hooks.native_stand_in import Native

MS = 1_000_000


class Took:
    """Memory that a framework took at its start."""

    def __init__(self, took: int | None, cores: bool = True) -> None:
        self.bytes, self.cores = took, cores

    def took(self) -> int | None:
        return self.bytes

    def ended(self) -> MemoryUsed:
        return MemoryUsed(500, 400)

    def on_cores(self) -> bool:
        return self.cores


class Calls:
    """A rank that can be stopped after jitted calls."""

    def __init__(self, took: int | None = 4000, cores: bool = True) -> None:
        self.pages = [bytearray(PAGE_BYTES) for _ in range(3)]
        self.memory = Took(took, cores)
        self.share = ShareControl(fixed=self.memory)
        self.limits, self.report = LimitsWriter(self.pages[0]), ReportReader(self.pages[1])
        self.share.pages_came(*self.pages)
        self.flag = FlagReader(self.pages[2])

    def ends(self) -> None:
        self.share.boundary(Step(3, 0.01, 0.0, JITTED_CALL))
        self.share.tell()
        assert self.report.fresh() is not None

    def acked(self) -> tuple[int, int]:
        assert self.report.newest is not None
        return self.report.newest.acked, self.report.newest.memory_limit_bytes


def test_a_rank_says_what_holds_it_back_before_its_first_mini_batch() -> None:
    """The rank may compile for longer than an agent waits for something that holds it back."""
    rank = Calls(None)
    report = rank.report.fresh()
    assert report is not None and GATES[report.gate] == "jitted call" and not report.fixed


def test_memory_that_was_taken_at_the_start_is_kept_under_smaller_limits() -> None:
    rank = Calls(4000)
    rank.limits.write(RankLimits(1, memory_bytes=6000))
    rank.ends()
    report = rank.report.newest
    assert report is not None and report.fixed and (report.peak_bytes, report.stable_bytes) == (4000, 4000)
    assert rank.acked() == (1, 6000)
    rank.limits.write(RankLimits(2, memory_bytes=3000, idle=0.5, busy=0.5, lease_ns=lease(9)))
    rank.ends()
    assert rank.acked() == (1, 6000) and rank.share.stops_now, "its rates are obeyed at once"
    rank.limits.write(RankLimits(3, memory_bytes=4000))
    time.sleep(0.2)
    rank.report.fresh()
    assert rank.acked() == (3, 4000), "nothing is to be given back: no mini-batch need end"


def test_who_does_not_know_what_it_took_keeps_its_first_limit() -> None:
    rank = Calls(0)
    rank.limits.write(RankLimits(1, memory_bytes=5000))
    rank.ends()
    rank.ends()
    rank.limits.write(RankLimits(2, memory_bytes=4999))
    rank.ends()
    assert rank.acked() == (1, 5000) and rank.report.newest is not None and rank.report.newest.stable_bytes == 5000


def test_a_call_that_is_at_work_keeps_the_flag_up_whatever_the_script_does() -> None:
    rank = Calls()
    for script, works, busy in [(True, True, True), (True, False, False), (False, False, True), (False, True, True)]:
        rank.share.works(works)
        rank.share.idles(script)
        assert rank.flag.busy() is busy
    rank.ends()
    assert rank.report.newest is not None and rank.report.newest.says_idle


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 9)), max_size=30))
def test_idle_and_work_add_up_to_what_was_said(said: list[tuple[bool, bool, int]]) -> None:
    words, now_ns, idle_ns, worked_ns = DeviceWords(), 0, 0, 0
    state = {True: False, False: False}
    for about_script, on, took_ns in said:
        (words.script_idles if about_script else words.device_works)(on, now_ns)
        state[about_script] = on
        assert words.idle is (state[True] and not state[False])
        idle_ns, worked_ns, now_ns = (
            idle_ns + took_ns * words.idle,
            worked_ns + took_ns * state[False],
            now_ns + took_ns,
        )
    assert (words.idle_ns(now_ns), words.worked_ns(now_ns)) == (idle_ns, worked_ns)


def test_on_a_gpu_a_share_is_one_of_the_time_that_calls_were_at_work() -> None:
    """This process uses no processor time while its calls run on the GPU. Reference: §3.1.2."""
    rank = Calls(cores=False)
    rank.ends()
    rank.limits.write(RankLimits(1, memory_bytes=4000, idle=0.2, busy=0.2, failsafe=0.2, lease_ns=lease(60)))
    rank.ends()
    began_s, worked_s = time.monotonic(), 0.0
    while time.monotonic() < began_s + 1.0:
        rank.share.works(True)
        time.sleep(0.01)
        rank.share.works(False)
        worked_s += 0.01
        rank.share.stop_if_limited()
    assert 0.05 < worked_s / (time.monotonic() - began_s) < 0.35


def test_a_stopped_script_goes_on_as_soon_as_its_neighbour_says_idle() -> None:
    """The writer of the flag wakes it: the median of nine lags is far below its pause between two looks."""
    rank, page = Calls(), bytearray(PAGE_BYTES)
    neighbour = Calls()
    neighbour.share = ShareControl(fixed=Took(1))
    neighbour.share.pages_came(bytearray(PAGE_BYTES), bytearray(PAGE_BYTES), page)
    rank.share.neighbour_is(page)
    rank.limits.write(RankLimits(1, memory_bytes=4000, idle=1, busy=0, failsafe=0.01, lease_ns=lease(60)))
    lags = []
    for _ in range(9):
        neighbour.share.idles(False)
        told: list[int] = []

        def says(told: list[int] = told) -> None:
            time.sleep(0.02)
            told.append(time.monotonic_ns())
            neighbour.share.idles(True)

        thread = threading.Thread(target=says)
        thread.start()
        rank.share.boundary(Step(3, 0.01, 0.0, JITTED_CALL))
        lags.append((time.monotonic_ns() - told[0]) / MS)
        thread.join()
    assert sorted(lags)[4] < 6


def test_a_word_wakes_who_sleeps_on_it_and_nobody_sleeps_on_what_has_changed() -> None:
    page = bytearray(PAGE_BYTES)
    word = SharedWord(page, BUSY_AT)
    began_s = time.monotonic()
    word.sleep(0, 50 * MS)
    assert time.monotonic() - began_s > 0.04
    page[BUSY_AT] = 1
    began_s = time.monotonic()
    word.sleep(0, 10_000 * MS)
    assert time.monotonic() - began_s < 5 and word.value == 1


def test_a_page_that_says_nothing_is_a_neighbour_that_is_always_busy() -> None:
    page = bytearray(b"\xff" * PAGE_BYTES)
    neighbour = Neighbour(page)
    assert neighbour.said() == (True, 0)
    began_s = time.monotonic()
    neighbour.sleep(50 * MS)
    assert time.monotonic() - began_s > 0.04, "and nobody runs in circles for it"
    FlagWriter(page).write(False, 7)
    assert neighbour.said() == (False, 7)


# ---- several frameworks in one process ----


class Torch:
    def __init__(self) -> None:
        self.applied: list[int] = []

    def ended(self) -> MemoryUsed:
        return MemoryUsed(100, 50, 7, 1)

    counting = False

    def apply(self, limit_bytes: int) -> bool:
        self.applied.append(limit_bytes)
        return True


def test_a_framework_that_comes_after_the_pages_goes_by_the_same_ones() -> None:
    rank, native, page = Calls(), Native(), bytearray(PAGE_BYTES)
    rank.share.neighbour_is(page)
    assert rank.share.gains(native=native, memory=Torch()) is rank.share  # type: ignore[arg-type]
    assert native.started == [(rank.pages[0], rank.pages[2])] and native.neighbours == [page]
    assert rank.share.gate == "operator"


def test_memory_of_two_frameworks_is_reported_once_and_stays_once_jax_ran() -> None:
    rank, torch = Calls(None), Torch()
    rank.share.gains(memory=torch)
    rank.limits.write(RankLimits(1, memory_bytes=3000))
    rank.ends()
    report = rank.report.newest
    assert report is not None and (report.peak_bytes, report.stable_bytes, report.fixed) == (100, 50, False)
    assert rank.acked() == (1, 3000) and torch.applied == [3000]
    rank.memory.bytes = 1000
    rank.limits.write(RankLimits(2, memory_bytes=2000))
    rank.ends()
    report = rank.report.newest
    assert report is not None and (report.peak_bytes, report.stable_bytes, report.fixed) == (3000, 3000, True)
    assert (report.spill_bytes, report.retries) == (7, 1)
    assert rank.acked() == (1, 3000) and torch.applied == [3000], "what JAX took is not PyTorch's to give back"


def test_jitted_calls_are_stopped_where_operators_have_a_gate_of_their_own() -> None:
    rank = Calls()
    rank.share.gains(native=Native(), memory=Torch())  # type: ignore[arg-type]
    rank.limits.write(RankLimits(1, memory_bytes=4000, idle=0, busy=0, failsafe=1, lease_ns=lease(0.4)))
    began_s = time.monotonic()
    rank.ends()
    assert time.monotonic() - began_s > 0.2


def test_a_device_that_jax_uses_is_not_metered_by_threads() -> None:
    rank = Calls(cores=False)
    assert rank.share._on_cores()
    rank.ends()
    assert not rank.share._on_cores()


# ---- mini-batches of a script that runs ahead ----


def told(steps: list[tuple[float, float]], boundary: str = JITTED_CALL) -> list[float]:
    rounds = CallRounds()
    found = [rounds.ended(Step(n, took, 0.0, boundary, waited)) for n, (took, waited) in enumerate(steps)]
    return [step.step_s for step in found if step is not None]


def test_calls_between_two_waits_for_the_device_count_as_equally_long() -> None:
    waves = [(0.001, 0.0)] * 5 + [(0.055, 0.05)]
    assert told(waves * 20)[6:] == pytest.approx([0.01] * 19)


def test_each_call_counts_by_itself_in_a_script_that_never_waits_or_always() -> None:
    assert len(told([(0.01, 0.0)] * 100)) == 100 and len(told([(0.01, 0.005)] * 100)) == 100
    assert len(told([(0.01, 0.0)] * 100, OPTIMIZER)) == 100
    late = told([(0.01, 0.005)] + [(0.01, 0.0)] * 3 * CALLS_MAX)
    assert len(late) > CALLS_MAX, "it waited once, and no more"


def test_a_mini_batch_is_never_kept_for_longer_than_a_second() -> None:
    assert len(told([(0.4, 0.1)] + [(0.4, 0.0)] * 30)) >= 10


@given(st.lists(st.tuples(st.floats(0.001, 0.5), st.sampled_from([0.0, 0.001])), min_size=1, max_size=200))
def test_no_mean_of_calls_leaves_their_range(steps: list[tuple[float, float]]) -> None:
    found = told(steps)
    assert found and min(took for took, _ in steps) <= fmean(found) * 1.000001
    assert max(found) <= max(took for took, _ in steps) * 1.000001
