"""The additions that can be done now, of all jobs of one process: what is due first, a part of a tensor at a time.

Where there are lanes (`lanes`), those of large tensors are theirs: the next lane that has room gets what is due first,
and so does this process with the rest, or with all of them while no lane is up.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from covey.ports.env import Env
from plugins.aggregator.datapath.lanes.lanes import Lanes
from plugins.aggregator.policy.urgency import MostUrgent

TURN_S = 0.002
"""Seconds that it adds before other work may read and write; one addition takes a tenth of that."""


class Adding(Protocol):
    """A tensor of a job, as far as the queue sees it."""

    @property
    def busy(self) -> bool:
        """Is there an addition to do?"""

    @property
    def is_large(self) -> bool:
        """Does an addition take so long that another process may do it?"""


class AddsFor(Protocol):
    """A job, as far as the queue sees it."""

    over: bool

    @property
    def due_s(self) -> float:
        """Time at which its sums of this iteration are due."""

    def add_part(self, key: int) -> None:
        """Do one addition of this tensor."""

    def hand_part(self, key: int, lanes: Lanes) -> None:
        """Give one addition of this tensor to a lane, if one can do it."""

    def broken(self, key: int, error: Exception) -> None:
        """An addition of this tensor failed, which concerns this job only."""


class _Waiting(NamedTuple):
    job: AddsFor
    key: int
    tensor: Adding


class AdditionQueue:
    def __init__(self, env: Env, lanes: Lanes | None = None) -> None:
        self._env, self._lanes = env, lanes
        self._waiting: MostUrgent[_Waiting] = MostUrgent()
        self._for_lanes: MostUrgent[_Waiting] = MostUrgent()
        self._queued: set[tuple[int, int]] = set()
        """Job and key of the tensors that wait."""
        self._running = False

    def put(self, job: AddsFor, key: int, tensor: Adding) -> None:
        """Add whatever can be added of this tensor, when its turn comes; at once where nothing else waits."""
        if self._lanes is not None and self._lanes.up and tensor.is_large:
            self._queue(self._for_lanes, job, key, tensor)
            self.deal()
            return
        if not self._waiting and tensor.busy and not self._add_part(job, key):
            return
        self._queue(self._waiting, job, key, tensor)
        self._begin()

    def deal(self) -> None:
        """Give lanes the additions for which they have room."""
        waiting, lanes = self._for_lanes, self._lanes
        while lanes is not None and waiting and (lanes.has_room or not lanes.up):
            job, key, tensor = waiting.first
            if lanes.up and tensor.busy and not job.over and self._hand_part(job, key, lanes):
                continue
            waiting.pop()
            self._queued.discard((id(job), key))
            if not lanes.up:
                self._queue(self._waiting, job, key, tensor)
        self._begin()

    def _queue(self, waiting: MostUrgent[_Waiting], job: AddsFor, key: int, tensor: Adding) -> None:
        if tensor.busy and (id(job), key) not in self._queued:
            self._queued.add((id(job), key))
            waiting.put(job.due_s, _Waiting(job, key, tensor))

    def _begin(self) -> None:
        if self._waiting and not self._running:
            self._running = True
            self._env.spawn("aggd adds", self._add())

    async def _add(self) -> None:
        """Add until nothing waits, letting other work run in between."""
        clock = self._env.clock
        try:
            while self._waiting:
                await asyncio.sleep(0)
                end_s = clock.cpu_s() + TURN_S
                while self._waiting and clock.cpu_s() < end_s:
                    self._add_one()
        finally:
            self._running = False

    def _add_one(self) -> None:
        job, key, tensor = self._waiting.first
        if tensor.busy and not job.over and self._add_part(job, key):
            return
        self._waiting.pop()
        self._queued.discard((id(job), key))

    def _add_part(self, job: AddsFor, key: int) -> bool:
        """Do one addition of this tensor. True: it did not fail."""
        return self._unbroken(job, key, partial(job.add_part, key))

    def _hand_part(self, job: AddsFor, key: int, lanes: Lanes) -> bool:
        """Give one addition of this tensor to a lane. True: it did not fail."""
        return self._unbroken(job, key, partial(job.hand_part, key, lanes))

    def _unbroken(self, job: AddsFor, key: int, adds: Callable[[], None]) -> bool:
        try:
            adds()
        except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            job.broken(key, error)
            return False
        return True
