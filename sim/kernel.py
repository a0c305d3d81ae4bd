"""Virtual time and the events that are due in it: the one module of `sim/` in which event queues live.

There are two forms. Both order events by time, then by a tie-break that looks at nothing inside the event, so a run
is the same every time.

    Kernel         any events, at times that are all int or all float. Of one time the lower rank comes first, and of
                   one rank what was posted first. It keeps the clock.
    PackedEvents   jobs by number, one event each at most, in whole seconds. Of one second the lower kind comes first,
                   and of one kind the lower number. Its caller keeps the clock.

`PackedEvents` packs an event into one int, which a heap compares faster than a tuple: `engine` simulates tens of
thousands of jobs a second with it. `sharing_cluster` has no event queue: the speed of every job may change at every
step, so it computes the next end at each.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Time = TypeVar("Time", int, float)
Event = TypeVar("Event")


class Kernel(Generic[Time, Event]):
    """Events, and the time until which they have happened. The unit of time is the caller's."""

    def __init__(self, now: Time) -> None:
        self.now: Time = now
        self._heap: list[tuple[Time, int, int]] = []
        """(time, rank, number), those of cancelled events included."""
        self._events: dict[int, Event] = {}
        """Events by number; an event that was cancelled is not here."""
        self._posted = 0

    def __len__(self) -> int:
        return len(self._events)

    def post(self, at: Time, event: Event, rank: int = 0) -> int:
        """Post an event at this time. Returns its number, for `cancel`. Raises ValueError when this time has passed."""
        if not at >= self.now:
            raise ValueError(f"an event at {at} would be in the past: it is {self.now}")
        self._posted += 1
        self._events[self._posted] = event
        heapq.heappush(self._heap, (at, rank, self._posted))
        return self._posted

    def cancel(self, number: int) -> None:
        """Cancel the event of this number; no effect when it has happened, or was cancelled before."""
        self._events.pop(number, None)

    def next_at(self) -> Time | None:
        """The time of the next event; None when there is none."""
        heap, events = self._heap, self._events
        while heap and heap[0][2] not in events:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop(self) -> Event:
        """Let time pass until the next event, and return it. Raises IndexError when there is none."""
        if self.next_at() is None:
            raise IndexError("no event is left")
        self.now, _, number = heapq.heappop(self._heap)
        return self._events.pop(number)

    def advance(self, to: Time) -> None:
        """Let time pass in which nothing happens. Raises ValueError when an event is due before `to`, or `to` has
        passed."""
        at = self.next_at()
        if not to >= self.now or (at is not None and at < to):
            raise ValueError(f"time cannot pass from {self.now} to {to}: the next event is at {at}")
        self.now = to

    def run_until(self, end: Time, happens: Callable[[Event], None]) -> None:
        """Run events up to this time, those at `end` included, and events that are posted meanwhile. Then it is
        `end`."""
        at = self.next_at()
        while at is not None and at <= end:
            happens(self.pop())
            at = self.next_at()
        self.advance(end)

    def run_while(self, goes_on: Callable[[], bool], happens: Callable[[Event], None]) -> None:
        """Run one event after another while `goes_on()` is true and there is one."""
        while self._events and goes_on():
            happens(self.pop())


_JOB_BITS = 32
_KIND_BITS = 3
_JOB_MASK = (1 << _JOB_BITS) - 1
_KIND_MASK = (1 << _KIND_BITS) - 1
_TIME_SHIFT = _JOB_BITS + _KIND_BITS


class PackedEvents:
    """At most one event for each of `jobs` jobs: a new one replaces it.

    An event is the int time << 35 | kind << 32 | job, with a kind from 1 to 7, so it is never 0.
    """

    def __init__(self, jobs: int) -> None:
        self._heap: list[int] = []
        """Heap of events, replaced and cancelled ones included."""
        self._event_of = [0] * jobs
        """The event of each job; 0 for none."""

    def post(self, job: int, at: int, kind: int) -> None:
        """Post what happens to this job next."""
        event = self._event_of[job] = (at << _KIND_BITS | kind) << _JOB_BITS | job
        heapq.heappush(self._heap, event)

    def cancel(self, job: int) -> None:
        """Cancel the job's event: nothing happens to it until something is posted."""
        self._event_of[job] = 0

    def next_at(self) -> int | None:
        """The second of the next event; None when there is none."""
        heap, event_of = self._heap, self._event_of
        while heap and event_of[heap[0] & _JOB_MASK] != heap[0]:
            heapq.heappop(heap)
        return heap[0] >> _TIME_SHIFT if heap else None

    def due(self, now: int) -> Iterator[tuple[int, int]]:
        """Yield (kind, job) for all events up to this second, those included that are posted meanwhile."""
        heap, event_of, pop = self._heap, self._event_of, heapq.heappop
        end = now + 1 << _TIME_SHIFT
        while heap and heap[0] < end:
            event = pop(heap)
            job = event & _JOB_MASK
            if event_of[job] == event:
                event_of[job] = 0
                yield event >> _JOB_BITS & _KIND_MASK, job
