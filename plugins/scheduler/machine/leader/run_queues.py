"""Which jobs should run, for tenants with and without quotas, kept up to date as jobs change.

It decides what `policy/classes.py: choose` decides, without looking at every job. Each tenant has an `OrderBook` of its
own. A job moves in its book only when it changed. One walk goes down all books of tenants with a quota at once, another
down those of the tenants without, who take turns (`policy/fair.py`; the first do where they are overbooked). Three
facts keep them short:

- A tenant is settled when its quota suffices for its running jobs and for none of those that wait. Nothing that other
  tenants' jobs do changes that, so the walk leaves out its book. In a full rack most tenants are settled.
- The running jobs of one queue all stay when their sum is within what is left of their tenant's quota, and the jobs
  chosen before them took none of their GPUs. The walk then counts the sum and looks at none of them.
- While the walk chooses among jobs that wait, what a tenant's next job may have only shrinks. So a job that was passed
  over stays passed over, and the next chosen job is the first that fits of all tenants' first jobs.
"""

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from covey.core.ids import JobId
from plugins.scheduler.machine.leader.order_book import JOB_BITS, JOB_MASK, OrderBook
from plugins.scheduler.machine.log.jobs import Job, row_of
from plugins.scheduler.policy import order
from plugins.scheduler.policy.classes import QuotaWalk, SharedWalk
from plugins.scheduler.policy.eligible import GangShape, shape_of
from plugins.scheduler.policy.fair import NOBODY, Shares, TenantUse, are_overbooked
from plugins.scheduler.policy.settings import SchedulerSettings

PART_BITS = 64
"""Bits of each part of a key; each part is a whole number below 2 to this power."""
Books = Mapping[str, OrderBook]
"""Tenant -> the order of its jobs."""


class QueueEntry(msgspec.Struct, frozen=True):
    """The entry of a guaranteed job in the order."""

    tenant: str
    has_quota: bool
    queue: int
    key: int
    running: bool
    promoted: bool
    firm: bool = False
    """Whether it runs, and stays whatever the order says; then it has no place in a queue."""


class Choice(NamedTuple):
    """What one walk found, each list in order."""

    start: list[JobId]
    """Jobs that wait and should run."""
    stop: list[JobId]
    """Jobs that run and should not."""


class RunQueues:
    """Jobs that may run. Whoever puts a job in says whether its tenant has a quota, and puts it in again when it
    changed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._queues = len(settings.queue_thresholds_gpu_s) + 1
        self.books: dict[bool, dict[str, OrderBook]] = {True: {}, False: {}}
        """The books of tenants with a quota, and of those without."""
        self.sizes: Counter[tuple[bool, str]] = Counter()
        """The number of jobs in each book."""
        self.entries: dict[JobId, QueueEntry] = {}
        """The guaranteed jobs; every job is here or in `shapes`."""
        self.ids: dict[int, JobId] = {}
        self.widths: dict[int, int] = {}
        """The GPUs of each guaranteed job, by its number."""
        self.opportunistic: dict[GangShape, list[int]] = {}
        """Shape -> numbers of the opportunistic jobs that wait, oldest first."""
        self.shapes: dict[JobId, tuple[GangShape, int]] = {}
        """The shape and the number of each opportunistic job that waits."""
        self._asked: tuple[int, dict[str, int], TenantUse] | None = None
        """GPUs, quotas and use of the newest walk; None: a job moved since."""
        self._choice = Choice([], [])
        """The choice of that walk."""

    def put(self, job: Job, has_quota: bool, firm: bool = False) -> None:
        """Add a job that is queued, being placed or running. `firm`: it runs, and is not to be stopped."""
        entry = self._entry(job, has_quota) if job.counts else None
        if entry is not None and firm:
            entry = QueueEntry(job.spec.tenant, has_quota, 0, job.number, True, False, True)
        if entry is not None and self.entries.get(job.id) == entry:
            return
        self.drop(job.id)
        if entry is not None:
            self._put_in_book(job, entry)
        elif job.state == "queued":
            shape = shape_of(job.spec)
            self.ids[job.number], self.shapes[job.id] = job.id, (shape, job.number)
            bisect.insort(self.opportunistic.setdefault(shape, []), job.number)

    def _entry(self, job: Job, has_quota: bool) -> QueueEntry:
        tenant, thresholds = job.spec.tenant, self.settings.queue_thresholds_gpu_s
        row = row_of(job, thresholds)
        queue = order.queue_of(row.attained_gpu_s, thresholds)
        if row.promoted is not None:
            return QueueEntry(tenant, has_quota, queue, packed((row.promoted,), job.number), row.running, True)
        if row.running and not self.settings.preemption:
            queue = 0  # the walk comes to it before all that wait, so it is never stopped
        key = packed(order.inside(row, self.settings.narrow_first), job.number)
        return QueueEntry(tenant, has_quota, queue, key, row.running, False)

    def _put_in_book(self, job: Job, entry: QueueEntry) -> None:
        self._asked = None
        self.ids[job.number], self.widths[job.number], self.entries[job.id] = job.id, job.spec.gpus, entry
        books = self.books[entry.has_quota]
        book = books.get(entry.tenant)
        if book is None:
            book = books[entry.tenant] = OrderBook(self._queues, self.widths)
        self.sizes[entry.has_quota, entry.tenant] += 1
        if entry.firm:
            book.firm += job.spec.gpus
        elif entry.promoted:
            book.promote(entry.key, entry.running)
        elif entry.running:
            book.run(entry.queue, entry.key)
        else:
            book.wait(entry.queue, entry.key)

    def drop(self, id: JobId) -> None:
        """Remove a job that is over, or may not run now."""
        if id in self.shapes:
            self._drop_opportunistic(id)
        if id in self.entries:
            self._drop_from_book(self.entries.pop(id))

    def _drop_opportunistic(self, id: JobId) -> None:
        shape, number = self.shapes.pop(id)
        numbers = self.opportunistic[shape]
        del numbers[bisect.bisect_left(numbers, number)], self.ids[number]
        if not numbers:
            del self.opportunistic[shape]

    def _drop_from_book(self, entry: QueueEntry) -> None:
        self._asked = None
        of = entry.has_quota, entry.tenant
        book, number = self.books[entry.has_quota][entry.tenant], entry.key & JOB_MASK
        if entry.firm:
            book.firm -= self.widths[number]
        elif entry.promoted:
            book.demote(entry.key)
        elif entry.running:
            book.stop(entry.queue, entry.key)
        else:
            book.leave(entry.queue, entry.key)
        del self.ids[number], self.widths[number]
        self.sizes[of] -= 1
        if not self.sizes[of]:
            del self.sizes[of], self.books[entry.has_quota][entry.tenant]

    # ---- the walk ----

    def choose(
        self, capacity: int, quota_left: Callable[[str], int], use: Callable[[Collection[str]], TenantUse]
    ) -> Choice:
        """Guaranteed jobs that should start and that should stop on `capacity` GPUs. `quota_left`: what is left of a
        tenant's quota, in GPUs; `use`: by what these tenants, without one, take turns. A repeated question is answered
        without a walk until a job moves."""
        left = {tenant: quota_left(tenant) for tenant in self.books[True]}
        in_turn = [*(self.books[True] if are_overbooked(left, capacity) else ()), *self.books[False]]
        asked = capacity, left, use(in_turn) if len(in_turn) > 1 else NOBODY
        if self._asked != asked:
            self._asked, self._choice = asked, self._walk(*asked)
        return self._choice

    def _walk(self, capacity: int, quotas: dict[str, int], use: TenantUse) -> Choice:
        with_quota, without = self.books[True], self.books[False]
        firm = sum(book.firm for book in without.values())
        booked = {tenant: book.running_gpus() for tenant, book in with_quota.items()}
        shares = Shares(use.by_quota(quotas), booked) if are_overbooked(quotas, capacity) else None
        walk = QuotaWalk(capacity - firm, booked, quotas, shares)
        for tenant, book in with_quota.items():
            walk.keep(tenant, book.firm)
        unsettled = {tenant: book for tenant, book in with_quota.items() if not _is_settled(book, quotas[tenant])}
        first = BookWalk(unsettled, self.widths, walk)
        if unsettled:
            first.go(self._queues)
        held = {tenant: book.running_gpus() for tenant, book in without.items()}
        then = BookWalk(without, self.widths, SharedWalk(walk.pool, Shares(use, held)))
        if without:
            then.go(self._queues)
        named = self.ids
        return Choice(
            [named[number] for number in [*first.start, *then.start]],
            [named[number] for number in [*first.stop, *then.stop]],
        )

    def oldest_opportunistic(self, gpus_max: int, fits: Callable[[JobId], bool]) -> Iterator[JobId]:
        """Opportunistic jobs of at most `gpus_max` GPUs that wait and fit, oldest first. What is free must only shrink
        meanwhile: once one job does not fit, none of its shape does."""
        heads = [
            (numbers[0], 0, shape)
            for shape, numbers in self.opportunistic.items()
            if shape.workers * shape.gpus_per_worker <= gpus_max
        ]
        heapq.heapify(heads)
        while heads:
            number, at, shape = heapq.heappop(heads)
            if fits(self.ids[number]):
                yield self.ids[number]
                if at + 1 < len(self.opportunistic[shape]):
                    heapq.heappush(heads, (self.opportunistic[shape][at + 1], at + 1, shape))

    def check(self) -> None:
        """Raise AssertionError when the books are inconsistent."""
        for book in [*self.books[True].values(), *self.books[False].values()]:
            book.check()
        assert sorted(self.ids.values()) == sorted([*self.entries, *self.shapes])
        assert self.sizes.total() == len(self.entries) == len(self.widths)


def packed(parts: Iterable[float], number: int) -> int:
    """The key of a job in its book: parts that the order compares one after the other, then its number."""
    key = 0
    for part in parts:
        key = key << PART_BITS | int(part)
    return key << JOB_BITS | number


class BookWalk:
    """One walk down the books of several tenants, merged into one order. The books are as before afterwards."""

    def __init__(self, books: Books, widths: Mapping[int, int], walk: QuotaWalk | SharedWalk) -> None:
        self.books, self.widths, self.walk = books, widths, walk
        self.start: list[int] = []
        """Numbers of jobs that wait and are chosen, in order."""
        self.stop: list[int] = []
        """Numbers of jobs that run and are not chosen, in order."""

    def go(self, queues: int) -> None:
        self._promoted()
        chosen: list[tuple[OrderBook, int, int]] = []
        for queue in range(queues):
            self._running(queue)
            chosen += self._waiting(queue)
        for book, queue, key in chosen:
            book.wait(queue, key)

    def _promoted(self) -> None:
        """Walk the promoted jobs, whether they run or wait."""
        merged = [(*each, tenant) for tenant, book in self.books.items() for each in book.promoted]
        for key, width, running, tenant in sorted(merged):
            chosen = self.walk.admit(tenant, width, running)
            if chosen and not running:
                self.start.append(key & JOB_MASK)
            elif running and not chosen:
                self.stop.append(key & JOB_MASK)

    def _running(self, queue: int) -> None:
        """Walk the running jobs of one queue: those of a tenant for which they cannot all stay, one by one."""
        held = {tenant: book.held[queue] for tenant, book in self.books.items() if book.held[queue]}
        tight = self.walk.tight(held)
        merged = [(key, tenant) for tenant in tight for key in self.books[tenant].running[queue]]
        for key, tenant in sorted(merged):
            if not self.walk.admit(tenant, self.widths[key & JOB_MASK], True):
                self.stop.append(key & JOB_MASK)

    def _waiting(self, queue: int) -> list[tuple[OrderBook, int, int]]:
        """Walk the waiting jobs of one queue. The chosen ones leave their books and are returned: book, queue and key
        of each."""
        chosen: list[tuple[OrderBook, int, int]] = []
        heads: list[tuple[float, int, int, str]] = []
        """Heap of (share, key, width, tenant): each tenant's first job that fits."""

        def look_at(tenant: str) -> None:
            key, width = self.books[tenant].first(queue, self.walk.gpus_max(tenant))
            if key >= 0:
                heapq.heappush(heads, (self.walk.share(tenant), key, width, tenant))

        for tenant, book in self.books.items():
            if book.narrow[queue]:
                look_at(tenant)
        while heads:
            _, key, width, tenant = heapq.heappop(heads)
            if width <= self.walk.gpus_max(tenant):
                book = self.books[tenant]
                chosen.append((book, queue, book.pop(queue, width)))
                self.walk.admit(tenant, width, False)
                self.start.append(key & JOB_MASK)
            look_at(tenant)
        return chosen


def _is_settled(book: OrderBook, quota: int) -> bool:
    """Whether all of a tenant's running jobs stay and none of its waiting ones is chosen, whatever other tenants do:
    the quota suffices for the running ones, and for no other."""
    quota -= book.firm
    for held, narrow in zip(book.held, book.narrow, strict=True):
        quota -= held
        if quota < 0 or (narrow and narrow[0] <= quota):
            return False
    return not book.promoted
