"""The controller that keeps one guaranteed job unharmed: four phases around one number (`policy.ladder`).

              precise                confident violation              recovered: down a rung
    baseline ---------> run ------------------------------> verify -----------------------> run
    (others stopped)     ^  confident that it is fine:      (others  \\-- still slow: the job itself
                         |  up a rung                       stopped)       has changed ----> baseline
                         '<----------- it works again --- idle  <--- no mini-batch for long, device idle

A violation is not blamed on the others until they have been stopped: whoever keeps the first baseline
for ever (AntMan, AIMD, PI, TGS as published) starves the others when the guaranteed job grows slower by itself, and
harms it when it grows faster.
"""

import math
from typing import Literal

from plugins.sharing.policy import interference, ladder
from plugins.sharing.policy.interference import STEPS_WINDOW_MAX, TOLERANCE, Slowdown, StepSamples
from plugins.sharing.policy.ladder import QUIET_WINDOWS, TARGET, U_START, Rates

Phase = Literal["baseline", "run", "verify", "idle"]
SILENT_BASELINES = 8.0
"""Mini-batch durations without a word after which a job that is idle on the device counts as away."""
SILENT_MIN_S = 0.2
SILENT_UNKNOWN_S = 1.0
"""Seconds assumed for a mini-batch whose duration has not been measured yet."""
AUDIT_S = 300.0
"""Seconds after which a baseline is confirmed at the latest, so that drift and harm are told apart."""
HOPELESS = 3
"""The number of verdicts in a row on the first rungs after which these jobs do not belong on one device."""
IDLE_WEIGHT = 0.1
"""Weight of the newest idle phase in the typical one."""


class Ladder:
    """The controller of the jobs beside one guaranteed job. `stepped` and `passed` return a reason when the rates have
    changed, else None."""

    def __init__(self, tolerance: float = TOLERANCE, flag: bool = True) -> None:
        self.tolerance, self.flag = tolerance, flag
        self.phase: Phase = "baseline"
        self.u = 0.0
        self.resume_u = U_START if flag else 1 + ladder.BUSY_START
        """The rung from which to continue after baseline, verify or idle."""
        self.baseline = StepSamples()
        self.window = StepSamples()
        self.too_much: float | None = None
        """The lowest rung that was found guilty and is not forgotten yet."""
        self.quiet = 0
        self.idle_s = 0.0
        """Typical idle phase of the guaranteed job on the device, s."""
        self.last_step_s: float | None = None
        """When the guaranteed job's newest mini-batch ended."""
        self.baseline_s: float | None = None
        """When the baseline was last measured or confirmed."""
        self.audits = 0
        """The number of windows in which the others were stopped to measure the job alone."""
        self.found = Slowdown(0.0, math.inf)
        """The slowdown that was last measured before the others were found guilty."""
        self._guilty = 0
        """The number of verdicts in a row against the others on the first rungs."""
        self._accused = False
        """Whether it verifies because the job was too slow, not because the baseline is old."""
        self._skip = True
        self._used = True
        """Somebody computes under the rung."""
        self._now_s = self._changed_s = -math.inf
        """When the newest event happened; when the others were last told other limits."""

    @property
    def rates(self) -> Rates:
        if self.phase == "idle":
            return ladder.freed(self.resume_u, self.flag)
        return ladder.rates(self.u, self.idle_s, self.flag)

    @property
    def hopeless(self) -> bool:
        """Whether the others harm the job even with next to nothing."""
        return self._guilty >= HOPELESS

    @property
    def measured(self) -> Slowdown:
        return interference.slowdown(self.baseline, self.window)

    def stepped(
        self,
        step_s: float,
        idle_s: float,
        now_s: float,
        ended_s: float | None = None,
        held: bool = True,
        used: bool = True,
    ) -> str | None:
        """The guaranteed job finished a mini-batch of `step_s` seconds, `idle_s` of them without work on the device. It
        ended at `ended_s` and is heard of now; None: just now. `held`: all others go by their rates. While one does
        not, as one that has just begun, the job is slowed whatever the rates say: it is not measured alone. `used`:
        some other has finished a mini-batch. Until one has, nobody knows what a rung does: none is climbed."""
        self._now_s = self.last_step_s = now_s
        if ended_s is not None and ended_s <= self._changed_s:
            return None  # under the limits before: heard of too late to be blamed on these
        self.idle_s += (1.0 if self.idle_s == 0 else IDLE_WEIGHT) * (idle_s - self.idle_s)
        if self.phase == "idle":
            phase: Phase = "run" if self.baseline.count else "baseline"
            return self._enter(phase, self.resume_u, "the guaranteed job works again")
        if self._skip:  # this mini-batch began under the limits before
            self._skip = False
            return None
        if not held and self.phase in ("baseline", "verify"):
            return None
        self._used = used
        self.window = self.window.plus(interference.clipped(self.baseline, step_s))
        if self.phase == "baseline":
            return self._baseline()
        if not interference.is_look(self.window.count):
            return None
        return self._run() if self.phase == "run" else self._verify()

    def passed(self, now_s: float, busy: bool) -> str | None:
        """Note that time went by; `busy`: the guaranteed job has work on the device now."""
        self._now_s = now_s
        if self.phase == "idle" or busy or self.last_step_s is None or not self.flag:
            return None
        silent_s, step_s = now_s - self.last_step_s, self.baseline.mean_s or self.window.mean_s or SILENT_UNKNOWN_S
        if silent_s <= max(SILENT_MIN_S, SILENT_BASELINES * step_s):
            return None
        why = f"no mini-batch for {silent_s:.1f} s and the device idle"
        return self._enter("idle", self.u if self.phase == "run" else self.resume_u, why)

    def restart(self, why: str) -> str:
        """Forget the baseline and what was too much: the guaranteed job has changed."""
        self.baseline, self.too_much, self.quiet = StepSamples(), None, 0
        resume_u = self.resume_u if self.phase != "run" else self.u
        return self._enter("baseline", resume_u, why)

    def check(self) -> None:
        assert 0 <= self.u <= ladder.U_MAX
        assert self.phase in ("run", "idle") or self.u == 0, "the others are stopped for a measurement"
        rates = self.rates
        assert 0 <= rates.busy <= 1 and 0 <= rates.idle <= 1 and rates.head_s >= 0

    # ---- the phases ----

    def _enter(self, phase: Phase, u: float, why: str) -> str:
        self.phase, self.window, self._skip, self._changed_s = phase, StepSamples(), True, self._now_s
        if phase in ("baseline", "verify"):
            self.resume_u, self.u = u, 0.0
        elif phase == "idle":
            self.resume_u = u
        else:
            self.u = u
        return f"{why}; others now: {self.rates}"

    def _baseline(self) -> str | None:
        if not interference.is_precise(self.window, self.tolerance):
            return None
        self.baseline, self.baseline_s = self.window, self.last_step_s
        self.audits += 1
        mean_ms, error = 1000 * self.baseline.mean_s, self.baseline.error_s / self.baseline.mean_s
        why = f"alone it takes {mean_ms:.1f} ms ± {100 * error:.1f} % ({self.baseline.count} mini-batches)"
        return self._enter("run", self.resume_u, why)

    def _run(self) -> str | None:
        measured, count = self.measured, self.window.count
        if measured.least > self.tolerance or measured.most < -self.tolerance:
            return self._violated(measured)
        if measured.most < self.tolerance:
            return self._quiet(measured)
        if count < STEPS_WINDOW_MAX:
            return None
        if measured.excess > self.tolerance:
            return self._enter("run", ladder.descended(self.u), f"{measured} slower, perhaps too much")
        return self._quiet(measured)

    def _violated(self, measured: Slowdown) -> str | None:
        self._accused, self.found = measured.excess > 0, measured
        whose = "whose fault?" if self._accused else "has it changed?"
        return self._enter("verify", self.u, f"it is {measured} slower than alone: {whose}")

    def _quiet(self, measured: Slowdown) -> str | None:
        self.quiet += 1
        self._guilty = 0
        if self._is_old():
            self.too_much, self.quiet, self._accused = None, 0, False
            return self._enter("verify", self.u, "its baseline is old")
        target = TARGET * self.tolerance
        up = ladder.climbed(self.u, measured.excess, target, self._ceiling())
        if self.flag and not self._is_known():
            up = max(self.u, min(up, 1.0))
        if measured.excess >= target or up <= self.u or not self._used:
            self.window = StepSamples()
            return None
        return self._enter("run", up, f"{measured} slower, room for more")

    def _verify(self) -> str | None:
        measured = self.measured
        recovered = abs(measured.excess) + interference.CONFIDENCE * measured.error < self.tolerance
        changed = measured.least > self.tolerance / 2 or measured.most < -self.tolerance / 2
        if not (recovered or changed) and self.window.count < interference.STEPS_BASELINE_MAX:
            return None
        if changed or abs(measured.excess) > self.tolerance / 2:
            self.baseline, self.too_much = StepSamples(), None
            return self._enter(
                "baseline", self.resume_u, f"{measured} slower with the others stopped: the job itself has changed"
            )
        self.baseline, self.baseline_s = self.baseline.joined(self.window), self.last_step_s
        self.audits += 1
        if not self._accused:
            return self._enter("run", self.resume_u, f"{measured} slower with the others stopped: as before")
        self.too_much, self.quiet = self.resume_u, 0
        self._guilty = self._guilty + 1 if self.resume_u <= U_START else 0
        return self._enter("run", ladder.descended(self.resume_u), f"{measured} slower with the others stopped")

    # ---- rules, each of which can be taken out (`machine.ablations`) ----

    def _is_old(self) -> bool:
        """Whether the baseline has to be confirmed."""
        old_s = 0.0 if self.baseline_s is None or self.last_step_s is None else self.last_step_s - self.baseline_s
        return self.quiet >= QUIET_WINDOWS or old_s >= AUDIT_S

    def _is_known(self) -> bool:
        """Whether the baseline is known well enough to give busy time away."""
        return interference.is_known(self.baseline, self.tolerance)

    def _ceiling(self) -> float | None:
        """The rung that is approached and not crossed; None: there is none."""
        return self.too_much
