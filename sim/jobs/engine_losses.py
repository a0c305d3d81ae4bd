"""What a stop loses in the fast engine, where jobs save every so often: what they ran since, and which are not stopped
for it. The decisions are the leader's own (`plugins/scheduler/machine/leader/firm_jobs.py`)."""

import math
from typing import Protocol

from plugins.scheduler.machine.leader.firm_jobs import FirmJobs, JobRun
from plugins.scheduler.machine.leader.order_book import OrderBook
from plugins.scheduler.policy.order import stoppable_for
from plugins.scheduler.policy.rules import OrderRules
from sim.kernel import PackedEvents

SAVE = 1
"""The kind of the only event of a job here."""
ALWAYS = float(1 << 50)
"""Later than any second: a job that saves often enough may be stopped at any time."""


class Ordering(Protocol):
    """An engine, as far as its jobs are taken out of the order and put back."""

    now: int
    width: list[int]
    queue: list[int]
    key: list[int]
    lead: list[int]
    book: OrderBook


class Losses:
    """The checkpoints of the jobs of one engine, which are one tenant's."""

    def __init__(self, engine: Ordering, rules: OrderRules) -> None:
        count = len(engine.width)
        self.engine, self.every_s = engine, rules.checkpoint_every_s or 0
        self.firm = FirmJobs(rules.unsaved_stops)
        self.restart_s = rules.preempt_s + rules.restore_s
        self.since_s, self.went_s = [0] * count, [0] * count
        """For each job: when it got its GPUs, and when it began to make progress on them."""
        self.lost = 0
        """How often a job was stopped, and did not save then: nobody does here."""
        self.saved_s: list[int | None] = [None] * count
        self.out_of_order: set[int] = set()
        """Jobs that are taken out of the order for being firm."""
        self._saves = PackedEvents(count)
        """The next checkpoint of each job."""

    def started(self, job: int) -> None:
        """Count a job that has its GPUs, and a place in the order, from now on."""
        self.since_s[job] = self.engine.now
        self._look(job)

    def went(self, job: int) -> None:
        """Let a job make progress from now on."""
        self.went_s[job] = self.engine.now
        self._await_save(job)

    def lost_s(self, job: int) -> int:
        """Seconds of progress that a job loses that is stopped now."""
        ran_s = self.engine.now - self.went_s[job]
        return ran_s % self.every_s if self.every_s else ran_s

    def next_s(self) -> int | None:
        """When something happens that may change who is stopped."""
        saves_s, closes_s = self._saves.next_at(), self.firm.next_s()
        times = [at for at in (saves_s, None if closes_s is None else math.ceil(closes_s)) if at is not None]
        return min(times, default=None)

    def take(self) -> bool:
        """Take in the checkpoints of this second; returns whether anybody may be stopped who might not, or the other
        way."""
        now, changed = self.engine.now, False
        for job in self.firm.closed(now):
            self._take_out(job)
            changed = True
        for _, job in self._saves.due(now):
            self.saved_s[job] = now
            changed |= self._look(job)
            self._await_save(job)
        return changed

    def back(self, job: int) -> None:
        """Put a job back into the order, which is about to lose its place there."""
        if job in self.out_of_order:
            self._put_back(job)

    def settle(self, job: int) -> None:
        """Take a job out of the order that has a place there again, if it is firm."""
        if job in self.firm.firm and job not in self.out_of_order:
            self._take_out(job)

    def drop(self, job: int) -> None:
        """Forget a job that was stopped, or has ended."""
        self._saves.cancel(job)
        self.firm.drop(job)

    def lost_by_stop(self) -> None:
        """Count a job that was stopped, and has not saved."""
        self.lost += 1
        if self.lost == self.firm.unsaved_stops:
            for job in list(self.firm.runs):
                self._look(job)

    def _await_save(self, job: int) -> None:
        run = self.firm.runs.get(job)
        if self.every_s and run is not None and run.saved_s != ALWAYS:
            self._saves.post(job, self.engine.now + self.every_s, SAVE)

    def _look(self, job: int) -> bool:
        """Take in a job as it is now; returns whether it became firm, or is so no more."""
        now, saved_s = self.engine.now, self.saved_s[job]
        spent = self.firm.unsaved_stops is not None and self.lost >= self.firm.unsaved_stops
        run = JobRun(self.since_s[job], saved_s, spent, self.restart_s)
        firm = self.firm.put(job, run, now)
        if not firm and saved_s == now and self._stays_open(now - self.since_s[job]):
            firm = self.firm.put(job, run._replace(saved_s=ALWAYS), now)
        if firm == (job in self.out_of_order):
            return False
        (self._take_out if firm else self._put_back)(job)
        return True

    def _stays_open(self, held_s: int) -> bool:
        """Whether a job that saves now may be stopped until its next checkpoint, and so after every later one."""
        return stoppable_for(held_s, 0, self.restart_s) >= self.every_s

    def _take_out(self, job: int) -> None:
        engine = self.engine
        self.out_of_order.add(job)
        if engine.lead[job]:
            engine.book.demote(engine.lead[job])
        else:
            engine.book.stop(engine.queue[job], engine.key[job])
        engine.book.firm += engine.width[job]

    def _put_back(self, job: int) -> None:
        engine = self.engine
        self.out_of_order.remove(job)
        engine.book.firm -= engine.width[job]
        if engine.lead[job]:
            engine.book.promote(engine.lead[job], True)
        else:
            engine.book.run(engine.queue[job], engine.key[job])
