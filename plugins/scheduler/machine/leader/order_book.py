"""The order of all jobs, kept up to date instead of sorted anew: what lets one decision cost microseconds.

A decision walks down the order and gives GPUs to whatever fits whole (`policy/order.py: select` is the same walk,
plain). Three facts make that cheap. Jobs ask for few different widths, so a queue keeps one heap per width and only
looks at the heads of those that still fit. Running jobs of a queue that all fit need no walk at all, their sum is
enough. And a job that waits keeps its place until something happens to it.

    queue 0   promoted, oldest first | running | waiting, by key: width 1, width 2, width 8 ...
    queue 1                            running | waiting ...

A *key* is a whole number, smallest first, whose low 32 bits are the job's number: so keys differ and name their job.
With `merged` the running jobs of a queue do not go ahead of those that wait, all are ordered by key. Where keys change
while a job runs, a `Moving` keeps the running jobs in order: a decision asks it only for those behind the first job
that waits and fits, since all before them stay.
"""

import bisect
import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol

JOB_BITS = 32
JOB_MASK = (1 << JOB_BITS) - 1


class Moving(Protocol):
    """Running jobs whose keys change as they run, by their present keys."""

    def behind(self, queue: int, key: int) -> int:
        """GPUs of the running jobs of this queue that come after `key`."""

    def after(self, queue: int, key: int) -> list[int]:
        """The present keys of those jobs, ascending."""


class OrderBook:
    """The order of all jobs that run or wait. `widths[job]`: GPUs that the job takes."""

    def __init__(
        self,
        queues: int,
        widths: Sequence[int] | Mapping[int, int],
        *,
        merged: bool = False,
        blocking: bool = False,
        moving: Moving | None = None,
    ) -> None:
        self.widths = widths
        self.merged, self.blocking, self.moving = merged, blocking, moving
        self.waiting: list[dict[int, list[int]]] = [{} for _ in range(queues)]
        """Waiting jobs per queue: width -> heap of keys. There is no empty heap, and no head that has left."""
        self.narrow: list[list[int]] = [[] for _ in range(queues)]
        """The widths of waiting jobs per queue, ascending."""
        self.left: list[set[int]] = [set() for _ in range(queues)]
        """Keys per queue that left from the middle of a heap and are in it still."""
        self.running: list[list[int]] = [[] for _ in range(queues)]
        """Keys of running jobs per queue, ascending; with `moving` it keeps them, and these are empty."""
        self.held: list[int] = [0] * queues
        """GPUs of the running jobs per queue."""
        self.firm = 0
        """GPUs of running jobs that stay whatever the order says; they are in no list."""
        self.promoted: list[tuple[int, int, bool]] = []
        """Promoted jobs as (key, width, whether it runs), ascending; they are in no other list."""

    # ---- changes ----

    def wait(self, queue: int, key: int) -> None:
        """Add a job that waits."""
        if key in self.left[queue]:
            self.left[queue].remove(key)
            return
        width = self.widths[key & JOB_MASK]
        heaps = self.waiting[queue]
        heap = heaps.get(width)
        if heap is None:
            heaps[width] = [key]
            bisect.insort(self.narrow[queue], width)
        else:
            heapq.heappush(heap, key)

    def leave(self, queue: int, key: int) -> None:
        """Remove a waiting job that was not chosen."""
        width = self.widths[key & JOB_MASK]
        if self.waiting[queue][width][0] == key:
            self.pop(queue, width)
        else:
            self.left[queue].add(key)

    def pop(self, queue: int, width: int) -> int:
        """Remove and return the first waiting job of this width."""
        heap = self.waiting[queue][width]
        key = heapq.heappop(heap)
        left = self.left[queue]
        while heap and heap[0] in left:
            left.remove(heapq.heappop(heap))
        if not heap:
            del self.waiting[queue][width]
            self.narrow[queue].remove(width)
        return key

    def run(self, queue: int, key: int) -> None:
        """Add a job that holds its GPUs now."""
        if self.moving is None:
            bisect.insort(self.running[queue], key)
        self.held[queue] += self.widths[key & JOB_MASK]

    def stop(self, queue: int, key: int) -> None:
        """Remove a running job: it gives its GPUs up, or goes to another queue."""
        if self.moving is None:
            running = self.running[queue]
            del running[bisect.bisect_left(running, key)]
        self.held[queue] -= self.widths[key & JOB_MASK]

    def promote(self, key: int, running: bool) -> None:
        """Put a job at the head of everything, behind those promoted before it."""
        bisect.insort(self.promoted, (key, self.widths[key & JOB_MASK], running))

    def demote(self, key: int) -> None:
        """End a job's promotion; the caller says where it goes."""
        del self.promoted[bisect.bisect_left(self.promoted, (key, 0, False))]

    def first(self, queue: int, most: int) -> tuple[int, int]:
        """The first waiting job of at most `most` GPUs, and its width; (-1, 0) when there is none."""
        return self._best(self.narrow[queue], self.waiting[queue], most)

    def running_gpus(self) -> int:
        """GPUs of all running jobs of the book."""
        return self.firm + sum(self.held) + sum([width for _, width, running in self.promoted if running])

    # ---- the walk ----

    def decide(self, capacity: int, vacant: int) -> tuple[list[int], list[int]]:
        """Jobs to start, in order, and running jobs to stop. `vacant`: GPUs that no job holds; a chosen job for which
        they do not suffice claims its GPUs and is not started. Jobs to start have left those that wait when this
        returns; promoted ones are still where they were."""
        free = capacity - self.firm
        start: list[int] = []
        stop: list[int] = []
        for key, width, running in self.promoted:
            if width <= free:
                free -= width
                if not running and width <= vacant:
                    vacant -= width
                    start.append(key & JOB_MASK)
            elif running:
                stop.append(key & JOB_MASK)
        claims: list[tuple[int, int]] = []
        for queue, heaps in enumerate(self.waiting):
            narrow = self.narrow[queue]
            held = self.held[queue]
            if held and self.merged and narrow and narrow[0] <= free:
                free, vacant = self._merge(queue, free, vacant, start, stop, claims)
                continue
            if held <= free:
                free -= held
            else:
                free = self._squeeze(queue, free, stop)
            while narrow and narrow[0] <= free:
                best, width = self._best(narrow, heaps, free)
                if self.blocking and self._blocked(queue, best):
                    break
                self.pop(queue, width)
                free -= width
                if width <= vacant:
                    vacant -= width
                    start.append(best & JOB_MASK)
                else:
                    claims.append((queue, best))
        for queue, key in claims:
            self.wait(queue, key)
        return start, stop

    def _blocked(self, queue: int, best: int) -> bool:
        """Whether a job that does not fit precedes the first one that does."""
        return any(heap[0] < best for heap in self.waiting[queue].values())

    def _squeeze(self, queue: int, free: int, stop: list[int]) -> int:
        """Go down the order of a queue whose running jobs do not all fit: who fits stays. Return the GPUs that are free
        then."""
        widths = self.widths
        for key in self._after(queue, -1):
            job = key & JOB_MASK
            if widths[job] <= free:
                free -= widths[job]
            else:
                stop.append(job)
        return free

    def _after(self, queue: int, key: int) -> list[int]:
        """Keys of the running jobs of this queue that come after `key`, ascending."""
        if self.moving is not None:
            return self.moving.after(queue, key)
        running = self.running[queue]
        return running[bisect.bisect_right(running, key) :]

    def _behind(self, queue: int, key: int) -> int:
        """GPUs of the running jobs of this queue that come after `key`."""
        if self.moving is not None:
            return self.moving.behind(queue, key)
        running, widths = self.running[queue], self.widths
        return sum([widths[each & JOB_MASK] for each in running[bisect.bisect_right(running, key) :]])

    def _merge(
        self, queue: int, free: int, vacant: int, start: list[int], stop: list[int], claims: list[tuple[int, int]]
    ) -> tuple[int, int]:
        """Walk running and waiting jobs of this queue in one order, and return the GPUs that are free and vacant
        then."""
        narrow, heaps, widths = self.narrow[queue], self.waiting[queue], self.widths
        held = self.held[queue]
        best, width = self._best(narrow, heaps, free)
        if held > free:
            running = self._after(queue, -1)
        else:
            free -= held  # what is left when all that run stay
            while True:  # whoever waits and fits, as long as all that run after it stay too
                if best < 0:
                    return free, vacant
                behind = self._behind(queue, best)
                if width > free + behind:  # nor will anybody so wide who comes later
                    best, width = self._best(narrow, heaps, free + behind)
                    continue
                if width > free:
                    break
                self.pop(queue, width)
                free -= width
                if width <= vacant:
                    vacant -= width
                    start.append(best & JOB_MASK)
                else:
                    claims.append((queue, best))
                best, width = self._best(narrow, heaps, free + behind)
            free += behind
            running = self._after(queue, best)
        at, count = 0, len(running)
        while True:
            if at < count and (best < 0 or running[at] < best):
                job = running[at] & JOB_MASK
                at += 1
                if widths[job] > free:
                    stop.append(job)
                    continue
                free -= widths[job]
                if width > free and best >= 0:
                    best, width = self._best(narrow, heaps, free)
                continue
            if best < 0:
                return free, vacant
            self.pop(queue, width)
            free -= width
            if width <= vacant:
                vacant -= width
                start.append(best & JOB_MASK)
            else:
                claims.append((queue, best))
            best, width = self._best(narrow, heaps, free)

    @staticmethod
    def _best(narrow: list[int], heaps: dict[int, list[int]], free: int) -> tuple[int, int]:
        """The first waiting job that fits, and its width; (-1, 0) when none does."""
        best, width = -1, 0
        for each in narrow:
            if each > free:
                break
            key = heaps[each][0]
            if key < best or best < 0:
                best, width = key, each
        return best, width

    def check(self) -> None:
        """Raise AssertionError when the book is inconsistent."""
        for queue, heaps in enumerate(self.waiting):
            assert sorted(heaps) == self.narrow[queue], "the widths that wait are the widths that have a heap"
            assert all(heap and heap[0] not in self.left[queue] for heap in heaps.values()), "the head of a heap waits"
            assert self.held[queue] == sum(self.widths[key & JOB_MASK] for key in self._after(queue, -1))
            assert self.held[queue] == self._behind(queue, -1)
            assert self.running[queue] == sorted(self.running[queue])
        assert self.promoted == sorted(self.promoted)
