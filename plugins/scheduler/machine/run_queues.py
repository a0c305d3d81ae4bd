"""Whose turn it is, for jobs of several tenants, without looking at everybody (`policy/classes.py: choose`, fast).

Each tenant with a quota has an order of its own, all others share one: one `OrderBook` each, in which a job moves only
when it changed. The walk down all of them at once rests on what makes one book fast, and on three facts about quotas. A
tenant whose quota suffices for its running jobs and for none of the others rests: nothing that the others do changes
it, and in a full rack most do. One whose chosen jobs owe nothing keeps all its running jobs of a queue when their sum
is within its quota, whatever the others do. And while those that wait are walked, what a tenant may have only shrinks,
so that whoever was passed over stays passed over, and the next one chosen is the first of the heads that fit.
"""

import bisect
import heapq
from collections.abc import Callable, Iterator

import msgspec

from covey.core import JobId
from plugins.scheduler.machine.jobs import HOLDING, Job
from plugins.scheduler.machine.order_book import JOB_BITS, JOB_MASK, OrderBook
from plugins.scheduler.messages.spec import Pack
from plugins.scheduler.policy.classes import QuotaWalk
from plugins.scheduler.policy.order import queue_of
from plugins.scheduler.policy.settings import SchedulerSettings

NEVER = 1 << 60
"""Of a job that never started; over every index of the log."""
PLENTY = 1 << 60
"""More GPUs than there are."""


Shape = tuple[int, int, Pack]
"""Workers, GPUs of each, how they lie on hosts."""


class QueueEntry(msgspec.Struct, frozen=True):
    """Where a guaranteed job stands."""

    tenant: str | None
    """Whose book; None: that of the tenants without a quota."""
    queue: int
    key: int
    running: bool
    promoted: bool


class RunQueues:
    """Jobs that may run. Whoever puts one in says whether its tenant has a quota, and puts it in again when it
    changed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.books: dict[str | None, OrderBook] = {}
        self.sizes: dict[str | None, int] = {}
        """Jobs in each book."""
        self.entries: dict[JobId, QueueEntry] = {}
        self.ids: dict[int, JobId] = {}
        self.widths: dict[int, int] = {}
        self.opportunistic: dict[Shape, list[int]] = {}
        """Shape -> numbers of the opportunistic jobs that wait, oldest first."""
        self.shapes: dict[JobId, tuple[Shape, int]] = {}
        """Where each of them stands there, and its number."""
        self._chosen: tuple[tuple[int, dict[str, int]], tuple[list[JobId], list[JobId]]] | None = None
        """What the newest walk was asked and answered; None when somebody moved since."""

    def put(self, job: Job, has_quota: bool) -> None:
        """A job that is queued, being placed or running."""
        entry = self._entry(job, job.spec.tenant if has_quota else None) if job.counts else None
        if entry is not None and self.entries.get(job.id) == entry:
            return
        self.drop(job.id)
        number = job.number
        if entry is None:
            if job.state == "queued":
                shape = job.spec.workers, job.spec.gpus_per_worker, job.spec.pack
                self.ids[number], self.shapes[job.id] = job.id, (shape, number)
                bisect.insort(self.opportunistic.setdefault(shape, []), number)
            return
        self._chosen = None
        self.ids[number], self.widths[number], self.entries[job.id] = job.id, job.spec.gpus, entry
        book = self.books.get(entry.tenant)
        if book is None:
            queues = len(self.settings.queue_thresholds_gpu_s) + 1
            book = self.books[entry.tenant] = OrderBook(queues, self.widths)
        self.sizes[entry.tenant] = self.sizes.get(entry.tenant, 0) + 1
        if entry.promoted:
            book.promote(entry.key, entry.running)
        elif entry.running:
            book.run(entry.queue, entry.key)
        else:
            book.wait(entry.queue, entry.key)

    def _entry(self, job: Job, tenant: str | None) -> QueueEntry:
        attained = max(0.0, job.attained_gpu_s - job.base_gpu_s)
        queue, running = queue_of(attained, self.settings.queue_thresholds_gpu_s), job.state in HOLDING
        if job.promoted is not None and queue == 0:
            return QueueEntry(tenant, queue, job.promoted << JOB_BITS | job.number, running, True)
        if running and not self.settings.preemption:
            queue = 0  # nobody stops it, so nobody is chosen in its stead
        first = NEVER if job.first is None else job.first
        if not running and self.settings.narrow_first:
            first |= job.spec.gpus * 2 * NEVER
        return QueueEntry(tenant, queue, first << JOB_BITS | job.number, running, False)

    def drop(self, id: JobId) -> None:
        """A job that is over, or sits this out."""
        if id in self.shapes:
            shape, number = self.shapes.pop(id)
            numbers = self.opportunistic[shape]
            at = bisect.bisect_left(numbers, number)
            del numbers[at], self.ids[number]
            if not numbers:
                del self.opportunistic[shape]
        entry = self.entries.pop(id, None)
        if entry is None:
            return
        self._chosen = None
        book, number = self.books[entry.tenant], entry.key & JOB_MASK
        if entry.promoted:
            book.demote(entry.key)
        elif entry.running:
            book.stop(entry.queue, entry.key)
        else:
            book.leave(entry.queue, entry.key)
        del self.ids[number], self.widths[number]
        self.sizes[entry.tenant] -= 1
        if not self.sizes[entry.tenant]:
            del self.sizes[entry.tenant], self.books[entry.tenant]

    # ---- the walk ----

    def choose(self, capacity: int, left: Callable[[str], int]) -> tuple[list[JobId], list[JobId]]:
        """Jobs that wait and should run, and jobs that run and should not, both in order. `left`: GPUs of a tenant's
        quota. Asked the same again before anybody moved, it answers without walking."""
        with_quota = {tenant: book for tenant, book in self.books.items() if tenant is not None}
        asked = capacity, {tenant: left(tenant) for tenant in with_quota}
        if self._chosen is None or self._chosen[0] != asked:
            self._chosen = asked, self._walk(*asked, with_quota)
        return self._chosen[1]

    def _walk(
        self, capacity: int, quotas: dict[str, int], with_quota: dict[str, OrderBook]
    ) -> tuple[list[JobId], list[JobId]]:
        walk = QuotaWalk(capacity, {tenant: book.running_gpus() for tenant, book in with_quota.items()}, quotas)
        run: list[int] = []
        stop: list[int] = []
        awake = {tenant: book for tenant, book in with_quota.items() if not _rests(book, quotas[tenant])}
        self._promoted(awake, walk, run, stop)
        taken: list[tuple[OrderBook, int, int]] = []
        for queue in range(len(self.settings.queue_thresholds_gpu_s) + 1) if awake else ():
            self._running(queue, awake, walk, stop)
            self._waiting(queue, awake, walk, run, taken)
        for book, queue, key in taken:
            book.wait(queue, key)
        others = self.books.get(None)
        if others is not None:
            begin, end = others.decide(walk.pool, PLENTY)
            for number in begin:
                entry = self.entries[self.ids[number]]
                if not entry.promoted:
                    others.wait(entry.queue, entry.key)
            run += begin
            stop += end
        return [self.ids[number] for number in run], [self.ids[number] for number in stop]

    def _promoted(self, books: dict[str, OrderBook], walk: QuotaWalk, run: list[int], stop: list[int]) -> None:
        everybody = [(*each, tenant) for tenant, book in books.items() for each in book.promoted]
        for key, width, running, tenant in sorted(everybody):
            chosen = walk.see(tenant, width, running)
            if chosen != running:
                (run if chosen else stop).append(key & JOB_MASK)

    def _running(self, queue: int, books: dict[str, OrderBook], walk: QuotaWalk, stop: list[int]) -> None:
        """Those who cannot all stay are walked one by one."""
        tight = [
            tenant for tenant, book in books.items() if book.held[queue] and not walk.all_stay(tenant, book.held[queue])
        ]
        for key, tenant in sorted([(key, name) for name in tight for key in books[name].running[queue]]):
            if not walk.see(tenant, self.widths[key & JOB_MASK], True):
                stop.append(key & JOB_MASK)

    def _waiting(
        self,
        queue: int,
        books: dict[str, OrderBook],
        walk: QuotaWalk,
        run: list[int],
        taken: list[tuple[OrderBook, int, int]],
    ) -> None:
        heads: list[tuple[int, int, str]] = []

        def look_at(tenant: str) -> None:
            key, width = books[tenant].first(queue, walk.most(tenant))
            if key >= 0:
                heapq.heappush(heads, (key, width, tenant))

        for tenant, book in books.items():
            if book.narrow[queue]:
                look_at(tenant)
        while heads:
            key, width, tenant = heapq.heappop(heads)
            if width <= walk.most(tenant):
                taken.append((books[tenant], queue, books[tenant].pop(queue, width)))
                walk.see(tenant, width, False)
                run.append(key & JOB_MASK)
            look_at(tenant)

    def oldest_opportunistic(self, most: int, fits: Callable[[JobId], bool]) -> Iterator[JobId]:
        """Opportunistic jobs of at most so many GPUs that wait and fit, oldest first; what is free only shrinks
        meanwhile."""
        heads = [(numbers[0], 0, shape) for shape, numbers in self.opportunistic.items() if shape[0] * shape[1] <= most]
        heapq.heapify(heads)
        while heads:
            number, at, shape = heapq.heappop(heads)
            if fits(self.ids[number]):
                yield self.ids[number]
                if at + 1 < len(self.opportunistic[shape]):
                    heapq.heappush(heads, (self.opportunistic[shape][at + 1], at + 1, shape))

    def check(self) -> None:
        """What must hold between two looks."""
        for book in self.books.values():
            book.check()
        assert sorted(self.ids.values()) == sorted([*self.entries, *self.shapes])
        assert sum(self.sizes.values()) == len(self.entries) == len(self.widths)


def _rests(book: OrderBook, quota: int) -> bool:
    """Whether all of a tenant's running jobs stay, and none of its others is chosen, whatever the other tenants do:
    the quota suffices for those and not for one more."""
    for held, narrow in zip(book.held, book.narrow, strict=True):
        quota -= held
        if quota < 0 or (narrow and narrow[0] <= quota):
            return False
    return not book.promoted
