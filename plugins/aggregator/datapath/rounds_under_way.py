"""The rounds of one job that are under way at its aggregator, and the moment at which another host can take it over."""

import asyncio

from covey.ports.clock import Clock
from plugins.aggregator.datapath.iteration_gaps import IterationGaps


class RoundsUnderWay:
    """The rounds under way of one job. Keys are those of tensors."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gaps = IterationGaps()
        self._open: dict[int, float] = {}
        """Tensor -> time since which its round is under way."""
        self._owed = 0
        """Number of results that are still to be sent."""
        self._changed = asyncio.Event()
        """Set, and replaced, when no round is under way any more, or a worker left."""
        self.iteration_s = clock.now_s()
        """Time at which the present iteration began, as far as can be seen: the end of the last round of the one
        before."""
        self._away: set[int] = set()
        """Workers that were here and are not."""
        self._next_is_ready = False

    @property
    def is_quiet(self) -> bool:
        """Is no round under way, and was every result sent?"""
        return not self._open and not self._owed

    def longest(self) -> tuple[int, float] | None:
        """The tensor whose round has been under way for longest, and for how many seconds."""
        key = min(self._open, key=self._open.__getitem__, default=None)
        return None if key is None else (key, self._clock.now_s() - self._open[key])

    def follow(self, key: int, under_way: bool) -> None:
        """Note whether a round of this tensor is under way now, apart from results that are to be sent."""
        if not under_way:
            self._open.pop(key, None)
            return
        if self.is_quiet:
            if self._gaps.is_end:
                self.iteration_s = self._gaps.since_s
            self._gaps.began(self._clock.now_s())
        self._open.setdefault(key, self._clock.now_s())

    def owe(self) -> None:
        """A result is to be sent."""
        self._owed += 1

    def paid(self, key: int) -> None:
        """A result was sent, or cannot be."""
        self._owed -= 1
        if self.is_quiet:
            self._gaps.quiet(key, self._clock.now_s())
            self._tell()

    def come(self, rank: int) -> None:
        """A worker connected."""
        self._away.discard(rank)

    def leave(self, rank: int) -> None:
        """A worker's connection ended."""
        self._away.add(rank)
        self._tell()

    def next_is_ready(self) -> None:
        """The next owner is ready, as far as is known."""
        if not self._next_is_ready:
            self._next_is_ready = True
            self._tell()

    async def until_between(self, ready_s: float, within_s: float, least_s: float = 0.0) -> str:
        """Wait until the next owner is ready, for `ready_s` at most and for `least_s` in any case, and then until an
        iteration ends, for `within_s` at most; after half of that time, until no round is under way for a moment. A
        worker that is away ends all waiting. Returns what ended it, for people."""
        least_s = min(least_s, ready_s)
        if not await self._left_within(least_s, False) and not await self._left_within(ready_s - least_s, True):
            end_s = self._clock.now_s() + within_s
            while (left_s := end_s - self._clock.now_s()) > 0 and not self._away:
                try:
                    async with asyncio.timeout(min(left_s, self._gaps.patience_s)):
                        await self._changed.wait()
                except TimeoutError:
                    if self.is_quiet:
                        return "nobody pushed"
                    continue
                if self.is_quiet and self._gaps.is_end:
                    return "an iteration ended"
                if self.is_quiet and left_s < within_s / 2:
                    return "no round was under way"
        return "a worker left" if self._away else "a round was always under way"

    async def _left_within(self, seconds: float, until_ready: bool) -> bool:
        """Wait for some seconds. True: a worker left."""
        try:
            async with asyncio.timeout(seconds):
                while not self._away and not (until_ready and self._next_is_ready):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return bool(self._away)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
