"""One GPU in virtual time: a guaranteed job, opportunistic ones beside it, and the controller that bounds what these
may do.

The model. A mini-batch of the guaranteed job is work on the device, then a wait without it (input, gradients). An
opportunistic job has one operation after the other. Operations cannot be interrupted; those of several jobs run at
once and share the device: a guaranteed job is slowed by 1 + `contention` per operation beside it (1: they halve the
device; 0.15: it leaves most of the device idle), an opportunistic one runs at `beside` of its speed. What the
guaranteed job needs is drawn before another job interferes, so the slowdown is exact: time it took over time it would
have taken alone.

Each opportunistic job asks its gate before each operation. The gate has the rates that the controller gave and reads,
`FLAG_DELAY_S` late, whether the guaranteed job is busy on the device. A rate under 1 is an account: running takes from
it, the rate fills it, an operation may start when it is not overdrawn. Nothing here reads a clock; a seed decides all.

Where the device is a core (`wake_s`), a guaranteed job that has waited gets it from an opportunistic operation only at
the end of a time slice of the kernel's, and can say that it is busy only then: it waits in the run queue meanwhile.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from plugins.sharing.policy.ladder import Rates

FLAG_DELAY_S = 0.0002
"""Seconds after which the gate of another process sees whether the guaranteed job is busy: it looks between
operations."""
ACCOUNT_MAX_S = 0.002
"""Most unused time that an account keeps, in seconds: one quantum."""
TICK_S = 0.05
"""Seconds between calls of the controller with the time."""
NEVER = math.inf


class Controller(Protocol):
    """A law that sets the rates: called after each mini-batch of the guaranteed job and each `TICK_S`; returns why
    rates change."""

    @property
    def rates(self) -> Rates: ...
    def stepped(self, step_s: float, idle_s: float, now_s: float, ended_s: float | None = None) -> str | None: ...
    def passed(self, now_s: float, busy: bool) -> str | None: ...


@dataclass(frozen=True)
class Scenario:
    """Two jobs on one device. Durations in seconds."""

    name: str
    compute_s: float
    wait_s: float
    op_s: float
    variation: float = 0.02
    """Coefficient of variation of both parts of a mini-batch of the guaranteed job."""
    contention: float = 1.0
    beside: float = 0.5
    """Speed of an opportunistic operation beside a busy guaranteed job."""
    drift_at_s: float = NEVER
    drift: float = 1.0
    """Factor of the guaranteed job's work on the device from `drift_at_s` on."""
    op_drift: float = 1.0
    """Factor of the length of opportunistic operations from `drift_at_s` on."""
    away_s: tuple[float, float] = (NEVER, NEVER)
    """Time from and to which the guaranteed job does not use the device and finishes no mini-batch (an evaluation on
    the CPU)."""
    idle_seen_s: float = FLAG_DELAY_S
    """Seconds after which gates see that the guaranteed job waits."""
    wake_s: float = 0.0
    """Mean seconds that the guaranteed job, after a wait, is in the run queue of a core on which an operation runs; 0:
    a GPU."""
    heard_s: float = 0.0
    """Seconds between the reports in which mini-batches reach the controller, as those of a real job do; 0: at once."""
    opportunistic: int = 1
    guest_ops: int = 10
    guest_wait_s: float = 0.0
    """Seconds that an opportunistic job waits after `guest_ops` operations; 0: it always has one more."""


@dataclass(frozen=True)
class Outcome:
    slowdown: float
    """Slowdown of the guaranteed job over all its mini-batches: 0.05 is 5 % slower than alone."""
    share: float
    """Work done by opportunistic jobs, as a share of what one would have done alone."""
    bad_windows: float
    """Share of the runs of 50 mini-batches in which the guaranteed job was slower by more than the tolerance."""
    steps: int
    first_s: float
    """Seconds until the opportunistic jobs first reached 80 % of their final share."""
    story: Sequence[tuple[float, str]] = ()
    timeline: Sequence[tuple[float, float, float]] = ()
    """Rows per half second: time, slowdown of the mini-batches that ended in it (NaN: none), share."""


@dataclass
class Guest:
    """One opportunistic job at its gate."""

    lengths: Sequence[float]
    next: int = 0
    left_s: float = 0.0
    """Seconds left of the running operation; 0: none runs."""
    account_s: float = 0.0
    work_s: float = 0.0
    wait_s: float = 0.0
    """Seconds that the job waits by itself after each mini-batch."""
    waits_s: float = 0.0
    """Seconds that are left of this wait."""

    def opens_in(self, rate: float) -> float:
        """Seconds until the next operation may start, if nothing changes."""
        if rate <= 0:
            return self.waits_s or NEVER
        opens_s = 0.0 if rate >= 1 or self.account_s >= -1e-12 else -self.account_s / rate
        return max(opens_s, self.waits_s)

    def start(self, rate: float, factor: float) -> None:
        self.left_s = factor * self.lengths[self.next % len(self.lengths)]
        self.next += 1
        self.waits_s = 0.0
        if rate >= 1:
            self.account_s = max(0.0, self.account_s)


@dataclass
class _Guaranteed:
    scenario: Scenario
    rng: random.Random
    left_s: float = 0.0
    """Seconds left of the job's work on the device; 0: it waits."""
    until_s: float = NEVER
    """Time at which the job's wait is over."""
    queued_s: float = 0.0
    """Time until which the job is in a run queue, if operations run until then."""
    began_s: float = 0.0
    alone_s: float = 0.0
    """Seconds that the running mini-batch takes alone."""
    wait_s: float = 0.0
    took: list[tuple[float, float, float]] = field(default_factory=list)
    """For each mini-batch: when it ended, seconds it took, seconds it would have taken alone."""

    def begin(self, now_s: float) -> None:
        shape = self.scenario
        factor = shape.drift if now_s >= shape.drift_at_s else 1.0
        self.left_s = factor * shape.compute_s * self._noise()
        self.wait_s = shape.wait_s * self._noise() if shape.wait_s else 0.0
        self.began_s, self.until_s = now_s, NEVER
        self.alone_s = self.left_s + self.wait_s

    def slice_s(self) -> float:
        """Seconds left of a time slice, wherever in it the job wakes."""
        return self.rng.uniform(0.0, 2 * self.scenario.wake_s) if self.scenario.wake_s else 0.0

    def _noise(self) -> float:
        """A log-normal factor with mean 1."""
        sigma2 = math.log1p(self.scenario.variation**2)
        return math.exp(self.rng.gauss(-sigma2 / 2, math.sqrt(sigma2)))


class Device:
    """One run. `story` gets (time, reason) whenever the rates change."""

    def __init__(self, scenario: Scenario, controller: Controller, seed: int) -> None:
        rng = random.Random(f"{scenario.name}/{seed}")
        self.scenario, self.controller = scenario, controller
        self.job = _Guaranteed(scenario, random.Random(rng.random()))
        self.guests = [
            Guest([scenario.op_s * rng.uniform(0.8, 1.2) for _ in range(997)], wait_s=scenario.guest_wait_s)
            for _ in range(scenario.opportunistic)
        ]
        self.now_s = 0.0
        self.story: list[tuple[float, str]] = []
        self._rates = controller.rates
        self._seen_busy, self._seen_since_s = True, 0.0
        self._sees_s = NEVER
        """Time at which the gates will see that the flag has changed."""
        self._tick_s = TICK_S
        self._unheard: list[tuple[float, float, float]] = []
        """Mini-batches of the next report: seconds it took, seconds idle, when it ended."""
        self._report_s = scenario.heard_s
        self._share: list[tuple[float, float]] = [(0.0, 0.0)]

    def run(self, seconds: float) -> "Device":
        job, guests = self.job, self.guests
        job.begin(0.0)
        while self.now_s < seconds:
            rate, closes_s = self._gate()
            factor = self.scenario.op_drift if self.now_s >= self.scenario.drift_at_s else 1.0
            for guest in guests:
                if guest.left_s <= 0 and rate > 0 and guest.opens_in(rate) <= 0:
                    guest.start(rate, factor)
            running = [guest for guest in guests if guest.left_s > 0]
            if self.now_s < job.queued_s and not running:
                self._runs()
                continue
            busy = job.left_s > 0 and self.now_s >= job.queued_s
            slow = 1 + self.scenario.contention * len(running)
            speed = self._guest_speed(busy, len(running))
            until = min(self._tick_s, self._sees_s, closes_s, job.until_s)
            until = min(until, job.queued_s) if self.now_s < job.queued_s else until
            dt = until - self.now_s
            if busy:
                dt = min(dt, job.left_s * slow)
            for guest in guests:
                dt = min(dt, guest.left_s / speed if guest.left_s > 0 else guest.opens_in(rate))
            self._advance(max(0.0, dt), busy, slow, running, speed, rate)
        return self

    def _gate(self) -> tuple[float, float]:
        """The rate in force at the gates, and when it ends by itself."""
        rates = self._rates
        if self._seen_busy:
            return rates.busy, NEVER
        closes_s = self._seen_since_s + rates.head_s
        return (rates.idle, closes_s) if self.now_s < closes_s - 1e-12 else (0.0, NEVER)

    def _guest_speed(self, busy: bool, running: int) -> float:
        if running == 0:
            return 1.0
        return 1 / (1 / self.scenario.beside + running - 1) if busy else 1 / running

    def _advance(self, dt: float, busy: bool, slow: float, running: Sequence[Guest], speed: float, rate: float) -> None:
        self.now_s += dt
        for guest in self.guests:
            if guest.waits_s > 0:
                guest.waits_s = guest.waits_s - dt if guest.waits_s - dt > 1e-12 else 0.0
            if guest.left_s > 0:
                done = dt * speed
                guest.work_s += done
                guest.left_s = guest.left_s - done if guest.left_s - done > 1e-12 else 0.0
                guest.account_s -= dt
                if guest.left_s == 0.0 and guest.next % self.scenario.guest_ops == 0:
                    guest.waits_s = guest.wait_s
            guest.account_s = min(ACCOUNT_MAX_S, guest.account_s + rate * dt)
        job = self.job
        if busy:
            job.left_s -= dt / slow
            if job.left_s <= 1e-12:
                job.left_s = 0.0
                job.until_s = max(self.now_s, self._back_s()) + job.wait_s
                if job.wait_s > 0 or job.until_s > self.now_s:
                    self._sees_s = self.now_s + self.scenario.idle_seen_s
        if job.left_s == 0.0 and self.now_s >= job.until_s - 1e-12:
            self._ended()
        if self.now_s >= self._sees_s - 1e-12:
            self._sees_s = NEVER
            if self._seen_busy != (job.left_s > 0):
                self._seen_busy, self._seen_since_s = job.left_s > 0, self.now_s
        if self.now_s >= self._tick_s - 1e-12:
            self._tick_s += TICK_S
            if self._unheard and self.now_s >= self._report_s - 1e-12:
                self._hear()
            self._said(self.controller.passed(self.now_s, job.left_s > 0))
            self._share.append((self.now_s, self._work_s()))

    def _work_s(self) -> float:
        """Work of the opportunistic jobs, as seconds of one of them alone."""
        shape = self.scenario
        mini_batch_s = shape.guest_ops * shape.op_s
        return sum(guest.work_s for guest in self.guests) * (mini_batch_s + shape.guest_wait_s) / mini_batch_s

    def _back_s(self) -> float:
        gone, back = self.scenario.away_s
        return back if gone <= self.now_s < back else self.now_s

    def _ended(self) -> None:
        job, took_s = self.job, self.now_s - self.job.began_s
        away = took_s - job.alone_s > 1 and self.scenario.away_s[1] < NEVER
        if not away:  # the mini-batch with the evaluation in it is no measure of anything
            job.took.append((self.now_s, took_s, job.alone_s))
        waited_s = job.wait_s
        job.begin(self.now_s)
        if waited_s > 0 or away:
            job.queued_s = self.now_s + job.slice_s()
            self._sees_s = job.queued_s + FLAG_DELAY_S
        if self.scenario.heard_s:
            self._unheard.append((took_s, waited_s, self.now_s))
        else:
            self._said(self.controller.stepped(took_s, waited_s, self.now_s))

    def _hear(self) -> None:
        """Let the controller read a report."""
        heard, self._unheard = self._unheard, []
        self._report_s = self.now_s + self.scenario.heard_s
        for took_s, waited_s, ended_s in heard:
            self._said(self.controller.stepped(took_s, waited_s, self.now_s, ended_s))

    def _runs(self) -> None:
        """Let the guaranteed job have the core: no operation is on it any more."""
        self.job.queued_s = self.now_s
        self._sees_s = self.now_s + FLAG_DELAY_S

    def _said(self, why: str | None) -> None:
        self._rates = self.controller.rates
        if why is not None:
            self.story.append((self.now_s, why))

    def outcome(self, tolerance: float = 0.05) -> Outcome:
        took = self.job.took
        alone_s = sum(alone for _, _, alone in took)
        runs = [took[i : i + 50] for i in range(0, len(took) - 49, 50)]
        bad = sum(sum(t for _, t, _ in run) > (1 + tolerance) * sum(a for _, _, a in run) for run in runs)
        timeline = self._timeline()
        final = sum(share for _, _, share in timeline[-10:]) / max(1, len(timeline[-10:]))
        first = next((at for at, _, share in timeline if share >= 0.8 * final), NEVER)
        return Outcome(
            slowdown=sum(t for _, t, _ in took) / alone_s - 1 if alone_s else 0.0,
            share=self._work_s() / self.now_s if self.now_s else 0.0,
            bad_windows=bad / len(runs) if runs else 0.0,
            steps=len(took),
            first_s=first,
            story=self.story,
            timeline=timeline,
        )

    def _timeline(self) -> list[tuple[float, float, float]]:
        width, rows, at = 0.5, [], 0
        points = self._share[:: round(width / TICK_S)]
        for (from_s, before), (to_s, after) in pairwise(points):
            took = alone = 0.0
            while at < len(self.job.took) and self.job.took[at][0] <= to_s:
                took, alone, at = took + self.job.took[at][1], alone + self.job.took[at][2], at + 1
            rows.append((to_s, took / alone - 1 if alone else math.nan, (after - before) / (to_s - from_s)))
        return rows


def simulate(scenario: Scenario, make: Callable[[], Controller], seed: int, seconds: float) -> Outcome:
    """Run one controller in one scenario."""
    return Device(scenario, make(), seed).run(seconds).outcome()
