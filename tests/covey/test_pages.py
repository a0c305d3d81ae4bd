"""Pages shared by a rank and its agent."""

import errno
import os
import random

import pytest

from covey.kernel import memfd, pages
from covey.kernel.pages import (
    FlagReader,
    FlagWriter,
    LimitsReader,
    LimitsWriter,
    MiniBatch,
    RankLimits,
    RankReport,
    ReportReader,
    ReportWriter,
    rates_at,
)

HALF = RankLimits(7, 1.0, 5_000_000, 0.25, 1 << 30, 0.1, 10**12)


def test_limits_are_read_once_and_whole() -> None:
    page = bytearray(pages.PAGE_BYTES)
    writer, reader = LimitsWriter(page), LimitsReader(page)
    assert not reader.changed() and reader.newest is None
    writer.write(HALF)
    assert reader.changed() and reader.newest == HALF
    assert not reader.changed()
    assert reader.garbage == 0


def test_a_report_brings_each_mini_batch_once() -> None:
    page = bytearray(pages.PAGE_BYTES)
    writer, reader = ReportWriter(page), ReportReader(page)
    seen = []
    for number in range(200):
        writer.write(RankReport(acked=3, gate=1, says_idle=True), MiniBatch(number, 5_000_000, 1_000_000))
        if number % 50 == 49 and (report := reader.fresh()) is not None:
            assert (report.acked, report.gate, report.says_idle) == (3, 1, True)
            seen += [batch.number for batch in report.batches]
    assert seen == list(range(200)) and reader.missed == 0
    for number in range(100):
        writer.write(RankReport(), MiniBatch(number, 5_000_000, 0))
    report = reader.fresh()
    assert report is not None and len(report.batches) == pages.HISTORY and reader.missed == 36


def test_a_report_of_another_version_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    page = bytearray(pages.PAGE_BYTES)
    with monkeypatch.context() as another:
        another.setitem(pages._VERSIONS, "report", 2)
        ReportWriter(page).write(RankReport(acked=3, gate=1))
    reader = ReportReader(page)
    assert reader.fresh() is None and reader.garbage == 1


def test_a_writer_that_died_in_the_middle_leaves_the_record_before() -> None:
    page = bytearray(pages.PAGE_BYTES)
    writer = LimitsWriter(page)
    writer.write(HALF)
    before = bytes(page)
    writer.write(RankLimits(8))
    after, rng = bytes(page), random.Random(1)
    for _ in range(300):
        cut = rng.randrange(pages.PAGE_BYTES)
        reader = LimitsReader(bytearray(after[:cut] + before[cut:]))
        assert reader.changed() and reader.newest in (HALF, RankLimits(8))


def test_garbage_is_counted_and_is_no_limit() -> None:
    rng = random.Random(2)
    for _ in range(500):
        page = bytearray(pages.PAGE_BYTES)
        LimitsWriter(page).write(HALF)
        for _ in range(rng.randrange(1, 200)):
            page[pages.PAGE_BYTES // 2 + rng.randrange(72)] = rng.randrange(256)
        limits, report = LimitsReader(page), ReportReader(page)
        assert limits.changed() is (limits.newest == HALF)
        assert report.fresh() is None
        assert limits.garbage == (limits.newest is None) and report.garbage


@pytest.mark.parametrize(
    "impossible",
    [
        RankLimits(1, idle=1.5),
        RankLimits(1, busy=float("nan"), lease_ns=9),
        RankLimits(1, failsafe=0.0),
        RankLimits(1, busy=0.0),
        RankLimits(-1),
        RankLimits(1, memory_bytes=-1),
    ],
    ids=["more than all", "no number", "a failsafe of nothing", "stopped without a lease", "epoch", "memory"],
)
def test_limits_out_of_bounds_are_refused(impossible: RankLimits) -> None:
    page = bytearray(pages.PAGE_BYTES)
    LimitsWriter(page).write(impossible)
    reader = LimitsReader(page)
    assert not reader.changed() and reader.garbage == 1


def test_once_the_lease_is_over_the_failsafe_holds_and_memory_stays() -> None:
    """In AntMan a coordinator that dies at a limit of 0 stops its job for ever."""
    stopped = RankLimits(1, 0.0, -1, 0.0, 1 << 30, 0.1, lease_ns=100)
    assert rates_at(stopped, 99) == stopped
    over = rates_at(stopped, 100)
    assert (over.idle, over.busy, over.memory_bytes) == (0.1, 0.1, 1 << 30)


def test_nobody_but_its_writer_writes_a_sealed_page() -> None:
    descriptor = memfd.make("report")
    mine = memfd.writable(descriptor)
    with pytest.raises(ValueError, match="seals"):
        memfd.readable(descriptor)
    memfd.close_for_writers(descriptor)
    with pytest.raises(PermissionError):
        os.write(descriptor, b"x")
    with pytest.raises(PermissionError):
        memfd.writable(descriptor)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    with pytest.raises(OSError) as shrunk:
        os.ftruncate(again, 1)
    assert shrunk.value.errno == errno.EPERM
    theirs = memfd.readable(descriptor)
    ReportWriter(mine).write(RankReport(acked=5), MiniBatch(0, 1, 0))
    report = ReportReader(theirs).fresh()
    assert report is not None and report.acked == 5
    os.close(again)
    os.close(descriptor)


def test_a_descriptor_that_is_no_page_is_refused(tmp_path: os.PathLike[str]) -> None:
    plain = os.open(f"{tmp_path}/file", os.O_RDWR | os.O_CREAT)
    small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    for descriptor in (plain, small):
        with pytest.raises(ValueError, match=r"sealed|seals"):
            memfd.writable(descriptor)
        os.close(descriptor)


def test_a_flag_says_busy_idle_or_nothing() -> None:
    page = bytearray(pages.PAGE_BYTES)
    reader = FlagReader(page)
    assert reader.busy() is None
    writer = FlagWriter(page)
    assert reader.busy() is False
    writer.write(True, 5)
    assert reader.busy() is True
