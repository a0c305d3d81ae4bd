"""The reporter between hooks and agent (`covey.hooks.reporter`): events that are no news are counted later."""

import itertools
from random import Random
from types import SimpleNamespace
from typing import Any

from covey.hooks.limits.sharing import ShareControl
from covey.hooks.quiet import Quiet
from covey.hooks.reporter import LATER_MAX, SEND_S, Reporter
from covey.hooks.reports.steps import Step, StepCounter
from covey.kernel.pages import PAGE_BYTES, ReportReader
from tests.covey.hooks.test_sharing import Rank

ONE, OTHER = 1, 2


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_steps_are_counted_the_same_now_and_later() -> None:
    """The times are those of the events, whatever the hooks see, in whatever order, and whoever asks to catch up."""
    for seed in range(50):
        random, clock, expected = Random(seed), Clock(), StepCounter()
        reporter = Reporter(now_s=clock)
        put_off = 0
        for _ in range(600):
            clock.s += random.random() / 500
            what, optimizer, waited_s = random.random(), random.choice([ONE, ONE, ONE, OTHER]), random.random() / 900
            if what < 0.6:
                expected.optimizer_stepped(optimizer, clock.s)
                reporter.optimizer_stepped(optimizer)
            elif what < 0.95:
                expected.batch_fetched(waited_s, True, clock.s)
                reporter.batch_fetched(waited_s, True)
            elif what < 0.97:
                expected.optimizer_gone(optimizer)
                reporter.optimizer_gone(optimizer)
            elif what < 0.99:
                expected.device_waited(waited_s)
                reporter.device_waited(waited_s)
            else:
                reporter.catch_up()
            put_off += len(reporter._later) > 0
            assert len(reporter._later) <= LATER_MAX
        reporter.catch_up()
        assert reporter._steps == expected and put_off > 300


def test_every_mini_batch_of_a_lone_rank_reaches_its_agent() -> None:
    """Each mini-batch is noted when it ends and counted before a report, though the agent is not told of each."""
    rank, clock = Rank(), Clock()
    reporter = Reporter(now_s=clock)
    reporter.attach("a stand-in", share=rank.share)
    share, seen = rank.share, []
    for at in range(500):
        clock.s += 0.004
        if at % 40 == 5:
            share.quiet.until(clock.s + 0.1, (1,), share._script, 48)
        reporter.optimizer_stepped(ONE)
        if at % 40 == 39:
            share.tell()
        report = rank.report.fresh()
        seen += [] if report is None else [(batch.number, batch.step_ns) for batch in report.batches]
    assert [number for number, _ in seen] == list(range(1, 480)), "the first has no time"
    assert {round(step_ns / 1e6) for _, step_ns in seen} == {4}


def test_the_newest_step_is_told_at_the_end() -> None:
    """Whether it was counted at once or later; and one that was told is not told again."""
    clock, told = Clock(), list[int]()
    reporter = Reporter(now_s=clock)
    client: Any = SimpleNamespace(observed=lambda number, *_, **__: told.append(number))
    reporter._connected = lambda: client  # type: ignore[method-assign]
    for at in range(33):
        clock.s += SEND_S / 7
        reporter.optimizer_stepped(ONE)
        if at == 20:
            reporter.finish()
            assert told[-1] == 20
            before = list(told)
            reporter.finish()
            assert told == before
    assert told[-1] < 32
    reporter.finish()
    assert told[-1] == 32 and told == sorted(set(told))


def test_what_ended_before_there_were_pages_is_not_reported() -> None:
    """It is not known how much of those mini-batches was idle."""
    share, clock = ShareControl(), Clock()
    reporter = Reporter(now_s=clock)
    reporter.attach("a stand-in", share=share)
    for _ in range(40):
        clock.s += 0.004
        reporter.optimizer_stepped(ONE)
    assert len(reporter._later) > 10
    pages = [bytearray(PAGE_BYTES) for _ in range(3)]
    share.pages_came(*pages)
    share.tell()
    report = ReportReader(pages[1]).fresh()
    share.close()
    assert report is not None and report.batches == () and reporter._steps.count == 40


def test_a_quiet_time_ends_with_the_first_news() -> None:
    quiet, changes = Quiet(), [3]
    assert quiet.lasts(1e9, 1000), "no agent asks"
    quiet.until(5.0, changes, None, 4)
    assert quiet.lasts(4.9, 3) and not quiet.lasts(5.0, 3) and not quiet.lasts(4.9, 4)
    changes[0] += 1
    assert not quiet.lasts(4.9, 0), "its flag moved, or it was stopped"
    quiet.until(5.0, changes, -1, 4)
    assert not quiet.lasts(4.9, 0), "another thread"
    quiet.until(5.0, changes, None, 4)
    quiet.end()
    assert not quiet.lasts(4.9, 0)


def test_the_agent_hears_the_newest_step_when_it_is_due() -> None:
    clock, told = Clock(), []

    class Told(Reporter):
        def _connected(self) -> None:
            told.append(self._steps.count)

    reporter = Told(now_s=clock)
    for _ in range(100):
        clock.s += SEND_S / 10
        reporter.optimizer_stepped(ONE)
    assert told[0] == 2 and all(8 <= later - before <= 12 for before, later in itertools.pairwise(told)), told


def test_a_step_of_no_time_is_no_mini_batch() -> None:
    rank = Rank()
    rank.share.ended_before(Step(1, 0.0, 0.0, "optimizer"))
    rank.share.tell()
    report = rank.report.fresh()
    assert report is None or report.batches == ()
