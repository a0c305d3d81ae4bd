"""When a rank's report is written: agents look every 50 ms, and writing one costs the script's thread some 20 us."""

from collections import deque

from covey.hooks.reports.steps import Step
from covey.kernel.pages import MiniBatch, RankReport, ReportWriter

WRITE_NS, ALONE_WRITE_NS = 40_000_000, 200_000_000
"""Least ns between two reports with no news but mini-batches; and for a rank that is alone on its device."""
WAITING_MAX = 48
"""Most mini-batches in one report: it has places for 64 (`covey.kernel.pages.HISTORY`)."""


class RankReports:
    """Writes a page of reports. Called under one lock, except `later`, which needs none; times are CLOCK_MONOTONIC in
    ns."""

    def __init__(self, page: ReportWriter) -> None:
        self._page = page
        self._newest: RankReport | None = None
        self._waiting: deque[Step] = deque()
        """Mini-batches that ended while nothing else happened, for the next report."""
        self._added = 0
        """Number of mini-batches on the page that agents cannot read yet."""
        self.due_ns = 0
        """Time from which on a mini-batch is written at once."""

    @property
    def untold(self) -> bool:
        """Whether mini-batches ended that agents cannot read yet."""
        return bool(self._added or self._waiting)

    @property
    def left(self) -> int:
        """How many more mini-batches without other news may wait for the next report."""
        return WAITING_MAX - self._added - len(self._waiting)

    def later(self, step: Step) -> None:
        """Take a mini-batch without an idle or a stopped moment, for the next report."""
        self._waiting.append(step)

    def write(self, report: RankReport, ended: MiniBatch | None, now_ns: int, alone: bool = False) -> None:
        """Write the report if it is due. `report.batches` is ignored: `ended` is added after the mini-batches that
        waited. Without `ended` it is always written."""
        for _ in range(len(self._waiting)):
            self._add(mini_batch(self._waiting.popleft(), 0, 0))
        if ended is not None:
            self._add(ended)
        early = now_ns < self.due_ns and self._added < WAITING_MAX
        if ended is None or not early or report != self._newest:
            self._page.write(report)
            self._added = 0
            self._newest, self.due_ns = report, now_ns + (ALONE_WRITE_NS if alone else WRITE_NS)

    def _add(self, batch: MiniBatch) -> None:
        self._page.add(batch)
        self._added += 1


def mini_batch(step: Step, idle_ns: int, gated_ns: int) -> MiniBatch:
    """The mini-batch of a step, for a report: neither time is longer than the mini-batch."""
    step_ns, ended_ns = int(step.step_s * 1e9), int(step.ended_s * 1e9)
    return MiniBatch(step.number, step_ns, min(max(idle_ns, 0), step_ns), min(max(gated_ns, 0), step_ns), ended_ns)
