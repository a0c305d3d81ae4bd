"""Room that aggregators hold for jobs of one another (`plugins.aggregator.machine.cycle_ledger.CycleLedger`), by seed:
several empty themselves at a time, again and again, and what they say comes late, twice and out of order.

What must hold: the last that asked (by epoch, then by attempt) and was told yes has its room until it gives it back or
its time is over, whatever comes late from an earlier owner or attempt.
"""

import heapq
import itertools
import random
from collections.abc import Callable

from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.cycle_ledger import RESERVE_S, CycleLedger, Reservation
from plugins.aggregator.messages import Demand

JOBS = tuple(JobId(f"j{number}") for number in range(1, 4))
OWNERS = tuple(HostId(f"h{number}") for number in range(1, 4))
ATTEMPTS = 40
SLOW_S = 6.0


class Room:
    """One aggregator that is asked, and the owners that ask it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"{seed}/reservations")
        self.now_s = 0.0
        self.steps = self.faults = 0
        self.ledger = CycleLedger()
        self.held: dict[JobId, Reservation] = {}
        """Room that was promised to the last one that asked, by job."""
        self.epochs = dict.fromkeys(JOBS, 1)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    @property
    def ended(self) -> object:
        return self.now_s, sorted(self.epochs.items())

    def _late(self, what: Callable[[], None]) -> None:
        for _ in range(2 if self.rng.random() < 0.1 else 1):
            delay_s = self.rng.uniform(0.0, SLOW_S) if self.rng.random() < 0.3 else 0.01
            heapq.heappush(self._queue, (self.now_s + delay_s, next(self._number), what))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self._queue)
            self.steps += 1
            self._expire()
            what()
            self.check()
        self.now_s = end_s

    def attempt(self, number: int) -> None:
        """Let an owner ask for room for a job, and perhaps give it back; now and then the job has a new owner."""
        job, by = self.rng.choice(JOBS), self.rng.choice(OWNERS)
        if self.rng.random() < 0.2:
            self.epochs[job] += 1
        demand = Demand(period_us=1000, work_us=self.rng.choice((10, 50, 200)))
        asked = Reservation(by, self.epochs[job], number, self.now_s + RESERVE_S)
        self._late(lambda: self._reserve(job, demand, asked))
        if self.rng.random() < 0.5:
            self._late(lambda: self._release(job, by, number))

    def _reserve(self, job: JobId, demand: Demand, asked: Reservation) -> None:
        refused = self.ledger.reserve(job, demand, asked)
        before = self.held.get(job)
        if before is not None and (asked.epoch, asked.attempt) < (before.epoch, before.attempt):
            assert refused, f"{job}: room held for {before} was given to {asked}, which is older"
        elif not refused:
            self.held[job] = asked

    def _release(self, job: JobId, by: HostId, attempt: int) -> None:
        self.ledger.release(job, by, attempt)
        held = self.held.get(job)
        if held is not None and (held.by, held.attempt) == (by, attempt):
            del self.held[job]

    def _expire(self) -> None:
        self.ledger.expire(self.now_s)
        self.held = {job: held for job, held in self.held.items() if held.until_s > self.now_s}

    def check(self) -> None:
        self.ledger.check()
        assert self.ledger.reserved == self.held, f"room is held for {self.ledger.reserved}, promised to {self.held}"
        assert set(self.ledger.demands) == set(self.held), "room is held without a demand, or not held"


def play(seed: int) -> Room:
    """Play one seed. Raises AssertionError when a job loses the room it was promised."""
    room = Room(seed)
    for number in range(1, ATTEMPTS + 1):
        room.attempt(number)
        room.run(room.rng.choice((0.0, 0.05, 1.0, SLOW_S)))
    room.run(RESERVE_S + 2 * SLOW_S)
    return room
