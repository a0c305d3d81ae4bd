"""When a rank's report is written: agents look at it every 50 ms, and each one costs the script's thread some 20 us."""

from collections.abc import Sequence

from covey.attach.steps import Step
from covey.pages import MiniBatch, RankReport, ReportWriter

WRITE_NS, ALONE_WRITE_NS = 40_000_000, 200_000_000
"""Between two reports with no other news than mini-batches, and where nobody shares the device."""
WAITING_MAX = 48
"""Mini-batches in one report: it has places for 64 (`covey.pages.HISTORY`)."""


class RankReports:
    """Writes a page. Called under one lock; times are CLOCK_MONOTONIC, ns."""

    def __init__(self, page: ReportWriter) -> None:
        self._page = page
        self._newest: RankReport | None = None
        self._added = 0
        self.due_ns = 0
        """From when on mini-batches are written at once."""
        self.untold = False
        """Mini-batches were added that nobody can read yet."""

    def write(self, report: RankReport, ended: Sequence[MiniBatch], now_ns: int, alone: bool = False) -> None:
        """`report.batches` is not looked at: `ended` are more. Without any it is written in any case."""
        for batch in ended:
            self._page.add(batch)
        self._added += len(ended)
        early = now_ns < self.due_ns and self._added < WAITING_MAX
        self.untold = bool(ended) and early and report == self._newest
        if not self.untold:
            self._page.write(report)
            self._added = 0
            self._newest, self.due_ns = report, now_ns + (ALONE_WRITE_NS if alone else WRITE_NS)


def mini_batch(step: Step, idle_ns: int, gated_ns: int) -> MiniBatch:
    """As a report has it: neither time is longer than the mini-batch."""
    step_ns = int(step.step_s * 1e9)
    return MiniBatch(step.number, step_ns, min(max(idle_ns, 0), step_ns), min(max(gated_ns, 0), step_ns))
