"""The data Blocks of a process of which some lie outside of memory, and come back one ahead of use (Harmony §4.3.3).

    in memory        Blocks up to `resident_max` bytes, less those that the walk has put outside
    outside          the rest, evenly between them in the order of use: one comes back while others are computed
    ahead            a thread reads the next Block in use that is outside, checks it, and it waits in memory

How many lie outside is found by trying (`covey.core.spill_walk`): the time of a step is measured, the median of three,
and the number of Blocks outside changes by 8, 4, 2, 1 as long as that makes steps shorter. `resident_max` bounds it,
and so does a share of the host's memory that moves (`covey.job.blocks.memory_use`): when less is left, Blocks go
outside at once, and the walk begins anew at the end of the step.
Which Blocks are where changes no bit: they are what `load` returned.

Data does not change, so a Block is written once and stays outside as a copy when it is in memory too. One that cannot
be written stays in memory; one that cannot be read is loaded again.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator

from covey.core.spill_walk import Climb, measured
from covey.core.units import format_size
from covey.job.blocks.block_arrays import bytes_in_block
from covey.job.blocks.block_store import BlockStore
from covey.job.blocks.block_wire import BlockArrays
from covey.job.blocks.memory_share import kept_bytes
from covey.job.blocks.spilled import NoRoom, SpilledAt, SpillPlace

STEPS_MEASURED = 3
"""Steps whose median is one measurement; the step in which the number changes is not among them."""
AHEAD_MAX = 64
"""Blocks after the one in use among which the next one from outside is looked for."""
CLOSE_S = 5.0
"""Most seconds that `close` waits for a Block that is being read, and for one that is being written."""


class SpillingStore(BlockStore):
    """The Blocks of one set, some of them outside of memory. Any thread may call."""

    spills = True

    def __init__(
        self,
        name: str,
        spill: SpillPlace,
        resident_max: int,
        people: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
        share: Callable[[], int] | None = None,
    ) -> None:
        """`resident_max`: most bytes of Blocks in memory, beside the one in use and the one that comes next. `share`
        returns most bytes with these, as it is now; None: there is no such limit."""
        super().__init__()
        self._now_s = now_s
        self._name, self._spill, self._resident_max, self._people = name, spill, resident_max, people
        self._share, self._largest = share, 0
        self._changed = threading.Condition(self._lock)
        self._writing = threading.Lock()
        self._sizes: dict[int, int] = {}
        """Bytes of each Block, in memory or outside."""
        self._outside: dict[int, SpilledAt] = {}
        """Blocks that have been written, by number."""
        self._away: set[int] = set()
        """Blocks that are to be outside."""
        self._after: dict[int, int] = {}
        """The Block that was used after each."""
        self._last: int | None = None
        self._using: tuple[int, BlockArrays] | None = None
        """The Block from outside that the script has."""
        self._next: tuple[int, BlockArrays | None] | None = None
        """The Block that comes ahead of use; its arrays are None until they are here."""
        self._full = self._closed = False
        self._thread: threading.Thread | None = None
        self._climb: Climb | None = None
        self._of_climb = (0, 0)
        self._took_s: list[float] = []
        self._stepped_s: float | None = None
        self.waited = 0
        """How many Blocks were not here when the script wanted them."""

    @property
    def resident_max(self) -> int:
        """Most bytes of Blocks in memory now, beside those around the one in use."""
        if self._share is None:
            return self._resident_max
        return min(self._resident_max, kept_bytes(self._share(), self._largest))

    # ---- as every store ----

    def __contains__(self, block: int) -> bool:
        return block in self._sizes

    def __iter__(self) -> Iterator[int]:
        with self._lock:
            return iter(sorted(self._sizes))

    def get(self, block: int) -> BlockArrays | None:
        """The Block, wherever it is; None: it is not here, or cannot be read any more."""
        found = self._get(block)
        if found is not None:
            return found
        with self._changed:
            at = self._outside.get(block)
        if at is None:
            return None
        self.waited += 1
        return self._read(block, at)

    def used(self, block: int) -> BlockArrays | None:
        """The Block for the script, as `get` gives it; remembers the order of use, and lets the next one come."""
        with self._changed:
            if self._last is not None:
                self._after[self._last] = block
            self._last = block
            while self._next is not None and self._next[0] == block and self._next[1] is None and not self._closed:
                self.waited += 1
                self._changed.wait(1.0)
        found = self.get(block)
        resident_max = self.resident_max  # without the lock: it asks other sets
        with self._changed:
            if block not in self._here and found is not None:
                self._using = block, found
                more = self._sizes.get(block, resident_max + 1)  # it was dropped meanwhile
                if block not in self._away and self._here_bytes + more <= resident_max:
                    self._keep(block, found)
            if self._next is not None and self._next[0] == block:
                self._next = None
            self._look_ahead(block)
        self._keep_within(resident_max)
        return found

    def put(self, block: int, arrays: BlockArrays) -> None:
        with self._changed:
            self._let_go(block)
            self._sizes[block] = bytes_in_block(arrays)
            self._largest = max(self._largest, self._sizes[block])
            self._keep(block, arrays)
        resident_max = self.resident_max
        with self._changed:
            fits = block not in self._away and self._here_bytes <= resident_max
        if not fits:
            self._put_outside(block)

    def drop(self, block: int) -> None:
        with self._changed:
            self._let_go(block)
            self._sizes.pop(block, None)
            self._away.discard(block)
            at = self._outside.pop(block, None)
        if at is not None:
            self._spill.drop(at)
            self._full = False

    @property
    def resident_bytes(self) -> int:
        with self._lock:
            beside = {each[0]: each[1] for each in (self._using, self._next) if each is not None}
            more = (each for block, each in beside.items() if each is not None and block not in self._here)
            return self._here_bytes + sum(map(bytes_in_block, more))

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._writing.acquire(timeout=CLOSE_S):  # else the place goes with the process
            try:
                self._spill.close()
            finally:
                self._writing.release()

    def abandon(self) -> None:
        self._closed = True
        self._here, self._using, self._next = {}, None, None  # arrays from a disk are mapped, and keep its room taken
        self._spill.abandon()

    # ---- what lies where ----

    def stepped(self) -> None:
        """A step has ended: measure, and perhaps put other Blocks outside."""
        now_s, resident_max = self._now_s(), self.resident_max
        with self._changed:
            numbers = sorted(self._sizes)
            mean = sum(self._sizes.values()) / max(1, len(numbers))
            least = max(0, len(numbers) - int(resident_max // max(1, mean)))
            least = self._steady(len(numbers), least)
        if self._climb is None or self._of_climb != (len(numbers), least):
            over = len(numbers) - least
            self._of_climb, self._climb = (len(numbers), least), Climb(over, over, 0)
            self._arrange(numbers, least)
            self._took_s, self._stepped_s = [], None
            return
        if self._stepped_s is not None:
            self._took_s.append(now_s - self._stepped_s)
        self._stepped_s = now_s
        if len(self._took_s) < STEPS_MEASURED + 1 or self._climb.is_over:
            return
        before = self._climb.next
        self._climb = measured(self._climb, statistics.median(self._took_s[1:]))
        self._took_s, self._stepped_s = [], None
        if self._climb.next != before:
            self._arrange(numbers, least + self._climb.next)
        if self._climb.is_over:
            self._people(self.words)

    def _steady(self, blocks: int, least: int) -> int:
        """The fewest Blocks that are to be outside: more at once when memory is short, fewer only when that is worth a
        walk that begins anew."""
        of, before = self._of_climb
        return before if self._climb is not None and of == blocks and 0 < before - least <= blocks // 16 else least

    @property
    def words(self) -> str:
        """What lies where, for people."""
        with self._lock:
            count, here = len(self._sizes), [size for block, size in self._sizes.items() if block not in self._away]
        kept = f"keeps {len(here)} of {count} Blocks of {self._name!r} in memory ({format_size(sum(here))})"
        return f"{kept}, the others in {self._spill.where}"

    def _arrange(self, numbers: list[int], count: int) -> None:
        """Let so many of these Blocks be outside, evenly between the others."""
        away = {numbers[at * len(numbers) // count] for at in range(count)} if count else set()
        with self._changed:
            self._away = away
            goes = [block for block in numbers if block in away and block in self._here]
        for block in goes:
            self._put_outside(block)

    def _keep_within(self, resident_max: int) -> None:
        """Put Blocks outside, the highest numbers first, until the others are no more than this."""
        while self._here_bytes > resident_max and not (self._full or self._closed):
            with self._changed:
                block = max(self._here, default=None)
            if block is None:
                return
            self._put_outside(block)

    def _put_outside(self, block: int) -> None:
        with self._writing:
            with self._changed:
                arrays, at = self._here.get(block), self._outside.get(block)
                if arrays is None or self._closed or (self._full and at is None):
                    return
            if at is None:
                try:
                    at = self._spill.write(block, arrays)
                except NoRoom as error:
                    self._full = True
                    what = f"Block {block} of {self._name!r} was not spilled and stays in memory"
                    self._people(f"says: {what}\n{error}\nnext: make room there, or set TMPDIR to a larger folder")
                    return
            with self._changed:
                if self._here.get(block) is arrays:
                    self._outside[block] = at
                    self._let_go(block)
                    return
            self._spill.drop(at)  # the Block was dropped meanwhile

    def _keep(self, block: int, arrays: BlockArrays) -> None:
        """The Block, which was not in memory, is. The caller holds the lock."""
        self._here[block] = arrays
        self._here_bytes += self._sizes[block]

    def _let_go(self, block: int) -> None:
        """The Block is in memory no longer. The caller holds the lock."""
        if self._here.pop(block, None) is not None:
            self._here_bytes -= self._sizes[block]

    # ---- one ahead of use ----

    def _get(self, block: int) -> BlockArrays | None:
        with self._changed:
            for each in (self._next, self._using):
                if each is not None and each[0] == block and each[1] is not None:
                    return each[1]
            return self._here.get(block)

    def _read(self, block: int, at: SpilledAt) -> BlockArrays | None:
        closed = self._closed
        if closed:
            return None
        try:
            return self._spill.read(at)
        except (OSError, MemoryError, ValueError) as error:
            with self._changed:
                if self._closed or self._outside.get(block) is not at:
                    return None  # it was dropped, or another thread has found this
                del self._outside[block]
                if block not in self._here:
                    del self._sizes[block]
            self._people(f"loads Block {block} of {self._name!r} again: {error}")
            self._spill.drop(at)
            return None

    def _look_ahead(self, block: int) -> None:
        """Begin to read the next Block in use that is outside. The caller holds the lock."""
        if len(self._here) == len(self._sizes):
            return
        at = self._after.get(block)
        for _ in range(AHEAD_MAX):
            if at is None or at == block or at not in self._here:
                break
            at = self._after.get(at)
        if at is None or at == block or at in self._here or at not in self._outside or self._closed:
            return
        if self._next is None or self._next[0] != at:
            self._next = at, None
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_ahead, name="covey-ahead", daemon=True)
                self._thread.start()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._next is None or self._next[1] is not None):
                    self._changed.wait()
                if self._closed or self._next is None:
                    return
                block = self._next[0]
                at = self._outside.get(block)
            found, is_over = None, True
            try:
                found = None if at is None else self._read(block, at)
                is_over = False
            finally:
                with self._changed:
                    if is_over:
                        self._thread = None  # the next Block ahead begins another
                    self._came(block, found)

    def _came(self, block: int, found: BlockArrays | None) -> None:
        """The Block that comes ahead of use is here; None: it cannot be read. The caller holds the lock."""
        if self._next is not None and self._next[0] == block:
            self._next = None if found is None else (block, found)
        self._changed.notify_all()
