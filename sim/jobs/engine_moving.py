"""Running jobs whose place in the order changes while they run.

Under LAS, SRSF and SRTF all running jobs of one width move at one pace: what they attained grows by their GPUs a
second, what remains shrinks by them. So among themselves they never change places, and a sorted list per width stays
sorted:

    rank now = factor * (offset ± now)        las: factor = GPUs, + ; srsf: GPUs, - ; srtf: 1, -

Where a key of another job falls between them is a binary search per width. Jobs that are being restored make no
progress and have a list of their own. The Gittins index moves up and down and keeps no such order: there every running
job is looked at, once per instant.
"""

import bisect
from collections.abc import Callable, Sequence

from plugins.scheduler.machine.leader.order_book import JOB_BITS, JOB_MASK

_RANK_SHIFT = 2 * JOB_BITS
_TIES = (1 << _RANK_SHIFT) - 1
"""Mask of a key's low bits, which decide between equal ranks, and name the job."""


class Paced:
    """Order of running jobs by keys that move with time. A key is rank << 64 | tie << 32 | job. `direction`: +1 ranks
    grow, -1 they shrink; `by_width`: by the job's GPUs each second, else by one."""

    def __init__(self, widths: Sequence[int], direction: int, by_width: bool) -> None:
        self.widths, self.direction, self.by_width = widths, direction, by_width
        self.now = 0
        self.groups: dict[int, list[int]] = {}
        """Width -> offset << 64 | tie << 32 | job, ascending, of the jobs that make progress."""
        self.still: list[int] = []
        """Keys, ascending, of the jobs that hold GPUs and make no progress."""
        self.codes: dict[int, int] = {}
        """Job -> its entry in `still` or in its group."""
        self.moves: set[int] = set()

    def hold(self, job: int, key: int) -> None:
        """Enter a job that holds GPUs and makes no progress, with its key."""
        self.codes[job] = key
        bisect.insort(self.still, key)

    def go(self, job: int) -> None:
        """Let a job that made no progress make progress from now on."""
        key = self.codes[job]
        del self.still[bisect.bisect_left(self.still, key)]
        width = self.widths[job]
        rank = key >> _RANK_SHIFT
        offset = (rank // width if self.by_width else rank) - self.direction * self.now
        code = self.codes[job] = offset << _RANK_SHIFT | key & _TIES
        self.moves.add(job)
        group = self.groups.get(width)
        if group is None:
            self.groups[width] = [code]
        else:
            bisect.insort(group, code)

    def drop(self, job: int) -> None:
        """Remove a job that holds no GPUs any more."""
        code = self.codes.pop(job)
        where = self.still
        if job in self.moves:
            self.moves.remove(job)
            where = self.groups[self.widths[job]]
        del where[bisect.bisect_left(where, code)]

    def _at(self, width: int, key: int) -> int:
        """How many jobs of this width come before `key`, or have it."""
        rank = key >> _RANK_SHIFT
        whole, part = divmod(rank, width) if self.by_width else (rank, 0)
        offset = whole - self.direction * self.now
        code = offset << _RANK_SHIFT | (_TIES if part else key & _TIES)
        return bisect.bisect_right(self.groups[width], code)

    def behind(self, queue: int, key: int) -> int:
        """GPUs of the running jobs that come after `key`."""
        widths, gpus = self.widths, 0
        still = self.still
        if still and still[-1] > key:
            gpus = sum([widths[each & JOB_MASK] for each in still[bisect.bisect_right(still, key) :]])
        if self.by_width:
            for width, group in self.groups.items():
                if group:
                    gpus += width * (len(group) - self._at(width, key))
            return gpus
        code = key - (self.direction * self.now << _RANK_SHIFT)
        for width, group in self.groups.items():
            if group and group[-1] > code:
                gpus += width * (len(group) - bisect.bisect_right(group, code))
        return gpus

    def after(self, queue: int, key: int) -> list[int]:
        """Keys, as of now and ascending, of the running jobs that come after `key`."""
        found = self.still[bisect.bisect_right(self.still, key) :]
        moved = self.direction * self.now
        for width, group in self.groups.items():
            if not group:
                continue
            factor = width if self.by_width else 1
            later = group[self._at(width, key) :]
            found += [((code >> _RANK_SHIFT) + moved) * factor << _RANK_SHIFT | code & _TIES for code in later]
        found.sort()
        return found


class Evaluated:
    """Order of running jobs whose keys have to be computed: `key_of(job)` is the key now."""

    def __init__(self, widths: Sequence[int], queues: int, key_of: Callable[[int], int]) -> None:
        self.widths, self.key_of = widths, key_of
        self.now = 0
        self.jobs: list[dict[int, None]] = [{} for _ in range(queues)]
        self.queue_of: dict[int, int] = {}
        self.known: list[tuple[int, list[int]] | None] = [None] * queues
        """Per queue: an instant and the keys at it; None after a change."""

    def enter(self, job: int, queue: int) -> None:
        """Enter a job that holds GPUs in this queue."""
        self.jobs[queue][job] = None
        self.queue_of[job] = queue
        self.known[queue] = None

    def drop(self, job: int) -> None:
        """Remove a job that holds no GPUs any more."""
        queue = self.queue_of.pop(job)
        del self.jobs[queue][job]
        self.known[queue] = None

    def _keys(self, queue: int) -> list[int]:
        known = self.known[queue]
        if known is None or known[0] != self.now:
            known = self.known[queue] = (self.now, sorted([self.key_of(job) for job in self.jobs[queue]]))
        return known[1]

    def behind(self, queue: int, key: int) -> int:
        """GPUs of the running jobs of this queue that come after `key`."""
        return sum([self.widths[each & JOB_MASK] for each in self.after(queue, key)])

    def after(self, queue: int, key: int) -> list[int]:
        """Keys, as of now and ascending, of the running jobs of this queue that come after `key`."""
        keys = self._keys(queue)
        return keys[bisect.bisect_right(keys, key) :]
