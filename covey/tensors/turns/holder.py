"""The turns of one process, taken and given in memory that it shares with the other jobs of its host.

    script computes   COMP     given when the script waits for a sum, taken before it gets the result; of a script that
                              waits for no sums, the hooks say when it computes (`covey.hooks.turns`)
    frames are sent   COMM     taken for what goes to other hosts by any `push`, which does not wait, and by a
                              `push_pull` of more than 64 KiB; given when the last frame is sent

COMM is sending only. Nobody waits for other ranks with a turn: results are received, sums are added and sent, and
owners answer without one, so whoever has the network comes to an end by itself. A process of a job that does not share
its host has `on` False, and does nothing here.
"""

import contextlib
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from covey.tensors.turns.page import AT, BEAT_NS, BELL, KEY, SPIN_NS, STATE, Taker, TurnsPage
from covey.tensors.turns.rules import LANES, Need
from covey.tensors.turns.spent import TurnsSpent
from covey.wire.frames import FrameError

if TYPE_CHECKING:
    from covey.kernel.futex import SharedWord

IDLE_S = 1.0
"""Seconds after which a script that has the processors and does not use them loses its turn: it hangs, sleeps, or waits
for something that is no sum."""
IDLE_SHARE = 0.02
"""Share of one processor below which a script does not use them."""
HELD_MAX_S = 300.0
"""Seconds after which a script that still computes loses its turn to another job that waits."""
UNSEEN_MAX_S = 10.0
"""Seconds after which a script gives its turn to another job that waits, where hooks take the turns and see no end of a
mini-batch. The next operator asks for the next turn, so nothing is lost."""


ORDERS = platform.machine() == "x86_64"
"""Whether taking a lock orders all that is read and written around it, as a call of futex(2) does on any machine."""
_order = threading.Lock()


def _fence() -> None:
    """Make this process's writes visible to others before its next reads."""
    with _order:
        pass


class ProcessTurns:
    """The turns of this process. Methods may be called from any thread."""

    def __init__(
        self, now_ns: Callable[[], int] = time.monotonic_ns, worked_s: Callable[[], float] = time.process_time
    ) -> None:
        """`worked_s`: seconds of processor time of this process."""
        self.on = False
        """Whether this process takes turns: the one thing that others look at."""
        self.lost = 0
        """Turns that this process held too long."""
        self._now_ns, self._worked_s = now_ns, worked_s
        self._taker: Taker | None = None
        self._bells: dict[int, SharedWord] = {}
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._comm = threading.Lock()
        """Held by the thread that takes or gives the network."""
        self._sending = self._coming = 0
        """Threads that send, and posts that are yet to be sent, under one turn."""
        self._sent_s = self._waited_s = self._added_s = 0.0
        self._waits_since_s: float | None = None
        """The processor time of this process when its script began to wait for sums; None: it does not."""
        self._words = threading.RLock()
        """Held while the words of this process are looked at and written: by the script's thread, by those that send,
        and by the one that beats."""
        self._by_sums = self._by_threads = False
        """Whether the script itself has waited for sums, which say when it computes; whether other threads of it wait
        for sums, so that these do not say it."""
        self.hooks_changed: Callable[[], None] = lambda: None
        """Called when `comp_word` may have changed; waits for nothing."""
        self._waiting = set[object]()
        """A mark of each thread that waits for a turn: what is added or discarded twice, since an exception came in
        between, counts once."""
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None

    # ---- from the agent ----

    def page_came(self, page: Any, slot: int, use: int) -> None:
        """From now on turns are taken on this page, in this use of the slot (`page.USE`). FrameError when the agent has
        not prepared the page for it, or has given the slot to another process since."""
        turns = TurnsPage(page)
        if not turns.valid or not 0 <= slot < turns.slots or not turns.owns(slot, turns.get(slot, KEY), use):
            raise FrameError("turns cannot be taken: the page of turns has no such slot")
        self._drop()
        with self._lock:
            self._bells = {}
            taker = Taker(turns, slot, self._now_ns, _fence if ORDERS else self._bell(turns, slot).wake, use)
            taker.alive()
            self._taker, self.on = taker, not self._closed.is_set()
            if self._beats is None:
                self._beats = threading.Thread(target=self._beat, name="covey-turns", daemon=True)
                self._beats.start()
        self.hooks_changed()

    def close(self) -> None:
        """Give what is held, and take nothing any more. A second call is harmless."""
        self.on = False
        self._closed.set()
        self._drop()
        self.hooks_changed()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    # ---- COMP: from the script's thread ----

    def computed(self) -> None:
        """The script waits for other ranks from now on: others may compute."""
        taker = self._taker
        if taker is not None and not self._by_threads:
            self._sums_tell()
            self._give(taker, "comp")
            if self._waits_since_s is None:
                self._waits_since_s = self._worked_s()

    def computes(self) -> None:
        """The script has what it waited for. Returns once it is its turn to compute."""
        taker = self._taker
        if taker is not None and not self._by_threads and self.on:
            self._sums_tell()
            since_s, self._waits_since_s = self._waits_since_s, None
            if since_s is not None:
                with self._lock:
                    self._added_s += self._worked_s() - since_s
            self._take(taker, "comp")

    def in_background(self) -> None:
        """Threads of a framework wait for sums while the script computes: sums say no more when it computes."""
        self._by_threads = True
        taker = self._taker
        if taker is not None:
            self._give(taker, "comp")
        self.hooks_changed()

    def _sums_tell(self) -> None:
        if not self._by_sums:
            self._by_sums = True
            self.hooks_changed()

    # ---- COMP: from hooks, where sums do not say when the script computes ----

    @property
    def comp_word(self) -> tuple[Any, int] | None:
        """Where hooks see whether this process may compute: the memory of the page, and the place in it of a word, in
        bytes (`page.STATE`, `rules.HOLDS`). None where hooks need take no turns: no other job is on the page, or sums
        tell when this script computes."""
        taker = self._taker
        if not self._hooks_take(taker) or not taker.page.has_others(taker.job):
            return None
        return taker.page.page, taker.page.offset(taker.slot, AT["comp"] + STATE)

    @property
    def has_comp(self) -> bool:
        """Whether this process may compute now, by the page."""
        taker = self._taker
        return taker is not None and taker.holds("comp")

    def begins(self) -> None:
        """The script's thread is about to compute. Returns once it is its turn."""
        taker = self._taker
        if self._hooks_take(taker) and not taker.holds("comp"):
            self._take(taker, "comp")

    def rests(self) -> None:
        """The script waits for something: others may compute. A wish for a turn stays."""
        taker = self._taker
        if self._hooks_take(taker):
            self._give_held(taker)

    @property
    def comp_wanted(self) -> bool:
        """Whether this process has the turn to compute, and another job waits for it."""
        taker = self._taker
        return self._hooks_take(taker) and taker.holds("comp") and taker.others_wait("comp")

    def _hooks_take(self, taker: Taker | None) -> TypeGuard[Taker]:
        return taker is not None and self.on and taker.owns and (self._by_threads or not self._by_sums)

    def _give_held(self, taker: Taker) -> None:
        with self._words:
            slots = taker.give("comp") if taker.holds("comp") else []
        self._ring(taker, slots)

    @property
    def waits(self) -> bool:
        """Whether a thread waits for a turn now."""
        return bool(self._waiting)

    # ---- COMM: from whoever sends ----

    @contextlib.contextmanager
    def sending(self, coming: int = 0) -> Iterator[None]:
        """Send inside, under the turn of this process. `coming`: as many posts were announced, and are sent here."""
        taker = self._taker
        if taker is None:
            yield
            return
        with self._comm:
            with self._lock:
                self._coming = max(0, self._coming - coming)
            if not self._sending and not taker.holds("comm"):
                self._take(taker, "comm")
            self._sending += 1
        began_ns = self._now_ns()
        try:
            yield
        finally:
            with self._comm:
                self._sending -= 1
                with self._lock:
                    self._sent_s += (self._now_ns() - began_ns) / 1e9
                    done = not self._sending and not self._coming
                if done:
                    self._give(taker, "comm")

    def announce(self) -> None:
        """A post will be sent under the turn that this process has now, or takes next."""
        with self._lock:
            self._coming += 1

    def progress(self) -> None:
        """A frame was sent: a turn with which nothing is sent does not last."""
        taker = self._taker
        if taker is not None:
            taker.progress()

    # ---- figures ----

    def spent(self) -> TurnsSpent:
        with self._lock:
            return TurnsSpent(self._sent_s, self._waited_s, self._added_s)

    # ---- inside ----

    def _bell(self, page: TurnsPage, slot: int) -> "SharedWord":
        found = self._bells.get(slot)
        if found is None:
            from covey.kernel.futex import SharedWord  # imports numpy, which a script that pushes has

            found = self._bells[slot] = SharedWord(page.page, page.offset(slot, BELL))
        return found

    def _take(self, taker: Taker, need: Need) -> None:
        """Take a turn; returns without it when this process is closed, or has another page or no slot by now. A wait
        that an exception ends, such as KeyboardInterrupt, leaves neither wish nor turn behind."""
        mark, ended = object(), False
        try:
            self._wait_for(taker, need, mark)
            ended = True
        finally:
            self._waiting.discard(mark)
            if not ended:
                self._give(taker, need)

    def _wait_for(self, taker: Taker, need: Need, mark: object) -> None:
        began_ns, rung = self._now_ns(), None
        bell: SharedWord | None = None
        steps = taker.take(need)
        while (nap_ns := self._step(steps)) is not None:
            if not nap_ns:
                rung = None if bell is None else bell.value
                continue
            if self._closed.is_set() or self._taker is not taker:
                self._give(taker, need)
                return
            bell = self._bell(taker.page, taker.slot)
            self._waiting.add(mark)
            if nap_ns <= SPIN_NS:
                time.sleep(nap_ns / 1e9)
            elif rung is not None:
                bell.sleep(rung, nap_ns)
        if bell is None:
            return
        if need == "comm":
            self._ring(taker, taker.next_slots(need))
        waited_ns = self._now_ns() - began_ns
        with self._lock:
            self._waited_s += waited_ns / 1e9
            taker.waited(waited_ns)

    def _step(self, steps: Iterator[int]) -> int | None:
        with self._words:
            return next(steps, None)

    def _give(self, taker: Taker, need: Need) -> None:
        with self._words:
            slots = taker.give(need)
        self._ring(taker, slots)

    def _ring(self, taker: Taker, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot != taker.slot:
                taker.page.put(slot, BELL, self._now_ns() ^ taker.slot)
                self._bell(taker.page, slot).wake()

    def _drop(self) -> None:
        """Give everything on the present page."""
        taker, self._taker = self._taker, None
        if taker is not None:
            for need in LANES:
                self._give(taker, need)

    # ---- the thread that shows that this process lives ----

    def _beat(self) -> None:
        idle_since_ns, worked_s = self._now_ns(), self._worked_s()
        while not self._closed.wait(BEAT_NS / 1e9):
            taker = self._taker
            if taker is None:
                continue
            with self._words:
                if not taker.alive():
                    self.lost += 1
            now_ns, now_worked_s = self._now_ns(), self._worked_s()
            if now_worked_s - worked_s > IDLE_SHARE * BEAT_NS / 1e9:
                idle_since_ns = now_ns
            worked_s = now_worked_s
            self._look(taker, now_ns, idle_since_ns)

    def _look(self, taker: Taker, now_ns: int, idle_since_ns: int) -> None:
        """Give up what is held for no use, or for too long."""
        slots = list[int]()
        with self._words:
            since_ns = taker.since_ns("comp")
            held_s = (now_ns - since_ns) / 1e9
            idle = now_ns - max(since_ns, idle_since_ns) > IDLE_S * 1e9
            by_hooks = self._hooks_take(taker)
            most_s = UNSEEN_MAX_S if by_hooks else HELD_MAX_S
            if taker.holds("comp") and (idle or (held_s > most_s and taker.others_wait("comp"))):
                lost = idle or not by_hooks
                self.lost += lost
                slots = taker.lose("comp") if lost else taker.give("comp")
        self._ring(taker, slots)
