"""Jobs that share GPUs, in virtual time: whoever cannot have GPUs of its own runs beside others on theirs (AntMan
§3.3).

Each GPU has one *owner* and room for one *guest*. Owners are chosen by the usual walk down the order. Whoever comes
after them is a guest while there is room: a gang needs that many guest places, all at once. A guest becomes an owner,
and an owner a guest, without a checkpoint: its share of the GPUs is only changed (AntMan's upgrade and dynamic
scaling). Only who has no place at all is checkpointed.

What is assumed, and has to be said with every result: a guest makes `guest_rate` of its own speed, and as long as there
is any guest *every* owner makes 1 - `slowdown` of its own. Guest places are alike, memory always suffices (the sharing
room sees to that on a host), and service attained counts the progress that was made.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cli.sim.engine import NEVER, Outcome, SimJob
from plugins.scheduler.policy.rules import Rules

UNBORN, WAIT, OWNER, GUEST, SUSP, RESUME, DONE = range(7)
PARTS = 1000
"""Progress is counted in thousandths of a second."""


@dataclass(frozen=True)
class Device:
    """What sharing a GPU does to the two jobs on it, as shares of their own speed."""

    guest_rate: Fraction = Fraction(2, 5)
    """Of a guest, alone: 1. The ladder gives 0.2 to 0.5 beside a job with input waits, 0.02 beside one that never
    waits (`covey-sim sharing`); jobs of production clusters keep their GPUs half busy (AntMan §2)."""
    slowdown: Fraction = Fraction(1, 20)
    """Of an owner with a guest: the tolerance of the sharing room's controller."""


class Shared:
    """One run; `rules` are those of `covey`. The state of every job is looked at at every event."""

    def __init__(self, jobs: Sequence[SimJob], capacity: int, rules: Rules, device: Device) -> None:
        order = sorted(range(len(jobs)), key=lambda at: (jobs[at].submit_s, jobs[at].id))
        self.given, self.jobs = order, [jobs[at] for at in order]
        if any(not 1 <= job.gpus <= capacity for job in jobs):
            raise ValueError(f"a job of no GPU, or of more than {capacity}, can never run")
        count = len(jobs)
        self.capacity, self.rules = capacity, rules
        self.guest_parts = int(device.guest_rate * PARTS)
        self.owner_parts = PARTS - math.ceil(device.slowdown * PARTS)
        self.left = [job.duration_s * PARTS for job in self.jobs]
        """Thousandths of seconds still to do."""
        self.ran = [0] * count
        """The same, done since the last promotion."""
        self.state, self.rate = [UNBORN] * count, [0] * count
        self.since, self.first = [0] * count, [NEVER] * count
        self.ready = [0] * count
        """When a checkpoint or a restore is over."""
        self.promoted = [0] * count
        self.active: list[int] = []
        self.now = 0
        self.out = Outcome([0] * count, [0] * count, [0] * count, [0] * count, [0] * count)

    def run(self, progress: Callable[[float, str], None] | None = None) -> Outcome:
        arrived, total, steps = 0, len(self.jobs), 0
        while arrived < total or self.active:
            self._advance(self._next(arrived))
            while arrived < total and self.jobs[arrived].submit_s == self.now:
                self.active.append(arrived)
                self.state[arrived], self.since[arrived] = WAIT, self.now
                arrived += 1
            self._promotions()
            self._decide()
            self.out.decisions += 1
            steps += 1
            if progress is not None and steps % 512 == 0:
                done = arrived - len(self.active)
                progress(done / total, f"{done} of {total} jobs ended, {self.now / 86400:.1f} days of virtual time")
        return self._outcome()

    def _outcome(self) -> Outcome:
        for name in ("end_s", "first_s", "wait_s", "preempted", "promoted"):
            values = getattr(self.out, name)
            given = [0] * len(values)
            for at, value in zip(self.given, values, strict=True):
                given[at] = value
            setattr(self.out, name, given)
        return self.out

    def _next(self, arrived: int) -> int:
        now, limit = self.now, self.rules.starve_limit_s
        soonest = self.jobs[arrived].submit_s if arrived < len(self.jobs) else NEVER
        for job in self.active:
            state = self.state[job]
            if state in (OWNER, GUEST):
                rate = self.rate[job]
                if rate:
                    soonest = min(soonest, now - (-self.left[job] // rate), self._crossing(job, rate))
            elif state in (SUSP, RESUME):
                soonest = min(soonest, self.ready[job])
            elif limit is not None and not self.promoted[job]:
                soonest = min(soonest, self.since[job] + limit)
        return max(soonest, now)

    def _crossing(self, job: int, rate: int) -> int:
        """When it reaches the limit of its queue."""
        width = self.jobs[job].gpus
        queue = self._queue(job)
        if queue == len(self.rules.thresholds_gpu_s):
            return NEVER
        lacks = self.rules.thresholds_gpu_s[queue] * PARTS - self.ran[job] * width
        return self.now + max(1, -(-lacks // (rate * width)))

    def _queue(self, job: int) -> int:
        return bisect.bisect_right(self.rules.thresholds_gpu_s, self.ran[job] * self.jobs[job].gpus // PARTS)

    def _advance(self, now: int) -> None:
        """To `now`: progress, ends, and checkpoints and restores that are over."""
        passed, still = now - self.now, []
        self.now = now
        for job in self.active:
            state = self.state[job]
            if state in (OWNER, GUEST):
                made = passed * self.rate[job]
                self.left[job] -= made
                self.ran[job] += made
                if state == OWNER:
                    self.out.held_gpu_s += passed * self.jobs[job].gpus
                if self.left[job] <= 0:
                    self.state[job] = DONE
                    self.out.end_s[job], self.out.first_s[job] = now, self.first[job]
                    continue
                if self.promoted[job] and self._queue(job) > 0:
                    self.promoted[job] = 0
            elif state == SUSP and self.ready[job] <= now:
                self.state[job], self.since[job] = WAIT, now
            elif state == RESUME and self.ready[job] <= now:
                self.state[job] = OWNER
            still.append(job)
        self.active = still

    def _promotions(self) -> None:
        limit = self.rules.starve_limit_s
        if limit is None:
            return
        for job in self.active:
            if self.state[job] == WAIT and not self.promoted[job] and self.now - self.since[job] >= limit:
                self.promoted[job], self.ran[job] = self.now + 1, 0
                self.out.promoted[job] += 1

    def _key(self, job: int) -> tuple[int, ...]:
        if self.promoted[job]:
            return (0, 0, self.promoted[job], job)
        owns = self.state[job] in (OWNER, RESUME)
        width = self.jobs[job].gpus if self.rules.narrow_first and not owns else 0
        return (self._queue(job), 1, 0 if owns else 1, width, self.first[job], job)

    def _decide(self) -> None:
        """Owners down the order. Guests stay guests; an owner that lost its GPUs is one if there is room; then those
        that wait, down the order."""
        width = [job.gpus for job in self.jobs]
        free = rooms = self.capacity
        owners: list[int] = []
        lost: list[int] = []
        waiting: list[int] = []
        guests: list[int] = []
        for job in sorted(self.active, key=self._key):
            state = self.state[job]
            if state == SUSP:
                rooms -= width[job]
            elif width[job] <= free:
                free -= width[job]
                owners.append(job)
            elif state == GUEST:
                rooms -= width[job]
                guests.append(job)
            else:
                (waiting if state == WAIT else lost).append(job)
        for job in [*lost, *waiting]:
            if self.guest_parts and width[job] <= rooms:
                rooms -= width[job]
                guests.append(job)
            elif self.state[job] != WAIT:
                self._suspend(job)
                rooms -= width[job]
        owned = self.owner_parts if guests else PARTS
        for job in owners:
            self._place(job, OWNER, owned)
        for job in guests:
            self._place(job, GUEST, self.guest_parts)

    def _suspend(self, job: int) -> None:
        self.out.preempted[job] += 1
        self.state[job], self.rate[job] = SUSP, 0
        self.ready[job] = self.now + self.rules.preempt_s
        if not self.rules.preempt_s:
            self.state[job], self.since[job] = WAIT, self.now

    def _place(self, job: int, role: int, rate: int) -> None:
        if self.state[job] == WAIT:
            self.out.wait_s[job] += self.now - self.since[job]
            if self.first[job] != NEVER and self.rules.restore_s:
                self.state[job], self.ready[job] = RESUME, self.now + self.rules.restore_s
            else:
                self.state[job] = role
            self.first[job] = min(self.first[job], self.now)
        elif self.state[job] != RESUME:
            self.state[job] = role
        self.rate[job] = rate if self.state[job] == role else 0
