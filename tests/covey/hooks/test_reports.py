"""When a rank's report is written (`covey.hooks.reports.figures`)."""

from random import Random

from covey.hooks.reports.figures import WRITE_NS, RankReports, mini_batch
from covey.hooks.reports.steps import Step, StepCounter
from covey.kernel.pages import PAGE_BYTES, RankReport, ReportReader, ReportWriter


def step(number: int) -> Step:
    return Step(number, 0.0001, 0.0, "optimizer")


def test_a_report_says_when_each_mini_batch_ended() -> None:
    counter = StepCounter()
    steps = [counter.optimizer_stepped(1, 5.0 + 0.25 * at) for at in range(3)]
    assert [mini_batch(each, 0, 0).ended_ns for each in steps if each is not None] == [
        5_000_000_000,
        5_250_000_000,
        5_500_000_000,
    ]


def test_no_mini_batch_is_lost_however_many_end_between_two_reports() -> None:
    """Some mini-batches wait with news of their own, some without; a page has places for 64."""
    for seed in range(20):
        random = Random(seed)
        page = bytearray(PAGE_BYTES)
        reports, reader, now_ns = RankReports(ReportWriter(page)), ReportReader(page), WRITE_NS
        seen: list[int] = []
        reports.write(RankReport(), None, now_ns)
        quiet = [at % 2 for at in range(20) for _ in range(random.randrange(60))] * 2
        for number in range(400):
            now_ns += random.choice([0, 0, 0, WRITE_NS // 100])
            if quiet[number] and now_ns < reports.due_ns and reports.left > 0:
                reports.later(step(number))
            else:
                reports.write(RankReport(), mini_batch(step(number), 5, 0), now_ns)
            report = reader.fresh()
            seen += () if report is None else [batch.number for batch in report.batches]
        assert reports.untold or seen[-1] == 399
        reports.write(RankReport(), None, now_ns)
        report = reader.fresh()
        seen += () if report is None else [batch.number for batch in report.batches]
        assert seen == list(range(400)) and not reports.untold
