"""The iterations of one job, as its coordinator hears of them: what the job needs, and what it loses by sharing.

A window begins with the owner's counters and ends when enough iterations have passed, with its counters again: the
difference is the owner's work in them. The trial is the first window. A window in which a job came to the owner or left
it is begun anew, as its iterations were not alike (`Pool` does the same).
"""

from fractions import Fraction
from typing import Literal

import msgspec

from plugins.aggregator.messages import AggregatorSettings, Demand, WorkCounters
from plugins.aggregator.policy.measured import MeasuredIterations, is_hurt, loss_measured
from plugins.aggregator.policy.profile import Pace, calibrated, demand_of, differs, limit_of

WINDOW_S = 2.0
"""Shortest window in seconds: the counters are asked for over the network, milliseconds after the last step."""
ASK_S = 10.0
"""Seconds between two questions to the owner of a job whose script says nothing of its steps."""
FIRST_S = 3.0
"""Seconds after its assignment at which the owner is asked for the first time, if no step was heard before."""

Found = Literal["", "profiled", "judged", "hurt"]


class Mark(msgspec.Struct, frozen=True):
    """The beginning of a window."""

    work: WorkCounters
    at_s: float
    by_steps: bool
    """The script says when it made a step."""


class Profiler:
    def __init__(self, settings: AggregatorSettings) -> None:
        self._settings = settings
        self.demand: Demand | None = None
        self.lost = Fraction(0)
        """Part of its speed that the job lost in the last window."""
        self.iterations = 0
        """Number of iterations in the last window."""
        self._pace = Pace()
        self._steps = 0
        """Number of iterations since the mark, outliers included."""
        self._last: int | None = None
        """The number that the script gave its last step."""
        self._mark: Mark | None = None
        self._asked_s = 0.0

    def begin(self, now_s: float) -> None:
        """Begin anew: the job has another owner."""
        self._mark, self._pace, self._asked_s = None, self._pace.begun_anew(), now_s - ASK_S + FIRST_S

    def stepped(self, step: int, period_us: int, now_s: float) -> bool:
        """Count one iteration; True when the owner should be asked for its counters."""
        anew = self._last is not None and step <= self._last
        self._last, self._steps = step, self._steps + 1
        if self._mark is not None and (anew or not self._mark.by_steps):
            self._mark = None  # the script counts its steps anew, or has just begun to say them
        if self._mark is None:
            return self._ask(now_s, FIRST_S)
        self._pace = self._pace.plus(period_us)
        if self._pace.measured.count < self._needed or now_s - self._mark.at_s < WINDOW_S:
            return False
        return self._ask(now_s, WINDOW_S / 2)

    def due(self, now_s: float) -> bool:
        """Once a second: should the owner be asked although no step was heard?"""
        return self._ask(now_s, ASK_S)

    def _ask(self, now_s: float, pause_s: float) -> bool:
        if now_s - self._asked_s < pause_s:
            return False
        self._asked_s = now_s
        return True

    @property
    def _needed(self) -> int:
        return self._settings.trial_iterations if self.demand is None else self._settings.revert_iterations

    def heard(self, work: WorkCounters, now_s: float) -> Found:
        """Take in the owner's counters. `profiled`: `demand` is new; `judged`, `hurt`: `lost` is."""
        mark = self._mark
        changed = self.demand is not None and mark is not None and work.changes != mark.work.changes
        if mark is None or changed or not mark.work.iterations or work.busy_us < mark.work.busy_us:
            self._open(work, now_s)
            return ""
        iterations, measured = self._passed(mark, work, now_s)
        if measured.count < self._needed or iterations <= 0:
            return ""
        limit = limit_of(self.demand) if self.demand else Fraction(round(self._settings.loss_limit * 1000), 1000)
        found = demand_of(measured, work.busy_us - mark.work.busy_us, iterations, limit)
        self._open(work, now_s)
        return self._judge(measured, found, work.beside) if found is not None else ""

    def _open(self, work: WorkCounters, now_s: float) -> None:
        self._mark, self._pace = Mark(work, now_s, self._last is not None), self._pace.begun_anew()
        self._steps = 0

    def _passed(self, mark: Mark, work: WorkCounters, now_s: float) -> tuple[int, MeasuredIterations]:
        """Iterations since the mark, and those that count with their time; rounds where the script says no steps."""
        if mark.by_steps:
            return self._steps, self._pace.measured
        rounds = work.iterations - mark.work.iterations
        return rounds, MeasuredIterations(rounds, round((now_s - mark.at_s) * 1e6))

    def _judge(self, measured: MeasuredIterations, found: Demand, beside: int) -> Found:
        known = self.demand
        if known is None:
            self.demand = found
            return "profiled"
        self.lost, self.iterations = loss_measured(measured, known.period_us), measured.count
        if beside and is_hurt(measured, known.period_us, limit_of(known), self._settings.revert_iterations):
            return "hurt"
        demand = calibrated(known, found, alone=not beside)
        if not differs(known, demand):
            return "judged"
        self.demand = demand
        return "profiled"
