"""Jobs that are asked to end while they train: each process hears of it at another time, and in every step all must
have one answer to whether they stop."""

import asyncio
import random
from collections.abc import Callable

from covey.core.ids import JobId

HEARS = 0.7
"""Chance that a process hears at all that its job is to stop."""
WITHIN_S = 25.0
"""Most seconds after its start until it does."""


class Hears:
    """When one process hears that its job is to stop. Chosen without the numbers by which everything else is chosen."""

    def __init__(self, process: str) -> None:
        """`process`: what names this process and no other."""
        draws, now_s = random.Random(process), asyncio.get_running_loop().time()
        self._at_s = now_s + draws.uniform(0.0, WITHIN_S) if draws.random() < HEARS else float("inf")

    def now(self) -> bool:
        """Whether it has heard."""
        return asyncio.get_running_loop().time() >= self._at_s


class Answers:
    """What processes of a rack's jobs were told when they asked whether all stop (`JobState.stopping`)."""

    def __init__(self, wrong: Callable[[str], object]) -> None:
        self._wrong = wrong
        self._given: dict[tuple[JobId, int, int], bool] = {}
        """Job, grant and step -> whether its ranks stop after it."""
        self.stopped = 0
        """How many steps had yes as their answer."""

    def given(self, job: JobId, epoch: int, rank: int, step: int, stops: bool) -> None:
        """A process that computes for this rank asked at the end of this step."""
        key = job, epoch, step
        if key not in self._given:
            self._given[key] = stops
            self.stopped += stops
        if self._given[key] != stops:
            self._wrong(f"{job} rank {rank} {'stops' if stops else 'goes on'} after step {step}, and others do not")
